"""Launches on a CUDA device: kernels compiled on first use and kept, arguments passed by value.

`cuda-core` compiles and loads. It launches with scalars and pointers only, so launches go through
`cuda-bindings`, on which it rests: the driver takes a table of up to 32764 bytes by value.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

import torch

from infinity.errors import MachineError
from infinity.optim import nvrtc
from infinity.optim.cuda_tables import Launch, Variant
from infinity.optim.kernel_cache import KernelCache

_OLDEST_DRIVER = 12010  # CUDA 12.1: parameters of more than 4 KiB
_OLDEST_DEVICE = (7, 0)


def why_not(device: torch.device) -> str | None:
    """Why `device` cannot run the kernels, in one line; None if it can. Compiles nothing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is not a CUDA device that torch can use"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_DEVICE:
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    if (reason := nvrtc.why_not()) is not None:
        return reason
    version = int(_checked(_driver().cuDriverGetVersion()))
    if version < _OLDEST_DRIVER:
        return f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}, older than 12.1"
    return None


class CudaLauncher:
    """The kernels of one device."""

    def __init__(self, device: torch.device, cache: KernelCache | None = None) -> None:
        """Raises `MachineError` where `why_not` gives a reason."""
        if (reason := why_not(device)) is not None:
            raise MachineError(f"no kernels for {device}", because=reason)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self._index)
        major, minor = torch.cuda.get_device_capability(self._index)
        self._arch = f"sm_{major}{minor}"
        self._cache = KernelCache() if cache is None else cache
        self._modules: dict[Variant, Any] = {}
        self._kernels: dict[tuple[Variant, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, launch: Launch, stream: torch.cuda.Stream | None) -> None:
        """Queue a launch on `stream`, by default torch's current one."""
        with torch.cuda.device(self._index):
            self._enter()
            kernel = self._kernel(launch.variant, launch.kernel)
            queue = torch.cuda.current_stream(self._index) if stream is None else stream
            addresses = (ctypes.c_void_p * len(launch.arguments))(
                *(ctypes.addressof(argument) for argument in launch.arguments)
            )
            driver = _driver()
            _checked(
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

    def load(self, variant: Variant) -> None:
        """Compile a variant, or take it from the cache, and load it."""
        with self._lock:
            if variant in self._modules:
                return
            code = nvrtc.cubin(self._arch, variant, self._cache)
            self._modules[variant] = nvrtc.core().ObjectCode.from_cubin(code)

    def room(self, num_elements: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """fp64 memory of torch's allocator, which orders its reuse behind `stream`."""
        queue = torch.cuda.current_stream(self._index) if stream is None else stream
        with torch.cuda.stream(queue):
            return torch.empty(num_elements, dtype=torch.float64, device=self.device)

    def _kernel(self, variant: Variant, name: str) -> int:
        """The driver's handle of a kernel."""
        found = self._kernels.get((variant, name))
        if found is None:
            self.load(variant)
            found = int(self._modules[variant].get_kernel(name).handle)
            self._kernels[variant, name] = found
        return found

    def _enter(self) -> None:
        """Make torch's context current in this thread: the driver asks for one, torch does not."""
        nvrtc.core().Device(self._index).set_current()


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a driver call returned; raises `MachineError` with its error's name."""
    status, *values = answer
    if int(status) != 0:
        raise MachineError(f"the CUDA driver answered {status!r}")
    return values[0] if values else None
