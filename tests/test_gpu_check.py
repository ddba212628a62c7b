"""`tools/gpu_check.sh` without a GPU: what it would run, what it says, and its report."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.config.schema import load_config
from infinity.cutting import case_for, cut_model, groups_of
from infinity.model.shapes import target_of
from infinity.plan.budget import budgeted_bytes
from infinity.plan.cost import NOMINAL, Rates, step_cost
from infinity.plan.machine import PlanMachine
from infinity.plan.planner import Case

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import _gpu_check as tool
import bench_step
from _bench_bound import bounds_of
from _bench_config import PLACEMENTS, engine_config
from _bench_contender import cap_device
from _bench_model import outline
from _bench_targets import judged
from _gpu_targets import TARGETS, table

ROOT = Path(__file__).resolve().parent.parent
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "tools" / "gpu_check.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


@pytest.mark.parametrize("stage", tool.STAGES)
def test_what_it_runs_is_there(stage: str, tmp_path: Path) -> None:
    """Every file, and every option of the step benchmark; none is stopped by the whole's limit."""
    checks = tool.checks_of([stage], tmp_path, tmp_path)
    for check in checks:
        for word in check.command:
            if word.startswith(("tests/", "tools/")):
                assert (ROOT / word).exists(), word
    assert checks[0].name == "rates"  # before any plan is made
    building = tool.build(tmp_path)
    whole_s = sum(check.limit_s for check in [*building, *checks]) + tool.FACTS_S
    assert whole_s <= tool.LIMIT_S < 600
    assert len({check.name for check in checks}) == len(checks)
    drawn = [check for check in checks if check.name.endswith("-trace")]
    assert 4 + 2 * len(drawn) <= 8  # files in all: so few that they are looked at


GIB = 1 << 30
FAST = Rates(3e9, 2e9, 3.5e9, update={"fp32": 3e9, "bf16": 4e9, "8bit": 4e9},
             compute={"bf16": 600e12, "fp32": 50e12}, to_device=50e9, from_device=50e9,
             device_update=140e9)  # fmt: skip
DEVICE_BYTES, RAM_BYTES, DISK_BYTES = 139 * GIB, 126 * GIB, 50 * GIB
PROCESS_BYTES = 2 * GIB  # of torch with CUDA, before a plan is made
BESIDE_BYTES = 8 * GIB  # RAM for the kernel, the parents, and what CUDA loads later
LOGITS_BYTES = 3 * GIB // 2  # llama.py makes them a slice at a time, four times as large at most


def benchmarks() -> list[tuple[str, dict[str, Any], list[str]]]:
    """Each step benchmark of each stage: its name, its job, its contenders."""
    found = []
    for check in tool.checks_of(tool.STAGES[1:], Path("/out"), Path("/work")):
        if "tools/bench_step.py" in check.command:
            options = list(check.command)[check.command.index("tools/bench_step.py") + 1 :]
            arguments = bench_step._parser().parse_args(options)
            assert arguments.device == "cuda"
            job = bench_step.job_of(arguments, Path("/disk"))
            job |= {"trace_steps": [1, 2], "traces": "/traces", "contender": "ours"}
            found.append((check.name, job, list(arguments.only)))
    return found


def case_of(job: dict[str, Any], contender: str, rates: Rates) -> Case:
    """What the engine would plan on a machine with one H200."""
    config = load_config(engine_config(job, contender))
    model = outline(job)
    groups = groups_of(model, config)
    machine = PlanMachine("H200", RAM_BYTES, DEVICE_BYTES, DISK_BYTES, False, 16, rates)
    return case_for(
        target_of(job["model"], model, {}),
        cut_model(model, config, groups, None),
        groups,
        config,
        machine,
        job["rows"] * job["context"],
        recompute=job["checkpointing"],
        base=PROCESS_BYTES,
        made=max(parameter.nbytes for parameter in model.parameters()),
    )


def activation_bytes(case: Case, slices: int) -> int:
    found = case.activations()
    return found.saved // slices + found.boundaries + found.flow + found.gradients + LOGITS_BYTES


@pytest.mark.parametrize("rates", [NOMINAL, FAST], ids=["nominal", "fast"])
@pytest.mark.parametrize(
    ("name", "job", "contenders"), benchmarks(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_benchmark_fits_the_machine(
    name: str, job: dict[str, Any], contenders: list[str], rates: Rates
) -> None:
    """Planned as a run would, whatever the rates are; nothing is allocated."""
    for contender in contenders:
        if contender == "torch_ram":
            continue
        case = case_of(job, contender, rates)
        budget = case.limits.device
        assert budget is not None
        assert budget <= DEVICE_BYTES - 2 * GIB  # CUDA and its kernels need some
        assert (case.limits.host or 0) <= RAM_BYTES - BESIDE_BYTES
        plan = case.plan()  # or it raises
        room = budget - budgeted_bytes(plan)["device"]
        assert activation_bytes(case, job["slices"]) <= room, name
        bounds = bounds_of(plan, rates, 0.5, 1.0)
        assert 1.5 * job["micro_batches"] <= bounds.ideal_s <= bounds.schedule_s
        assert bounds_of(plan, rates, 0.0, 0.0).schedule_s == step_cost(plan, rates).seconds
    if "torch_ram" in contenders:
        assert plain_bytes(job) <= DEVICE_BYTES - 4 * GIB  # its allocator is no arena


def plain_bytes(job: dict[str, Any]) -> int:
    """Weights, masters, two moments, gradients (summed in fp32), and the largest one in fp32."""
    numels = [parameter.numel() for parameter in outline(job).parameters()]
    gradient = 4 if job["micro_batches"] > 1 else 2
    case = case_of(job | {"slices": 1, "offload": "none", "by_engine": False}, "infinity_ram", FAST)
    return sum(numels) * (2 + 4 + 8 + gradient) + 4 * max(numels) + activation_bytes(case, 1)


def test_the_budgets_of_ours_are_told_on_a_gpu_only() -> None:
    _, job, _ = next(one for one in benchmarks() if one[0] == "step-8b-32k")
    config = engine_config(job, "infinity_ram")
    assert config["budget"] == {"device": "24GiB", "host": "116GiB"}
    assert config["placement"] == {}
    assert config["activations"] == {
        "checkpoint": "units", "slices": 2, "offload": "host", "tokens": 16384
    }  # fmt: skip
    on_cpu = engine_config(job | {"device": "cpu"}, "infinity_ram")
    assert on_cpu["budget"] == {}
    assert on_cpu["placement"] == PLACEMENTS["infinity_ram"]
    assert engine_config(job | {"compile": True}, "infinity_disk")["compile"] is True
    assert engine_config(job | {"state": "host"}, "infinity_ram")["placement"] == {
        "moments": "host"
    }


def test_the_cap_is_the_budgets_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, torch.device]] = []
    facts = SimpleNamespace(total_memory=96 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: told.append((share, device)),
    )
    device = torch.device("cuda", 0)
    cap_device(24 * GIB, device)
    cap_device(200 * GIB, device)
    assert told == [(0.25, device), (1.0, device)]


def report_of(**more: Any) -> dict[str, Any]:
    """What a benchmark on a GPU says, as far as targets look at it."""
    ours = {"median_step_s": 5.0, "tokens_per_s": 6554.0, "peak_reserved_bytes": 23 * GIB,
            "device_budget_bytes": 24 * GIB}  # fmt: skip
    return {"device": "cuda", "model": "llama-8b", "tokens": 32768, "ratio": {},
            "contenders": {"infinity_ram": ours}, "phases": {}, "skipped": {}} | more  # fmt: skip


def test_a_gpu_is_judged_by_a_gpus_targets() -> None:
    def said(**more: Any) -> dict[str, tuple[str, bool]]:
        return {one["name"]: (one["target"], one["met"]) for one in judged(report_of(**more))}

    plain, peer = "tokens/s beside plain torch", "tokens/s beside DeepSpeed"
    assert said(ratio={"torch_ram": 1.12})[plain] == ("at least 0.9", False)
    assert said(ratio={"torch_ram": 1.10})[plain] == ("at least 0.9", True)
    small = {"tokens": 8192, "ratio": {"torch_ram": 1.3, "deepspeed_cpu_to_ram": 1.9}}
    assert said(**small)[plain] == ("at least 0.75", True)
    assert said(**small)[peer] == ("at least 2", False)
    assert plain not in said(tokens=512, ratio={"torch_ram": 9.0})
    assert said(model="llama-14b")["tokens/s"] == ("at least 6000", True)
    disk = said(ratio={"schedule": 1.11})
    assert disk["all on disk: step beside the schedule bound"] == ("at most 1.10", False)
    assert said()["infinity_ram: device memory, GiB"] == ("at most 24 GiB", True)
    on_cpu = said(device="cpu", tokens=512, ratio={"torch_ram": 1.04})
    assert on_cpu[plain] == ("at least 0.9524", True)


def test_the_table_says_what_was_found_and_what_was_not_run() -> None:
    parts = {"forward_s": 0.3, "backward_s": 0.7, "update_s": 0.4}
    text = "\n".join(
        table(
            {
                "step-8b-8k-plain": report_of(contenders={}, phases=parts),
                "step-8b-32k": report_of(),
                "step-1.5b-8k": report_of(
                    ratio={"torch_ram": 1.5}, skipped={"deepspeed_cpu": "not importable"}
                ),
            }
        )
    )
    assert "8k) | >= 0.9 | 0.88 | MISSED |" in text  # (4 * 1.0 + 0.4) / 5
    assert "| 1.5B, 8k: tokens/s beside plain torch | >= 0.75 | 0.6667 | MISSED |" in text
    assert "ZeRO-3 offload | >= 2 | - | not run: not importable |" in text
    assert "| 14B, 32k, whole card: tokens/s | >= 6000 | - | not run |" in text
    assert "reserved | <= 24 | 23 | met |" in text
    assert len(text.splitlines()) == 2 + len(TARGETS)


def test_a_dry_run_says_all_and_does_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script("--dry-run", *tool.STAGES, OUT=str(out))
    assert done.returncode == 0, done.stderr
    for words in ("-m gpu tests/gpu", "bench_adam_cuda", "llama-8b", "--device-budget 24GiB",
                  "--machine-file", "--compare deepspeed-cpu"):  # fmt: skip
        assert words in done.stdout
    assert not out.exists()
    assert script("--dry-run", "all").returncode == 2


@needs_no_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script(OUT=str(out))
    assert done.returncode == 4
    assert "sees no CUDA device" in done.stderr
    assert "nothing was built, run or reported" in done.stderr
    assert not out.exists()


def test_a_build_is_kept_until_its_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "one.py").write_text("1")
    monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
    before = tool.fingerprint()
    (tmp_path / "README.md").write_text("else")
    assert tool.fingerprint() == before
    (tmp_path / "infinity" / "one.py").write_text("2")
    assert tool.fingerprint() != before


def python(name: str, code: str, limit_s: float = 60, json: bool = False) -> tool.Check:
    return tool.Check(name, limit_s, [sys.executable, "-c", code], json)


def test_a_call_from_its_start_to_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the GPU; the second call finds what the first one built."""
    report = json.dumps(report_of(ratio={"schedule": 1.05}))
    checks = [python("step-1.5b-disk", f"print({report!r})", json=True), python("one", "print(1)")]
    built = []

    def build(site: Path) -> list[tool.Check]:
        built.append(site)
        return [python("build", "print('built')")]

    monkeypatch.setattr(tool, "why_no_gpu", lambda: None)
    monkeypatch.setattr(tool, "missing", lambda pyproject: [])
    monkeypatch.setattr(tool, "build", build)
    monkeypatch.setattr(tool, "BUILT", tmp_path / "built")
    monkeypatch.setattr(tool, "FACTS", "print('H200 139 GiB, 16 CPU cores')")
    monkeypatch.setattr(tool, "checks_of", lambda stages, out, work: checks)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert tool.main(["disk"]) == 0
    assert tool.main(["disk"]) == 0
    assert len(built) == 1
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names[1:] == ["log.txt", "results.json"]
    assert names[0].startswith("gpu_disk_h200-139_20")
    row = "| 1.5B, all on disk: step beside the schedule bound | <= 1.1 | 1.05 | met |"
    assert row in (tmp_path / "out" / names[0]).read_text()
    capsys.readouterr()
    assert tool.main(["--table", str(tmp_path / "out" / "results.json")]) == 0
    assert row in capsys.readouterr().out


def test_traces_come_back_small(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "trace-infinity_ram.json").write_text("[]" * 1000)
    tool.keep_traces(tmp_path, tmp_path)
    assert gzip.decompress((tmp_path / "step.trace.json.gz").read_bytes()) == b"[]" * 1000


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert [line for line in tool.missing(ROOT / "pyproject.toml") if "cuda-core" not in line] == []
    project = tmp_path / "pyproject.toml"
    project.write_text(
        text.replace('"pydantic>=2.10"', '"pydantic>=999"').replace('"aiofiles', '"no-such-package')
    )
    found = "\n".join(tool.missing(project))
    assert "pydantic>=999: " in found
    assert "no-such-package>=24.1: not there" in found
    project.write_text(text.replace('"nanobind>=2.9"', '"nanobind>=999"'))
    assert "nanobind>=999" in "\n".join(tool.missing(project))


def test_a_failure_hides_nothing_and_the_report_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until = time.monotonic() + 300
    checks = [
        python("good", "import sys; print('{}'); print('a table', file=sys.stderr)", json=True),
        python("bad", "print('why'); raise SystemExit(7)"),
        python("slow", "import time; print('begun', flush=True); time.sleep(600)", limit_s=8),
        python("last", "print('x\\n' * 500 + 'the end')"),
    ]
    work = tmp_path / "work"
    work.mkdir()
    results = tool.run_all(checks, tmp_path, work, until)
    results += tool.run_all([python("late", "print(1)")], tmp_path, work, time.monotonic())
    assert [result.code for result in results] == [0, 7, tool.STOPPED, 0, None]
    assert tool.reports_in(work, checks) == {"good": {}}
    machine = "NVIDIA H200 139 GiB, 16 CPU cores\n"
    report = tool.write_report(results, machine, ["quick"], tmp_path, {})
    assert report.name.startswith("gpu_quick_nvidia-h200-139_20")
    text = report.read_text()
    for words in (
        "| target | wanted | found | |",
        "not run |",
        "| good | passed |",
        "| bad | FAILED, exit code 7 |",
        "| slow | stopped after",
        "| late | not run: no time was left |",
        "a table",
        "why",
        "begun",
        "the end",
    ):
        assert words in text
    assert text.count("\nx") <= tool.SHOWN_LINES
    assert "bad: exit code 7" in (tmp_path / "log.txt").read_text()
    assert "bad: exit code 7" in capsys.readouterr().out
