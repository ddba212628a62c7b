"""Training of the small model in a separate process."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import torch
from support import fault_injection
from support.small import masters, settings, small_model, train
from torch import Tensor


def digest(state: dict[str, Tensor]) -> str:
    """Return a hash of a state."""
    hasher = hashlib.sha256()
    for name, value in sorted(state.items()):
        hasher.update(name.encode())
        hasher.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def train_alone(path: Path, steps: int, more: dict[str, Any], group: Path | None) -> None:
    """Train `steps` steps, or until killed if 0; in control group `group` if one is given.

    Prints "ready" and the drives once the state is written, then one line of JSON per step, then
    the digest of the masters.
    """
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    engine, *_ = fault_injection.initialize(small_model(), settings(path, **more), poison=None)
    with engine:
        print("ready", json.dumps(engine.drives()), flush=True)
        for index in range(steps) if steps else count():
            (loss,) = train(engine, 1, first=index)
            print(json.dumps({"step": index, "loss": loss}), flush=True)
        print(digest(masters(engine)), flush=True)
