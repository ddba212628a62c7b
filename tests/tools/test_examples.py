"""Tests of the examples: corpus, models, output, and the demo and step benchmark end to end.

They run in this process where possible: importing torch takes longer than training a tiny model.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from support.forked import HANG_S, Program
from support.small import assert_nothing_left
from support.waiting import wait_until
from unit.plan.test_planner import plan_of

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.plan.cost import step_cost
from infinity.plan.rates import Rates, nominal
from infinity.profiling.calibration import KnownRates
from infinity.profiling.trace_reader import read_timeline
from infinity.profiling.trace_shares import Shares

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _training
import _ui
import corpus
import gpt
import llama
import presets
import pretrain_gpt
from _plain import PlainTorch
from step import bound, child, contender
from step import main as bench_step
from step.bound import bounds_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOOLS = Path(__file__).resolve().parents[2] / "tools"
DEMO = EXAMPLES / "pretrain_gpt.py"
BENCH = TOOLS / "bench_step.py"


@dataclass
class RecordedReport:
    """A recorded `engine.last_report`."""

    stall_s: dict[str, float] = field(
        default_factory=lambda: {"disk_read": 1.2, "update": 0.0, "slot": 0.1, "gradient": 0.02}
    )
    skipped: bool = False


@pytest.fixture(scope="module")
def library() -> corpus.Corpus:
    return corpus.standard_library()


# The corpus


def test_corpus_is_reproducible(library: corpus.Corpus) -> None:
    again = corpus.standard_library()
    assert torch.equal(library.train, again.train)
    assert torch.equal(library.held_out, again.held_out)
    assert len(library.train) + len(library.held_out) <= corpus.MAX_BYTES
    assert len(library.train) > 2**20
    assert len(library.held_out) > 2**16


def test_batches_depend_on_seed_and_position_only(library: corpus.Corpus) -> None:
    first = corpus.batches(library.train, seed=3, micro_batch=2, context=16)
    drawn = [next(first) for _ in range(4)]
    assert first.position == 4
    resumed = corpus.batches(library.train, seed=3, micro_batch=2, context=16)
    resumed.position = 2
    for (tokens, targets), (same_tokens, same_targets) in zip(drawn[2:], resumed, strict=False):
        assert torch.equal(tokens, same_tokens)
        assert torch.equal(targets, same_targets)
    tokens, targets = drawn[0]
    assert tokens.shape == (2, 16)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    other, _ = next(corpus.batches(library.train, seed=4, micro_batch=2, context=16))
    assert not torch.equal(tokens, other)


def test_held_out_batches_span_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    drawn = list(corpus.held_out_batches(text, num_batches=3, micro_batch=2, context=9))
    assert [tokens.shape for tokens, _ in drawn] == [(2, 9)] * 3
    assert drawn[0][0][0, 0] == 0
    assert drawn[-1][1][-1, -1] == 99


def test_batches_of_shortest_text_are_complete() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    tokens, targets = next(corpus.batches(text, seed=0, micro_batch=1, context=9))
    assert tokens.tolist() == [list(range(9))]
    assert targets.tolist() == [list(range(1, 10))]


def test_text_shorter_than_sequence_raises(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    short = corpus.one_file(path)
    short.require(context=5)
    with pytest.raises(ConfigError, match=r"held-out text has 6 bytes; .* 6 tokens needs 7"):
        short.require(context=6)
    with pytest.raises(ConfigError, match="training text has 94 bytes"):
        short.require(context=1000)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="training text has 0 bytes"):
        corpus.one_file(path).require(context=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        corpus.one_file(tmp_path / "missing.txt")


# The model


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("gpt-tiny", 5e5, 1e6),
        ("gpt-100m", 100e6, 120e6),
        ("gpt-124m", 124e6, 136e6),
        ("gpt-350m", 340e6, 380e6),
        ("gpt-1.3b", 1.25e9, 1.4e9),
    ],
)
def test_preset_sizes_match_names(name: str, least: float, most: float) -> None:
    assert least <= presets.count_parameters(gpt.PRESETS[name]) <= most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_new_model_loss_is_uniform(dtype: torch.dtype) -> None:
    model = presets.build(presets.shape_of("gpt-tiny"), dtype, seed=0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, tokens)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(256)) < 0.2
    assert torch.get_default_dtype() == torch.float32


def test_gpt_is_causal_and_checkpointing_exact() -> None:
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        shape = presets.shape_of("gpt-tiny", checkpointing=checkpointing)
        model = presets.build(shape, torch.float32, seed=0)
        model(tokens, tokens.roll(-1, 1)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    changed = tokens.clone()
    changed[0, -1] += 1
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(tokens, tokens)
        model(changed, tokens)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    with pytest.raises(ValueError, match="positions"):
        model(torch.zeros(1, 65, dtype=torch.int64), torch.zeros(1, 65, dtype=torch.int64))


def test_llama_whole_logits_match_sliced() -> None:
    shape = presets.PRESETS["llama-tiny"]
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for whole_logits in (False, True):
        model = presets.build(replace(shape, whole_logits=whole_logits), torch.float32, seed=0)
        seen: list[int] = []
        model.head.register_forward_hook(lambda _, given, made, seen=seen: seen.append(len(made)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "_LOGITS", 4 * 256 * 32)  # slices of 32 tokens
            losses.append(model(tokens, tokens.roll(-1, 1)))
        assert seen == ([128] if whole_logits else [32] * 4)
    torch.testing.assert_close(*losses)


def test_tied_head_counted_once() -> None:
    plain = gpt.PRESETS["gpt-tiny"]
    tied = gpt.GPTConfig(**(vars(plain) | {"tied": True}))
    difference = presets.count_parameters(plain) - presets.count_parameters(tied)
    assert difference == plain.vocab_size * plain.width


# The plain baseline


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_plain_baseline_matches_adamw_with_clipping(micro_batches: int) -> None:
    from infinity.config.schema import load_config

    shape = gpt.GPTConfig(vocab_size=32, context=8, num_layers=1, num_heads=2, width=16)
    config = load_config(
        {
            "precision": "fp32",
            "gradient_accumulation_steps": micro_batches,
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
            "scheduler": {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 2}},
        }
    )
    model_of_baseline = presets.build(shape, torch.float32, seed=0)
    reference = presets.build(shape, torch.float32, seed=0)
    plain = PlainTorch(model_of_baseline, config)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    text = torch.arange(200, dtype=torch.uint8) % 32
    source = corpus.batches(text, seed=0, micro_batch=2, context=8)
    for _ in range(4):
        micro_batches_of_step = [next(source) for _ in range(micro_batches)]
        plain.step(micro_batches_of_step)
        for tokens, targets in micro_batches_of_step:
            (reference(tokens, targets) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    # Softmax ignores a shift of all keys: the key bias has no gradient, only rounding noise, and
    # what Adam makes of that depends on the thread count.
    keys = slice(shape.width, 2 * shape.width)
    with torch.no_grad():
        for model in (model_of_baseline, reference):
            bias = model.blocks[0].query_key_value.bias
            assert bias[keys].abs().max() < 1e-3
            bias[keys] = 0
    for a, b in zip(model_of_baseline.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_plain_baseline_bf16_learns(micro_batches: int) -> None:
    from infinity.config.schema import load_config

    config = load_config({"gradient_accumulation_steps": micro_batches, "optimizer": {"lr": 1e-2}})
    shape = gpt.GPTConfig(vocab_size=32, context=8, num_layers=1, num_heads=2, width=16)
    plain = PlainTorch(presets.build(shape, torch.bfloat16, seed=0), config)
    text = torch.arange(200, dtype=torch.uint8) % 32
    source = corpus.batches(text, seed=0, micro_batch=2, context=8)
    losses = [plain.step([next(source) for _ in range(micro_batches)])[-1] for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == torch.bfloat16 for p in plain.model.parameters())


# Output


@pytest.mark.parametrize(
    ("given", "bf16_s", "expected"),
    [({}, 1.1, "bf16"), ({}, 50.0, "fp32"), ({"precision": "bf16"}, 50.0, "bf16")],
)
def test_precision_fp32_where_bf16_is_slow(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], bf16_s: float, expected: str
) -> None:
    times = {torch.bfloat16: bf16_s, torch.float32: 1.0}
    monkeypatch.setattr(_training, "_product_s", times.__getitem__)
    config = infinity.config.schema.load_config(given)
    assert _training._with_precision(config, torch.device("cpu")).precision == expected
    assert _training._with_precision(config, torch.device("cuda")).precision == "bf16"


def test_step_line_names_longest_stall() -> None:
    report = RecordedReport()
    line = _ui.StepLine(
        step=3,
        num_steps=36,
        loss=5.25,
        tokens_per_s=64.0,
        wall_s=8.0,
        stall_s=report.stall_s,
        eta_s=264.0,
    )
    text = _ui.format_step(line)
    assert text == "step  3/36  5.250 bits/byte    64 tokens/s  left 4 min 24 s  stall read 15%"
    assert len(text) <= 80
    assert _ui.format_stall({"update": 0.0}, 1.0) == "stall none"
    assert _ui.format_stall({"update": 1.0}, 0.0) == "stall none"
    assert "skipped" in _ui.format_step(replace(line, skipped=True))


def test_step_lines_are_rate_limited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first, the last, and one every few seconds between them, by a fake clock."""
    now = [100.0]
    monkeypatch.setattr(_ui, "time", SimpleNamespace(monotonic=lambda: now[0]))
    screen = _ui.Screen()
    for step in range(1, 11):
        screen.step(_ui.StepLine(step, 10, 8.0, 1.0, 1.0, {}, 0.0))
        now[0] += 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]


def test_results_page_texts() -> None:
    result = {
        "num_parameters": 114 * 10**6,
        "loss_bits_per_byte": [8.1, 6.0, 4.7],
        "held_out_bits_per_byte": {"first": 8.0, "last": 4.6},
        "peak_rss_bytes": 900 * 2**20,
        "budget_host_bytes": 2**30,
        "plain_bytes_per_parameter": 16,
        "disk_parts": {"weights": 2**30, "state": 2**31},
        "moved_bytes": {"disk_read": 1000, "disk_write": 990},
        "predicted_bytes": {"disk_read": 1000, "disk_write": 1000},
        "step_s": 8.0,
        "tokens_per_step": 512,
    }
    page = _ui.answer(result)
    assert page["peak RAM"].endswith("measured, all of this process (budget 1.00 GiB: kept)")
    assert page["plain"].startswith("PyTorch needs 1.70 GiB of RAM")
    assert "derived" in page["plain"]
    assert page["on disk"] == "3.00 GiB: weights 1.00 GiB, state 2.00 GiB"
    assert page["loss"].startswith("8.100 -> 4.700 bits/byte in 3 steps")
    assert page["step"] == "8.0 s (median), 64 tokens/s"
    assert page["disk"] == "read 1000 B (as planned), written 990 B (-1.0% of the plan) a step"
    page = _ui.answer(result | {"peak_rss_bytes": 2**31, "moved_bytes": {}})
    assert "EXCEEDED" in page["peak RAM"]
    assert "disk" not in page
    assert "no budget" in _ui.answer(result | {"budget_host_bytes": None})["peak RAM"]
    plain = {
        "step_s": 7.5,
        "our_step_s": 8.1,
        "ratio": 1.08,
        "turns": 3,
        "peak_rss_bytes": 2**31,
        "our_peak_rss_bytes": 2**30,
        "largest_loss_difference": 0.003,
        "num_steps": 6,
    }
    assert _ui.comparison(plain) == {
        "step": "8.1 s, plain PyTorch 7.5 s: 1.08 x (median of 3 turns)",
        "peak RAM": "1.00 GiB, plain PyTorch 2.00 GiB: 0.50 x (both measured)",
        "losses": "of the first 6 steps: differ by 3.0e-03 bits/byte at most",
    }
    page = _ui.comparison(plain | {"largest_loss_difference": 0.0, "peak_rss_bytes": None})
    assert page["losses"] == "of the first 6 steps: equal, bit for bit"
    assert "peak RAM" not in page
    took = _ui.seconds({"imports": 3.0, "text": 1.0, "training": 60.0}, ("imports", "text"))
    assert (
        took == "set-up 4.0 s (imports 3.0 s, text 1.0 s), training 1 min 00 s; together 1 min 04 s"
    )


# The bounds of bench_step


def test_bounds_of_plan_known_values() -> None:
    """State and weights on disk, gradients in RAM: 12 bytes a parameter each way, one pass."""
    placement = {"weights": "disk", "optimizer_state": "disk", "gradients": "host"}
    sizes = [102_400] * 8
    for micro_batches in (1, 2):
        plan = plan_of(
            sizes, placement=placement, prefetch_units=1, gradient_accumulation_steps=micro_batches
        )
        pass_s = 2 * 12 * sum(sizes) / 1.5e9
        weights_s = (8 - 3) * 102_400 * 2 / 2e9  # three are in slots when backward starts
        rates = Rates(2e9, 1e9, 1.5e9, update={"fp32": sum(sizes) / 0.5})
        first_s = pass_s / 8  # the first unit's update, before which nothing is computed
        compute_bound = bounds_of(plan, rates, 1.0, 2.0)  # compute binds, and the update with it
        assert compute_bound.ideal_s == pytest.approx(3.0 * micro_batches + 0.5)
        assert compute_bound.schedule_s == pytest.approx(compute_bound.ideal_s + first_s)
        assert compute_bound.binds == "compute" if micro_batches > 1 else "compute and update"
        update_bound = bounds_of(plan, rates, 0.0, 0.0)
        assert update_bound.schedule_s == pytest.approx(step_cost(plan, rates).seconds + first_s)
        if micro_batches == 1:
            assert update_bound.schedule_s == pytest.approx(0.5 + first_s + weights_s)
            rates = replace(rates, update={"fp32": 1e12})
            disk_bound = bounds_of(plan, rates, 0.0, 0.0)
            assert disk_bound.schedule_s == disk_bound.ideal_s == pytest.approx(pass_s + weights_s)
            assert disk_bound.binds == "disk"
            assert bounds_of(plan, rates, 0.0, 1.0).schedule_s == pytest.approx(pass_s + 1.0)


# The demo, end to end


def demo_arguments(folder: Path, *arguments: str, held_mib: int = 0) -> list[str]:
    return [
        "--model", "gpt-tiny", "--nvme-path", str(folder), "--eval-batches", "2", "--no-compare",
        "--set", f"budget.host={2048 + held_mib}MiB", *arguments,
    ]  # fmt: skip


def arguments_here(folder: Path, *arguments: str) -> list[str]:
    """Return arguments for this process, whose budget includes the memory already in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return demo_arguments(folder, *arguments, held_mib=pages * os.sysconf("SC_PAGESIZE") >> 20)


def run_in_process(script: Path, *arguments: str) -> tuple[int | None, str, str]:
    with Program(script, *arguments) as program:
        return program.end()


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: corpus.Corpus
) -> Iterator[Call]:
    """Return a function that calls `main`; restore the signal handlers that it installs."""
    monkeypatch.setattr(corpus, "standard_library", lambda: library)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def call(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        return code, *capsys.readouterr()

    yield call
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_demo_output_complete_and_losses_match_plain_torch(
    tmp_path: Path,
) -> None:
    """Runs in a process of its own, to measure peak memory."""
    steps = ["--steps", "4", "--compare-steps", "3", "--compare", "--json"]
    code, output, errors = run_in_process(DEMO, *demo_arguments(tmp_path, *steps))
    assert code == 0, errors
    result = json.loads(output)
    assert result["steps"] == 4
    assert len(result["loss_bits_per_byte"]) == 4
    held_out = result["held_out_bits_per_byte"]
    assert held_out["last"] < held_out["first"]
    assert result["peak_rss_bytes"] < result["budget_host_bytes"] == 2 * 2**30
    for direction in ("disk_read", "disk_write"):
        assert result["moved_bytes"][direction] == result["predicted_bytes"][direction]
    assert result["predicted_bytes"]["disk_write"] >= result["state_bytes"]
    assert result["skipped_steps"] == 0
    assert result["config"]["gradient_accumulation_steps"] == 1
    assert set(_training.SETUP) | {"training", "comparison"} == set(result["seconds"])
    titles = ["predicted per step", "Training: 4 steps", "Result: ", "Comparison: 3 steps"]
    places = [errors.index(title) for title in [*titles, "Like with like", "What next"]]
    assert places == sorted(places)
    assert "\x1b" not in errors
    assert "\r" not in errors
    plain = result["plain_torch"]
    assert plain["num_steps"] == 3
    assert plain["turns"] == 1  # two steps, of which the second is timed, and one alone
    assert plain["ratio"] == plain["our_step_s"] / plain["step_s"]
    assert plain["largest_loss_difference"] < 0.02
    assert list(tmp_path.iterdir()) == []


def test_demo_without_comparison(tmp_path: Path, call_main: Call) -> None:
    code, output, errors = call_main(
        pretrain_gpt.main, arguments_here(tmp_path, "--steps", "1", "--json")
    )
    assert code == 0, errors
    assert json.loads(output)["plain_torch"] is None


def test_signal_during_torch_import_stops_demo(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), *demo_arguments(tmp_path, "--steps", "10000")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            assert wait_until(lambda: "libtorch" in maps.read_text())
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert_stopped(process.returncode, errors, signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_signal_during_step_stops_demo(tmp_path: Path) -> None:
    with Program(DEMO, *demo_arguments(tmp_path, "--steps", "10000")) as demo:
        assert wait_until(lambda: demo.said(r" *step"), HANG_S)
        demo.signal(signal.SIGINT)
        code, _, errors = demo.end()
    assert_stopped(code, errors, signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


def assert_stopped(code: int | None, errors: str, signum: int) -> None:
    assert code == 128 + signum, errors
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("stopped by")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["writing", "starting", "in a step", "closing"])
def test_signal_at_any_moment_leaves_nothing(
    tmp_path: Path, call_main: Call, monkeypatch: pytest.MonkeyPatch, signum: int, moment: str
) -> None:
    """During the initial write, at the plan, after a forward, and during close."""
    sent: list[str] = []

    def send(when: str) -> None:
        if when == moment and not sent:
            sent.append(when)
            signal.raise_signal(signum)

    def before(owner: Any, name: str, when: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def hooked(*arguments: Any, **more: Any) -> Any:
            send(when(*arguments))
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, hooked)

    before(_ui.Screen, "progress", lambda *_: "writing")
    before(_ui.Screen, "say", lambda _, text: "starting" if "predicted per step" in text else "")
    before(_training, "_finite", lambda _, step, *__: "in a step" if step == 2 else "")
    before(Engine, "close", lambda *_: "closing")
    threads = set(threading.enumerate())
    code, _, errors = call_main(pretrain_gpt.main, arguments_here(tmp_path, "--steps", "3"))
    assert sent
    assert_stopped(code, errors, signum)
    assert_nothing_left(tmp_path, threads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nvme-path", "/missing/folder"], "/missing/folder"),
        (["--set", "placment.weights=disk"], "placement"),
        (["--set", "budget.host=8MiB"], "budget"),
        (["--set", "precision=fp16"], "precision=bf16, or fp32"),
        (["--model", "gpt-100n"], "gpt-100m"),
        (["--text", "/dev/null"], "0 bytes"),
        (["--steps", "6", "--set", "optimizer.lr=1e30", "--set", "scheduler="], "loss"),
        (["--config", "/missing.yaml"], "/missing.yaml"),
        (["--set", "nonsense"], "key=value"),
    ],
)
def test_invalid_input_prints_one_error(
    tmp_path: Path, call_main: Call, arguments: list[str], message: str
) -> None:
    threads = set(threading.enumerate())
    code, output, errors = call_main(
        pretrain_gpt.main, arguments_here(tmp_path, "--json", *arguments)
    )
    assert code not in (0, None), errors
    assert "Traceback" not in errors
    assert output == ""
    last = errors[errors.rindex("error: ") :]
    assert message in last
    assert len(last.splitlines()) <= 6
    assert_nothing_left(tmp_path, threads)


# The benchmark of steps


def pipe() -> tuple[TextIO, TextIO]:
    read, write = os.pipe()
    return open(read), open(write, "w")


class ThreadedContender:
    """A fake of a contender's `subprocess.Popen` that runs in a thread of this process."""

    def __init__(self, command: list[str], **_: Any) -> None:
        assert command[-1] == "step.contender"
        requests, self.stdin = pipe()
        self.stdout, replies = pipe()

        def work() -> None:
            with requests, replies:
                contender.serve(requests, replies)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def poll(self) -> None:
        assert self._thread.is_alive()

    def communicate(self, text: str, timeout: float) -> None:
        self.stdin.write(text)
        self.stdin.flush()
        assert self.stdout.read() == ""

    def kill(self) -> None:
        """Do nothing: `wait` closes the input, which ends the thread."""

    def wait(self) -> None:
        self.stdin.close()
        self._thread.join()
        self.stdout.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run contenders of `bench_step` in threads and measure rates only briefly."""
    known = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=ThreadedContender, **known))
    monkeypatch.setattr(bound, "MEASURE_S", 0.01)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("micro_batches", ["1", "2"])
def test_bench_step_reports_ratios(tmp_path: Path, call_main: Call, micro_batches: str) -> None:
    threads = set(threading.enumerate())
    arguments = [
        "--model", "gpt-tiny", "--rounds", "2", "--warmup", "1",
        "--tokens", "128", "--micro-batches", micro_batches, "--path", str(tmp_path), "--json",
        "--compare", "deepspeed,fsdp2", "--traces", str(tmp_path / "kept"),
    ]  # fmt: skip
    code, output, errors = call_main(bench_step.main, arguments)
    assert code == 0, errors
    report = json.loads(output)
    assert set(report["contenders"]) >= {"torch_ram", "infinity_ram", "infinity_disk", "fsdp2"}
    for bounds in report["bound"].values():
        assert 0 < bounds["ideal"] <= bounds["schedule"]
        assert bounds["resources_s"]["compute"] > 0
    assert set(report["bound"]) == {"infinity_ram", "infinity_disk"}
    assert set(report["ratio"]) >= {"torch_ram", "schedule", "ideal"}
    assert {one["target"] for one in report["targets"]} == {"at least 0.9524", "at most 1.10"}
    disk, plain, sharded = (
        report["contenders"][name] for name in ("infinity_disk", "torch_ram", "fsdp2")
    )
    for one in (disk, sharded):  # same initial weights
        assert one["loss"] == pytest.approx(plain["loss"], abs=0.02)
    for direction in ("disk_read", "disk_write"):
        assert disk["moved_bytes"][direction] == disk["predicted_bytes"][direction]
    assert "gpu_idle_share" not in report["contenders"]["torch_ram"]
    for name in ("infinity_ram", "infinity_disk"):
        facts = report["contenders"][name]
        assert facts["gpu_idle_share"] == pytest.approx(1 - facts["busy_share"]["compute"])
        assert 0 < facts["busy_share"]["compute"] <= 1
        assert (facts["busy_share"]["disk"] > 0) == (name == "infinity_disk")
        assert facts["verdict"].startswith("all 2 steps: ")
        assert f"{name} was busy: compute" in errors
        shares = Shares(read_timeline(tmp_path / "kept" / f"trace-{name}.json"))
        assert shares.total is not None
        assert shares.total.share("compute") == facts["busy_share"]["compute"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert set(threading.enumerate()) <= threads


@pytest.mark.usefixtures("served")
def test_bench_step_compares_expert_ranges_with_layers(tmp_path: Path, call_main: Call) -> None:
    """The number of experts per unit changes bytes and times, but no bit of the loss."""
    arguments = [
        "--model", "moe-tiny", "--experts-per-unit", "3", "--rounds", "1", "--warmup", "1",
        "--tokens", "64", "--path", str(tmp_path), "--json",
        "--only", "infinity_disk,infinity_layers",
    ]  # fmt: skip
    code, output, errors = call_main(bench_step.main, arguments)
    assert code == 0, errors
    report = json.loads(output)
    ranges, layers = (report["contenders"][n] for n in ("infinity_disk", "infinity_layers"))
    assert ranges["loss"] == layers["loss"]
    assert ranges["moved_bytes"] == ranges["predicted_bytes"] != layers["moved_bytes"]
    assert set(report["ratio"]) == {"layers_to_disk"}
    unused = 2 * (8 - 2) * 3 * 64 * 64  # layers, experts unused by a token, parameters
    assert report["num_parameters"] - report["num_active"] == unused


def test_contender_gets_fastest_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One micro-batch does not fit, unless recomputed; two are faster, four are not."""
    seconds = {(1, True): 3.0, (2, False): 2.0, (4, False): 2.5, (8, False): 1.0}
    tried: list[tuple[int, bool]] = []

    def one_step_s(self: Any, name: str, job: dict[str, Any]) -> float:
        tried.append((job["micro_batches"], job["checkpointing"]))
        assert job["micro_batches"] * job["rows"] == 8
        if tried[-1] not in seconds:
            raise child.ContenderFailedError(f"{name} ended with code -9")
        return seconds[tried[-1]]

    monkeypatch.setattr(bench_step.Race, "_one_step_s", one_step_s)
    options = ["--tokens", "512", "--context", "64", "--micro-batches", "8", "--device", "cpu"]
    arguments = bench_step._parser().parse_args([*options, "--schedule", "best"])
    lines: list[str] = []
    race = bench_step.Race(arguments, bench_step.job_of(arguments, Path("/disk")), lines.append)
    job = race.job_for("fsdp2")
    assert (job["micro_batches"], job["rows"], job["checkpointing"]) == (2, 4, False)
    assert tried == [(1, False), (1, True), (2, False), (4, False)]
    assert "fsdp2: 1 x 512 tokens, blocks recomputed: 3.000 s" in lines
    assert race.job_for("infinity_plan") == race.job
    seconds.clear()
    with pytest.raises(child.ContenderFailedError):
        race.job_for("fsdp2")


@pytest.mark.usefixtures("served")
def test_bench_step_follows_plan(
    tmp_path: Path, call_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement and schedule come from the plan; the choice and the prediction are reported."""
    rates = KnownRates(nominal(unified=True), None, ())
    monkeypatch.setattr(contender, "cached_rates", lambda *_, **__: rates)
    planned, batch_shapes = contender.Planned, set[tuple[int, ...]]()
    batch = planned.batch

    def watched(self: contender.Planned) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = batch(self)
        batch_shapes.update(tuple(tokens.shape) for tokens, _ in found)
        return found

    monkeypatch.setattr(planned, "batch", watched)
    arguments = [
        "--model", "gpt-tiny", "--rounds", "1", "--warmup", "1", "--tokens", "128",
        "--checkpointing", "--micro-batches", "2", "--path", str(tmp_path), "--json",
        "--only", "infinity_plan",
    ]  # fmt: skip
    code, output, errors = call_main(bench_step.main, arguments)
    assert code == 0, errors
    report = json.loads(output)
    facts = report["contenders"]["infinity_plan"]
    assert facts["schedule"].startswith("one micro-batch of 128 tokens")  # other contenders get two
    assert batch_shapes == {(2, 64)}
    assert facts["recomputed"] == 0
    assert facts["hardware_tflops"] == pytest.approx(facts["model_tflops"])
    assert facts["links_bytes_per_s"] is None  # nothing is copied here
    assert facts["predicted_device_bytes"] > 0
    expected = facts["median_step_s"] / facts["predicted_s"]
    assert report["ratio"]["plan_to_predicted"] == pytest.approx(expected)
    assert "step relative to the plan's time" in {one["name"] for one in report["targets"]}


@pytest.mark.big
def test_bench_step_recompute_slices_and_offload(tmp_path: Path) -> None:
    """Blocks are recomputed, in slices, with inputs on disk; recomputed FLOP are reported.

    Parent and contenders run in processes of their own, as for users.
    """
    arguments = [
        "--model", "llama-tiny", "--rounds", "1", "--warmup", "1",
        "--tokens", "256", "--context", "64", "--checkpointing", "--slices", "2", "--offload",
        "disk", "--only", "torch_ram,infinity_ram", "--alone", "--path", str(tmp_path), "--json",
        "--device", "cpu", "--device-budget", "1GiB",
    ]  # fmt: skip
    code, output, errors = run_in_process(BENCH, *arguments)
    assert code == 0, errors
    report = json.loads(output)
    assert (report["slices"], report["offload"]) == (2, "disk")
    assert "8*N*tokens" in report["flop_formula"]
    for facts in report["contenders"].values():
        assert facts["hardware_tflops"] == pytest.approx(8 / 6 * facts["model_tflops"])
        assert "device_budget_bytes" not in facts  # only a GPU has a cap
    offloaded, plain = (report["contenders"][name] for name in ("infinity_ram", "torch_ram"))
    assert offloaded["loss"] == pytest.approx(plain["loss"], abs=0.05)
    assert "hardware" in errors
    assert list(tmp_path.iterdir()) == []


def assert_learns(name: str, output: str) -> None:
    steps = [line.split() for line in output.splitlines() if line.startswith("step")]
    losses = [float(line[line.index("loss") + 1]) for line in steps]
    assert losses[-1] < 0.75 * losses[0]
    assert "Meant for" in (EXAMPLES / name).read_text()


def test_quickstart_is_short_and_learns() -> None:
    """Runs in a process of its own, as for users."""
    code, output, errors = run_in_process(EXAMPLES / "quickstart.py")
    assert code == 0, errors
    assert_learns("quickstart.py", output)
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize("loop", [[], ["stage3"]])
def test_deepspeed_style_loop_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loop: list[str]
) -> None:
    path = str(EXAMPLES / "deepspeed_style.py")
    monkeypatch.setattr(sys, "argv", [path, *loop])
    runpy.run_path(path, run_name="__main__")
    assert_learns("deepspeed_style.py", capsys.readouterr().out)
