#!/usr/bin/env python3
"""Compare predictions of plans with measurements: bytes per direction and step time.

    python tools/bench_plan.py --path DIR --json

Engines with very different plans for the same small GPT are alive at once and take turns. The rates
of disk and links are measured directly before and after each turn with the settings of the plan,
since the disk fluctuates; a prediction uses their mean. If plain torch or the disk became more than
a quarter faster or slower during a turn, other load disturbed it: the turn is repeated once, and
does not count if it is disturbed again. Prints a table of predicted and measured time, the error,
the binding resource, and if the bytes per direction equal the prediction, which they must. Errors
are medians over turns of predicted / measured.

The compute rate is that of plain torch on the same model and tokens, forward and backward without
an optimizer, so that transfers and overlap of the plan are tested. The prediction from rates of
products, attention etc., which `infinity plan` uses, is in a separate column.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import gpt
import presets
from support.fault_injection import faulty_io, initialize

import infinity
from infinity.config.schema import IoConfig
from infinity.model.targets import target_of
from infinity.plan.cost import StepCost, StepWork, step_cost
from infinity.plan.machine import read_machine
from infinity.plan.plan import DIRECTIONS, Plan
from infinity.plan.rates import COMPUTE, Rates
from infinity.profiling.processor_rates import measure_processors
from infinity.storage.devices import resolve_device
from infinity.storage.disk_rates import measure_disk

STEADY = 1.25  # largest factor between rates before and after a turn that counts
TRIES = 2
IN_RAM = {"weights": "device", "optimizer_state": "host", "gradients": "host"}
ON_DISK = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
STATE_ON_DISK = {"weights": "device", "optimizer_state": "disk", "gradients": "host"}
GRADIENTS_IN_RAM = {"weights": "disk", "optimizer_state": "disk", "gradients": "host"}
SLOW = {"slow_bytes_per_s": 400_000_000}
BUDGET = "by budget"

# name -> additional configuration
PLANS: dict[str, dict[str, Any]] = {
    "half in RAM, by budget": {"budget": BUDGET},  # first: the budget covers the full process
    "all in RAM": {"placement": IN_RAM},
    "all in RAM, M=4": {"placement": IN_RAM, "gradient_accumulation_steps": 4},
    "moments on disk": {"placement": STATE_ON_DISK},
    "moments on disk, 8 bit": {"placement": STATE_ON_DISK, "optimizer": {"moments": "8bit"}},
    "weights and moments on disk, M=2": {
        "placement": GRADIENTS_IN_RAM,
        "gradient_accumulation_steps": 2,
    },
    "all on disk": {"placement": ON_DISK},
    "all on disk, M=4": {"placement": ON_DISK, "gradient_accumulation_steps": 4},
    "all on a disk of 0.4 GB/s, M=2": {
        "placement": ON_DISK,
        "gradient_accumulation_steps": 2,
        "io": SLOW,
    },
}


class Plain:
    """The model in plain torch, to time forward and backward without an engine."""

    def __init__(self, shape: gpt.GPTConfig, batch: int) -> None:
        self._model = presets.build(shape, torch.float32, seed=1)
        self._tokens = torch.randint(0, shape.vocab_size, (batch, shape.context))
        lookups = target_of("gpt", self._model, {}).lookups
        matrices = (p for i, p in enumerate(self._model.parameters()) if i not in lookups)
        elements = sum(p.numel() for p in matrices if p.dim() > 1)
        self._flop = 6 * elements * self._tokens.numel()
        self.flop_per_s()

    def flop_per_s(self) -> float:
        """Return FLOP per second of matrix products, over the full time of forward and backward."""
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            self._model(self._tokens, self._tokens).backward()
            seconds.append(time.perf_counter() - started)
            self._model.zero_grad(set_to_none=True)
        return self._flop / statistics.mean(seconds)


@dataclass
class Contender:
    """A plan with its engine and measurements."""

    name: str
    engine: infinity.Engine
    rough: dict[str, Any]  # options that slow down its disk
    work: StepWork
    shape: gpt.GPTConfig
    batch: int
    turns: list[dict[str, float]] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    binds: str = ""

    @property
    def plan(self) -> Plan:
        """Plan of the engine."""
        return self.engine.plan

    def step(self, seed: int) -> float:
        """Run one step; return seconds from the end of the previous step to the end of this one."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.batch, self.shape.context)
        for _ in range(self.plan.micro_batches):
            tokens = torch.randint(0, self.shape.vocab_size, size, generator=generator)
            loss = self.engine(tokens, tokens)
            self.engine.backward(loss)
            self.engine.step()
        report = self.engine.last_report
        assert report is not None
        self.moved, self.stalls = report.moved, report.stall_s
        return report.wall_s

    def turn(self, steps: int, seed: int) -> float:
        """Return the median seconds of `steps` steps after an untimed one."""
        self.step(seed)
        times = [self.step(seed + 1 + i) for i in range(steps)]
        self.engine.settle()  # no transfers during the turns of others
        return statistics.median(times)

    def predict(self, rates: Rates) -> StepCost:
        """Return the predicted cost of a steady step at these rates."""
        return step_cost(self.plan, rates, self.work)


def start(
    name: str, changes: dict[str, Any], shape: gpt.GPTConfig, batch: int, path: str
) -> Contender:
    """Return a contender with explicit placement, or with a budget for half of the state."""
    model = presets.build(shape, torch.float32, seed=1)
    target = target_of("gpt", model, {})
    config: dict[str, Any] = {"nvme_path": path, "precision": "fp32", "gradient_clipping": 1.0}
    config |= changes
    optimizer = {"type": "AdamW", "lr": 1e-4, **config.get("optimizer", {})}
    config["optimizer"] = optimizer
    if config.get("budget") == BUDGET:
        machine = read_machine()
        state = 16 * presets.count_parameters(shape)
        process_bytes = machine.process_rss_bytes - 4 * presets.count_parameters(shape)
        config["budget"] = {"host": int((process_bytes + state / 2) / 0.7)}
    engine = initialize(model, config, poison=None)[0]
    tokens = batch * shape.context
    work = StepWork(tokens, context=shape.context, lookups=target.lookups, heads=target.heads)
    return Contender(name, engine, config.get("io", {}), work, shape, batch)


def rates_now(rough: dict[str, Any], path: Path, seconds: float, plain: Plain) -> dict[str, float]:
    """Measure the rates of the machine, with the disk slowed down like that of the engine.

    The additional key "plain" is the FLOP per second of plain torch on the model.
    """
    device = resolve_device("cpu")
    threads = read_machine().num_cpus
    numbers = measure_processors(device, threads, seconds)
    device.close()
    with faulty_io(**rough):
        numbers |= measure_disk([path], IoConfig(), seconds)
    return numbers | {"plain": plain.flop_per_s()}


def is_steady(before: dict[str, float], after: dict[str, float]) -> bool:
    """Return True if the rates before and after a turn agree within `STEADY`."""
    ratios = [after[name] / before[name] for name in ("plain", "disk_mixed", "update.fp32")]
    return all(1 / STEADY < ratio < STEADY for ratio in ratios)


def measure(
    contenders: Sequence[Contender], rounds: int, path: Path, seconds: float, plain: Plain
) -> None:
    """Run interleaved turns of all contenders, with rates measured before and after each."""
    seed = 0
    for _ in range(rounds):
        for contender in contenders:
            seed += 100
            for _ in range(TRIES):
                before = rates_now(contender.rough, path, seconds, plain)
                measured = contender.turn(2, seed)
                after = rates_now(contender.rough, path, seconds, plain)
                steady = is_steady(before, after)
                if steady:
                    break
            numbers = {name: (before[name] + after[name]) / 2 for name in before}
            flop_per_s = numbers.pop("plain")
            known_cost = contender.predict(Rates.of(numbers))
            without_compute = {name: rate for name, rate in numbers.items() if name not in COMPUTE}
            cost = contender.predict(Rates.of(without_compute | {"compute.fp32": flop_per_s}))
            contender.binds = cost.binds
            turn = {"measured_s": measured, "predicted_s": cost.seconds, "steady": float(steady)}
            turn |= {"known_s": known_cost.seconds, "rate.plain": flop_per_s}
            turn |= {f"stall.{name}": value for name, value in contender.stalls.items()}
            turn |= {f"direction.{name}": value for name, value in cost.resources.items()}
            contender.turns.append(turn | {f"rate.{k}": v for k, v in numbers.items()})


def result_of(contender: Contender) -> dict[str, Any]:
    """Return the result of one plan."""
    turns, plan = contender.turns, contender.plan
    disturbed = sum(not turn["steady"] for turn in turns)
    turns = [turn for turn in turns if turn["steady"]] or turns
    predicted = contender.engine.forecast()
    return {
        "name": contender.name,
        "measured_s": statistics.median(t["measured_s"] for t in turns),
        "predicted_s": statistics.median(t["predicted_s"] for t in turns),
        "ratio": statistics.median(t["predicted_s"] / t["measured_s"] for t in turns),
        "known_ratio": statistics.median(t["known_s"] / t["measured_s"] for t in turns),
        "binds": contender.binds,
        "bytes": {
            direction: [predicted[direction], contender.moved[direction]]
            for direction in DIRECTIONS
        },
        "bytes_equal": all(
            predicted[direction] == contender.moved[direction] for direction in DIRECTIONS
        ),
        "memory": plan.tier_bytes,
        "disturbed": disturbed,
        "turns": turns,
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table in Markdown."""
    print("| plan | predicted s | measured s | error | turns | by known rates | binds | disk, GB a "
          "step | bytes |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for result in results:
        ratios = [t["predicted_s"] / t["measured_s"] - 1 for t in result["turns"]]
        turns = f"{min(ratios):+.0%} … {max(ratios):+.0%} ({len(ratios)})"
        if result["disturbed"]:
            turns += f", {result['disturbed']} disturbed"
        moved = (
            sum(result["bytes"][direction][1] for direction in ("disk_read", "disk_write")) / 1e9
        )
        print(
            f"| {result['name']} | {result['predicted_s']:.2f} | {result['measured_s']:.2f} | "
            f"{result['ratio'] - 1:+.0%} | {turns} | {result['known_ratio'] - 1:+.0%} | "
            f"{result['binds']} | {moved:.2f} | "
            f"{'equal' if result['bytes_equal'] else 'DIFFER'} |"
        )


def main() -> int:
    """Measure; exit code 1 if bytes differ from those predicted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement of rates")
    parser.add_argument("--only", default="", help="plans whose name holds this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = min(options.tokens, 128)
    shape = gpt.GPTConfig(
        vocab_size=1024,
        context=context,
        num_layers=options.layers,
        num_heads=options.width // 64,
        width=options.width,
    )
    started = time.perf_counter()
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir=options.path) as folder:
        contenders = []
        for name, changes in PLANS.items():
            if options.only in name:
                contender = start(name, changes, shape, options.tokens // context, folder)
                contenders.append(contender)
                stack.callback(contender.engine.close)
        plain = Plain(shape, options.tokens // context)
        measure(contenders, options.rounds, Path(folder), options.seconds, plain)
        results = [result_of(contender) for contender in contenders]
        stack.close()
    if options.json:
        print(json.dumps({"results": results, "seconds": time.perf_counter() - started}))
    else:
        show(results)
        millions = presets.count_parameters(shape) / 1e6
        print(f"\n{millions:.0f}M parameters, {options.tokens} tokens a micro-batch, "
              f"{time.perf_counter() - started:.0f} s in all")  # fmt: skip
    return 0 if all(result["bytes_equal"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
