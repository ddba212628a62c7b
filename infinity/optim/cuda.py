"""Optimizer kernels on a CUDA device: same bits as `CpuKernels`, many parameters per launch.

Work is queued on the caller's stream without synchronization, except in `square_sum`, which returns
a number. Tensors are 1-D, contiguous and on the device; the caller keeps them alive until the
stream has executed the work. The arithmetic is in csrc/adam/update.inl, the kernels in
fused_adam.cu. Must not know units, tiers or files.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from infinity.errors import MachineError, first_lines
from infinity.optim import cuda_compile
from infinity.optim.cpu import (
    FLOATS,
    Piece,
    check_pieces,
    check_tensor,
    split_by_kernel,
    step_matrices,
)
from infinity.optim.cuda_launch import (
    Launch,
    Variant,
    num_square_tiles,
    square_launches,
    update_launches,
)
from infinity.optim.rules import SGD

# `cuda-core` compiles kernels on first use, and loads them. Its launches take scalars and pointers
# only, so launches use `cuda-bindings`, on which it is built: the driver takes a table of up to
# 32764 bytes by value.
_OLDEST_DRIVER = 12010  # CUDA 12.1: kernel parameters above 4 KiB
_OLDEST_DEVICE = (7, 0)


def why_not(device: torch.device) -> str | None:
    """Return why `device` cannot run the kernels (one line), or None. Compiles nothing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is not a CUDA device that torch can use"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_DEVICE:
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    if (reason := cuda_compile.why_not()) is not None:
        return reason
    version = int(_driver_value(_driver().cuDriverGetVersion()))
    if version < _OLDEST_DRIVER:
        return f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}, older than 12.1"
    return None


class CudaLauncher:
    """Launches compiled kernels on one device."""

    def __init__(self, device: torch.device) -> None:
        """Raise `MachineError` if `why_not` gives a reason."""
        if (reason := why_not(device)) is not None:
            raise MachineError(f"no kernels for {device}", because=reason)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self._index)
        major, minor = torch.cuda.get_device_capability(self._index)
        self._arch = f"sm_{major}{minor}"
        self._modules: dict[Variant, Any] = {}
        self._kernels: dict[tuple[Variant, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, launch: Launch, stream: torch.cuda.Stream | None) -> None:
        """Queue a launch on `stream`, by default torch's current stream."""
        with torch.cuda.device(self._index):
            # Driver calls need a current context, which is per thread: torch may not have set its
            # context on this thread, and another library may have set another one.
            cuda_compile.core().Device(self._index).set_current()
            kernel = self._kernel(launch.variant, launch.kernel)
            queue = torch.cuda.current_stream(self._index) if stream is None else stream
            addresses = (ctypes.c_void_p * len(launch.arguments))(
                *(ctypes.addressof(argument) for argument in launch.arguments)
            )
            driver = _driver()
            _driver_value(
                driver.cuLaunchKernel(
                    driver.CUfunction(kernel),
                    *(launch.blocks, 1, 1),
                    *(launch.threads, 1, 1),
                    0,
                    driver.CUstream(queue.cuda_stream),
                    ctypes.addressof(addresses),
                    0,
                )
            )

    def scratch(self, num_elements: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Allocate uninitialized fp64 scratch memory, for use on `stream`."""
        queue = torch.cuda.current_stream(self._index) if stream is None else stream
        with torch.cuda.stream(queue):
            return torch.empty(num_elements, dtype=torch.float64, device=self.device)

    def _kernel(self, variant: Variant, name: str) -> int:
        """Return the driver's handle of a kernel, compiling its variant unless cached."""
        handle = self._kernels.get((variant, name))
        if handle is None:
            with self._lock:
                if variant not in self._modules:
                    code = cuda_compile.cubin(self._arch, variant)
                    self._modules[variant] = cuda_compile.core().ObjectCode.from_cubin(code)
            handle = int(self._modules[variant].get_kernel(name).handle)
            self._kernels[variant, name] = handle
        return handle


@cache  # called for each launch, as is `cuda_compile.core`
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _driver_value(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; raises `MachineError` with the name of its error."""
    status, *values = result
    if int(status) != 0:
        raise MachineError(f"the CUDA driver returned {status!r}")
    return values[0] if values else None


class Launcher(Protocol):
    """Executes launches: `CudaLauncher`, or a fake in tests without a GPU."""

    def __call__(self, launch: Launch, stream: torch.cuda.Stream | None) -> None:
        """Queue a launch."""

    def scratch(self, num_elements: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Allocate fp64 scratch memory on the device, for use on `stream`."""


class CudaKernels:
    """Optimizer kernels of one device; thread-safe."""

    def __init__(self, device: torch.device | str, launcher: Launcher | None = None) -> None:
        """Raise `MachineError` if kernels cannot be compiled or run on `device`."""
        self.device = torch.device(device)
        if launcher is None:
            launcher = CudaLauncher(self.device)
            self.device = launcher.device
        self._launch = launcher
        self._self_test()

    def _self_test(self) -> None:
        """Launch one kernel of each sort, so that driver errors are raised before training."""
        try:
            total = self.square_sum(torch.ones(10, dtype=torch.float32, device=self.device))
            weight, gradient = torch.ones(2, 1, dtype=torch.float32, device=self.device)
            self.update_all([Piece(weight, None, (), gradient, SGD(lr=0.25), 1)])
            results = total, float(weight)
        except MachineError:
            raise
        except Exception as error:  # from cuda-core, which loads code lazily
            raise MachineError(
                f"the CUDA kernels do not run on {self.device}", because=first_lines(error)
            ) from error
        if results != (10.0, 0.75):
            raise MachineError(
                f"the CUDA kernels compute wrong results on {self.device}",
                because=f"10 ones squared are {results[0]:g}, and 1 - 0.25 is {results[1]:g}",
            )

    def update_all(self, pieces: Iterable[Piece], stream: torch.cuda.Stream | None = None) -> None:
        """Update all pieces in place, on `stream` (default: torch's current stream).

        Groups and steps of pieces may differ. All pieces are checked first; no two may share
        memory. There is one launch per combination of rule, dtypes and formats; matrices are
        updated by torch operations.
        """
        elementwise, matrices = split_by_kernel(pieces)
        check_pieces(elementwise, self.device)
        for launch in list(update_launches(elementwise)):
            self._launch(launch, stream)
        with torch.cuda.stream(stream) if matrices else nullcontext():
            step_matrices(matrices)

    def square_sum(self, tensor: torch.Tensor) -> float:
        """Return the sum of squares in fp64 over a fixed tree; synchronizes.

        It is inf or nan if any element is.
        """
        sums = self._launch.scratch(1, None)
        self.square_sums([tensor], sums)
        total = float(sums.item())
        return math.nan if math.isnan(total) else total

    def square_sums(
        self,
        tensors: Sequence[torch.Tensor],
        sums: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Write the sum of squares of each tensor to the fp64 device tensor `sums`."""
        check_tensor("sums", sums, len(tensors), (torch.float64,), self.device)
        for tensor in tensors:
            check_tensor("tensor", tensor, tensor.numel(), FLOATS, self.device)
        partials = self._launch.scratch(num_square_tiles(tensors), stream)
        for launch in square_launches(tensors, sums, partials):
            self._launch(launch, stream)
