"""Tests of the `infinity plan` command: targets, machines, advice, ranks and errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.live_bytes import LiveBytes
from typer.testing import CliRunner

from infinity.cli import plan_report
from infinity.cli.main import app
from infinity.cli.plan import SearchOptions, report_of
from infinity.common.sizes import format_size
from infinity.config.schema import load_config
from infinity.errors import MachineError
from infinity.integrations.huggingface.meta import find_target
from infinity.model.named_models import NAMED
from infinity.model.partition import groups_of, partition_model
from infinity.model.targets import named_target
from infinity.plan.activations import passes
from infinity.plan.rates import COMPUTE, COPIES, DEVICE_UPDATE, Rates, nominal
from infinity.profiling.calibration import KnownRates

ADAPTERS = plan_report._adapters
GIB = 1 << 30
DESKTOP = ["--device", "24GiB", "--host", "64GiB", "--disk", "2TiB"]
TINY = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64,
        "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
TOP_KEYS = {"schedule", "ranks",
    "infinity", "model", "machine", "work", "fits", "problem", "activations", "ways", "plan",
    "moved", "step", "wear", "faster",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured rates of this machine by round numbers."""

    def known(paths: Any, device: Any, **more: Any) -> KnownRates:
        numbers = nominal(device.unified).numbers() | {"update.fp32": 1e9, "disk_read": 2e9}
        return KnownRates(Rates.of(numbers), "2026-01-02")

    monkeypatch.setattr("infinity.profiling.calibration.cached_rates", known)
    monkeypatch.setattr(plan_report, "_adapters", lambda *_: [])  # saves two searches
    monkeypatch.setattr("infinity.cli.plan.report_of", shared_report)


def make_cached_report() -> Callable[..., dict[str, Any]]:
    """Return a cached `report_of`, so that a page and its JSON share one report."""
    reports: dict[Any, dict[str, Any]] = {}

    def cached(search: SearchOptions, rated: int, *more: Any) -> dict[str, Any]:
        if (search, rated) not in reports:
            reports[search, rated] = report_of(search, rated, *more)
        return reports[search, rated]

    return cached


shared_report = make_cached_report()


@pytest.fixture
def with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Include LoRA and QLoRA in the advice."""
    monkeypatch.setattr(plan_report, "_adapters", ADAPTERS)
    monkeypatch.setattr("infinity.cli.plan.report_of", make_cached_report())


def no_more_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the search for advice in later commands."""
    for name in ("faster", "_adapters"):
        monkeypatch.setattr(plan_report, name, lambda *_, **__: [])
    monkeypatch.setattr("infinity.cli.plan.report_of", make_cached_report())


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    found, out, error = run(*arguments, "--json")
    assert found == code, out + error
    assert error == ""
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def smaller_model(path: Path, name: str, **layers: int) -> str:
    """Write a config of a known model with changed sizes, for a faster search."""
    (path / "config.json").write_text(json.dumps(NAMED[name] | layers))
    return str(path)


def test_offload_without_effect_keeps_schedule(tiny: str, tmp_path: Path) -> None:
    """Offloading to RAM has no effect if the CPU computes, or if nothing is recomputed."""
    results = []
    for offload in ("none", "host"):
        path = tmp_path / f"{offload}.json"  # equal options would be cached
        path.write_text(json.dumps({"activations": {"offload": offload}}))
        found = answer(str(path), "--model", tiny, "--host", "8GiB", "--tokens", "2048")
        results.append((found["schedule"]["line"], found["step"]["seconds"]))
    assert results[0] == results[1]
    assert "wait" not in results[0][0]
    free, named = (
        answer(tiny, *DESKTOP, "--no-recompute", *more) for more in ((), ("--activations", "host"))
    )
    assert free["step"] == named["step"]
    assert free["schedule"] == named["schedule"]


@pytest.mark.big
def test_search_tries_more_micro_batches_for_less_recomputation(
    tmp_path: Path,
) -> None:
    """Eight micro-batches look slower than four before recomputed blocks are counted."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
             "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8000}  # fmt: skip
    model = smaller_model(tmp_path, "8b", **sizes)
    arguments = [model, "--device", "2200MiB", "--host", "3000MiB", "--disk", "1TiB"]
    arguments += ["--tokens", "8192", "--sequence", "512", "--activations", "none"]
    free, named = (answer(*arguments, *more) for more in ((), ("--micro-batches", "16")))
    assert free["step"]["seconds"] == named["step"]["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "4096", "--sequence", "2048", "--slices", "3"], "of the 2 samples"),
        (["--tokens", "4096", "--sequence", "2048", "--micro-batches", "3"], "of the 2 samples"),
        (["--tokens", "32", "--slices", "64"], "64 slices cannot be made of the 32 samples"),
        (["--activations", "disk", "--disk", "0"], "--disk 0, but placement or activations"),
    ],
)
def test_invalid_slices_or_micro_batches_are_refused(
    tiny: str, arguments: list[str], message: str
) -> None:
    code, _, error = run(tiny, *DESKTOP, *arguments)
    assert code == 2
    assert message in error


# --- report --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_adapters")
def test_plan_of_70b_matches_hand_calculation() -> None:
    """docs/bytes.md: all on disk is 16 bytes read and 14 written, less the bytes in RAM."""
    arguments = ["70b", *DESKTOP, "--tokens", "2048", "--recompute"]
    report = answer(*arguments)
    assert report["fits"]
    assert report["problem"] is None
    assert report["model"]["parameters"] == 68_976_648_192
    moved = {direction: found["per_parameter"] for direction, found in report["moved"].items()}
    placement = report["plan"]["placement"]
    on_disk = {kind: placement[kind].get("disk", {"bytes": 0})["bytes"] for kind in placement}
    total = {kind: sum(h["bytes"] for h in placement[kind].values()) for kind in placement}
    assert total["weights"] == pytest.approx(2 * 68_976_648_192, rel=1e-3)
    assert total["moments and residual"] == pytest.approx(10 * 68_976_648_192, rel=1e-3)
    assert total["gradients"] == total["weights"], "one micro-batch in bf16"
    parameters = report["model"]["parameters"]
    written = sum(on_disk.values()) / parameters
    assert moved["disk_write"] == pytest.approx(written, rel=1e-6)
    backward = moved["disk_read"] - written
    assert 0.9 * on_disk["weights"] / parameters < backward <= on_disk["weights"] / parameters
    code, out, error = run(*arguments, "-v")
    assert (code, error) == (0, "")
    assert out.startswith("70b on a GPU with 24 GiB, 64 GiB of RAM, 2 TiB of disk: fits, ")
    for text in (
        "70b (llama): 69.0B parameters in 81 units",
        "12 bytes of state per parameter",
        f"disk read {format_size(report['moved']['disk_read']['bytes'])}",
        f"disk write {format_size(report['moved']['disk_write']['bytes'])}",
        "nominal rates of a common machine: nothing was measured",
        "rated writes last for",
        "binds",
        "to go faster",
        "--lora 16 --rest nf4",
    ):
        assert text in out, text
    assert "Traceback" not in out
    summary = run(*arguments)[1]
    assert len(summary.splitlines()) < 0.5 * len(out.splitlines())
    assert "rated writes" not in summary


def test_words_are_not_broken_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*FOUR, "-v"]
    words = set(run(*arguments)[1].split())
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "80")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", run(*arguments)[1]).splitlines()
    assert max(map(len, lines)) == 80
    cut = {word for line in lines for word in line.split()} - words
    assert all(set(word) <= {"─"} for word in cut), cut


def test_default_tokens_per_step(tiny: str) -> None:
    """The default is that of the presets; with --micro-batches, one sample in each."""
    report = answer(tiny, *DESKTOP)
    assert report["work"]["tokens_per_step"] == 65536
    assert report["work"]["assumed_tokens"]
    named = (tiny, *DESKTOP, "--tokens", "65536")
    assert answer(*named)["step"] == report["step"]
    shares = report["step"]["bottlenecks"]
    assert sum(shares.values()) == pytest.approx(1)
    assert "(the default; another: --tokens)" in run(*named[:-2])[1]
    assert "the default" not in run(*named)[1]
    with_micro_batches = answer(tiny, *DESKTOP, "--micro-batches", "3", "--sequence", "512")
    assert with_micro_batches["work"]["tokens_per_step"] == 3 * 512


def test_json_has_every_documented_key(tiny: str) -> None:
    import infinity.cli.plan_report as documented

    report = answer(tiny, *DESKTOP)
    assert set(report) == TOP_KEYS
    for key in TOP_KEYS - {"infinity"}:
        assert f"`{key}`" in (documented.__doc__ or ""), key
    assert set(report["moved"]) == {"disk_read", "disk_write", "to_device", "from_device",
                                    "all_gather", "all_to_all", "between_hosts"}  # fmt: skip
    assert report["ranks"] is None
    assert set(report["machine"]["nominal"]) == set(report["machine"]["rates"])
    assert report["step"]["seconds"] == pytest.approx(
        sum(phase["seconds"] * phase["count"] for phase in report["step"]["phases"])
    )
    assert report["wear"]["days"] is None, "it fits the device"
    assert report["plan"]["budget"]["device"] == int(0.9 * 24 * GIB)
    assert report["plan"]["budget"]["host"] == int(0.8 * 64 * GIB)


def test_equal_micro_batches_are_grouped(tiny: str) -> None:
    report = answer(tiny, "--device", "64MiB", "--host", "2GiB", "--disk", "1GiB",
                    "--tokens", "576", "--micro-batches", "9")  # fmt: skip
    names = [phase["name"] for phase in report["step"]["phases"]]
    assert names[:2] == ["forward 1", "backward 1"]
    assert sum(phase["count"] for phase in report["step"]["phases"]) == 18
    assert len(names) <= 6
    assert report["work"]["tokens_per_step"] == 9 * 64


def test_wear_scales_with_endurance(tmp_path: Path) -> None:
    sizes = ["--device", "3GiB", "--host", "8GiB", "--disk", "1TiB", "--tokens", "512"]
    arguments = [smaller_model(tmp_path, "7b", num_hidden_layers=8), *sizes]
    common = answer(*arguments)["wear"]
    half = answer(*arguments, "--endurance", "300TB")["wear"]
    assert common["rated_bytes"] == 600 * 10**12
    assert half["days"] == pytest.approx(common["days"] / 2)
    assert common["written_per_step"] > 0


def test_recompute_moments_and_precision_options(tiny: str) -> None:
    sizes = [*DESKTOP, "--tokens", "4096"]
    plain, again = answer(tiny, *sizes), answer(tiny, *sizes, "--checkpointing")
    assert again["work"]["recompute"]
    assert again["activations"]["saved"] < plain["activations"]["saved"]
    lossy = answer(tiny, *sizes, "--moments", "8bit")
    assert lossy["plan"]["lossy"]
    assert lossy["plan"]["per_parameter"]["moments and residual"] == pytest.approx(4.06, abs=0.01)
    assert any("lossy" in note for note in lossy["plan"]["notes"])
    assert answer(tiny, *sizes, "--precision", "fp32")["plan"]["per_parameter"]["weights"] == 4


# --- targets -------------------------------------------------------------------------------------


def test_target_is_name_file_or_directory(tiny: str) -> None:
    by_directory = answer(tiny, *DESKTOP)
    by_file = answer(f"{tiny}/config.json", *DESKTOP)
    assert by_directory["model"]["parameters"] == by_file["model"]["parameters"]
    assert by_directory["plan"] == by_file["plan"]
    aliases = [{"--device": "--vram", "--host": "--ram"}.get(word, word) for word in DESKTOP]
    assert answer("1.3B", *aliases)["model"]["family"] == "gpt2"


def test_adapters_on_quantized_base(tmp_path: Path) -> None:
    """Sizes are computed by hand for two layers of 8b."""
    layers = smaller_model(tmp_path, "8b", num_hidden_layers=2)
    arguments = ["--device", "24GiB", "--host", "32GiB", "--disk", "1TiB", "--lora", "8"]
    plain = answer(layers, *arguments, "--tokens", "2048")
    quantized = answer(layers, *arguments, "--tokens", "2048", "--rest", "nf4")
    hidden, inner, keys = 4096, 14336, 1024
    shapes = [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 3
    matrices, tables = 2 * sum(a * b for a, b in shapes), 2 * 128256 * hidden
    adapters = 2 * sum(8 * (a + b) for a, b in shapes)
    weights = [
        sum(at["bytes"] for at in report["plan"]["placement"]["weights"].values())
        for report in (plain, quantized)
    ]
    assert weights[0] == pytest.approx(2 * (matrices + tables + adapters), rel=1e-3)
    assert weights[1] == pytest.approx(0.5625 * matrices + 2 * (tables + adapters), rel=1e-3)
    assert "436.2M stored and moved as nf4 (lossy)" in quantized["plan"]["frozen"]
    assert quantized["model"]["parameters"] == plain["model"]["parameters"]
    for wrong in (["--rest", "nf4"], ["--lora", "8", "--rest", "fp4"]):
        code, _, error = run(layers, *arguments[:6], *wrong)
        assert code == 2
        assert "frozen.format" in error


def test_configuration_file_is_applied(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "nvme_path: /a/b\ngradient_accumulation_steps: 3\nplacement: {optimizer_state: disk}\n"
        "optimizer: {type: Lion, moments: bf16}\nbudget: {host: 1GiB}\n"
    )
    report = answer(str(path), "--model", tiny, *DESKTOP)
    assert report["work"]["micro_batches"] == 3
    assert report["plan"]["rule"] == "Lion"
    assert report["plan"]["moments"] == ["bf16"]
    assert report["plan"]["placement"]["moments and residual"].keys() == {"disk"}
    assert report["plan"]["budget"]["host"] == GIB
    over = answer(str(path), "--model", tiny, *DESKTOP, "--micro-batches", "1", "--moments", "fp32")
    assert over["work"]["micro_batches"] == 1
    assert over["plan"]["moments"] == ["fp32"]
    as_json = tmp_path / "ours.json"
    as_json.write_text('{"gradient_accumulation_steps": 2}')
    again = answer(str(as_json), "--model", tiny, *DESKTOP)
    assert again["work"]["micro_batches"] == 2


def test_fused_experts_are_a_block_with_token_share(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
        "vocab_size": 1000, "num_local_experts": 8, "num_experts_per_tok": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = find_target(str(tmp_path))
    names = [name for name, _ in target.module.named_parameters()]
    assert {names[i] for i in target.shares} == {name for name in names if ".experts." in name}
    assert set(target.shares.values()) == {0.5}
    assert [names[i] for i in target.heads] == ["lm_head.weight"]
    assert [names[i] for i in target.lookups] == ["model.embed_tokens.weight"]
    model = answer(str(tmp_path), *DESKTOP)["model"]
    assert (model["units"], model["largest_unit"]["name"]) == (3, "model.layers.0")
    sizes = [p.numel() for p in target.module.parameters()]
    experts = 2 * 8 * 3 * 256 * 512
    assert (model["parameters"], model["active_parameters"]) == (
        sum(sizes), sum(sizes) - experts // 2,
    )  # fmt: skip
    matrices = sum(p.numel() for p in target.module.parameters() if p.dim() > 1)
    assert model["flop_per_token"] == 6 * (matrices - 1000 * 256 - experts / 2)
    assert "7.2M parameters, 4.1M active a token" in run(str(tmp_path), *DESKTOP)[1]
    settings = load_config({})
    cut = partition_model(target.module, settings, groups_of(target.module, settings), None)
    stacks = [s for unit in cut.layouts for s in unit.segments if s.parameter in target.shares]
    assert [passes(stack, target.shares) for stack in stacks] == [4.0] * 4


def test_tied_table_is_head_and_positions_are_lookups() -> None:
    target = named_target("1.3b")
    names = [name for name, _ in target.module.named_parameters()]
    assert [names[i] for i in target.heads] == ["transformer.wte.weight"]
    assert [names[i] for i in target.lookups] == ["transformer.wpe.weight"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["7c"], "did you mean '7b'?"),
        (["no/such/config.json"], "does not exist"),
        (["{dir}"], "config.json cannot be read"),
        (["{dir}/list.json"], "no model_type"),
        (["{dir}/ours.yaml"], "add --model"),
        (["{dir}/typo.yaml", "--model", "7b"], "did you mean 'precision'?"),
        (["{dir}/text.txt"], "is not JSON"),
        (["7b", "--model", "7b"], "two models"),
        (["7b", "--class", "AutoModel"], "--class AutoModel: 7b is a causal language model"),
        (["7b", "--device", "5 apples"], "apples"),
        (["7b", "--device", "0"], "--device is 0"),
        (["7b", "--device", "24"], "did you mean --device 24GiB?"),
        (["7b", "--disk", "500"], "did you mean --disk 500GiB?"),
        (["7b", "--endurance", "600"], "did you mean --endurance 600TB?"),
        (["7b", "--host", "0"], "--host is 0"),
        (["7b", "--endurance", "0"], "--endurance is 0"),
        (["7b", "--tokens", "0"], "--tokens"),
        (["7b", "--micro-batches", "1025"], "--micro-batches"),
        (["7b", "--moments", "4bit"], "did you mean '8bit'?"),
        (["7b", "--precision", "fp8"], "precision: should be"),
        (["7b", "--machine", "{dir}/missing.json"], "does not exist"),
        (["7b", "--machine", "{dir}/list.json"], "list.json"),
        (["7b", "--machine", "{dir}/m.json", "--refresh"], "--refresh"),
        (["7b", "budget.hosst=4GiB"], "did you mean 'budget.host'?"),
        (["7b", "what"], "write key=value"),
        (["{dir}/big.yaml", "--model", "7b", "--host", "4GiB", "--disk", "1TiB"], "budget.host"),
    ],
)
def test_invalid_arguments_are_explained(tmp_path: Path, arguments: list[str], part: str) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "ours.yaml").write_text("precision: bf16\n")
    (tmp_path / "typo.yaml").write_text("precison: bf16\n")
    (tmp_path / "big.yaml").write_text("budget: {host: 8GiB}\n")
    code, out, error = run(*(argument.format(dir=tmp_path) for argument in arguments))
    assert code == 2, error
    assert out == ""
    assert part in error
    assert "Traceback" not in error


HOSTILE: dict[str, Any] = {
    "nested": "[" * 200_000,
    "digits": '{"model_type": "gpt2", "n_embd": ' + "9" * 10_000 + "}",
    "layers": {**NAMED["7b"], "num_hidden_layers": 10**9},
    "too many bytes": {**NAMED["7b"], "hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1},
    "a list": {**NAMED["7b"], "hidden_size": [4096]},
    "a float": {**NAMED["7b"], "vocab_size": 1e9},
    "no number": '{"model_type": "llama", "hidden_size": NaN}',
    "more heads than width": {**NAMED["7b"], "num_attention_heads": 8192},
    "family": {"model_type": ["llama"]},
    "unknown family": {"model_type": "nonesuch"},
    "bytes": b"\xff\xfe\x00",
    "empty": "",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_config_is_one_error(tmp_path: Path, name: str) -> None:
    text = HOSTILE[name]
    path = tmp_path / "config.json"
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    for target in (path, tmp_path):
        code, out, error = run(str(target), *DESKTOP)
        assert code == 2, (out, error)
        assert out == ""
        assert error.startswith("error: ")
        assert len(error) < 2000


def test_device_file_is_not_opened() -> None:
    code, _, error = run("/dev/zero", *DESKTOP)
    assert code == 2
    assert "neither a file nor a directory" in error


# --- machines ------------------------------------------------------------------------------------


def test_plan_for_this_machine_uses_measured_rates(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = answer(tiny, "--path", str(tmp_path), "--tokens", "64")
    machine = report["machine"]
    assert machine["unified"]
    assert machine["rates"]["update.fp32"] == 1e9
    assert machine["nominal"] == []
    assert machine["rates_origin"] == "measured 2026-01-02 (again: --refresh)"
    assert machine["disk_bytes"] > 0
    assert report["plan"]["budget"]["device"] is None
    assert machine["assumed_disk"] is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no cached rates
    monkeypatch.chdir(tmp_path)  # no drive given: nothing is written, free space is used
    bare = answer(tiny, "--tokens", "64")
    assert bare["machine"]["disk_bytes"] > 0
    assert set(bare["machine"]["nominal"]) == {"disk_read", "disk_write", "disk_mixed"}
    _, out, _ = run(tiny, "--tokens", "64")
    assert f"the free space at {tmp_path}; another: --path DIR" in out
    assert "device" not in out.partition("to go faster")[0]
    none = answer(tiny, "--tokens", "64", "--disk", "0")
    assert none["machine"]["disk_bytes"] == 0
    assert "no disk (--path DIR or --disk SIZE)" in run(tiny, "--tokens", "64", "--disk", "0")[1]


def test_cheapest_remedy_comes_first_if_everything_is_short() -> None:
    """More RAM alone would suffice, but costs a hundred times as much as some RAM and a disk."""
    report = answer("7b", "--host", "1GiB", "--disk", "0", code=3)
    first = report["ways"][0]["how"]
    host, disk = (re.search(rf"--{tier} (\d+)(GiB|MiB)", first) for tier in ("host", "disk"))
    assert disk is not None, first
    assert host is not None, first
    assert host[2] == "MiB" or int(host[1]) < 16


def test_absent_gpu_has_nominal_rates_and_drive_measured(tiny: str, tmp_path: Path) -> None:
    report = answer(tiny, "--device", "8GiB", "--path", str(tmp_path))
    machine = report["machine"]
    assert not machine["unified"]
    assert machine["device_bytes"] == 8 * GIB
    assert machine["rates"]["disk_read"] == 2e9
    assert machine["rates"]["update.fp32"] == 1e9
    assert set(machine["nominal"]) == {*COMPUTE, *COPIES[:2], DEVICE_UPDATE}
    assert machine["rates"]["compute.bf16"] == nominal(False).compute["bf16"]


def test_machine_file_with_size_overrides(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    facts = {
        "format": 1, "name": "box", "measured": "2026-11-01", "host_ram": "32GiB",
        "device_memory": "16GiB", "disk_free": "1TiB", "num_cpus": 8,
        "rates": {"disk_read": "5 GB/s", "disk_write": "4 GB/s", "disk_mixed": "6 GB/s"},
    }  # fmt: skip
    path.write_text(json.dumps(facts))
    report = answer(tiny, "--machine", str(path))
    assert report["machine"]["name"] == "box"
    assert report["machine"]["rates"]["disk_read"] == 5e9
    assert "to_device" in report["machine"]["nominal"]
    changed = answer(tiny, "--machine", str(path), "--host", "8GiB", "--device", "12GiB")
    assert changed["machine"]["host_bytes"] == 8 * GIB
    assert changed["machine"]["device_bytes"] == 12 * GIB
    assert changed["machine"]["rates"] == report["machine"]["rates"]


# --- misfits and advice --------------------------------------------------------------------------


def options(how: str) -> list[str]:
    """Split a remedy that consists of options into arguments."""
    return shlex.split(how)


@pytest.mark.usefixtures("with_adapters")
@pytest.mark.parametrize(
    ("name", "layers", "sizes"),
    [
        pytest.param(
            "7b",
            {"num_hidden_layers": 8},
            "--device 6GiB --host 8GiB --disk 13GiB --tokens 256",
            marks=pytest.mark.big,
        ),
        ("7b", {"num_hidden_layers": 8}, "--device 6GiB --host 2GiB --disk 1TiB --tokens 256"),
        pytest.param(
            "7b",
            {"num_hidden_layers": 8},
            "--device 8GiB --host 16GiB --disk 1TiB --tokens 16384 --micro-batches 1 "
            "--slices 1 --no-recompute",
            marks=pytest.mark.big,
        ),
        ("1.3b", {"n_layer": 6}, "--device 600MiB --host 8GiB --disk 60GiB --tokens 16"),
        ("8b", {"num_hidden_layers": 4}, "--device 12GiB --host 16GiB --disk 0 --tokens 2048"),
    ],
    ids=["disk", "host", "activations", "device", "adapters"],
)
def test_misfit_names_shortage_and_remedies_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layers: dict[str, int],
    sizes: str,
) -> None:
    arguments = [smaller_model(tmp_path, name, **layers), *sizes.split()]
    report = answer(*arguments, code=3)
    assert not report["fits"]
    assert re.search(r"[0-9.]+ [KMGT]?i?B", report["problem"]["what"])
    remedies = [way["how"] for way in report["ways"]]
    assert len(set(remedies)) == len(remedies) in range(1, 8)
    assert "--lora 16" in remedies or "--disk 0" not in sizes, (
        "faster here than QLoRA, which fits too"
    )
    assert report["faster"] == []
    page = run(*arguments)
    no_more_advice(monkeypatch)
    for way in report["ways"]:
        found = answer(*arguments, *options(way["how"]))
        assert found["fits"], way["how"]
        assert found["step"]["tokens_per_s"] >= 0.99 * way["tokens_per_s"], way["how"]
    code, out, error = page
    assert (code, error) == (3, "")
    assert "DOES NOT FIT" in out
    for way in report["ways"]:
        assert way["how"] in out


@pytest.mark.parametrize(
    ("name", "layers", "sizes"),
    [
        ("8b", {"num_hidden_layers": 4}, "--device 12GiB --host 16GiB --disk 64GiB"),
        ("8b", {}, "--device 24GiB --host 128GiB --disk 2TiB --lora 16"),
        ("8b", {"num_hidden_layers": 4}, "--device 2GiB --host 3GiB --disk 4GiB"),
        ("1.3b", {"n_layer": 6}, "--device 4GiB --host 8GiB --disk 60GiB --tokens 16384"),
    ],
    ids=["faster", "adapters", "two tiers", "tokens"],
)
def test_advice_numbers_match_its_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layers: dict[str, int],
    sizes: str,
) -> None:
    monkeypatch.setattr(plan_report, "_adapters", ADAPTERS)
    arguments = [smaller_model(tmp_path, name, **layers), *sizes.split()]
    code, out, error = run(*arguments, "--json")
    assert code in (0, 3), error
    report = json.loads(out)
    assert code == (0 if report["fits"] else 3)
    ways = report["faster"] or report["ways"]
    assert ways
    assert "--lora" not in sizes or "--rest nf4" in [way["how"] for way in ways]
    no_more_advice(monkeypatch)
    for way in ways:
        found = answer(*arguments, *options(way["how"]))
        assert found["fits"], way["how"]
        assert found["step"]["tokens_per_s"] == way["tokens_per_s"], way["how"]
        if report["fits"]:
            gain = way["tokens_per_s"] / report["step"]["tokens_per_s"]
            assert way["speed_up"] == pytest.approx(gain)


def test_misfit_of_activations_still_shows_plan(tmp_path: Path) -> None:
    model = smaller_model(tmp_path, "70b", num_hidden_layers=12)
    unsplit = ["--micro-batches", "1", "--slices", "1", "--no-recompute"]
    code, out, _ = run(model, *DESKTOP, "--tokens", "32768", *unsplit)
    assert code == 3
    assert "memory      device" in out
    assert "to make it fit" in out
    assert "--recompute" in out
    details = run(model, *DESKTOP, "--tokens", "32768", *unsplit, "-v")[1]
    assert "bytes of state per parameter" in details


def test_plan_shows_chosen_schedule_and_runner_up(tmp_path: Path) -> None:
    model = smaller_model(tmp_path, "70b", num_hidden_layers=12)
    arguments = [model, "--device", "24GiB", "--host", "24GiB", "--disk", "1TiB"]
    report = answer(*arguments, "--tokens", "32768")
    assert report["fits"]
    work, schedule = report["work"], report["schedule"]
    assert work["micro_batches"] == 1
    assert schedule["blocks"] == 12
    assert f"{work['slices']} slices" in schedule["line"]
    assert schedule["runner_up"]["tokens_per_s"] < 1.05 * report["step"]["tokens_per_s"]
    out = run(*arguments, "--tokens", "32768", "-v")[1]
    assert schedule["line"] in out
    assert schedule["runner_up"]["line"] in out
    assert work["tokens_per_step"] == work["tokens"] * work["micro_batches"] == 32768
    assert report["activations"]["missing"] == 0
    without_recompute = answer(*arguments, "--tokens", "32768", "--no-recompute")
    assert not without_recompute["work"]["recompute"]
    assert without_recompute["step"]["seconds"] > report["step"]["seconds"]
    batch_options = ["--micro-batches", "4", "--slices", "2", "--recompute-blocks", "3"]
    large_machine = [model, "--device", "80GiB", "--host", "64GiB", "--disk", "1TiB"]
    assert (work["context"], "2,048 a sample" in out) == (2048, True)
    assert (work["tokens"] // work["slices"]) % 2048 == 0  # slices are whole samples
    shorter = answer(*arguments, "--tokens", "32768", "--sequence", "1024")
    assert shorter["work"]["context"] == 1024
    assert shorter["step"]["seconds"] < report["step"]["seconds"]
    found = answer(*large_machine, "--tokens", "16384", *batch_options)["work"]
    assert (found["micro_batches"], found["slices"], found["recompute"]) == (4, 2, 3)


@pytest.mark.usefixtures("with_adapters")
def test_faster_advice_is_as_fast_as_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "--device 8GiB --host 10GiB --disk 1TiB --tokens 4096"
    arguments = [
        smaller_model(tmp_path, "8b", num_hidden_layers=4, vocab_size=32000),
        *sizes.split(),
    ]
    ways = answer(*arguments)["faster"]
    remedies = " | ".join(way["how"] for way in ways)
    for name in ("--lora 16", "--moments 8bit", "--host"):
        assert name in remedies, name
    no_more_advice(monkeypatch)
    for way in ways:
        found = answer(*arguments, *options(way["how"]))
        assert found["step"]["tokens_per_s"] >= 0.99 * way["tokens_per_s"], way["how"]


ENCODER_DECODER = {"model_type": "t5", "d_model": 256, "d_kv": 32, "d_ff": 512, "num_heads": 8,
                   "vocab_size": 4000, "architectures": ["T5ForConditionalGeneration"],
                   "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_slightly_different_blocks_are_blocks(tmp_path: Path, layers: int) -> None:
    """The first block of each stack holds the relative position bias."""
    depth = {"num_layers": layers, "num_decoder_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(ENCODER_DECODER | depth))
    report = answer(str(tmp_path), "--device", "600MiB", "--host", "2GiB", "--disk", "1TiB")
    assert report["fits"]
    if layers > 1:
        assert report["schedule"]["blocks"] == 2 * layers
        assert report["model"]["units"] == 2 * layers + 2, "the table, and what is left"


# --- allocation and processes --------------------------------------------------------------------


def test_plan_allocates_no_weights() -> None:
    search = SearchOptions("70b", device=24 * GIB, host=64 * GIB, disk=2 << 40, tokens=2048)
    with LiveBytes() as live:
        report = report_of(search, 10**15)
    assert report["model"]["parameters"] == 68_976_648_192
    assert live.peak == 0


def test_plan_runs_as_a_process(tiny: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "infinity.cli", "plan", tiny, *DESKTOP, "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["fits"]


# --- invalid paths -------------------------------------------------------------------------------


def test_path_must_be_a_directory(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "afile"
    file.write_text("x")
    code, _, error = run(tiny, "--path", str(file))
    assert code == MachineError.exit_code
    assert f"{file} is not a directory" in error
    (tmp_path / "run.yaml").write_text(f"nvme_path: {file}\n")
    code, _, error = run(str(tmp_path / "run.yaml"), "--model", tiny, "--disk", "1TiB")
    assert code == MachineError.exit_code
    assert f"{file} is not a directory" in error


def test_directory_without_config(tmp_path: Path) -> None:
    code, _, error = run(str(tmp_path))
    assert code == 2
    assert "try: give one of 1.3b, " in error


# --- several ranks -------------------------------------------------------------------------------

FOUR = ["70b", "--gpus", "4", "--device", "24GiB", "--host", "256GiB", "--disk", "2TiB",
        "--tokens", "32768", "--recompute", "--micro-batches", "1"]  # fmt: skip


def test_four_gpus_share_node_and_units() -> None:
    """By hand: a rank has a quarter of 69.0e9 parameters, and gathers all of them twice."""
    report = answer(*FOUR, "--link", "25GB/s")
    assert report["fits"]
    parameters, plan, moved = report["model"]["parameters"], report["plan"], report["moved"]
    assert (report["ranks"]["count"], report["ranks"]["zero_stage"]) == (4, 3)
    assert report["ranks"]["whole_units"] == 0
    assert report["work"]["tokens_per_step"] == 32768
    assert report["work"]["tokens"] == 8192
    budget = plan["budget"]
    assert (budget["device"], budget["disk"]) == (int(0.9 * 24 * GIB), 512 * GIB)
    assert budget["host"] == int(0.8 * 256 * GIB) // 4
    used = {tier: sum(sizes.values()) for tier, sizes in plan["memory"].items()}
    assert report["ranks"]["node_bytes"] == {tier: 4 * used[tier] for tier in ("host", "disk")}
    pinned = used["host"] - plan["memory"]["host"]["process"]
    assert report["ranks"]["pinned_bytes"] == pinned
    # Stored per rank: a quarter of 12 bytes and of an fp32 sum, over all tiers.
    stored_bytes = sum(at["bytes"] for kind in plan["placement"].values() for at in kind.values())
    assert stored_bytes == pytest.approx((12 + 4) * parameters / 4, rel=2e-3)
    # Three quarters of bf16 weights for each forward and backward (the last units stay in
    # between), and of bf16 gradients once.
    received = 2 * parameters * 3 / 4
    assert 1.9 * received < moved["all_gather"]["bytes"] <= 2.01 * received
    assert moved["all_to_all"]["bytes"] == pytest.approx(received, rel=2e-3)
    assert moved["all_gather"]["rate"] == 25e9
    links = report["step"]["resources"]["link"]
    link_bytes = moved["all_gather"]["bytes"] + moved["all_to_all"]["bytes"]
    assert links == pytest.approx(link_bytes / 25e9)
    rates = report["machine"]["rates"]
    assert moved["disk_read"]["rate"] == rates["disk_read"] / 4
    assert report["wear"]["written_per_step"] == 4 * moved["disk_write"]["bytes"]
    assert report["step"]["tokens_per_s"] == pytest.approx(32768 / report["step"]["seconds"])
    kinds = [way["how"].split()[0] for way in report["faster"]]
    assert len(set(kinds)) == len(kinds) == 3, "no two of a kind"


def test_plan_separates_rank_and_node_figures() -> None:
    page = run(*FOUR, "-v")[1]
    for text in (
        "4 GPUs with 24 GiB each, 256 GiB of RAM",
        "each of 4 ranks: one micro-batch of 8,192 tokens",
        "4 such ranks: RAM ",
        "each stores 1/4 of weights, state and gradients of every unit",
        "(ZeRO-3)",
        "predicted per step: ",
        "all gather",
    ):
        assert text in page, text


def test_unsharded_resident_units_are_zero_2(tiny: str) -> None:
    arguments = [tiny, "--gpus", "2", "--device", "4GiB", "--host", "8GiB"]
    report = answer(*arguments)
    assert report["ranks"]["zero_stage"] == 2
    assert report["ranks"]["whole_units"] == report["model"]["units"] == 6
    page = run(*arguments, "-v")[1]
    assert "(ZeRO-2)\n  weights stay gathered in slots" in page


def test_slow_link_binds_and_faster_link_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_advice(monkeypatch)
    slow, fast = (answer(*FOUR, "--link", link)["step"] for link in ("100MB/s", "200MB/s"))
    assert slow["binds"] == fast["binds"] == "link"
    assert slow["resources"]["link"] == pytest.approx(2 * fast["resources"]["link"])
    assert fast["tokens_per_s"] > 1.5 * slow["tokens_per_s"]


def test_nodes_share_network_bandwidth(tmp_path: Path) -> None:
    """2 x 2 ranks: a ring enters a node once; in all-to-all two ranks receive from two others."""
    model = smaller_model(tmp_path, "1.3b", n_layer=6)
    arguments = [model, "--gpus", "2", "--nodes", "2", "--device", "8GiB", "--host", "32GiB",
                 "--link", "25GB/s", "--tokens", "8192"]  # fmt: skip
    report = answer(*arguments, "--between", "10GB/s")
    assert (report["machine"]["gpus"], report["machine"]["nodes"]) == (2, 2)
    assert report["ranks"]["count"] == 4
    assert report["plan"]["budget"]["host"] == int(0.8 * 32 * GIB) // 2, "a node's, of 2 ranks"
    assert report["moved"]["all_gather"]["rate"] == 10e9
    assert report["moved"]["all_to_all"]["rate"] == pytest.approx(10e9 * 3 / (2 * 2))
    page = run(*arguments)[1]
    assert "2 nodes, each 2 GPUs with 8 GiB each" in page
    assert "between_nodes" in page, "nominal, and said to be"


def test_cpu_ranks_share_cores(tiny: str) -> None:
    one, two = (answer(tiny, "--gpus", n, "--host", "8GiB", "--tokens", "4096") for n in "12")
    assert two["plan"]["budget"]["host"] == one["plan"]["budget"]["host"] // 2
    assert two["step"]["resources"]["link"] > 0
    compute = [report["step"]["resources"]["compute"] for report in (one, two)]
    assert compute[1] == pytest.approx(compute[0], rel=0.5), "half the tokens on half the cores"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "25GB/s"], "--link is a rate between ranks, and there is one"),
        (["--gpus", "2", "--between", "1GB/s"], "--between is a rate between nodes"),
        (["--gpus", "2", "--link", "fast"], "--link is 'fast', not a rate"),
        (["--gpus", "2", "--link", "0"], "--link is '0', not a rate"),
        (["--gpus", "0"], "--gpus"),
        (["--nodes", "-1"], "--nodes"),
    ],
)
def test_inconsistent_rank_options_are_refused(
    tiny: str, arguments: list[str], message: str
) -> None:
    code, _, error = run(tiny, *DESKTOP, *arguments)
    assert code == 2
    assert message in error


def test_expert_range_minimizes_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with plans for each candidate size; 10 is the default rule."""
    no_more_advice(monkeypatch)
    model = smaller_model(tmp_path, "gpt-oss-120b", num_hidden_layers=3)
    adapted = ["--lora", "16", "--rest", "nf4", "--tokens", "4096"]
    machine = ["--device", "11GiB", "--host", "64GiB", "--disk", "2TiB"]
    found, seconds = answer(model, *adapted, *machine), {}
    for experts in (5, 10, 19):
        path = tmp_path / f"{experts}.json"  # equal options would be cached
        named = {"experts_per_unit": experts, "activations": {"logits": "chunked"}}
        path.write_text(json.dumps(named))
        report = answer(str(path), "--model", model, *adapted, *machine)
        seconds[experts] = report["step"]["seconds"]
    schedule = found["schedule"]
    chosen = schedule["settings"]["experts_per_unit"]
    assert f"{chosen} experts at a time" in schedule["line"]
    assert found["step"]["seconds"] == seconds[chosen]
    assert seconds[chosen] < 1.02 * min(seconds.values())
    assert seconds[chosen] < 0.98 * seconds[10]
