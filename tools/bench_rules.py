#!/usr/bin/env python3
"""Measure stored bytes per parameter and step time relative to AdamW of each update rule.

    python tools/bench_rules.py --model gpt-tiny --rounds 20

One process trains one model of examples/gpt.py for each rule, all in RAM on the CPU. In a round
every rule runs one step (forward, backward, update), in rotating order. The result of a rule is the
median over rounds of its seconds divided by AdamW's in the same round, with quartiles. Seconds are
CPU seconds of all threads, which depend less on other load than wall time. Bytes are the mean
stored bytes per parameter, including moments and masters. Rules of packages that are not installed
are skipped. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

# Built-in rules: sections of the configuration by name; the first is the baseline.
BUILT_IN: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW"},
    "AdamW, moments 8bit": {"type": "AdamW", "moments": "8bit"},
    "Muon": {"type": "Muon"},
    "Lion": {"type": "Lion"},
    "SGD, momentum": {"type": "SGD", "momentum": 0.9},
    "Adagrad": {"type": "Adagrad"},
}


def adapted() -> Iterator[tuple[str, Any]]:
    """Yield (name, optimizer argument of `initialize`) of rules that torch optimizers compute."""
    import torch

    yield "torch.optim.AdamW", torch.optim.AdamW
    yield "torch.optim.Adafactor", torch.optim.Adafactor
    with contextlib.suppress(ImportError):
        import schedulefree  # type: ignore[import-not-found,unused-ignore]

        def in_train_mode(groups: Any) -> Any:
            optimizer = schedulefree.AdamWScheduleFree(groups)
            optimizer.train()
            return optimizer

        yield "schedulefree.AdamWScheduleFree", in_train_mode
    with contextlib.suppress(ImportError):
        import pytorch_optimizer  # type: ignore[import-not-found,unused-ignore]

        yield "pytorch_optimizer.Lamb", pytorch_optimizer.Lamb


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt-tiny", help="a preset of examples/gpt.py")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="tokens a step")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--only", nargs="*", metavar="RULE", help="these, and AdamW")
    arguments = parser.parse_args(argv)
    import presets
    import torch

    import infinity

    shape = presets.shape_of(arguments.model, arguments.context)
    tokens = torch.randint(0, 256, (1, arguments.context + 1))
    in_ram = {"placement": dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")}
    contenders: dict[str, tuple[dict[str, Any], Any]] = {
        name: ({**in_ram, "optimizer": section}, None) for name, section in BUILT_IN.items()
    }
    contenders |= {name: (in_ram, optimizer) for name, optimizer in adapted()}
    if (only := arguments.only) is not None:
        contenders = {name: pair for name, pair in contenders.items() if name in ("AdamW", *only)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, (config, optimizer) in contenders.items():
            model = presets.build(shape, torch.bfloat16, 0)
            made = infinity.initialize(model, config, optimizer=optimizer, device="cpu")[0]
            engines[name] = stack.enter_context(made)
        for number in range(arguments.rounds + 1):  # the first round is a warm-up
            names = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
            for name in names:
                started = time.process_time()
                engine = engines[name]
                engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
                engine.step()
                engine.settle()
                seconds[name].append(time.process_time() - started)
        sizes = {name: engine.plan.bytes_per_parameter for name, engine in engines.items()}
    print("| rule | bytes of state per parameter | a step, AdamW = 1: median (quartiles) |")
    print("| --- | --- | --- |")
    for name, rule_seconds in seconds.items():
        pairs = zip(rule_seconds[1:], seconds["AdamW"][1:], strict=True)
        low, middle, high = statistics.quantiles([value / base for value, base in pairs], n=4)
        print(f"| {name} | {sizes[name]:.3g} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
