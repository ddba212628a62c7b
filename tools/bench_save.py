#!/usr/bin/env python3
"""Time checkpoints: the cost of a save for the training loop, and its disk bandwidth.

    python tools/bench_save.py --path /mnt/nvme --json
    python tools/bench_save.py --path /mnt/nvme --durable  # cost of committing steps instead

A perceptron with `--layers` layers is trained with its state in RAM, or on disk. Each round runs
ordinary steps, then a save and steps until the checkpoint is complete, then the same save without
training, and a plain O_DIRECT write of the same number of bytes: ratios are within a round.
`stall_steps` is the number of ordinary steps that the loop lost by a save; `rate_ratio` is the
bandwidth of the save without training relative to the plain write. The removal of the previous
checkpoint is timed separately (`prune_s`), that of the plain file is not timed. State on disk is
read from the drive that the checkpoint is written to: `copy_ratio` compares the save with a file
copy of the same number of bytes, 32 MiB in flight, without checksums. `*_cpu_s` are the CPU seconds
of the process, which depend less on other load of the machine.

With `--durable` two engines take turns, one with `durable: true`; a turn ends when everything is
written and committed, once. `commit_s` is the difference of their times; `ratio` is the resulting
ratio of step times if every `durable_every`-th step commits, as planned.
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
from infinity import _aio
from infinity.checkpoint.directory import prune
from infinity.engine import Engine

PLACEMENTS = {
    "ram": {"weights": "device", "optimizer_state": "device", "gradients": "device"},
    "disk": {"weights": "disk", "optimizer_state": "disk", "gradients": "host"},
}
_WIDTH = 2048
_BLOCK = 4 << 20
_NUM_COPY_BLOCKS = 8  # blocks in flight during a file copy
_STEPS = 4  # maximum steps of a turn


def make_engine(path: Path, placement: str, num_layers: int, **more: Any) -> Engine:
    """Return an engine of a deep fp32 perceptron; `more` is merged into its configuration."""
    torch.manual_seed(0)
    path.mkdir(exist_ok=True)
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)])
    config = {
        "precision": "fp32",
        "nvme_path": str(path),
        "placement": PLACEMENTS[placement],
        "optimizer": {"lr": 1e-5},
        **more,
    }
    engine, *_ = infinity.initialize(model, config)
    return engine


def step(engine: Engine, batch: torch.Tensor) -> float:
    """Return seconds of one step; its update may still be pending, as for all steps."""
    start = time.perf_counter()
    engine.backward(engine(batch).square().mean())
    engine.step()
    return time.perf_counter() - start


def plain_write(path: Path, nbytes: int, *, keep: bool = False) -> float:
    """Return seconds of an O_DIRECT write of random bytes to a new file, including fsync."""
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
    if not keep:
        name.unlink()
    return seconds


def plain_copy(path: Path, nbytes: int) -> float:
    """Return seconds of an O_DIRECT copy of a file to a new one, including fsync."""
    source, target = path / "plain.bin", path / "copy.bin"
    plain_write(path, nbytes, keep=True)
    memory = torch.frombuffer(mmap.mmap(-1, _NUM_COPY_BLOCKS * _BLOCK), dtype=torch.uint8)
    blocks = [memory[at : at + _BLOCK] for at in range(0, _NUM_COPY_BLOCKS * _BLOCK, _BLOCK)]
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
    start = time.perf_counter()
    engine = _aio.Engine(queue_depth=16)
    files = _aio.File(str(source), read_only=True), _aio.File(str(target))
    files[1].allocate(nbytes)
    in_flight: dict[int, _aio.Ticket] = {}

    def submit(operation: int, file: _aio.File, number: int) -> None:
        block = blocks[number % _NUM_COPY_BLOCKS]
        segments = [(file, number * _BLOCK, _BLOCK, block.data_ptr())]
        in_flight[number % _NUM_COPY_BLOCKS] = engine.submit(operation, segments, keep=memory)

    count, ahead = nbytes // _BLOCK, _NUM_COPY_BLOCKS // 2
    for number in range(count + ahead):
        if number < count:
            if number >= _NUM_COPY_BLOCKS:
                in_flight[number % _NUM_COPY_BLOCKS].wait()
            submit(_aio.READ, files[0], number)
        if number >= ahead:
            in_flight[(number - ahead) % _NUM_COPY_BLOCKS].wait()
            submit(_aio.WRITE, files[1], number - ahead)
    for ticket in in_flight.values():
        ticket.wait()
    files[1].sync()
    seconds = time.perf_counter() - start
    for file in files:
        file.close()
    engine.close()
    source.unlink()
    target.unlink()
    return seconds


def measure(engine: Engine, path: Path, batch: torch.Tensor, number: int) -> dict[str, Any]:
    """Run one round and return its measurements."""
    ordinary = [step(engine, batch) for _ in range(3)]
    usual_s = statistics.median(ordinary)
    start = time.perf_counter()
    engine.save_checkpoint(path, f"{number}-busy", keep_last=1)
    call_s = time.perf_counter() - start
    steps_during_save = []
    while engine.saving:
        steps_during_save.append(step(engine, batch))
    engine.finish_saving()
    busy_s = time.perf_counter() - start
    lost_s = call_s + sum(steps_during_save) - len(steps_during_save) * usual_s
    engine.settle()
    start, cpu_start = time.perf_counter(), time.process_time()
    saved = engine.save_checkpoint(path, f"{number}-alone", wait=True)
    alone_s, alone_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    nbytes = sum(f.stat().st_size for f in saved.iterdir())
    cpu_start = time.process_time()
    plain_s = plain_write(path, nbytes)
    plain_cpu_s = time.process_time() - cpu_start
    copy_s = plain_copy(path, nbytes)
    start = time.perf_counter()
    prune(path, 1)
    prune_s = time.perf_counter() - start
    return {
        "step_s": usual_s,
        "call_s": call_s,
        "steps_behind": len(steps_during_save),
        "busy_s": busy_s,
        "stall_steps": lost_s / usual_s,
        "alone_s": alone_s,
        "alone_cpu_s": alone_cpu_s,
        "plain_s": plain_s,
        "plain_cpu_s": plain_cpu_s,
        "copy_s": copy_s,
        "prune_s": prune_s,
        "nbytes": nbytes,
        "rate_ratio": plain_s / alone_s,
        "copy_ratio": copy_s / alone_s,
    }


def turn(engine: Engine, batch: torch.Tensor, steps: int) -> float:
    """Return mean seconds per step of `steps` steps, until everything is written and committed."""
    engine.settle()
    start = time.perf_counter()
    for _ in range(steps):
        step(engine, batch)
    engine.settle()
    return (time.perf_counter() - start) / steps


def measure_durable(folder: Path, arguments: argparse.Namespace, placement: str) -> dict[str, Any]:
    """Run all rounds of an ordinary engine against a durable one."""
    batch = torch.randn(arguments.tokens, _WIDTH)
    layers = arguments.layers
    with make_engine(folder / "planned", placement, layers, durable=True) as planned:
        every = planned.plan.durable_every
    # Steps between commits are ordinary ones, so a turn of few steps with one commit is enough.
    steps = min(every, _STEPS)
    more = {"durable": True, "commit_every": steps}
    with (
        make_engine(folder / "plain", placement, layers) as plain,
        make_engine(folder / "durable", placement, layers, **more) as durable,
    ):
        rounds = []
        for number in range(-1, arguments.rounds):
            plain_s, durable_s = turn(plain, batch, steps), turn(durable, batch, steps)
            if number < 0:  # warm-up: access order and second copies on disk do not exist yet
                continue
            commit_s = (durable_s - plain_s) * steps
            ratio = 1 + commit_s / (every * plain_s)
            rounds.append({"plain_s": plain_s, "commit_s": commit_s, "ratio": ratio})
        return {
            "median": {key: statistics.median(r[key] for r in rounds) for key in rounds[0]},
            "rounds": rounds,
            "durable_every": every,
            "steps_a_turn": steps,
            "commit_bytes": durable.plan.commit_bytes,
            "parameters": layers * _WIDTH**2,
        }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--layers", type=int, default=40, help=f"of {_WIDTH} x {_WIDTH}")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--placement", choices=[*PLACEMENTS, "both"], default="both")
    parser.add_argument("--durable", action="store_true", help="time durable steps, not saves")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run(arguments: argparse.Namespace, placement: str) -> dict[str, Any]:
    """Run all rounds of one placement."""
    folder = Path(tempfile.mkdtemp(prefix="bench-save-", dir=arguments.path))
    batch = torch.randn(arguments.tokens, _WIDTH)
    try:
        if arguments.durable:
            return measure_durable(folder, arguments, placement)
        with make_engine(folder, placement, arguments.layers) as engine:
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
    names = list(PLACEMENTS) if arguments.placement == "both" else [arguments.placement]
    results = {name: run(arguments, name) for name in names}
    if arguments.json:
        print(json.dumps({"command": sys.argv, "results": results}))
        return
    for name, result in results.items():
        m = result["median"]
        if arguments.durable:
            print(
                f"{name:5} {result['parameters'] / 1e6:.0f}M parameters, a commit every "
                f"{result['durable_every']} steps takes {m['commit_s']:.3f} s more than those of "
                f"{m['plain_s']:.3f} s: {m['ratio']:.3f} x"
            )
            continue
        print(
            f"{name:5} {result['parameters'] / 1e6:.0f}M parameters, "
            f"{m['nbytes'] / 2**30:.2f} GiB: step {m['step_s']:.2f} s, "
            f"save() returns after {m['call_s']:.2f} s, loses "
            f"{m['stall_steps']:.2f} steps ({m['steps_behind']:.0f} run behind it), alone "
            f"{m['alone_s']:.2f} s = {m['rate_ratio']:.2f} x the plain write's rate, "
            f"{m['copy_ratio']:.2f} x a copy's; {m['alone_cpu_s']:.2f} s of a core, "
            f"{m['plain_cpu_s']:.2f} s for the plain write"
        )


if __name__ == "__main__":
    main()
