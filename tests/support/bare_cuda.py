"""A `CudaDevice` without a GPU, for tests of methods that need none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.storage import cuda as module
from infinity.storage.cuda import CudaDevice


def bare_cuda_device(
    monkeypatch: pytest.MonkeyPatch,
    register: Callable[[int, int, int], int] = lambda address, size, flags: 0,
    unregister: Callable[[int], int] = lambda address: 0,
    current: Callable[[torch.device], AbstractContextManager[None]] = lambda device: nullcontext(),
) -> CudaDevice:
    """Return a `CudaDevice` made without `__init__`.

    `register` and `unregister` return CUDA error codes; `current` replaces `torch.cuda.device`.
    """
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(module, "stay_out_of_captures", lambda: None)
    device = CudaDevice.__new__(CudaDevice)
    attrs: dict[str, Any] = {"_pinned_ranges": [], "_node": None, "warnings": [], "_kernels": None}
    attrs |= {"_kernel_error": None, "_thread_role": threading.local()}
    attrs["_last_compute_stream"] = None
    for name, value in attrs.items():
        setattr(device, name, value)
    device.torch_device = torch.device("cpu")
    return device
