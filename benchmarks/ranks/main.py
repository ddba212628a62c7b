"""Time training steps of several ranks: infinity, DDP, FSDP2, DeepSpeed's ZeRO.

    python tools/bench_ranks.py --model gpt-100m --tokens 1024 --json
    python tools/bench_ranks.py --device cuda --device-budget 24GiB --model gpt-1.3b --tokens 8192

Ranks communicate by gloo on CPUs; with `--device cuda` each rank has a GPU and they use NCCL.

Every contender has one process per rank. All contenders are alive at once and take turns, so that
fluctuations of the machine affect all equally: only ratios within a round are compared. Contenders
that are not installed or fail are skipped and listed. All compute in fp32: CPUs emulate bf16, and
on GPUs no other contender keeps fp32 masters with it.

Prints step times, the peak RSS of all ranks together, bytes over the loopback interface per step
(of all ranks, counted by the kernel), ratios of step times to infinity's, and infinity's step time
relative to the schedule bound: the bytes of the plan over rates of gloo and disk measured in the
same rounds, with the compute time of DDP without communication. On GPUs there is no such bound:
links to RAM are not measured, and NCCL does not use the loopback interface.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import socket
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _process import Signals
from step.child import Child, ContenderFailedError
from step.main import finish, positive

CHOICES = (
    "infinity_ram", "infinity_disk", "ddp", "fsdp", "fsdp_offload",
    "deepspeed_0", "deepspeed_1", "deepspeed_2", "deepspeed_3",
)  # fmt: skip
OURS = CHOICES[:2]


class Team:
    """Contender with one process per rank."""

    def __init__(self, name: str, count: int, device: str) -> None:
        self.name = name
        device_environment = {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
        self.first: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = max((os.cpu_count() or 1) // count, 1)
        self.ranks = [
            Child(
                f"{name}, rank {rank},",
                "ranks.rank",
                {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
                    "GLOO_SOCKET_IFNAME": "lo", **device_environment,
                },
            )
            for rank in range(count)
        ]  # fmt: skip

    def start(self, job: dict[str, Any]) -> None:
        """Build the model on every rank and take the warm-up steps."""
        jobs = [job | {"rank": rank, "contender": self.name} for rank in range(len(self.ranks))]
        self.first = self._ask(jobs)[0]

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to all ranks; return the answer of each."""
        return self._ask([request] * len(self.ranks))

    def _ask(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        for child, request in zip(self.ranks, requests, strict=True):
            child.send(request)
        return [child.receive() for child in self.ranks]

    def turn(self, steps: int) -> dict[str, Any]:
        """Run timed steps; return times of the slowest rank and bytes over loopback."""
        before = loopback_bytes()
        answers = self.ask({"do": "turn", "steps": steps})
        crossed = loopback_bytes() - before
        step_s = [
            max(times) for times in zip(*(answer["step_s"] for answer in answers), strict=True)
        ]
        turn = answers[0] | {
            "step_s": step_s,
            "peak_rss_bytes": sum(answer["peak_rss_bytes"] for answer in answers),
            "loss": statistics.fmean(answer["loss"] for answer in answers),
            "loopback_bytes": crossed // (steps + 1),  # one is untimed
        }
        self.turns.append(turn)
        return turn

    def close(self, kill: bool) -> None:
        """End all ranks; without `kill` they clean up together first."""
        if not kill:
            for child in self.ranks:
                child.send({"do": "close"})
        for child in self.ranks:
            child.close(kill)


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def measure(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Any:
    """Run all rounds and return the report."""
    from step.bound import measure_disk_rates

    job, teams, skipped = job_of(arguments, folder), list[Team](), dict[str, str]()
    samples: list[dict[str, float]] = []  # per round: phases, links and disk
    done = False
    try:
        for name in arguments.only:
            if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
                skipped[name] = "deepspeed is not installed"
                continue
            teams.append(team := Team(name, arguments.ranks, arguments.device))
            try:
                say(f"starting {name} ...")
                team.start(job)
            except ContenderFailedError as error:
                teams.remove(team)
                team.close(kill=True)
                skipped[name] = f"failed: {error}"
                say(f"error: {error}")
        for index in range(arguments.rounds if teams else 0):
            for team in teams[index % len(teams) :] + teams[: index % len(teams)]:
                times = team.turn(arguments.steps)["step_s"]
                times_text = ", ".join(f"{step_s:.3f}" for step_s in times)
                say(f"round {index + 1}/{arguments.rounds}  {team.name:<14} {times_text} s")
            samples.append(parts_of({team.name: team for team in teams}))
            if any(team.name == "infinity_disk" for team in teams):
                samples[-1] |= measure_disk_rates(folder, unified=False)
        done = True
    finally:
        for team in teams:
            team.close(kill=not done)
    return report_of(arguments, job, teams, samples) | {"skipped": skipped}


def parts_of(teams: dict[str, Team]) -> dict[str, float]:
    """Measure compute, update and links separately, each on the slowest rank."""
    parts: dict[str, float] = {}
    if "ddp" in teams:
        for rank in teams["ddp"].ask({"do": "phases"}):
            for part in ("forward_s", "backward_s"):
                parts[part] = max(parts.get(part, 0.0), rank[part])
    team = next((teams[name] for name in OURS if name in teams), None)
    if team is not None:
        parts["update_s"] = max(rank["update_s"] for rank in team.ask({"do": "phases"}))
        parts |= team.ask({"do": "links"})[0]
    return parts


def report_of(
    arguments: argparse.Namespace,
    job: dict[str, Any],
    teams: Sequence[Team],
    samples: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Return medians, bounds and ratios as JSON-serializable data."""
    import platform

    import presets
    import torch

    times = {t.name: [statistics.median(turn["step_s"]) for turn in t.turns] for t in teams}
    bounds: dict[str, list[float]] = {}
    for team in teams:
        known = job["device"] == "cpu" and all("forward_s" in sample for sample in samples)
        if team.name in OURS and known:
            bounds[team.name] = bounds_in(team, samples)
    ours = [name for name in OURS if name in times]
    others = [name for name in times if name not in OURS]
    pairs = {f"{other}/{name}": (times[other], times[name]) for name in ours for other in others}
    pairs |= {f"{name}/schedule": (times[name], bounds[name]) for name in bounds}
    keys = samples[0] if samples else ()
    parts = {key: statistics.median(sample[key] for sample in samples) for key in keys}
    return {
        "model": arguments.model,
        "num_parameters": presets.count_parameters(presets.shape_of(arguments.model)),
        "ranks": arguments.ranks,
        "tokens": job["rows"] * job["context"] * job["micro_batches"] * arguments.ranks,
        "micro_batches": job["micro_batches"],
        "rounds": arguments.rounds,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
        },
        "contenders": {
            team.name: {
                **{k: v for k, v in team.turns[-1].items() if k != "step_s"},
                "loss": team.turns[0]["loss"],  # in later turns contenders are at different batches
                "median_step_s": statistics.median(times[team.name]),
                "min_step_s": min(times[team.name]),
                "peak_rss_bytes": max(turn["peak_rss_bytes"] for turn in team.turns),
                "loopback_bytes": statistics.median_low(t["loopback_bytes"] for t in team.turns),
            }
            for team in teams
        },
        "parts": parts,
        "bound": {name: statistics.median(values) for name, values in bounds.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(*pair, strict=True))
            for name, pair in pairs.items()
        },
    }


def bounds_in(team: Team, samples: Sequence[dict[str, float]]) -> list[float]:
    """Return the schedule bound of infinity's step by round."""
    from step.bound import bounds_of

    from infinity.plan.plan import LINKS
    from infinity.plan.rates import DISK, Rates

    plan = pickle.loads(Path(team.first["plan"]).read_bytes())
    bounds = []
    for sample in samples:
        disk = {name: sample.get(name, 1e12) / plan.ranks for name in DISK}
        links = {name: sample[name] for name in LINKS}
        # The update time was measured on a shard.
        update = plan.num_trained / plan.ranks / max(sample["update_s"], 1e-9)
        rates = Rates.of(disk | links | {"update.fp32": update})
        bound = bounds_of(plan, rates, sample["forward_s"], sample["backward_s"])
        bounds.append(bound.schedule_s)
    return bounds


def show(report: dict[str, Any]) -> None:
    """Print a human-readable report to stderr."""
    from rich.console import Console
    from rich.table import Table

    from infinity.common.sizes import format_count, format_rate, format_size

    console = Console(stderr=True, highlight=False)
    count = report["ranks"]
    table = Table(
        title=f"{report['model']}, {format_count(report['num_parameters'])} parameters, "
        f"{report['tokens']} tokens a step on {count} ranks"
    )
    for name in ("contender", "step", "tokens/s", "peak RSS, all", "loopback a step, all"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for name, facts in report["contenders"].items():
        table.add_row(
            name,
            f"{facts['median_step_s']:.3f} s",
            f"{report['tokens'] / facts['median_step_s']:.4g}",
            format_size(facts["peak_rss_bytes"]),
            format_size(facts["loopback_bytes"]),
        )
    console.print(table)
    for name, facts in report["contenders"].items():
        if "peak_device_bytes" in facts:
            console.print(f"{name}: {format_size(facts['peak_device_bytes'])} of the first GPU")
        if "moved_bytes" in facts:
            moved, predicted = facts["moved_bytes"], facts["predicted_bytes"]
            text = ", ".join(
                f"{link.replace('_', '-')} {format_size(moved[link])} of {format_size(n)} predicted"
                for link, n in predicted.items()
                if link.startswith("all_")
            )
            console.print(f"{name}, each rank: {text}")
    text = ", ".join(f"{name} {c['loss']:.7g}" for name, c in report["contenders"].items())
    console.print(f"losses after the same steps: {text}")
    parts = report["parts"]
    texts = [f"{k.removesuffix('_s')} {v:.3f} s" for k, v in parts.items() if k.endswith("_s")]
    texts += [f"{k} {format_rate(v)}" for k, v in parts.items() if not k.endswith("_s")]
    console.print(f"alone: {', '.join(texts)}")
    for name, seconds in report["bound"].items():
        console.print(f"schedule bound of {name}: {seconds:.3f} s")
    console.print("ratios: " + ", ".join(f"{k} {v:.3f}" for k, v in report["ratio"].items()))
    for name, why in report["skipped"].items():
        console.print(f"{name}: {why}")
    load, cpus = report["machine"]["load_average"], report["machine"]["cpus"]
    if load > 1.5 * count:
        console.print(f"load average {load:.1f} on {cpus} CPUs: others compute here too")


def job_of(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the job that is sent to every rank."""
    tokens = arguments.tokens // arguments.ranks // arguments.micro_batches
    context = min(arguments.context, tokens)
    return {
        "model": arguments.model,
        "precision": "fp32",
        "ranks": arguments.ranks,
        "micro_batches": arguments.micro_batches,
        "rows": tokens // context,
        "context": context,
        "checkpointing": False,
        "by_engine": False,
        "slices": 1,
        "compile": False,
        "offload": "none",
        "state": "auto",
        "warmup": arguments.warmup,
        "path": str(folder),
        "traces": str(folder),
        "trace_steps": [10**9, 10**9],
        "host_budget": None,
        "device": arguments.device,
        "device_budget": arguments.device_budget,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    signals = Signals()
    signals.install()
    return finish(_parsed(argv), signals, measure, show)


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    import presets

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="gpt-100m", choices=presets.PRESETS, metavar="NAME")
    add("--ranks", type=positive, default=2)
    add("--rounds", type=positive, default=5, help="turns per contender")
    add("--steps", type=positive, default=1, help="timed steps per turn (one more is untimed)")
    add("--warmup", type=positive, default=2, help="steps of each contender before the rounds")
    add("--tokens", type=positive, default=1024, help="per step, all ranks together")
    add("--micro-batches", type=positive, default=1, help="of each rank")
    add("--context", type=positive, default=256, help="longest sequence")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device of computation")
    add("--device-budget", metavar="SIZE", help='GPU memory of a rank of infinity; "24GiB"')
    add("--path", type=Path, help="folder on the drive to use (default: in the repository)")
    add(
        "--only",
        help=f"contenders, of {','.join(CHOICES)}",
        default=",".join(CHOICES),
        metavar="NAMES",
    )
    add("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    unknown = [name for name in arguments.only if name not in CHOICES]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} should be some of {', '.join(CHOICES)}")
    if arguments.tokens < arguments.ranks * arguments.micro_batches:
        parser.error(f"--tokens {arguments.tokens} is less than one per micro-batch and rank")
    return arguments
