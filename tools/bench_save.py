#!/usr/bin/env python3
"""Time checkpoints: what a save costs the training loop, and how fast its bytes reach the disk.

    python tools/bench_save.py --path /mnt/nvme --json

A perceptron with as much state as is asked for is trained with its state in RAM, or on disk. Each
round takes an ordinary step, then a save and the steps behind it until the checkpoint is there,
then the same save again with nothing else going on, and a plain O_DIRECT write of as many bytes:
so ratios are within a round. `stall_steps` is how many ordinary steps the loop lost by a save;
`rate_ratio` the undisturbed save's bytes per second against the plain write's.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.engine import Engine

HOMES = {
    "ram": {"weights": "device", "moments": "device", "gradients": "device"},
    "disk": {"weights": "disk", "moments": "disk", "gradients": "host"},
}
_WIDTH = 2048
_BLOCK = 4 << 20


def make_engine(path: Path, homes: str, num_layers: int) -> Engine:
    """An engine over a deep perceptron, fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)])
    config = {
        "precision": "fp32",
        "nvme_path": str(path),
        "homes": HOMES[homes],
        "optimizer": {"lr": 1e-5},
    }
    engine, *_ = infinity.initialize(model, config)
    return engine


def step(engine: Engine, batch: torch.Tensor) -> float:
    """Seconds of one step whose update is owed when it returns, like all others."""
    start = time.perf_counter()
    engine.backward(engine(batch).square().mean())
    engine.step()
    return time.perf_counter() - start


def plain_write(path: Path, nbytes: int) -> float:
    """Seconds of an O_DIRECT write of incompressible bytes into a fresh file, fsync included."""
    block = mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(_BLOCK))
    name = path / "plain.bin"
    start = time.perf_counter()
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        for offset in range(0, nbytes // _BLOCK * _BLOCK, _BLOCK):
            os.pwrite(descriptor, block, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    seconds = time.perf_counter() - start
    name.unlink()
    return seconds


def measure(engine: Engine, path: Path, batch: torch.Tensor, number: int) -> dict[str, Any]:
    """One round."""
    ordinary = [step(engine, batch) for _ in range(3)]
    usual_s = statistics.median(ordinary)
    start = time.perf_counter()
    engine.save_checkpoint(path, f"{number}-busy", keep_last=1)
    call_s = time.perf_counter() - start
    behind = []
    while engine.saving:
        behind.append(step(engine, batch))
    engine.finish_saving()
    busy_s = time.perf_counter() - start
    lost_s = call_s + sum(behind) - len(behind) * usual_s
    engine.settle()
    start = time.perf_counter()
    saved = engine.save_checkpoint(path, f"{number}-alone", keep_last=1, wait=True)
    alone_s = time.perf_counter() - start
    nbytes = sum(f.stat().st_size for f in saved.iterdir())
    plain_s = plain_write(path, nbytes)
    return {
        "step_s": usual_s,
        "call_s": call_s,
        "steps_behind": len(behind),
        "busy_s": busy_s,
        "stall_steps": lost_s / usual_s,
        "alone_s": alone_s,
        "plain_s": plain_s,
        "nbytes": nbytes,
        "rate_ratio": plain_s / alone_s,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--layers", type=int, default=40, help=f"of {_WIDTH} x {_WIDTH}")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--homes", choices=[*HOMES, "both"], default="both")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run(arguments: argparse.Namespace, homes: str) -> dict[str, Any]:
    """All rounds of one placement."""
    folder = Path(tempfile.mkdtemp(prefix="bench-save-", dir=arguments.path))
    batch = torch.randn(arguments.tokens, _WIDTH)
    try:
        with make_engine(folder, homes, arguments.layers) as engine:
            for _ in range(3):
                step(engine, batch)
            rounds = [measure(engine, folder / "saved", batch, n) for n in range(arguments.rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    return {"median": median, "rounds": rounds, "parameters": arguments.layers * _WIDTH**2}


def main() -> None:
    """Measure and print."""
    arguments = parse()
    names = list(HOMES) if arguments.homes == "both" else [arguments.homes]
    results = {name: run(arguments, name) for name in names}
    if arguments.json:
        print(json.dumps({"command": sys.argv, "results": results}))
        return
    for name, result in results.items():
        m = result["median"]
        print(
            f"{name:5} {result['parameters'] / 1e6:.0f}M parameters, "
            f"{m['nbytes'] / 2**30:.2f} GiB: step {m['step_s']:.2f} s, "
            f"save() returns after {m['call_s']:.2f} s, loses "
            f"{m['stall_steps']:.2f} steps ({m['steps_behind']:.0f} run behind it), alone "
            f"{m['alone_s']:.2f} s = {m['rate_ratio']:.2f} x the plain write's rate"
        )


if __name__ == "__main__":
    main()
