"""Time training steps: plain PyTorch in RAM, infinity in RAM, infinity on disk.

    python tools/bench_step.py --model gpt-124m --json
    python tools/bench_step.py --model gpt-1.3b --precision fp32 --tokens 64 \\
        --host-budget 8GiB --only infinity_disk --compare deepspeed
    python tools/bench_step.py --device cuda --device-budget 24GiB --model llama-8b \\
        --tokens 32768 --context 4096 --checkpointing --only torch_ram,infinity_ram --alone

Each contender runs in a child process and they take turns, so that fluctuations of the machine
affect all equally: only ratios within a round are compared. With `--schedule best` each contender
uses its fastest micro-batches and recomputation. If the contenders do not fit together, `--alone`
runs them one after the other: ratios are less exact, and contenders that fail are skipped.

Prints step times, tokens and model FLOP per second (6 per active parameter and token), hardware
FLOP per second (8 if `--checkpointing` computes blocks twice), peak memory, moved and predicted
bytes, the bounds of ARCHITECTURE from the plan and measured rates, ratios (step times relative to
plain PyTorch, the bounds and DeepSpeed), processor seconds by thread, and if targets were met.
Two more steps of infinity, after the timed ones, are traced for busy shares of all tracks and the
idle share of the GPU (on a CPU: of the CPU, without waits).

On a GPU "ram" means: on the device within its budget, the remainder in RAM. Rates of links and
updates are measured first, once per machine. `--device-budget` is a cap that torch's allocator
enforces.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _process import Phase, Signals, Stopped

from step.child import Child, ContenderFailedError
from step.config import recomputes_by_engine

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = ("torch_ram", "infinity_ram", "infinity_disk")
# infinity_layers: all experts of a layer in one unit; infinity_plan: placement and schedule chosen.
CHOICES = (*OURS, "infinity_layers", "infinity_plan")
TRACED_STEPS = 2
PEERS = {"deepspeed": "deepspeed_nvme", "deepspeed-cpu": "deepspeed_cpu", "fsdp2": "fsdp2"}


def measure(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Any:
    """Run all rounds and return the report."""
    from step.bound import measure_disk_rates
    from step.report import report_of

    names, skipped = list(arguments.only), {}
    for peer in arguments.compare:
        if peer.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            skipped[PEERS[peer]] = "deepspeed is not importable: skipped"
            say("deepspeed is not importable: skipped")
        else:
            names.append(PEERS[peer])
    race = Race(arguments, job_of(arguments, folder), say)
    unified = arguments.device == "cpu"
    rates, stopped = [measure_disk_rates(folder, unified=unified)], False
    for group in [[name] for name in names] if arguments.alone else [names]:
        try:
            race.run(group)
        except ContenderFailedError as error:
            if not arguments.alone:
                raise
            skipped[group[0]] = f"failed: {error}"
            say(f"error: {error}")
        except Stopped as error:  # report contenders that have finished
            if not any(child.ended for child in race.children):
                raise
            skipped[group[0]], stopped = f"failed: {error}", True
            say(f"error: {error}")
            break
    rates += rates if stopped else [measure_disk_rates(folder, unified=unified)]
    ended = [child for child in race.children if child.ended or not stopped]
    report = report_of(arguments, race.job, ended, rates)
    return report | {"skipped": skipped}


class Race:
    """Contenders that take turns, with their results."""

    def __init__(
        self, arguments: argparse.Namespace, job: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self.arguments = arguments
        self.job = job
        self.say = say
        # Timed by phase: the engine if it computes on RAM directly, else plain torch.
        on_cpu = arguments.device == "cpu"
        self.timed = ("infinity_ram", "infinity_plan") if on_cpu else ("torch_ram",)
        # For every contender: activations differ in size, and fixed segments would fragment.
        self.environment = {} if on_cpu else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        self.children: list[Child] = []

    def job_for(self, name: str) -> dict[str, Any]:
        """Return the job of a contender, with its fastest schedule if `--schedule best`."""
        if self.arguments.schedule == "given" or name == "infinity_plan":
            return self.job
        return self._best_schedule(name)

    def _best_schedule(self, name: str) -> dict[str, Any]:
        """Return the job with the shortest step among 1, 2, 4, .. micro-batches.

        Blocks are recomputed only if a run without recomputation fails. The search ends at the
        first number of micro-batches that is slower. Raises `ContenderFailedError` if none runs.
        """
        rows = self.job["rows"] * self.job["micro_batches"]
        counts = [count for count in (2**n for n in range(8)) if rows % count == 0]
        best: tuple[float, dict[str, Any]] | None = None
        failure: ContenderFailedError | None = None
        for count in counts:
            result = None
            for checkpointing in (False, True):
                job = self.job | {"micro_batches": count, "rows": rows // count, "warmup": 1}
                job |= {"checkpointing": checkpointing}
                job |= {"by_engine": recomputes_by_engine(job)}
                try:
                    result = self._one_step_s(name, job), job | {"warmup": self.job["warmup"]}
                    break
                except ContenderFailedError as error:
                    failure = error
            if result is None:
                continue
            self.say(f"{name}: {schedule_words(result[1])}: {result[0]:.3f} s")
            if best is not None and result[0] >= best[0]:
                break
            best = result
        if best is None:
            assert failure is not None
            raise failure
        return best[1]

    def _one_step_s(self, name: str, job: dict[str, Any]) -> float:
        child = Child(name, environment=self.environment)
        try:
            child.start(job | self._trace_of(child))
            step_s: float = child.ask({"do": "turn", "steps": 1})["step_s"][0]
        finally:
            child.close(kill=True)
        return step_s

    def run(self, names: Sequence[str]) -> None:
        """Run all rounds of contenders that are alive at the same time."""
        alive: list[Child] = []
        done = False
        try:
            jobs = {name: self.job_for(name) for name in names}
            for name in names:
                alive.append(Child(name, environment=self.environment))
            self.children += alive
            for child in alive:
                self.say(f"starting {child.name} ...")
                job = jobs[child.name]
                child.start(job | self._trace_of(child))
                child.first.setdefault("schedule", schedule_words(job))
                child.first.setdefault("recomputed", float(job["checkpointing"]))
                self.say(f"{child.name} is ready after {child.first['init_s']:.0f} s")
            for index in range(self.arguments.rounds):
                for child in alive[index % len(alive) :] + alive[: index % len(alive)]:
                    self._turn(child, index)
            for child in alive:
                child.shares = child.ask({"do": "shares"})
            done = True
            for child in alive:
                child.ended = True
        finally:
            for child in alive:
                child.close(kill=not done)

    def _turn(self, child: Child, index: int) -> None:
        from step.bound import Phases

        answer = child.ask({"do": "turn", "steps": self.arguments.steps})
        child.turns.append(answer)
        times = ", ".join(f"{step_s:.3f}" for step_s in answer["step_s"])
        self.say(f"round {index + 1}/{self.arguments.rounds}  {child.name:<14} {times} s")
        if child.name in self.timed:
            child.phases.append(Phases(**child.ask({"do": "phases"})))

    def _trace_of(self, child: Child) -> dict[str, Any]:
        """Return the traced steps and the folder of the trace.

        They follow all other steps and one lead-in step. Contenders that are timed by phase run one
        more step per round.
        """
        arguments = self.arguments
        steps_per_round = 1 + arguments.steps + (child.name in self.timed)
        first = arguments.warmup + arguments.rounds * steps_per_round + 2
        folder = arguments.traces or Path(self.job["path"])
        return {"trace_steps": [first, first + TRACED_STEPS - 1], "traces": str(folder.resolve())}


def job_of(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the job that is common to all contenders."""
    per_micro_batch = arguments.tokens // arguments.micro_batches
    context = min(arguments.context, per_micro_batch)
    job = {
        "model": arguments.model,
        "layers": arguments.layers,
        "precision": arguments.precision,
        "micro_batches": arguments.micro_batches,
        "rows": per_micro_batch // context,
        "context": context,
        "checkpointing": arguments.checkpointing,
        "slices": arguments.slices,
        "compile": arguments.compile,
        "offload": arguments.offload,
        "experts": arguments.experts_per_unit,
        "state": arguments.state,
        "warmup": arguments.warmup,
        "path": str(folder),
        "host_budget": arguments.host_budget,
        "device": arguments.device,
        "device_budget": arguments.device_budget,
    }
    return job | {"by_engine": recomputes_by_engine(job)}


def schedule_words(job: dict[str, Any]) -> str:
    """Return a description of micro-batches and recomputation."""
    tokens = f"{job['micro_batches']} x {job['rows'] * job['context']:,} tokens"
    return tokens + (", blocks recomputed" if job["checkpointing"] else "")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
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

    import presets

    from step.report import show  # imports torch before a signal may raise

    if arguments.model not in presets.PRESETS:
        parser.error(f"--model {arguments.model} is not one of {', '.join(presets.PRESETS)}")
    return finish(arguments, signals, measure, show)


def finish(
    arguments: argparse.Namespace,
    signals: Signals,
    measure: Callable[[argparse.Namespace, Path, Callable[[str], None]], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Measure in a temporary folder and show the report; return the exit code."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    parent = arguments.path or REPOSITORY / "scratch"
    if arguments.path is None:
        parent.mkdir(exist_ok=True)
    folder: Path | None = None
    try:
        signals.enter(Phase.RUNNING)
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
        report = measure(arguments, folder, say)
        show(report)
        if arguments.json:
            print(json.dumps(report), flush=True)
        if any(why.startswith("failed") for why in report["skipped"].values()):
            return 1
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


def positive(text: str) -> int:
    """Parse a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _contenders(text: str) -> tuple[str, ...]:
    return _some_of(text, CHOICES)


def _peers(text: str) -> tuple[str, ...]:
    return _some_of(text, tuple(PEERS))


def _some_of(text: str, choices: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in choices]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {', '.join(choices)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="gpt-124m", help="a preset of examples/presets.py")
    add("--layers", type=positive, help="number of blocks (default: the preset's)")
    add("--rounds", type=positive, default=5, help="turns per contender")
    add("--steps", type=positive, default=1, help="timed steps per turn (one more is untimed)")
    add("--warmup", type=positive, default=2, help="steps of each contender before the rounds")
    add("--tokens", type=positive, default=512, help="per step, all micro-batches together")
    add("--micro-batches", type=positive, default=1)
    add("--context", type=positive, default=256, help="longest sequence")
    add("--checkpointing", action="store_true", help="recompute blocks in backward")
    add(
        "--schedule",
        choices=("given", "best"),
        default="given",
        help="micro-batches and recomputation: as given above, or the fastest in a trial for each "
        "contender; infinity_plan uses the plan's",
    )
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    add("--path", type=Path, help="folder on the drive to measure (default: in the repository)")
    add(
        "--host-budget",
        metavar="SIZE",
        help='RAM of infinity; infinity_disk keeps in RAM what fits (default: nothing); "8GiB"',
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="device of computation (default: cuda if available)",
    )
    add("--device-budget", metavar="SIZE", help='GPU memory of infinity; "24GiB" (default: all)')
    add(
        "--state",
        choices=("auto", "host"),
        default="auto",
        help="tier of the moments of infinity_ram on cuda",
    )
    add("--slices", type=positive, default=1, help="of infinity: activations.slices")
    add(
        "--experts-per-unit", type=positive, metavar="N",
        help="of infinity: experts of a mixture in a unit; infinity_layers has a unit per layer",
    )  # fmt: skip
    add("--compile", action="store_true", help="compile the blocks of infinity and plain torch")
    add(
        "--offload",
        choices=("none", "host", "disk"),
        default="none",
        help="of infinity: tier of the inputs of recomputed blocks (activations.offload)",
    )
    add("--only", type=_contenders, metavar="NAMES", help=f"contenders, of {','.join(CHOICES)}")
    add(
        "--alone",
        action="store_true",
        help="run contenders one after another, if memory does not suffice for all",
    )
    add("--compare", type=_peers, default=(), metavar="NAMES", help=f"peers: of {','.join(PEERS)}")
    add(
        "--traces",
        type=Path,
        metavar="DIR",
        help="folder for traces of infinity (see infinity trace)",
    )
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser
