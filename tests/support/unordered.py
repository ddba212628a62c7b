"""Training on the emulated CUDA device with one kind of synchronization removed at a time.

`main` prints, as JSON, the number of unordered accesses in each case. Import `host_cuda` first.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from support import host_cuda
from support.small import VOCABULARY, small_model
from support.trainer import cpu_update_share

import infinity
from infinity.storage.cuda import CudaDevice
from infinity.storage.cuda_events import CudaEvent
from infinity.storage.device import HAPPENED

_copy = CudaDevice._copy
CPU_THREAD = "what the optimizer pass waits for of the CPU's thread"
REMOVED_SYNC: dict[str, dict[tuple[Any, str], Any]] = {
    "nothing": {},
    "the edges of registrations": {
        (CudaDevice, "_registered_ranges"): lambda self, address, nbytes: [(0, nbytes)]
    },
    "what copies out wait for": {
        (CudaDevice, "copy_d2h"): lambda self, target, source, after=HAPPENED: _copy(
            self, self._d2h_stream, target, source, after
        )
    },
    "what all copies wait for": {
        (CudaDevice, "_copy"): lambda self, stream, target, source, after: _copy(
            self, stream, target, source, HAPPENED
        )
    },
    "what compute waits for": {(CudaDevice, "compute_wait"): lambda self, event: None},
    "what the host waits for": {
        (CudaEvent, "wait"): lambda self: None,
        (CudaEvent, "done"): lambda self: True,
    },
    CPU_THREAD: {(Future, "result"): lambda self, timeout=None: None},
}


def train(update: str) -> int:
    """Train three steps, mix tensors of two devices, and return the number of unordered accesses.

    With "beside" the CPU updates some chunks while others are streamed.
    """
    if update == "beside":
        with cpu_update_share(0.4):
            return train("device")
    config = {
        "placement": dict.fromkeys(("weights", "optimizer_state", "gradients"), "host"),
        "precision": "bf16",
        "update": update,
        "chunk_size": 2048,
    }
    model = small_model(num_blocks=8, width=32)
    engine, *_ = infinity.initialize(model, config, device="cuda")
    with engine:
        for _ in range(3):
            loss = engine(torch.randint(0, VOCABULARY, (2, 16), device="cuda"))
            engine.backward(loss)
            engine.step()
        with pytest.raises(RuntimeError, match="two devices"):
            loss + torch.ones(3)
    return len(host_cuda.violations())


def main() -> None:
    counts = {}
    with mock.patch.object(CudaDevice, "_PIN_SLICE", 1 << 14):
        for name, patches in REMOVED_SYNC.items():
            for (owner, attribute), value in patches.items():
                mock.patch.object(owner, attribute, value).start()
            updates = {"nothing": ("cpu", "device", "beside"), CPU_THREAD: ("beside",)}
            counts[name] = sum(map(train, updates.get(name, ("cpu",))))
            mock.patch.stopall()
    print(json.dumps(counts))
