"""DeepSpeed's `get_accelerator()` over `torch.cuda`, or the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from infinity.integrations.deepspeed.names import NoAttributeError, why_refused
from infinity.plan.machine import read_machine

_NVTX: Any = torch.cuda.nvtx


def _of(answer: Callable[..., Any]) -> Any:
    return answer


def _of_gpu(name: str, otherwise: Any = None) -> Any:
    """Return a method that calls `torch.cuda.<name>`, or returns `otherwise` without a GPU."""

    def method(self: DeepSpeedAccelerator, device_index: int | None = None) -> Any:
        return getattr(torch.cuda, name)(device_index) if self._is_gpu else otherwise

    return method


def _of_dtype(dtype: torch.dtype) -> Any:
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
        raise why_refused(f"accelerator.{name}", NoAttributeError)

    def _random(self, name: str, *args: Any) -> Any:
        return getattr(torch.cuda if self._is_gpu else torch, name)(*args)

    # --- devices ---------------------------------------------------------------------------------

    is_available = _of(lambda self: True)
    device = _of(lambda self, device_index=None: torch.device(self.device_name(device_index)))
    set_device = _of(lambda self, device_index: self._module.set_device(device_index))
    current_device = _of(lambda self: torch.cuda.current_device() if self._is_gpu else 0)
    current_device_name = _of(lambda self: self.device_name(self.current_device()))
    device_count = _of(lambda self: torch.cuda.device_count() if self._is_gpu else 1)
    communication_backend_name = _of(lambda self: "nccl" if self._is_gpu else "gloo")
    on_accelerator = _of(lambda self, tensor: tensor.device.type == self._name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda:1" for 1, "cuda" for None, "cpu" without a GPU."""
        return self._name if device_index is None or not self._is_gpu else f"cuda:{device_index}"

    synchronize = _of_gpu("synchronize")

    # --- random numbers --------------------------------------------------------------------------

    random = _of(lambda self: torch.random)
    manual_seed = _of(lambda self, seed: self._random("manual_seed", seed))
    initial_seed = _of(lambda self: self._random("initial_seed"))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        self._random("manual_seed_all" if self._is_gpu else "manual_seed", seed)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the state of the device's generator, a uint8 tensor."""
        where = () if device_index is None or not self._is_gpu else (device_index,)
        return self._random("get_rng_state", *where)  # type: ignore[no-any-return]

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Restore a state of the device's generator."""
        where = () if device_index is None or not self._is_gpu else (device_index,)
        self._random("set_rng_state", new_state, *where)

    # --- streams ---------------------------------------------------------------------------------

    Stream = property(lambda self: torch.cuda.Stream if self._is_gpu else None)
    Event = property(lambda self: torch.cuda.Event if self._is_gpu else None)
    default_stream = _of_gpu("default_stream")
    current_stream = _of_gpu("current_stream")
    stream = _of(
        lambda self, stream: torch.cuda.stream(stream) if self._is_gpu else contextlib.nullcontext()
    )
    range_push = _of(
        lambda self, msg, domain=None, category=None: (
            _NVTX.range_push(msg) if self._is_gpu else None
        )
    )
    range_pop = _of(lambda self, domain=None: _NVTX.range_pop() if self._is_gpu else None)

    # --- memory, in bytes ------------------------------------------------------------------------

    empty_cache = _of(lambda self: torch.cuda.empty_cache() if self._is_gpu else None)
    memory_allocated = _of_gpu("memory_allocated", 0)
    max_memory_allocated = _of_gpu("max_memory_allocated", 0)
    memory_reserved = _of_gpu("memory_reserved", 0)
    max_memory_reserved = _of_gpu("max_memory_reserved", 0)
    memory_stats = _of_gpu("memory_stats", {})
    reset_peak_memory_stats = _of_gpu("reset_peak_memory_stats")
    reset_max_memory_allocated = reset_peak_memory_stats
    total_memory = _of(
        lambda self, device_index=None: (
            torch.cuda.mem_get_info(device_index)[1]
            if self._is_gpu
            else read_machine().host_ram_bytes
        )
    )
    available_memory = _of(
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

    is_pinned = _of(lambda self, tensor: tensor.is_pinned())

    # --- dtypes ----------------------------------------------------------------------------------

    is_bf16_supported = _of(lambda self: not self._is_gpu or torch.cuda.is_bf16_supported())
    is_fp16_supported = _of(lambda self: True)
    supported_dtypes = _of(lambda self: [torch.float32, torch.float16, torch.bfloat16])
    BFloat16Tensor = _of_dtype(torch.bfloat16)
    ByteTensor = _of_dtype(torch.uint8)
    DoubleTensor = _of_dtype(torch.float64)
    FloatTensor = _of_dtype(torch.float32)
    HalfTensor = _of_dtype(torch.float16)
    IntTensor = _of_dtype(torch.int32)
    LongTensor = _of_dtype(torch.int64)


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process."""
    return DeepSpeedAccelerator()
