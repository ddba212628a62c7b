"""The optimizer kernels on a CUDA device: same bits as `CpuKernels`, many parameters in one launch.

Work is queued on the stream of the caller and the host never waits, but in `square_sum`, which
returns a number. Tensors are 1-D, contiguous and on the device; the caller keeps them alive until
the stream has passed. The maths is in csrc/adam/update.inl, the kernels in fused_adam.cu. Must not
know units, tiers or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from infinity.optim import cuda_launcher
from infinity.optim.checks import FLOATS, check_all_apart, check_apart, check_piece, check_tensor
from infinity.optim.cpu import Piece
from infinity.optim.cuda_launcher import CudaLauncher
from infinity.optim.cuda_tables import (
    HELPERS,
    Launch,
    Variant,
    accumulate_launch,
    num_square_tiles,
    square_launches,
    update_launches,
)

__all__ = ["CudaKernels", "why_not"]

why_not = cuda_launcher.why_not


class Launcher(Protocol):
    """What carries out launches: `CudaLauncher`, and a stand-in where there is no GPU."""

    def __call__(self, launch: Launch, stream: torch.cuda.Stream | None) -> None:
        """Queue a launch."""

    def load(self, variant: Variant) -> None:
        """Make a variant ready, so that its first launch does not have to."""

    def room(self, num_elements: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """fp64 scratch memory on the device, for work on this stream."""


class CudaKernels:
    """The kernels of one device; may be used from several threads at once."""

    def __init__(self, device: torch.device | str, launcher: Launcher | None = None) -> None:
        """Raises `MachineError` where kernels cannot be compiled or run on `device`."""
        self.device = torch.device(device)
        if launcher is None:
            launcher = CudaLauncher(self.device)
            self.device = launcher.device
        self._launch = launcher
        self._launch.load(HELPERS)

    def update_all(self, pieces: Iterable[Piece], stream: torch.cuda.Stream | None = None) -> None:
        """One step of every piece, in place; groups and steps may differ from one to another.

        All pieces are checked first; no two may share memory. One launch per combination of rule,
        dtypes and formats. `stream` is torch's current one by default.
        """
        chosen = list(pieces)
        for piece in chosen:
            check_piece(piece, self.device)
        check_all_apart(chosen)
        for launch in list(update_launches(chosen)):  # step 0 is refused before the first launch
            self._launch(launch, stream)

    def square_sum(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> float:
        """Sum of squares in fp64 over a fixed tree; inf or nan if any element is. Waits for it."""
        sums = self._launch.room(1, stream)
        self.square_sums([tensor], sums, stream)
        total = float(sums.item())
        return math.nan if math.isnan(total) else total

    def square_sums(
        self,
        tensors: Sequence[torch.Tensor],
        sums: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Sums of squares of `tensors` into the fp64 device tensor `sums`, one each."""
        check_tensor("sums", sums, len(tensors), (torch.float64,), self.device)
        for tensor in tensors:
            check_tensor("tensor", tensor, tensor.numel(), FLOATS, self.device)
        partials = self._launch.room(num_square_tiles(tensors), stream)
        for launch in square_launches(tensors, sums, partials):
            self._launch(launch, stream)

    def accumulate(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`target += source`, added in fp32; a 16-bit target is rounded to nearest even."""
        n = target.numel()
        check_tensor("target", target, n, FLOATS, self.device)
        check_tensor("source", source, n, FLOATS, self.device)
        check_apart(target, source)
        if n:
            self._launch(accumulate_launch(target, source), stream)
