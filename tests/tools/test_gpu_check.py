"""Tests of `tools/gpu_check.sh` without a GPU: its checks, output and report."""

from __future__ import annotations

import ast
import gzip
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.forked import Program
from support.waiting import wait_until

from infinity.common.sizes import parse_size
from infinity.plan.batch_schedule import BatchSchedule
from infinity.plan.budget import budgeted_bytes
from infinity.plan.cost import step_cost
from infinity.plan.inputs import PlanInput, limits_leaving_activations
from infinity.plan.rates import NOMINAL, Rates
from infinity.profiling.trace_reader import Slice, TraceTimeline
from infinity.profiling.trace_shares import Shares
from infinity.storage.cuda import CudaDevice
from infinity.types import Tier

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpu import check as tool
from gpu import plan as gpu_plan
from gpu import smoke as smoke
from gpu import wheels as carried
from gpu.plan import (
    DEVICE_BYTES,
    EXPECTED,
    GIB,
    PROCESS_BYTES,
    RAM_BYTES,
    Benchmark,
    benchmarks,
    machine_of,
    without_offload,
)
from gpu.stages import KERNEL_TESTS, TRAINING_TESTS, WHOLE_GIB
from gpu.targets import TARGETS, table
from step.bound import bounds_of, links_in_pass
from step.case import case_of, device_bytes, priced_of, unscheduled_job
from step.config import PLACEMENTS, engine_config
from step.contender import cap_device
from step.model import outline, shape_of
from step.targets import judge

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/", "tools/", "benchmarks/")
TRAINING = "tests-training"
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
def test_checks_name_existing_files_within_limits(stage: str, tmp_path: Path) -> None:
    """Check files, order and options; the sum of all limits is within the limit of a call."""
    checks = tool.checks_of([stage], tmp_path, tmp_path)
    for check in checks:
        for word in check.command:
            if word.startswith(FOLDERS):
                assert (ROOT / word).exists(), word
    # Facts before anything is built; rates before any plan is made.
    first = {"smoke": "machine", "integrations": "tests-integrations"}
    assert checks[0].name == first.get(stage, "rates")
    assert checks[0].plain == (stage == "smoke")
    whole_s = WHEELS_S + tool.build(tmp_path).limit_s + tool.FACTS_S
    whole_s += sum(check.limit_s for check in checks)
    assert whole_s <= tool.LIMIT_S < 600
    assert len({check.name for check in checks}) == len(checks)
    drawn = [check for check in checks if check.name.endswith("-trace")]
    assert 4 + 2 * len(drawn) <= 8  # files in total: few enough to be read
    commands = {check.name: check.command for check in checks}
    for check in drawn:  # the trace of a contender that runs
        raced = commands[check.name.removesuffix("-trace")]
        name = Path(check.command[-2]).stem.removeprefix("trace-")
        assert name in raced[raced.index("--only") + 1].split(",")


def test_hanging_test_reported_and_others_run(tmp_path: Path) -> None:
    (check,) = (c for c in tool.checks_of(["tests"], tmp_path, tmp_path) if c.name == TRAINING)
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(
        "import threading\nimport pytest\npytestmark = pytest.mark.gpu\n"
        "def test_one(): pass\ndef test_two(): threading.Event().wait()\ndef test_three(): pass\n"
    )
    command = [word for word in check.command if word not in TRAINING_TESTS]
    command[command.index("--timeout") + 1] = "3"
    command[command.index("faulthandler_timeout=45")] = "faulthandler_timeout=1"
    command += ["-c", str(ROOT / "pyproject.toml"), str(hangs)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert "1 failed, 2 passed" in done.stdout
    assert 'test_hangs.py", line 5 in test_two' in done.stdout + done.stderr


def test_contender_ends_with_parent(tmp_path: Path) -> None:
    options = ["--model", "gpt-tiny", "--only", "torch_ram", "--steps", "1000000"]
    with Program(ROOT / "tools" / "bench_step.py", *options, "--path", str(tmp_path)) as asking:
        assert wait_until(lambda: "is ready" in asking.err.read_text())
        (contender,) = psutil.Process(asking.process.pid).children()
        asking.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([contender], timeout=600)
    assert not alive


def test_gpu_tests_are_in_one_of_two_checks() -> None:
    existing = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert sorted(KERNEL_TESTS + TRAINING_TESTS) == sorted(existing)


H100_GIB = 79
WHEELS_S = 30.0
BESIDE_BYTES = 8 * GIB  # RAM for the kernel, the parents, and what CUDA loads later
LOGITS_BYTES = 3 * GIB // 2  # llama.py computes them in slices, at most four times as large


SLOWLY_PLANNED = "step-8b-16k", "step-8b-32k", "step-14b-32k"  # a search takes 5 to 15 s


def all_benchmarks(device_gib: float = WHOLE_GIB) -> list[Benchmark]:
    checks = tool.checks_of(tool.STAGES, Path("/out"), Path("/work"), device_gib)
    return benchmarks([check for check in checks if check.device_gib <= device_gib])


def benchmark_params(benchmarks: list[Benchmark]) -> list[Any]:
    """Return test parameters for the benchmarks; slow ones are marked `big`."""
    marks = {True: pytest.mark.big, False: ()}
    return [
        pytest.param(one, id=one.name, marks=marks[one.name in SLOWLY_PLANNED])
        for one in benchmarks
    ]


def activation_bytes(case: PlanInput, slices: int) -> int:
    found = case.activations()
    return found.saved // slices + found.boundaries + found.flow + found.gradients + LOGITS_BYTES


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(NOMINAL, id="nominal", marks=pytest.mark.big),
        pytest.param(EXPECTED, id="expected"),
    ],
)
@pytest.mark.parametrize("one", benchmark_params(all_benchmarks()))
def test_benchmarks_fit_machine(one: Benchmark, rates: Rates) -> None:
    """Plan as a run would, for any rates; nothing is allocated."""
    fits(one, rates, DEVICE_BYTES)


@pytest.mark.parametrize("one", benchmark_params(all_benchmarks(H100_GIB)))
def test_benchmarks_for_smaller_gpu_fit(one: Benchmark) -> None:
    fits(one, EXPECTED, H100_GIB * GIB)


def fits(one: Benchmark, rates: Rates, card_bytes: int) -> None:
    job = one.job
    for contender in one.contenders:
        if contender == "torch_ram":
            continue
        found = priced_of(job, contender, machine_of(rates, card_bytes), PROCESS_BYTES)  # or raises
        case, plan = found.case, found.plan
        budget = case.limits.device
        assert budget is not None
        assert budget <= card_bytes - 2 * GIB  # CUDA and its kernels need some
        assert (case.limits.host or 0) <= RAM_BYTES - BESIDE_BYTES
        if contender == "infinity_plan":  # the engine slices logits
            assert device_bytes(found) <= budget
            assert budget <= 0.95 * parse_size(job["device_budget"])
        else:
            free = budget - budgeted_bytes(plan)["device"]
            assert activation_bytes(case, job["slices"]) <= free
        bounds = bounds_of(plan, rates, 0.5, 1.0)
        assert 1.5 * case.micro_batches <= bounds.ideal_s <= bounds.schedule_s
        assert bounds_of(plan, rates, 0.0, 0.0).schedule_s >= step_cost(plan, rates).seconds
    if "torch_ram" in one.contenders:
        assert plain_bytes(job) <= card_bytes - 4 * GIB  # its allocator fragments


def plain_bytes(job: dict[str, Any]) -> int:
    """Return plain torch's device bytes; gradients are summed in fp32, one at a time is cast."""
    numels = [parameter.numel() for parameter in outline(job).parameters()]
    gradient = 4 if job["micro_batches"] > 1 else 2
    case = case_of(job | {"by_engine": False}, "infinity_ram", machine_of())
    return sum(numels) * (2 + 4 + 8 + gradient) + 4 * max(numels) + activation_bytes(case, 1)


def job_named(name: str) -> dict[str, Any]:
    return next(one.job for one in all_benchmarks() if one.name == name)


def test_plan_contender_gets_only_tokens_and_budgets() -> None:
    """The schedule of other contenders is dropped; the device budget is its only limit."""
    job = job_named("step-8b-8k") | {"micro_batches": 2, "rows": 1, "slices": 2, "offload": "host"}
    plan_job = unscheduled_job(job)
    config = engine_config(plan_job, "infinity_plan")
    assert (config["placement"], config.get("nvme_path")) == ({}, None)
    assert config["budget"] == {"device": int(0.95 * 24 * GIB), "host": "116GiB"}
    assert config["activations"] == {
        "checkpoint": "none", "slices": 1, "offload": "none", "logits": "chunked"
    }  # fmt: skip
    # Logits are sliced by the engine or by the model, not by both.
    assert [vars(shape_of(one))["whole_logits"] for one in (plan_job, job)] == [True, False]
    case = case_of(plan_job, "infinity_plan", machine_of())
    assert (case.work.tokens, case.micro_batches, case.work.recompute) == (8192, 1, 0)
    assert case.compute_bytes == case.limits.device == config["budget"]["device"]
    on_cpu = engine_config(unscheduled_job(job | {"device": "cpu"}), "infinity_plan")
    assert on_cpu["nvme_path"] == "/disk"
    assert on_cpu["activations"]["logits"] == "auto"


def test_engine_limits_equal_chosen_plan() -> None:
    """The engine reads the allocator's cap, the choice had the budget: both leave as much free."""
    job = job_named("step-8b-8k")
    found = priced_of(job, "infinity_plan", machine_of(), PROCESS_BYTES)
    config = found.case.config
    cap = parse_size(job["device_budget"])
    limits = replace(found.case.limits, activations=None)
    share = int(0.9 * cap)  # of what a device has free
    left = limits_leaving_activations(limits, found.activations, Tier.DEVICE, share)
    assert left == found.case.limits
    assert config.activations.tokens == found.case.work.tokens


def test_dry_run_prints_choice_and_expectation() -> None:
    checks = tool.checks_of(["8b"], Path("/out"), Path("/work"))
    (line,) = gpu_plan.plan_lines(checks)
    job = job_named("step-8b-8k")
    found = priced_of(job, "infinity_plan", machine_of(), PROCESS_BYTES)
    free = without_offload(job)
    plan = free.plan()
    assert all(h.state is h.weight is h.gradient is Tier.DEVICE for h in plan.placements)
    assert (free.work.tokens, free.work.recompute) == (8192, "all")
    share = step_cost(plan, EXPECTED, free.work).seconds / found.cost.seconds
    assert 0.3 < share < 1
    for text in (BatchSchedule.of(found.case).line(32),
                  f"{share:.2f} of a step without offload, wanted 0.55"):  # fmt: skip
        assert text in line


def test_search_tries_offloaded_block_inputs() -> None:
    """Streaming does not fit with one micro-batch, and many are faster, unless inputs offload."""
    found = priced_of(job_named("step-8b-32k"), "infinity_plan", machine_of(), PROCESS_BYTES)
    chosen = BatchSchedule.of(found.case)
    assert (chosen.micro_batches, chosen.recompute, chosen.offload) == (1, "all", "host")


def test_engine_config_has_budgets_only_on_gpu() -> None:
    job = job_named("step-8b-32k-m4") | {"slices": 2, "offload": "host", "by_engine": True}
    config = engine_config(job, "infinity_ram")
    assert config["budget"] == {"device": "24GiB", "host": "116GiB"}
    assert config["placement"] == {}
    assert config["activations"] == {
        "checkpoint": "units", "slices": 2, "offload": "host", "logits": "auto", "tokens": 8192
    }  # fmt: skip
    on_cpu = engine_config(job | {"device": "cpu"}, "infinity_ram")
    assert on_cpu["budget"] == {}
    assert on_cpu["placement"] == PLACEMENTS["infinity_ram"]
    assert engine_config(job | {"compile": True}, "infinity_disk")["compile"] is True
    assert engine_config(job | {"state": "host"}, "infinity_ram")["placement"] == {
        "optimizer_state": "host"
    }


def test_cap_device_sets_memory_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, torch.device]] = []
    facts = SimpleNamespace(total_memory=96 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: calls.append((share, device)),
    )
    device = torch.device("cuda", 0)
    cap_device(24 * GIB, device)
    cap_device(200 * GIB, device)
    assert calls == [(0.25, device), (1.0, device)]


@pytest.mark.parametrize(("share", "found"), [(1.0, 90), (0.25, 24 - 4), (0.01, 0)])
def test_device_memory_bytes_limited_by_memory_fraction(
    share: float, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 96 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GIB)
    device = SimpleNamespace(torch_device=torch.device("cuda", 0))
    assert CudaDevice.memory_bytes(device) == found * GIB  # type: ignore[arg-type]


def report_of(**more: Any) -> dict[str, Any]:
    """Return a GPU benchmark's report with the fields that targets read."""
    entry = {"median_step_s": 5.0, "tokens_per_s": 6554.0, "peak_reserved_bytes": 23 * GIB,
            "device_budget_bytes": 24 * GIB}  # fmt: skip
    return {"device": "cuda", "model": "llama-8b", "tokens": 32768, "ratio": {},
            "contenders": {"infinity_ram": entry}, "phases": {}, "skipped": {}} | more  # fmt: skip


def test_judged_uses_targets_of_device() -> None:
    def judgements(**more: Any) -> dict[str, tuple[str, bool]]:
        return {one["name"]: (one["target"], one["met"]) for one in judge(report_of(**more))}

    plain, peer = "tokens/s relative to plain torch", "tokens/s relative to DeepSpeed"
    assert judgements(ratio={"torch_ram": 1.09})[plain] == ("at least 0.93", False)
    assert judgements(ratio={"torch_ram": 1.07})[plain] == ("at least 0.93", True)
    assert judgements(tokens=16384, ratio={"torch_ram": 1.2})[plain] == ("at least 0.8", True)
    small = {"tokens": 8192, "ratio": {"torch_ram": 1.8, "deepspeed_cpu_to_ram": 1.9}}
    assert judgements(**small)[plain] == ("at least 0.55", True)
    assert judgements(**small)[peer] == ("at least 2", False)
    assert plain not in judgements(tokens=512, ratio={"torch_ram": 9.0})
    assert judgements(model="llama-14b")["tokens/s"] == ("at least 5500", True)
    disk = judgements(ratio={"schedule": 1.11})
    assert disk["all on disk: step relative to the schedule bound"] == ("at most 1.10", False)
    assert judgements()["infinity_ram: device memory, GiB"] == ("at most 24 GiB", True)
    on_cpu = judgements(device="cpu", tokens=512, ratio={"torch_ram": 1.04})
    assert on_cpu[plain] == ("at least 0.9524", True)


def chosen_report(step: float = 1.0, memory: float = 1.0, links: float = 1.0) -> dict[str, Any]:
    """Return a report of the plan's schedule with these ratios of measured to predicted."""
    entry = {"median_step_s": 5.0, "tokens_per_s": 6554.0, "peak_device_bytes": memory * 20 * GIB,
            "predicted_device_bytes": 20 * GIB, "links_bytes_per_s": links * 90e9}  # fmt: skip
    ratio = {"plan_to_torch_ram": 1.2, "plan_to_schedule": 1.05, "plan_to_predicted": step}
    bound = {"infinity_plan": {"rates": {"copies_mixed": 90e9}}}
    return report_of(contenders={"infinity_plan": entry}, ratio=ratio, bound=bound)


def test_plan_contender_judged_by_its_prediction() -> None:
    def missed(**found: float) -> set[str]:
        return {one["name"] for one in judge(chosen_report(**found)) if not one["met"]}

    plain, step = "tokens/s relative to plain torch", "step relative to the plan's time"
    memory = "infinity_plan: device memory relative to the plan's"
    links = "infinity_plan: links in the optimizer pass relative to copies alone"
    bound = "the plan's choice: step relative to the schedule bound"
    names = {one["name"] for one in judge(chosen_report())}
    assert names == {plain, bound, step, memory, links}
    assert missed() == missed(step=1.14, memory=1.04, links=0.91) == {plain}
    assert missed(step=0.84, memory=0.94) == missed(step=1.16, memory=1.06) == {plain, step, memory}
    assert missed(links=0.89) == {plain, links}
    on_cpu = judge(chosen_report(step=1.16) | {"device": "cpu"})
    assert {one["name"]: one["met"] for one in on_cpu}[step] is False


def copy_of(track: str, what: str, begin: float, end: float, nbytes: int) -> Slice:
    return Slice(track, what, "b", begin, begin, end, nbytes)


def test_links_in_pass_counts_copies_during_optimizer_pass() -> None:
    """Both directions, from the first copy of state in a step to the end of the last one."""
    copies = [
        copy_of("to_device", "weight", 0.0, 2.0, 100),  # half of it before the first state
        copy_of("to_device", "moment1", 1.0, 2.0, 50),
        copy_of("from_device", "moment1", 2.0, 3.0, 70),
        copy_of("from_device", "gradient", 2.5, 4.5, 40),  # three quarters of it afterwards
        copy_of("to_device", "residual", 12.0, 13.0, 30),  # another step
        copy_of("to_device", "master", 30.0, 31.0, 10**6),  # in none
    ]
    steps = [copy_of("step", f"step {n}", 10.0 * n, 10.0 * n + 9, 0) for n in (0, 1)]
    tracks = {"step": tuple(steps)} | {
        track: tuple(one for one in copies if one.track == track)
        for track in ("to_device", "from_device")
    }
    shares = Shares(TraceTimeline("here", {}, tracks, 0, True))
    assert links_in_pass(shares) == (50 + 50 + 70 + 10 + 30) / 3.0
    without = {"step": tracks["step"], "to_device": tracks["to_device"][:1]}
    assert links_in_pass(Shares(TraceTimeline("here", {}, without, 0, True))) is None


def plain_report(step_s: float) -> dict[str, Any]:
    return report_of(contenders={"torch_ram": {"median_step_s": step_s}})


def test_table_has_found_and_not_run_rows() -> None:
    text = "\n".join(
        table(
            {
                "step-8b-32k-plain-4": plain_report(1.0),
                "step-8b-32k-plain-8": plain_report(1.4),
                "step-8b-32k": report_of(),
                "step-1.5b-8k-trace": {"steps": []},  # not a benchmark: skipped
                "step-1.5b-8k": report_of(
                    ratio={"torch_ram": 2.0}, skipped={"deepspeed_cpu": "not importable"}
                ),
                "step-1.5b-8k-fsdp": report_of(ratio={"fsdp2_to_ram": 2.5}),
            }
        )
    )
    # 24 more blocks of 0.1 s each: 3.8 s, against 5 s.
    assert "plain torch (derived from 4 and 8 of its blocks) | >= 0.93 | 0.76 | MISSED |" in text
    assert "relative to FSDP2 with CPU offload | >= 2 | 2.5 | met |" in text
    assert "| 1.5B, 8k: tokens/s relative to plain torch | >= 0.55 | 0.5 | MISSED |" in text
    assert "ZeRO-3 offload | >= 2 | - | not run: not importable |" in text
    assert "| 14B, 32k, whole card: tokens/s | >= 5500 | - | not run |" in text
    assert "reserved | <= 24 | 23 | met |" in text
    assert len(text.splitlines()) == 2 + len(TARGETS)


def test_table_compares_plan_with_result() -> None:
    rows = table({
        "step-8b-8k": chosen_report(step=0.8, memory=1.02, links=0.88),
        "step-8b-32k-m4": report_of(ratio={"ram_to_schedule": 1.2}),
        "step-1.5b-8k-state-in-ram": report_of(ratio={"ram_to_schedule": 1.04}),
    })  # fmt: skip
    for row in (
        "| 8B, 8k: tokens/s relative to plain torch | >= 0.55 | 0.8333 | met |",
        "| 8B, 8k: step relative to the schedule bound | <= 1.1 | 1.05 | met |",
        "| 8B, 8k: step relative to the plan's time, difference | <= 0.15 | 0.2 | MISSED |",
        "| 8B, 8k: peak of device memory relative to the plan's, difference | <= 0.05 | 0.02 "
        "| met |",
        "| 8B, 8k: links in the optimizer pass relative to copies alone | >= 0.9 | 0.88 | MISSED |",
        "| 8B, 32k in 4 micro-batches: step relative to the schedule bound | <= 1.1 | 1.2 "
        "| MISSED |",
        "| 1.5B, 8k, all state in RAM: step relative to the schedule bound | <= 1.1 | 1.04 | met |",
        "| 14B, 32k: step relative to the schedule bound | <= 1.1 | - | not run |",
    ):
        assert row in rows, row


# --- carried packages -----------------------------------------------------------------------------


def installed() -> dict[str, carried.Package]:
    """Return the packages to carry as installed here: constraints.txt pins both."""
    found = {}
    for name in carried.CARRIED:
        distribution = importlib.metadata.distribution(name)
        found[name] = carried.Package(distribution.version, tuple(distribution.requires or ()))
    return found


def test_carried_packages_are_exactly_required() -> None:
    available, required = installed(), carried.wanted()
    assert carried.uncovered(required, available) == []
    for name in available:
        left = {other: package for other, package in available.items() if other != name}
        assert carried.uncovered(required, left), f"{name} is asked for by nobody"


def test_uncovered_names_missing_and_requirer() -> None:
    requires = (
        "two>=2; os_name == 'posix'",
        "old; os_name == 'nt'",
        "three; extra == 'more'",
        "torch",
    )
    available = {"one": carried.Package("1.0", requires), "two": carried.Package("1.9", ())}
    (wrong,) = carried.uncovered(["one"], available)
    assert wrong.startswith("two>=2")
    assert wrong.endswith("for one: 1.9 is carried")
    assert carried.uncovered(["One[more]"], available)[1].startswith("three")


def imported(entries: list[Path], folders: list[Path]) -> set[str]:
    """Return third-party modules imported at load time, directly or through files in `folders`."""
    names, seen = set[str](), set[Path]()
    while entries:
        path = entries.pop()
        if path in seen:
            continue
        seen.add(path)
        found = set[str]()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        for name in found:
            candidates = [folder / (name.replace(".", "/") + end)
                    for folder in folders for end in (".py", "/__init__.py")]  # fmt: skip
            entries += [candidate for candidate in candidates if candidate.exists()]
            names.add(name.partition(".")[0])
    return names - {path.stem for path in seen} - {"infinity", "support"} - sys.stdlib_module_names


def test_imports_are_covered_by_carried_packages() -> None:
    """Tests, tools and package import only modules of carried or installed distributions.

    Integration tests are excluded: they need the machine's transformers.
    """
    stages = [stage for stage in tool.STAGES if stage != "integrations"]
    entries = [ROOT / word for check in tool.checks_of(stages, Path("/out"), Path("/work"))
               for word in check.command if word.startswith(FOLDERS)]  # fmt: skip
    entries += [ROOT / "tests" / "conftest.py", ROOT / "benchmarks" / "step" / "contender.py"]
    entries += [ROOT / "infinity" / "engine.py", ROOT / "infinity" / "cli" / "main.py"]
    folders = [ROOT / name for name in ("tests", "tools", "benchmarks", "examples", ".")]
    providers = importlib.metadata.packages_distributions()
    allowed = {*carried.CARRIED, *carried.THERE}
    names = imported(entries, folders)
    assert {"torch", "pytest", "hypothesis", "pydantic", "typer", "yaml"} <= names
    for name in names:
        distributions = {carried.canonical(one) for one in providers.get(name, [])}
        assert distributions & allowed, f"{name} comes with {distributions or 'nothing'}"


def wheel_of(folder: Path, name: str, version: str) -> Path:
    return folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create `.whl/` as `--fetch` does, with metadata-only wheels, and a wheel of this package."""
    wheels = tmp_path / ".whl"
    monkeypatch.setattr(carried, "WHEELS", wheels)
    wheels.mkdir()
    for name, (version, requires) in installed().items():
        metadata = [
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        with zipfile.ZipFile(wheel_of(wheels, name, version), "w") as wheel:
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(metadata))
    native = wheels / "native" / carried.fingerprint()
    native.mkdir(parents=True)
    (native / "torch_infinity.whl").touch()
    return wheels


def test_main_without_gpu_checks_packages_and_plans_stages(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(tool, "why_no_gpu", lambda: "no GPU")
    assert tool.main(["smoke", "8b"]) == tool.NO_GPU
    printed = capsys.readouterr()
    assert "nothing was built, run or reported" in printed.err
    for text in ("all that is asked for, but numpy, pip, torch",
                  "torch_infinity.whl, built from these sources", "gpu/smoke.py --machine",
                  "smoke: plans nothing", "step-8b-8k, infinity_plan"):  # fmt: skip
        assert text in printed.out, text
    assert "step-1.5b" not in printed.out
    monkeypatch.setattr("gpu.plan.plan_lines", lambda checks: [f"planned {len(checks)}"])
    assert tool.main(["--dry-run", *tool.STAGES]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("planned ") == len(tool.STAGES)
    for text in (*KERNEL_TESTS, *TRAINING_TESTS, "bench_adam_cuda", "llama-8b", "--machine-file",
                  "--device-budget 24GiB", "--compare deepspeed-cpu"):  # fmt: skip
        assert text in printed.out, text
    assert not (tmp_path / "out").exists()
    next(folder.glob("execnet-*.whl")).unlink()
    monkeypatch.setattr(carried, "LIMIT_BYTES", 1)
    assert tool.main(["smoke"]) == tool.MISSING
    printed = capsys.readouterr()
    assert "execnet>=2.1, for pytest-xdist: not carried" in printed.err
    assert "MiB would travel, 0 at most may" in printed.err


@needs_no_gpu
def test_script_usage_errors(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script("--table", OUT=str(out))
    assert done.returncode == 2
    assert "usage: gpu_check.sh" in done.stderr
    assert script("--dry-run", "all").returncode == 2
    assert not out.exists()


def test_prebuilt_wheel_valid_until_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "one.py").write_text("1")
    monkeypatch.setattr(carried, "REPOSITORY", tmp_path)
    monkeypatch.setattr(carried, "WHEELS", tmp_path / ".whl")
    before = carried.fingerprint()
    (tmp_path / "README.md").write_text("else")
    assert carried.fingerprint() == before
    assert carried.prebuilt() is None
    folder_of_build = tmp_path / ".whl" / "native" / before
    folder_of_build.mkdir(parents=True)
    (folder_of_build / "ours.whl").touch()
    assert carried.prebuilt() == folder_of_build / "ours.whl"
    (tmp_path / "infinity" / "one.py").write_text("2")
    assert carried.fingerprint() != before
    assert carried.prebuilt() is None  # built from other sources


def python(name: str, code: str, limit_s: float = 600, json: bool = False) -> tool.Check:
    return tool.Check(name, limit_s, [sys.executable, "-c", code], json)


def test_main_runs_checks_and_writes_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but the GPU; the second call reuses the build of the first."""
    report = json.dumps(report_of(ratio={"schedule": 1.05}))
    checks = [python("step-1.5b-disk", f"print({report!r})", json=True), python("one", "print(1)")]
    checks.append(replace(python("large", "raise SystemExit(1)"), device_gib=80))
    built = []

    def build(site: Path) -> tool.Check:
        built.append(site)
        return python("build", "print('built')")

    monkeypatch.setattr(tool, "why_no_gpu", lambda: None)
    monkeypatch.setattr(carried, "missing", lambda: [])
    monkeypatch.setattr(carried, "WHEELS", tmp_path / ".whl")
    monkeypatch.setattr(tool, "build", build)
    monkeypatch.setattr(tool, "BUILT", tmp_path / "built")
    monkeypatch.setattr(tool, "FACTS", "print('H200 139 GiB, 16 CPU cores')")
    monkeypatch.setattr(tool, "checks_of", lambda stages, out, work, gib, ram: checks)
    monkeypatch.setattr(tool, "gpu_gib", lambda: 40.0)
    # The limits are for a rented machine and count from the import of the tool.
    monkeypatch.setattr(tool, "BEGAN", time.monotonic())
    monkeypatch.setattr(tool, "FACTS_S", 3600.0)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/before")
    for name in ("PYTHONUNBUFFERED", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "INFINITY_KERNEL_CACHE"):
        monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert tool.main(["disk", "--limit", "3600"]) == 0
    assert tool.main(["disk", "--limit", "3600"]) == 0
    assert len(built) == 1
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names[1:] == ["log.txt", "results.json"]
    assert names[0].startswith("gpu_disk_h200-139_20")
    row = "| 1.5B, all on disk: step relative to the schedule bound | <= 1.1 | 1.05 | met |"
    page = (tmp_path / "out" / names[0]).read_text()
    assert row in page
    assert "| large | not run: needs 80 GiB on the GPU, which has 40 |" in page
    capsys.readouterr()
    assert tool.main(["--table", str(tmp_path / "out" / "results.json")]) == 0
    assert row in capsys.readouterr().out


def test_keep_traces_compresses(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "trace-infinity_ram.json").write_text("[]" * 1000)
    tool.keep_traces(tmp_path, tmp_path)
    assert gzip.decompress((tmp_path / "step.trace.json.gz").read_bytes()) == b"[]" * 1000


@pytest.mark.parametrize("loads", [True, False])
def test_carried_wheel_used_if_it_loads(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "LOADS", f"raise SystemExit({int(not loads)})")
    monkeypatch.setattr(tool, "build", lambda site: python("build", "raise SystemExit(1)"))
    monkeypatch.setattr(tool, "install", lambda site, wheel: [sys.executable, "-c", f"# {wheel}"])
    until = time.monotonic() + 600

    def codes() -> list[tuple[str, int | None]]:
        results = tool.built(tmp_path / "site", tmp_path, tmp_path, until)
        return [(result.check.name, result.code) for result in results]

    monkeypatch.setattr(carried, "prebuilt", lambda: None)
    assert codes() == [("build", 1)]
    monkeypatch.setattr(carried, "prebuilt", lambda: Path("ours.whl"))
    assert codes() == ([("prebuilt", 0), ("loads", 0)] if loads else [("build", 1)])


@pytest.mark.parametrize(("there", "taken"), [(None, True), ("0.3.2", True), ("1.3", False)])
def test_cuda_packages_installed_together(
    there: str | None, taken: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if there is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return there

    monkeypatch.setattr(importlib.metadata, "version", version)
    (check,) = tool.wheels(folder / "site")
    names = {carried.name_of(Path(word)) for word in check.command if word.endswith(".whl")}
    assert names & set(carried.OF_CUDA) == (set(carried.OF_CUDA) if taken else set())
    assert names | set(carried.OF_CUDA) == set(carried.CARRIED)


def test_missing_names_packages_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert [line for line in carried.missing() if "cuda-core" not in line] == []
    project = tmp_path / "pyproject.toml"
    project.write_text(
        text.replace('"pydantic>=2.10"', '"pydantic>=999"').replace('"aiofiles', '"no-such-package')
    )
    found = "\n".join(carried.missing(project))
    assert "pydantic>=999: " in found
    assert "no-such-package>=24.1: not there" in found
    project.write_text(text.replace('"nanobind>=2.9"', '"nanobind>=999"'))
    assert "nanobind>=999" in "\n".join(carried.missing(project))

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cmake" if name == "cmake" else None)
    names = {line.partition(":")[0] for line in carried.missing()}
    assert "ninja" in names
    assert "cmake" not in names  # a program on the PATH suffices


def test_failed_checks_reported_and_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until = time.monotonic() + 3600
    checks = [
        python("good", "import sys; print('{}'); print('a table', file=sys.stderr)", json=True),
        python("bad", "print('why'); raise SystemExit(7)"),
        tool.Check("slow", 5, ["sh", "-c", "echo begun; exec sleep 600"]),
        python(
            "warns", 'print(\'{"contenders": {"o": {"warnings": ["not pinned"]}}}\')', json=True
        ),
        python("thrashes", 'print(\'{"contenders": {"o": {"alloc_retries": 3}}}\')', json=True),
        python("last", "print('x\\n' * 500 + 'the end')"),
    ]
    work = tmp_path / "work"
    work.mkdir()
    results = tool.run_all(checks, tmp_path, work, until)
    results += tool.run_all([python("late", "print(1)")], tmp_path, work, time.monotonic())
    warned = tool.WARNED
    assert [one.code for one in results] == [0, 7, tool.STOPPED, warned, warned, 0, None]
    assert tool.reports_in(work, checks).keys() == {"good", "warns", "thrashes"}
    machine = "NVIDIA H200 139 GiB, 16 CPU cores\n"
    found = {"step-1.5b-8k": report_of(ratio={"torch_ram": 2.0})}
    report = tool.write_report(results, machine, ["more"], tmp_path, found)
    assert report.name.startswith("gpu_more_nvidia-h200-139_20")
    text = report.read_text()
    for expected in (
        "| target | wanted | found | |",
        "| 0.5 | MISSED |",
        "| good | passed |",
        "| bad | FAILED, exit code 7 |",
        "| slow | stopped after",
        "| warns | FAILED: the engine warned |",
        "the engine warned: not pinned",
        "asked the driver again, 3 times",
        "| late | not run: no time was left |",
        "a table",
        "why",
        "begun",
        "the end",
    ):
        assert expected in text
    assert text.count("\nx") <= tool.SHOWN_LINES
    assert "bad: exit code 7" in (tmp_path / "log.txt").read_text()
    assert "bad: exit code 7" in capsys.readouterr().out


# --- smoke test -----------------------------------------------------------------------------------


def test_machine_facts_need_no_package() -> None:
    smoke_py = ROOT / "benchmarks" / "gpu" / "smoke.py"
    command = [sys.executable, "-I", "-S", str(smoke_py), "--machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    for word in ("Python.h: ", "MemTotal", "MemAvailable", "transparent huge pages", "g++: "):
        assert word in done.stdout


def test_smoke_on_fake_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeAccelerator] = []
    lines: list[str] = []

    def make() -> FakeAccelerator:
        made.append(FakeAccelerator(1, kernels=True))
        return made[-1]

    monkeypatch.setattr(smoke, "PINNED_GIB", 1 / 32)
    monkeypatch.setattr(smoke, "PINNED_STEP_GIB", 1 / 64)
    monkeypatch.setattr(smoke, "BESIDE_GIB", 0)
    try:
        found = smoke.run_parts(make, lines.append)
        assert found["failed"] == []
        assert found["warnings"] == []
        assert found["kernels"] == {"fp32": True, "8bit": True}
        assert found["links"].keys() == {"to_device", "from_device", "copies_mixed"}
        assert found["overlap"].keys() == {"copy_h2d", "copy_h2d_unordered", "copy_d2h_unordered"}
        assert len(found["training"]["losses"]) == smoke.NUM_STEPS
        assert (found["pinning"]["pinned_gib"], found["pinning"]["stopped"]) == (1 / 32, "")
        assert [len(device.violations) for device in made] == [0] * len(made)
        monkeypatch.setattr(FakeAccelerator, "why_no_kernels", lambda self: "the driver refuses")
        monkeypatch.setattr(smoke, "BESIDE_GIB", 1 << 20)
        found = smoke.run_parts(make, lines.append)
        assert found["failed"] == ["kernels: no kernels: the driver refuses"]
        assert found["pinning"]["pinned_gib"] == 0
        assert "are available" in found["pinning"]["stopped"]
    finally:
        for device in made:
            device.close()
