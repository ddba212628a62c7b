"""Contenders of `bench_adam.py`: optimizer steps on shared arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adam.arrays import HYPER, STEP, Arrays

MIN_SAMPLE_S = 0.03  # a sample repeats the step until it takes this long


@dataclass
class Contender:
    """An implementation of one step; `bytes_per_param` is the minimum traffic in bytes."""

    name: str
    bytes_per_param: float
    step: Callable[[], object]
    isa: str = ""
    repeats: int = 1

    def warm_up(self) -> None:
        """Run one step, and set `repeats` such that a sample takes `MIN_SAMPLE_S`."""
        self.step()
        self.repeats = max(1, round(MIN_SAMPLE_S / self._seconds()))

    def sample(self) -> float:
        """Return seconds per step."""
        start = time.perf_counter()
        for _ in range(self.repeats):
            self.step()
        return (time.perf_counter() - start) / self.repeats

    def _seconds(self) -> float:
        start = time.perf_counter()
        self.step()
        return max(1e-6, time.perf_counter() - start)


def plain_parameters(arrays: Arrays) -> list[torch.nn.Parameter]:
    """Return the fp32 arrays as parameters with gradients, one per piece."""
    parameters = []
    for weight, gradient in zip(
        arrays.parts(arrays.weight), arrays.parts(arrays.gradient), strict=True
    ):
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def torch_adamw(arrays: Arrays, name: str, *, copies: bool, **options: bool) -> Contender:
    """AdamW of torch; with `copies` also the bf16 copy of the weights for mixed precision."""
    parameters = plain_parameters(arrays)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=HYPER.lr,
        betas=HYPER.betas,
        eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
        **options,
    )
    moments = zip(arrays.parts(arrays.moments[0]), arrays.parts(arrays.moments[1]), strict=True)
    for parameter, (moment1, moment2) in zip(parameters, moments, strict=True):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(STEP)),
            "exp_avg": moment1,
            "exp_avg_sq": moment2,
        }

    def step() -> None:
        optimizer.step()
        if copies:
            arrays.copy.copy_(arrays.weight)

    return Contender(name, 34.0 if copies else 28.0, step)


def deepspeed_adam(arrays: Arrays) -> Contender:
    """CPU Adam of DeepSpeed with the bf16 copy; may raise any error of its import or build."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    parameters = plain_parameters(arrays)
    optimizer = DeepSpeedCPUAdam(
        parameters, lr=HYPER.lr, betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay
    )
    moments = zip(arrays.parts(arrays.moments[0]), arrays.parts(arrays.moments[1]), strict=True)
    for parameter, (moment1, moment2) in zip(parameters, moments, strict=True):
        optimizer.state[parameter] = {"step": STEP, "exp_avg": moment1, "exp_avg_sq": moment2}

    def step() -> None:
        optimizer.step()
        arrays.copy.copy_(arrays.weight)

    return Contender("DeepSpeed CPU Adam + copy", 34.0, step)


def take_turns(contenders: Sequence[Contender], num_rounds: int) -> list[list[float]]:
    """Return seconds per step by contender and round; the order rotates from round to round."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(num_rounds):
        for turn in range(len(contenders)):
            index = (number + turn) % len(contenders)
            times[index].append(contenders[index].sample())
    return times
