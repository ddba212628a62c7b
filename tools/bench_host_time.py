#!/usr/bin/env python3
"""Measure the host time per block of the engine and of plain torch.

    python tools/bench_host_time.py

A GPU is idle while its host still launches. Blocks of the Llama shape (nine parameters) are so
small here that only calls of torch and infinity take time. The device does nothing: copies and
updates are complete at once, and its memory is RAM. CUDA calls are thus not included; each copy and
event costs some microseconds more on a GPU. The time per block is the difference between a model of
many blocks and one of few, which excludes the constant cost of a step. Times are CPU times of the
thread, since machines are shared. Contenders take turns; the time of a turn is its fastest round,
and the table has the minimum and the median of all turns in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import llama

import infinity
from infinity.optim.cpu import Piece
from infinity.storage.device import HAPPENED, CpuDevice, Event, SquareSums

FEW, MANY = 4, 16
PHASES = ("forward", "backward")
IN_RAM = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
TOKENS = torch.zeros(1, 8, dtype=torch.long)


class _Zeros:
    """Square sums that are all zero."""

    def __init__(self, count: int) -> None:
        self._count = count

    def result(self) -> list[float]:
        return [0.0] * self._count


class NullDevice(CpuDevice):
    """A non-unified device whose kernels and copies do nothing and complete at once."""

    unified = False
    host_clock = False

    def memory_bytes(self) -> int | None:
        """Return 1 GiB."""
        return 1 << 30

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy nothing."""
        return HAPPENED

    copy_d2h = copy_h2d

    def why_no_kernels(self) -> str | None:
        """Return None: kernels exist, but do nothing."""
        return None

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """Update nothing."""
        return HAPPENED

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        """Return sums that are zero."""
        return _Zeros(len(tensors))


class Ours:
    """A model of `num_blocks` blocks under the engine; `recompute`: recomputed in backward."""

    def __init__(self, num_blocks: int, recompute: bool) -> None:
        activations = {"checkpoint": "units" if recompute else "none"}
        config = {"precision": "bf16", "placement": IN_RAM, "cpu": {"num_threads": 1},
                  "activations": activations, "update": "device"}  # fmt: skip
        self._engine = infinity.initialize(model_of(num_blocks), config, device=NullDevice())[0]

    def forward(self) -> Tensor:
        """Return the loss."""
        return self._engine(TOKENS, TOKENS)

    def backward(self, loss: Tensor) -> None:
        """Run backward and move gradients to their tier."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Run the optimizer step and wait for it."""
        self._engine.step()
        self._engine.settle()


class Plain:
    """The same model in plain torch."""

    def __init__(self, num_blocks: int, recompute: bool) -> None:
        self._model = model_of(num_blocks, recompute).bfloat16()

    def forward(self) -> Tensor:
        """Return the loss."""
        loss: Tensor = self._model(TOKENS, TOKENS)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Discard gradients; there is no update."""
        self._model.zero_grad()


def model_of(num_blocks: int, recompute: bool = False) -> llama.Llama:
    """Return a tiny Llama model."""
    model = llama.Llama(llama.LlamaConfig(32, 8, num_blocks, 2, 1, 16, 32, checkpointing=recompute))
    model.init_weights(0)
    return model


def round_s(contender: Any) -> dict[str, float]:
    """Return CPU seconds of one forward and one backward."""
    begin = time.thread_time()
    loss = contender.forward()
    middle = time.thread_time()
    contender.backward(loss)
    end = time.thread_time()
    del loss
    contender.step()
    return {"forward": middle - begin, "backward": end - middle}


def per_block(make: Callable[[int], Any], rounds: int) -> Callable[[], dict[str, list[float]]]:
    """Return a function that runs one more turn and returns us per block of all turns, by phase."""
    few, many = make(FEW), make(MANY)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def turn() -> dict[str, list[float]]:
        fastest = [min_of([round_s(contender) for _ in range(rounds)]) for contender in (few, many)]
        for phase in PHASES:
            times[phase].append((fastest[1][phase] - fastest[0][phase]) / (MANY - FEW) * 1e6)
        return times

    return turn


def min_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the minimum of each phase."""
    return {phase: min(times[phase] for times in rounds) for phase in PHASES}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=20, help="of one turn: the least counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = {
        (name, recompute): per_block(partial(contender, recompute=recompute), options.rounds)
        for recompute in (False, True)
        for name, contender in (("plain torch", Plain), ("infinity", Ours))
    }
    gc.disable()
    for turn in range(options.turns + 1):  # the first turn is a warm-up
        results = {key: take() for key, take in turns.items()}
        if not turn:
            for times in results.values():
                for phase_times in times.values():
                    phase_times.clear()
        gc.collect()
    print("| us per block: least (median) | forward | backward |\n| --- | ---: | ---: |")
    for (name, recompute), times in results.items():
        cells = (f"{min(times[p]):.0f} ({statistics.median(times[p]):.0f})" for p in PHASES)
        print(f"| {name}{', recomputed' if recompute else ''} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
