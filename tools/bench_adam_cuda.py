#!/usr/bin/env python3
"""Time the fused CUDA optimizer against a device copy of the same bytes and torch's AdamW.

    python tools/bench_adam_cuda.py --json

Contenders run interleaved, so that changes of the GPU clock affect all equally; ratios are medians
over rounds of ratios within a round. Times are those of CUDA events around work that is queued
while the GPU is busy, which excludes the host time (milliseconds for hundreds of pieces).
`limit` copies half the bytes of an update: it reads and writes the same number of bytes in total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from infinity.optim import cuda
from infinity.optim.cpu import Piece
from infinity.optim.cuda import CudaKernels
from infinity.optim.moments import Moment
from infinity.optim.rules import AdamW
from infinity.types import MomentFormat

HYPER = AdamW(lr=1e-4, weight_decay=0.01)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# name -> dtypes of weight, rest of the master and gradient; format of moments
LAYOUTS = {
    "fp32": (FP32, None, FP32, MomentFormat.FP32),
    "fp32, bf16 gradient": (FP32, None, BF16, MomentFormat.FP32),
    "split": (BF16, torch.int16, BF16, MomentFormat.FP32),
    "split, bf16 moments": (BF16, torch.int16, BF16, MomentFormat.BF16_STOCHASTIC),
    "split, 8-bit moments": (BF16, torch.int16, BF16, MomentFormat.INT8),
    "fp16": (FP16, FP32, FP16, MomentFormat.FP32),
}
AHEAD = 5  # fp32 products, 0.1 s on an H100, during which the timed calls are queued
StepWork = Callable[[], None]


class State:
    """Optimizer state of `n` parameters of one layout in `num_pieces` pieces."""

    def __init__(self, kernels: CudaKernels, layout: str, n: int, num_pieces: int) -> None:
        weight, rest, gradient, format = LAYOUTS[layout]
        device = kernels.device
        self.kernels = kernels
        self.tensors = [
            torch.randn(n, device=device).to(weight),
            torch.zeros(n, dtype=rest or torch.int8, device=device),
            torch.randn(n, device=device).mul_(1e-3).to(gradient),
        ]
        moments = [Moment.zeros(n, format, device) for _ in range(2)]
        size = -(-n // num_pieces // 4096) * 4096 or 4096
        self.pieces = [
            Piece(
                self.tensors[0][first:end],
                None if rest is None else self.tensors[1][first:end],
                [moment.part(first, end) for moment in moments],
                self.tensors[2][first:end],
                HYPER,
                step=10,
                first=first,
            )
            for first in range(0, n, size)
            for end in [min(first + size, n)]
        ]
        written = self.tensors[0].nbytes + (self.tensors[1].nbytes if rest else 0)
        written += sum(
            m.values.nbytes + (0 if m.scales is None else m.scales.nbytes) for m in moments
        )
        read = written - (self.tensors[0].nbytes if weight == FP16 else 0)
        self.nbytes = written + read + self.tensors[2].nbytes

    def update(self) -> None:
        """Run one step."""
        self.kernels.update_all(self.pieces)


def torch_fused(n: int, device: torch.device) -> StepWork:
    """Return a step of torch's AdamW with an fp32 gradient and a bf16 copy of the weights."""
    weight = torch.nn.Parameter(torch.randn(n, device=device))
    weight.grad = torch.randn(n, device=device).mul_(1e-3)
    copy = torch.empty(n, dtype=BF16, device=device)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)

    def step() -> None:
        optimizer.step()
        copy.copy_(weight.detach())

    return step


def seconds(work: StepWork, repeats: int) -> float:
    """Return device seconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    large = torch.ones(8192, 8192, device="cuda")
    for _ in range(AHEAD):
        large @ large
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def compare(contenders: dict[str, StepWork], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds per call by name and round, with interleaved contenders."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        work()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, work in contenders.items():
            times[name].append(seconds(work, repeats))
    return times


def measure(kernels: CudaKernels, n: int, rounds: int) -> Iterator[dict[str, object]]:
    """Yield one result per layout and number of pieces."""
    for layout in LAYOUTS:
        for num_pieces in (1, 300):
            state = State(kernels, layout, n, num_pieces)
            half = state.nbytes // 2
            source, target = (
                torch.empty(half, dtype=torch.uint8, device=kernels.device) for _ in range(2)
            )
            times = compare(
                {
                    "ours": state.update,
                    "limit": lambda target=target, source=source: target.copy_(source),
                    "torch": torch_fused(n, kernels.device),
                },
                rounds,
                repeats=10,
            )
            ours = statistics.median(times["ours"])
            yield {
                "layout": layout,
                "pieces": len(state.pieces),
                "bytes_per_param": round(state.nbytes / n, 2),
                "ns_per_param": ours / n * 1e9,
                "gb_s": state.nbytes / ours / 1e9,
                "limit_gb_s": 2 * half / statistics.median(times["limit"]) / 1e9,
                "ratio_to_limit": _ratio(times["limit"], times["ours"]),
                "speedup_vs_torch_fused": _ratio(times["torch"], times["ours"]),
            }
    tensor = torch.randn(n, device=kernels.device).to(BF16)
    sums = torch.zeros(1, dtype=torch.float64, device=kernels.device)
    helpers: dict[str, tuple[StepWork, int]] = {
        "square sum, bf16": (lambda: kernels.square_sums([tensor], sums), 2 * n)
    }
    for name, (work, nbytes) in helpers.items():
        seconds_per_call = statistics.median(compare({name: work}, rounds, repeats=10)[name])
        yield {
            "helper": name,
            "ns_per_param": seconds_per_call / n * 1e9,
            "gb_s": nbytes / seconds_per_call / 1e9,
        }


def _ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def main() -> int:
    """Print one line per result, or all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=int, default=250_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    if (reason := cuda.why_not(device)) is not None:
        print(f"bench_adam_cuda: {reason}", file=sys.stderr)
        return 4
    results = []
    for result in measure(CudaKernels(device), arguments.params, arguments.rounds):
        results.append(result)
        if not arguments.json:
            print(
                "  ".join(
                    f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in result.items()
                )
            )
    if arguments.json:
        name = torch.cuda.get_device_name(device)
        print(
            json.dumps({"device": name, "params": arguments.params, "results": results}, indent=2)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
