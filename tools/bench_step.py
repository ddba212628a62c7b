#!/usr/bin/env python3
"""Time whole training steps: plain PyTorch in RAM, our engine in RAM, our engine on disk.

    python tools/bench_step.py --model gpt-124m --json
    python tools/bench_step.py --model gpt-1.3b --precision fp32 --tokens 64 \\
        --host-budget 8GiB --only infinity_disk --compare deepspeed
    python tools/bench_step.py --device cuda --device-budget 24GiB --model llama-8b \\
        --tokens 32768 --context 4096 --checkpointing --only torch_ram,infinity_ram --alone

Each contender lives in a child process and they take turns, so that a machine whose speed wanders
slows all alike: only ratios within a round are compared. Where they do not fit beside each other,
`--alone` starts each by itself, and the ratios are worth less. Prints step times, tokens and model
FLOP per second (6 per parameter and token; the recomputation of `--checkpointing`, 2 more, is told
apart), peak memory, bytes moved beside bytes predicted, the bounds of DESIGN section 1 from times
and disk rates measured here, and ratios: step times beside plain PyTorch's, the bounds, the peer's.
Two more steps of ours, after the timed ones, are traced: busy shares of all lanes, and what compute
leaves, the GPU's idle share (on a CPU: the CPU's, waits taken out).
On a GPU "ram" means: on the device as far as its budget goes, the rest in RAM.
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
TRACED_STEPS = 2
PEERS = {"deepspeed": "deepspeed_nvme", "deepspeed-cpu": "deepspeed_cpu"}


class ContenderFailedError(Exception):
    """A child ended early; its own error is on stderr already."""


class Child:
    """A contender in its own process and session."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        self.shares: dict[str, Any] = {}  # of the traced steps; what has no trace has none
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
            **self.shares,
        }


def measure(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Any:
    """Run all rounds and return the report."""
    from _bench_bound import Phases, measure_rates

    names, skipped = list(arguments.only), {}
    if arguments.compare is not None:
        if importlib.util.find_spec("deepspeed") is None:
            skipped["deepspeed"] = "not importable: skipped"
            say("deepspeed: not importable: skipped")
        else:
            names.append(PEERS[arguments.compare])
    # Times of the parts: of the engine where it computes on RAM itself, else without any copies.
    timed = "infinity_ram" if arguments.device == "cpu" else "torch_ram"
    rates = [measure_rates(folder)]
    children = [Child(name) for name in names] if not arguments.alone else []
    groups = [children] if not arguments.alone else [[name] for name in names]
    phases: list[Phases] = []
    done = False
    try:
        for group in groups:
            alive = [Child(one) if isinstance(one, str) else one for one in group]
            children += [child for child in alive if child not in children]
            for child in alive:
                say(f"starting {child.name} ...")
                in_parts = child.name == timed
                child.start(job_of(arguments, folder) | trace_job(arguments, folder, in_parts))
            for index in range(arguments.rounds):
                for child in alive[index % len(alive) :] + alive[: index % len(alive)]:
                    answer = child.ask({"do": "turn", "steps": arguments.steps})
                    child.turns.append(answer)
                    times = ", ".join(f"{step_s:.3f}" for step_s in answer["step_s"])
                    say(f"round {index + 1}/{arguments.rounds}  {child.name:<14} {times} s")
                    if child.name == timed:
                        phases.append(Phases(**child.ask({"do": "phases"})))
            for child in alive:
                child.shares = child.ask({"do": "shares"})
            if arguments.alone:
                alive[0].close(kill=False)
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
        "device": arguments.device,
        "device_budget": arguments.device_budget,
    }


def trace_job(arguments: argparse.Namespace, folder: Path, in_parts: bool) -> dict[str, Any]:
    """Which steps a contender traces, and where to: after all others, and one that leads in.

    Who is timed `in_parts` too takes a step more each round.
    """
    first = arguments.warmup + arguments.rounds * (1 + arguments.steps + in_parts) + 2
    folder = arguments.traces or folder
    return {"trace_steps": [first, first + TRACED_STEPS - 1], "traces": str(folder.resolve())}


def report_of(
    arguments: argparse.Namespace, children: list[Child], phases: list[Any], rates: list[Any]
) -> dict[str, Any]:
    """Put medians, bounds and ratios together."""
    import presets
    import torch
    from _bench_bound import Phases, Rates, Traffic, ideal_bound_s, schedule_bound_s

    times = {c.name: [statistics.median(t["step_s"]) for t in c.turns] for c in children}
    disk = next((c.turns[-1] for c in children if c.name == "infinity_disk"), None)
    if disk is not None and phases:
        mean = Rates(*(statistics.fmean(pair) for pair in zip(*map(_values, rates), strict=True)))
        traffic = Traffic.of(disk["predicted_bytes"], arguments.micro_batches)
        rest = (mean, traffic, arguments.micro_batches, disk["unified"])
        times["schedule"] = [schedule_bound_s(part, *rest) for part in phases]
        times["ideal"] = [ideal_bound_s(part, *rest) for part in phases]
    compared = {
        name: pair for name, pair in COMPARED.items() if pair[0] in times and pair[1] in times
    }
    job = job_of(arguments, Path())
    medians = [statistics.median(kind) for kind in zip(*map(_values, phases), strict=True)]
    num_parameters = presets.count_parameters(presets.shape_of(arguments.model, job["context"]))
    tokens = job["rows"] * job["context"] * arguments.micro_batches
    return {
        "model": arguments.model,
        "num_parameters": num_parameters,
        "precision": arguments.precision,
        "checkpointing": arguments.checkpointing,
        "device": arguments.device,
        "budget": {"device": arguments.device_budget, "host": arguments.host_budget},
        "alone": arguments.alone,
        "tokens": tokens,
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
        "phases": vars(Phases(*medians)) if medians else {},
        "contenders": {
            child.name: child.summary() | _speed(times[child.name], num_parameters, tokens)
            for child in children
        },
        "bound": {
            bound: statistics.median(times[bound])
            for bound in ("schedule", "ideal")
            if bound in times
        },
        "ratio": {
            name: statistics.median(a / b for a, b in zip(times[ours], times[other], strict=True))
            for name, (ours, other) in compared.items()
        },
        # Beside busy neighbours medians wander; the fastest steps are those with fewest of them.
        "ratio_of_minima": {
            name: min(times[ours]) / min(times[other]) for name, (ours, other) in compared.items()
        },
    }


# Ratio of step times -> whose, to whose.
COMPARED = {
    "torch_ram": ("infinity_ram", "torch_ram"),
    "schedule": ("infinity_disk", "schedule"),
    "ideal": ("infinity_disk", "ideal"),
    "disk_to_torch_ram": ("infinity_disk", "torch_ram"),
    "deepspeed_nvme_to_disk": ("deepspeed_nvme", "infinity_disk"),
    "deepspeed_cpu_to_ram": ("deepspeed_cpu", "infinity_ram"),
    "deepspeed_cpu_to_disk": ("deepspeed_cpu", "infinity_disk"),
}


def _speed(step_s: list[float], num_parameters: int, tokens: int) -> dict[str, float]:
    """Tokens and model FLOP per second, of the median step; recomputation is not counted."""
    per_s = tokens / statistics.median(step_s)
    return {"tokens_per_s": per_s, "model_tflops": 6 * num_parameters * per_s / 1e12}


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
    for name in ("contender", "step", "tokens/s", "model TFLOP/s", "idle", "peak RSS",
                 "peak device", "read / predicted", "written / predicted"):  # fmt: skip
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
        on_device, idle = facts.get("peak_device_bytes"), facts.get("gpu_idle_share")
        table.add_row(
            name,
            f"{facts['median_step_s']:.3f} s",
            f"{facts['tokens_per_s']:.4g}",
            f"{facts['model_tflops']:.4g}",
            "-" if idle is None else f"{idle:.0%}",
            peak,
            "-" if on_device is None else format_size(on_device),
            *lanes,
        )
    console.print(table)
    for name, facts in report["contenders"].items():
        if "busy_share" in facts:
            busy = ", ".join(
                f"{k} {share:.0%}" for k, share in facts["busy_share"].items() if share
            )
            console.print(f"{name} was busy: {busy}; {facts['verdict']}")
    phases, lanes = report["phases"], report["lanes"]
    if phases:
        console.print(
            f"forward {phases['forward_s']:.3f} s, backward {phases['backward_s']:.3f} s per"
            f" micro-batch, update {phases['update_s']:.3f} s"
        )
    for when in ("before", "after"):
        rates = ", ".join(f"{k} {format_rate(v)}" for k, v in lanes[when].items())
        console.print(f"disk {when}: {rates}")
    bound, machine = report["bound"], report["machine"]
    if bound:
        console.print(f"bound: schedule {bound['schedule']:.3f} s, ideal {bound['ideal']:.3f} s")
    targets = {"torch_ram": " (target 1.05)", "schedule": " (target 1.10)"}
    for key, title in (("ratio", "ratio"), ("ratio_of_minima", "ratio of the fastest")):
        if report[key]:
            said = (f"{name} {x:.3f}{targets.get(name, '')}" for name, x in report[key].items())
            console.print(f"{title}: {', '.join(said)}")
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
    if arguments.only is None:
        arguments.only = OURS
    if arguments.device is None:
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    parent = arguments.path or REPOSITORY / "scratch"
    if arguments.path is None:
        parent.mkdir(exist_ok=True)
    folder: Path | None = None
    import _bench_bound  # noqa: F401  torch, before a signal may raise
    import presets

    if arguments.model not in presets.PRESETS:
        parser.error(f"--model {arguments.model} is not one of {', '.join(presets.PRESETS)}")
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


def _contenders(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in OURS]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {', '.join(OURS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="gpt-124m", help="a preset of examples/gpt.py or examples/llama.py")
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
    add("--device", choices=("cpu", "cuda"), help="where to compute (default: cuda if there)")
    add("--device-budget", metavar="SIZE", help='of ours on a GPU; "24GiB" (default: all of it)')
    add("--only", type=_contenders, metavar="NAMES", help=f"of {','.join(OURS)} (default: all)")
    add("--alone", action="store_true", help="one contender after another, for lack of memory")
    add("--compare", choices=tuple(PEERS), help="add this peer if it can be imported")
    add("--traces", type=Path, metavar="DIR", help="keep traces of ours there (see infinity trace)")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
