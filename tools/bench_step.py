#!/usr/bin/env python3
"""Time whole training steps: plain PyTorch in RAM, our engine in RAM, our engine on disk.

    python tools/bench_step.py --model gpt-124m --json

Each contender lives in a child process and they take turns, so that a machine whose speed wanders
slows all alike: only ratios within a round are compared. Prints step times, peak memory, bytes
moved beside bytes predicted, the bounds of DESIGN section 1 from times and disk rates measured
here, and `ratio.torch_ram`, `ratio.schedule` and `ratio.ideal`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from _process import Phase, Signals, Stopped

REPOSITORY = Path(__file__).resolve().parent.parent
OURS = ("torch_ram", "infinity_ram", "infinity_disk")


class ContenderFailedError(Exception):
    """A child ended early; its own error is on stderr already."""


class Child:
    """A contender in its own process and session."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        script = Path(__file__).with_name("_bench_contender.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, job: dict[str, Any]) -> None:
        """Build the model and take the warm-up steps."""
        self.first = self.ask(job | {"contender": self.name})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            code = self._process.wait()
            raise ContenderFailedError(f"{self.name} ended with code {code}") from error
        return answer

    def close(self, kill: bool) -> None:
        """End the process; without `kill` it may clean up first."""
        if not kill and self._process.poll() is None:
            try:
                self._process.communicate(json.dumps({"do": "close"}) + "\n", timeout=120)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                kill = True
        if kill:
            self._process.kill()
        self._process.wait()

    def summary(self) -> dict[str, Any]:
        """Return medians and the last known facts of this contender."""
        times = [step_s for turn in self.turns for step_s in turn["step_s"]]
        facts = {key: value for key, value in self.turns[-1].items() if key != "step_s"}
        return {
            "median_step_s": statistics.median(times),
            "min_step_s": min(times),
            "max_step_s": max(times),
            "num_steps": len(times),
            "init_s": self.first["init_s"],
            **facts,
        }


def measure(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Any:
    """Run all rounds and return the report."""
    from _bench_bound import Phases, measure_rates

    names, skipped = list(OURS), {}
    if arguments.compare == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            skipped["deepspeed"] = "not importable: skipped"
            say("deepspeed: not importable: skipped")
        else:
            names.append("deepspeed_nvme")
    rates = [measure_rates(folder)]
    children: list[Child] = []
    phases: list[Phases] = []
    done = False
    try:
        for name in names:
            say(f"starting {name} ...")
            children.append(Child(name))
            children[-1].start(job_of(arguments, folder))
        for index in range(arguments.rounds):
            for child in children[index % len(children) :] + children[: index % len(children)]:
                answer = child.ask({"do": "turn", "steps": arguments.steps})
                child.turns.append(answer)
                times = ", ".join(f"{step_s:.3f}" for step_s in answer["step_s"])
                say(f"round {index + 1}/{arguments.rounds}  {child.name:<14} {times} s")
                if child.name == "infinity_ram":
                    phases.append(Phases(**child.ask({"do": "phases"})))
        rates.append(measure_rates(folder))
        done = True
    finally:
        for child in children:
            child.close(kill=not done)
    report = report_of(arguments, children, phases, rates)
    return report | {"skipped": skipped}


def job_of(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what every contender must know."""
    per_micro_batch = arguments.tokens // arguments.micro_batches
    context = min(arguments.context, per_micro_batch)
    return {
        "model": arguments.model,
        "precision": arguments.precision,
        "micro_batches": arguments.micro_batches,
        "rows": per_micro_batch // context,
        "context": context,
        "checkpointing": arguments.checkpointing,
        "warmup": arguments.warmup,
        "path": str(folder),
        "host_budget": arguments.host_budget,
    }


def report_of(
    arguments: argparse.Namespace, children: list[Child], phases: list[Any], rates: list[Any]
) -> dict[str, Any]:
    """Put medians, bounds and ratios together."""
    import gpt
    import torch
    from _bench_bound import Phases, Rates, Traffic, ideal_bound_s, schedule_bound_s

    by_name = {child.name: child for child in children}
    disk = by_name["infinity_disk"].turns
    mean = Rates(*(statistics.fmean(pair) for pair in zip(*map(_values, rates), strict=True)))
    traffic = Traffic.of(disk[-1]["predicted_bytes"], arguments.micro_batches)
    rest = (mean, traffic, arguments.micro_batches, disk[-1]["unified"])
    schedule = [schedule_bound_s(part, *rest) for part in phases]
    ideal = [ideal_bound_s(part, *rest) for part in phases]
    times = {c.name: [statistics.median(t["step_s"]) for t in c.turns] for c in children}

    def ratio(name: str, to: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(times[name], to, strict=True))

    job = job_of(arguments, Path())
    medians = Phases(*(statistics.median(kind) for kind in zip(*map(_values, phases), strict=True)))
    return {
        "model": arguments.model,
        "num_parameters": gpt.count_parameters(gpt.shape_of(arguments.model, job["context"])),
        "precision": arguments.precision,
        "tokens": job["rows"] * job["context"] * arguments.micro_batches,
        "micro_batches": arguments.micro_batches,
        "rounds": arguments.rounds,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
        },
        "lanes": {
            "before": vars(rates[0]),
            "after": vars(rates[-1]),
            "unit": "bytes per second",
        },
        "phases": vars(medians),
        "contenders": {child.name: child.summary() for child in children},
        "bound": {"schedule": statistics.median(schedule), "ideal": statistics.median(ideal)},
        "ratio": {
            "torch_ram": ratio("infinity_ram", times["torch_ram"]),
            "schedule": ratio("infinity_disk", schedule),
            "ideal": ratio("infinity_disk", ideal),
            "disk_to_torch_ram": ratio("infinity_disk", times["torch_ram"]),
        },
        # Beside busy neighbours medians wander; the fastest steps are those with fewest of them.
        "ratio_of_minima": {
            "torch_ram": min(times["infinity_ram"]) / min(times["torch_ram"]),
            "schedule": min(times["infinity_disk"]) / min(schedule),
            "ideal": min(times["infinity_disk"]) / min(ideal),
            "disk_to_torch_ram": min(times["infinity_disk"]) / min(times["torch_ram"]),
        },
    }


def _values(record: Any) -> list[float]:
    return list(vars(record).values())


def show(report: dict[str, Any]) -> None:
    """Print the report for people, on stderr."""
    from rich.console import Console
    from rich.table import Table

    from infinity.sizes import format_count, format_rate, format_size

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=120)
    table = Table(
        title=f"{report['model']}, {format_count(report['num_parameters'])} parameters,"
        f" {report['tokens']} tokens in {report['micro_batches']} micro-batch(es)"
    )
    for name in ("contender", "step", "peak RSS", "read / predicted", "written / predicted"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for name, facts in report["contenders"].items():
        moved, predicted = facts.get("moved_bytes"), facts.get("predicted_bytes")
        lanes = ["-", "-"]
        if moved is not None and predicted is not None:
            lanes = [
                f"{format_size(moved[lane])} / {format_size(predicted[lane])}"
                for lane in ("disk_read", "disk_write")
            ]
        peak = format_size(facts["peak_rss_bytes"] or 0)
        table.add_row(name, f"{facts['median_step_s']:.3f} s", peak, *lanes)
    console.print(table)
    phases, lanes = report["phases"], report["lanes"]
    console.print(
        f"forward {phases['forward_s']:.3f} s, backward {phases['backward_s']:.3f} s per"
        f" micro-batch, update {phases['update_s']:.3f} s"
    )
    for when in ("before", "after"):
        rates = ", ".join(f"{k} {format_rate(v)}" for k, v in lanes[when].items())
        console.print(f"disk {when}: {rates}")
    bound, machine = report["bound"], report["machine"]
    console.print(f"bound: schedule {bound['schedule']:.3f} s, ideal {bound['ideal']:.3f} s")
    for key, title in (("ratio", "ratio"), ("ratio_of_minima", "ratio of the fastest")):
        ratio = report[key]
        console.print(
            f"{title}: torch_ram {ratio['torch_ram']:.3f} (target 1.05), schedule"
            f" {ratio['schedule']:.3f} (target 1.10), ideal {ratio['ideal']:.3f}"
        )
    if machine["load_average"] > 1.5 * machine["threads"]:
        console.print(f"load average {machine['load_average']:.1f}: others compute here too")


def main(argv: list[str] | None = None) -> int:
    """Measure, show, and leave nothing behind."""
    signals = Signals()
    signals.install()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.tokens < arguments.micro_batches:
        parser.error(f"--tokens {arguments.tokens} is less than one per micro-batch")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    parent = arguments.path or REPOSITORY / "scratch"
    if arguments.path is None:
        parent.mkdir(exist_ok=True)
    folder: Path | None = None
    import _bench_bound  # noqa: F401  torch, before a signal may raise
    import gpt  # noqa: F401

    try:
        signals.enter(Phase.RUNNING)
        folder = Path(tempfile.mkdtemp(prefix="bench-step-", dir=parent))
        report = measure(arguments, folder, say)
        show(report)
        if arguments.json:
            print(json.dumps(report), flush=True)
    except Stopped as stopped:
        say(str(stopped))
        return stopped.exit_code
    except ContenderFailedError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {error}")
        return 4
    finally:
        signals.enter(Phase.CLOSING)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if arguments.path is None and not any(parent.iterdir()):
            parent.rmdir()
        signals.enter(Phase.ENDED)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="gpt-124m", help="a preset of examples/gpt.py")
    add("--rounds", type=_positive, default=5, help="turns per contender")
    add("--steps", type=_positive, default=1, help="timed steps per turn (one more is untimed)")
    add("--warmup", type=_positive, default=2, help="steps of each contender before the rounds")
    add("--tokens", type=_positive, default=512, help="per step, all micro-batches together")
    add("--micro-batches", type=_positive, default=1)
    add("--context", type=_positive, default=256, help="longest sequence")
    add("--checkpointing", action="store_true", help="recompute blocks in backward")
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    add("--path", type=Path, help="folder on the disk to measure (default: the repository's)")
    add(
        "--host-budget",
        metavar="SIZE",
        help='infinity_disk keeps what fits in it in RAM; "8GiB" (default: all on disk)',
    )
    add("--compare", choices=("deepspeed",), help="add this peer if it can be imported")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
