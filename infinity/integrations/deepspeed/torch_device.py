"""DeepSpeed's `get_accelerator()` over `torch.cuda`, or the CPU."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from infinity.integrations.deepspeed.names import NoAttributeError, unsupported_error
from infinity.plan.machine import read_machine

# Names of torch.cuda in place of which a machine without a GPU returns a constant.
_WITHOUT_GPU: dict[str, Any] = {
    "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
    "max_memory_reserved": 0, "memory_stats": {}, "reset_peak_memory_stats": None,
    "reset_max_memory_allocated": None, "empty_cache": None, "default_stream": None,
    "is_bf16_supported": True,
}  # fmt: skip


class DeepSpeedAccelerator:
    """The GPUs visible to this process, else the CPU, by DeepSpeed's accelerator interface.

    Names without a method here are functions and classes of `torch.cuda`; without a GPU those of
    `torch.cpu` and `torch.random`. Memory sizes are in bytes; without a GPU the machine's RAM.
    Building operators at run time and capturing graphs are not supported.
    """

    def __init__(self) -> None:
        self._is_gpu = torch.cuda.is_available()
        self._name = "cuda" if self._is_gpu else "cpu"
        self._modules = (torch.cuda,) if self._is_gpu else (torch.cpu, torch.random)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("Tensor") and hasattr(torch, name):  # a constructor, as LongTensor
            return partial(torch.tensor, dtype=getattr(torch, name).dtype, device=self._name)
        for module in self._modules:
            found = vars(module).get(name)
            if callable(found) and str(found.__module__).startswith("torch"):  # not one it imports
                return found
        if not self._is_gpu and name in _WITHOUT_GPU:
            return lambda device_index=None: _WITHOUT_GPU[name]
        raise unsupported_error(f"accelerator.{name}", NoAttributeError)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda:1" for 1, "cuda" for None, "cpu" without a GPU."""
        return self._name if device_index is None or not self._is_gpu else f"cuda:{device_index}"

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        if self._is_gpu:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> Tensor:
        """Return a copy in pinned memory; without a GPU the tensor itself."""
        return tensor.pin_memory() if self._is_gpu else tensor

    def device(self, device_index: int | None = None) -> torch.device:
        """Return `torch.device` of `device_name`."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """Return the index of the current GPU; 0 without a GPU."""
        return torch.cuda.current_device() if self._is_gpu else 0

    def current_device_name(self) -> str:
        """Return `device_name` of the current device."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """Return the backend of `torch.distributed`: "nccl", or "gloo" without a GPU."""
        return "nccl" if self._is_gpu else "gloo"

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return True if the tensor is on a GPU; without a GPU if it is in RAM."""
        return tensor.device.type == self._name

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if the tensor is in pinned memory."""
        return tensor.is_pinned()

    def is_fp16_supported(self) -> bool:
        """Return True."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that models can compute in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of a GPU, or the RAM without a GPU, in bytes."""
        if self._is_gpu:
            return torch.cuda.mem_get_info(device_index)[1]
        return read_machine().host_ram_bytes

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of a GPU, or the available RAM without a GPU, in bytes."""
        if self._is_gpu:
            return torch.cuda.mem_get_info(device_index)[0]
        return read_machine().host_available_bytes


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process."""
    return DeepSpeedAccelerator()
