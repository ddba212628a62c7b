"""Time the optimizer kernels against the memory bandwidth, torch's AdamW and DeepSpeed's.

    python tools/bench_adam.py --json --n 10e6,100e6 --pieces 1,300 --threads 1,all

`limit` multiplies half the bytes of an update by 1 in place with torch: it reads and writes the
same number of bytes, with normal stores. (A copy with non-temporal stores was half as fast on an
EPYC, and slower than the update.) Contenders run interleaved because memory speed fluctuates.
Ratios are medians of ratios within a round, with the 90 % interval of the median.
`torch fused + copy` also writes the bf16 weights for mixed precision, as the split layout does in
the same pass; contenders are compared by parameters per second, not by bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from ratios import Ratio, ratio_of

from adam.arrays import CASES, Arrays, Case
from adam.contenders import Contender, deepspeed_adam, take_turns, torch_adamw
from infinity import _adam
from infinity.cli.doctor import machine_facts
from infinity.optim.cpu import CpuKernels, Piece

TARGET = 0.95  # fraction of the limit


def rounded(ratio: Ratio) -> dict[str, float]:
    return {"median": round(ratio.median, 3), "low": round(ratio.low, 3),
            "high": round(ratio.high, 3)}  # fmt: skip


def moved_by(piece: Piece) -> int:
    """Return the minimum number of bytes that an update reads and writes."""
    stored = [piece.master_state, *(t for m in piece.moments for t in (m.values, m.scales))]
    both = sum(tensor.nbytes for tensor in stored if tensor is not None)
    weights = 1 if piece.weight.dtype is torch.float16 else 2  # fp16: only written
    return weights * piece.weight.nbytes + 2 * both + piece.gradient.nbytes


class Bench:
    """Benchmark of one setting: numbers of parameters, pieces and threads."""

    def __init__(self, n: int, num_pieces: int, num_threads: int, num_rounds: int) -> None:
        self.n, self.num_pieces, self.num_threads = n, num_pieces, num_threads
        self.num_rounds = num_rounds
        torch.set_num_threads(num_threads)
        self.arrays = Arrays(n, num_pieces)
        self.kernels = {isa: CpuKernels(num_threads, isa) for isa in _adam.isas()}

    def close(self) -> None:
        for kernels in self.kernels.values():
            kernels.close()

    def run(self, cases: list[Case], slow: bool) -> Iterator[dict[str, Any]]:
        """Yield one row for each contender, case by case."""
        yield from self._plain(slow)
        for case in cases:
            yield from self._case(case)

    def _plain(self, slow: bool) -> Iterator[dict[str, Any]]:
        """Yield rows of torch and DeepSpeed on fp32 arrays, relative to `torch fused + copy`."""
        baseline = torch_adamw(self.arrays, "torch fused + copy", copies=True, fused=True)
        others = [torch_adamw(self.arrays, "torch fused", copies=False, fused=True)]
        if slow:
            others.append(torch_adamw(self.arrays, "torch foreach", copies=False, foreach=True))
        try:
            others.append(deepspeed_adam(self.arrays))
        except Exception as error:  # its import and build fail in many ways
            print(f"no DeepSpeed: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        contenders = [baseline, *others]
        for contender in contenders:
            contender.warm_up()
        times = take_turns(contenders, self.num_rounds)
        for contender, seconds in zip(contenders, times, strict=True):
            yield self._row(contender, seconds, None, times[0])

    def _case(self, case: Case) -> Iterator[dict[str, Any]]:
        pieces = self.arrays.pieces(case)
        nbytes = sum(map(moved_by, pieces)) / self.n
        limit = Contender("limit", nbytes, partial(self._in_place, int(nbytes * self.n) // 2))
        # The full call, including the checks of every piece.
        ours = [
            Contender(case.name, nbytes, lambda k=k: k.update_all(pieces), isa)
            for isa, k in self.kernels.items()
        ]
        baseline = torch_adamw(self.arrays, "torch fused + copy", copies=True, fused=True)
        for contender in [limit, baseline, *ours]:
            contender.warm_up()
        times = take_turns([limit, baseline, *ours], self.num_rounds)
        yield self._row(limit, times[0], times[0], times[1], of=case.name)
        for contender, seconds in zip(ours, times[2:], strict=True):
            yield self._row(contender, seconds, times[0], times[1])

    def _in_place(self, nbytes: int) -> None:
        """Read and write `nbytes` in place with the threads of torch."""
        values = self.arrays.gradient
        count = nbytes // values.itemsize
        for start in range(0, count, len(values)):
            values[: count - start].mul_(1.0)

    def _row(
        self,
        contender: Contender,
        seconds: list[float],
        limit: list[float] | None,
        baseline: list[float],
        of: str = "",
    ) -> dict[str, Any]:
        median_s = statistics.median(seconds)
        to_limit = None if limit is None else ratio_of(limit, seconds)
        return {
            "n": self.n,
            "pieces": self.num_pieces,
            "threads": self.num_threads,
            "contender": f"{contender.name} of {of}" if of else contender.name,
            "isa": contender.isa,
            "bytes_per_param": round(contender.bytes_per_param, 2),
            "ns_per_param": round(median_s / self.n * 1e9, 4),
            "gb_s": round(contender.bytes_per_param * self.n / median_s / 1e9, 2),
            "ratio_to_limit": None if to_limit is None else rounded(to_limit),
            "at_limit": None if to_limit is None else to_limit.high >= TARGET,
            "speedup_vs_torch_fused": rounded(ratio_of(baseline, seconds)),
        }


def show(row: dict[str, Any]) -> None:
    """Print one line of the table to stderr; stdout is for JSON."""

    def text(ratio: dict[str, float] | None) -> str:
        if ratio is None:
            return "-"
        return f"{ratio['median']:.2f} [{ratio['low']:.2f}-{ratio['high']:.2f}]"

    print(
        f"{row['n'] / 1e6:6.0f}M {row['pieces']:4d} {row['threads']:3d}  {row['contender']:38s}"
        f"{row['isa']:9s}{row['ns_per_param']:8.3f}{row['gb_s']:8.1f}"
        f"  {text(row['ratio_to_limit']):18s}{text(row['speedup_vs_torch_fused']):18s}",
        file=sys.stderr,
        flush=True,
    )


def numbers(text: str) -> list[int]:
    """Parse "10e6,100e6"."""
    return [int(float(part)) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--n", type=numbers, default=[100_000_000], help="parameters: 10e6,100e6")
    parser.add_argument("--pieces", type=numbers, default=[1, 300], help="pieces: 1,300")
    parser.add_argument("--threads", default="1,all", help="threads: 1,all")
    parser.add_argument("--rounds", type=int, default=15, help="rounds after the calibration")
    parser.add_argument("--only", default="", help="cases whose name contains this, e.g. 8bit")
    parser.add_argument("--no-slow", action="store_true", help="without torch's foreach loop")
    options = parser.parse_args()
    num_cpus = len(os.sched_getaffinity(0))
    threads = [num_cpus if t == "all" else int(t) for t in options.threads.split(",")]
    cases = [case for case in CASES if options.only in case.name]
    print("     n  pcs thr  contender                             isa      ns/par    GB/s"
          "  of limit          x torch fused + copy", file=sys.stderr)  # fmt: skip
    rows = []
    for n in options.n:
        for num_pieces in options.pieces:
            for num_threads in dict.fromkeys(threads):
                bench = Bench(n, num_pieces, num_threads, options.rounds)
                for row in bench.run(cases, slow=not options.no_slow):
                    show(row)
                    rows.append(row)
                bench.close()
    if options.json:
        facts = machine_facts() | {"torch": torch.__version__, "isas": _adam.isas()}
        print(json.dumps({"machine": facts, "target": TARGET, "rows": rows}))
