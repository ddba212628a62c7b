"""DeepSpeed's `get_accelerator()` over `torch.cuda`, or the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from infinity.integrations.deepspeed.names import NoAttributeError, unsupported_error
from infinity.plan.machine import read_machine

_NVTX: Any = torch.cuda.nvtx


def _method(function: Callable[..., Any]) -> Any:
    return function


def _gpu_method(name: str, default: Any = None) -> Any:
    """Return a method that calls `torch.cuda.<name>`, or returns `default` without a GPU."""

    def method(self: DeepSpeedAccelerator, device_index: int | None = None) -> Any:
        return getattr(torch.cuda, name)(device_index) if self._is_gpu else default

    return method


def _constructor(dtype: torch.dtype) -> Any:
    """Return a property: a tensor constructor of this dtype, like `torch.FloatTensor`."""
    return property(lambda self: partial(torch.tensor, dtype=dtype, device=self._name))


class DeepSpeedAccelerator:
    """The GPUs visible to this process, else the CPU, by DeepSpeed's accelerator interface.

    Without a GPU, streams and events are None, `synchronize` returns at once, and memory sizes are
    those of the machine's RAM, in bytes. Building operators at run time and capturing graphs are
    not supported.
    """

    def __init__(self) -> None:
        self._is_gpu = torch.cuda.is_available()
        self._name = "cuda" if self._is_gpu else "cpu"
        self._module: Any = torch.cuda if self._is_gpu else torch.cpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise unsupported_error(f"accelerator.{name}", NoAttributeError)

    def _random(self, name: str, *args: Any) -> Any:
        return getattr(torch.cuda if self._is_gpu else torch, name)(*args)

    # --- devices ---------------------------------------------------------------------------------

    is_available = _method(lambda self: True)
    device = _method(lambda self, device_index=None: torch.device(self.device_name(device_index)))
    set_device = _method(lambda self, device_index: self._module.set_device(device_index))
    current_device = _method(lambda self: torch.cuda.current_device() if self._is_gpu else 0)
    current_device_name = _method(lambda self: self.device_name(self.current_device()))
    device_count = _method(lambda self: torch.cuda.device_count() if self._is_gpu else 1)
    communication_backend_name = _method(lambda self: "nccl" if self._is_gpu else "gloo")
    on_accelerator = _method(lambda self, tensor: tensor.device.type == self._name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda:1" for 1, "cuda" for None, "cpu" without a GPU."""
        return self._name if device_index is None or not self._is_gpu else f"cuda:{device_index}"

    synchronize = _gpu_method("synchronize")

    # --- random numbers --------------------------------------------------------------------------

    random = _method(lambda self: torch.random)
    manual_seed = _method(lambda self, seed: self._random("manual_seed", seed))
    initial_seed = _method(lambda self: self._random("initial_seed"))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        self._random("manual_seed_all" if self._is_gpu else "manual_seed", seed)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the state of the device's generator, a uint8 tensor."""
        index = () if device_index is None or not self._is_gpu else (device_index,)
        return self._random("get_rng_state", *index)  # type: ignore[no-any-return]

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Restore a state of the device's generator."""
        index = () if device_index is None or not self._is_gpu else (device_index,)
        self._random("set_rng_state", new_state, *index)

    # --- streams ---------------------------------------------------------------------------------

    Stream = property(lambda self: torch.cuda.Stream if self._is_gpu else None)
    Event = property(lambda self: torch.cuda.Event if self._is_gpu else None)
    default_stream = _gpu_method("default_stream")
    current_stream = _gpu_method("current_stream")
    stream = _method(
        lambda self, stream: torch.cuda.stream(stream) if self._is_gpu else contextlib.nullcontext()
    )
    range_push = _method(
        lambda self, msg, domain=None, category=None: (
            _NVTX.range_push(msg) if self._is_gpu else None
        )
    )
    range_pop = _method(lambda self, domain=None: _NVTX.range_pop() if self._is_gpu else None)

    # --- memory, in bytes ------------------------------------------------------------------------

    empty_cache = _method(lambda self: torch.cuda.empty_cache() if self._is_gpu else None)
    memory_allocated = _gpu_method("memory_allocated", 0)
    max_memory_allocated = _gpu_method("max_memory_allocated", 0)
    memory_reserved = _gpu_method("memory_reserved", 0)
    max_memory_reserved = _gpu_method("max_memory_reserved", 0)
    memory_stats = _gpu_method("memory_stats", {})
    reset_peak_memory_stats = _gpu_method("reset_peak_memory_stats")
    reset_max_memory_allocated = reset_peak_memory_stats
    total_memory = _method(
        lambda self, device_index=None: (
            torch.cuda.mem_get_info(device_index)[1]
            if self._is_gpu
            else read_machine().host_ram_bytes
        )
    )
    available_memory = _method(
        lambda self, device_index=None: (
            torch.cuda.mem_get_info(device_index)[0]
            if self._is_gpu
            else read_machine().host_available_bytes
        )
    )

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> Tensor:
        """Return a copy in pinned memory; without a GPU the tensor itself."""
        return tensor.pin_memory() if self._is_gpu else tensor

    is_pinned = _method(lambda self, tensor: tensor.is_pinned())

    # --- dtypes ----------------------------------------------------------------------------------

    is_bf16_supported = _method(lambda self: not self._is_gpu or torch.cuda.is_bf16_supported())
    is_fp16_supported = _method(lambda self: True)
    supported_dtypes = _method(lambda self: [torch.float32, torch.float16, torch.bfloat16])
    BFloat16Tensor = _constructor(torch.bfloat16)
    ByteTensor = _constructor(torch.uint8)
    DoubleTensor = _constructor(torch.float64)
    FloatTensor = _constructor(torch.float32)
    HalfTensor = _constructor(torch.float16)
    IntTensor = _constructor(torch.int32)
    LongTensor = _constructor(torch.int64)


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process."""
    return DeepSpeedAccelerator()
