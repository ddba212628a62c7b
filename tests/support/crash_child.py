"""Processes that train and save, and may be killed at any moment; see test_crash.py.

They are forked from a server that has imported this file: a start costs milliseconds.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from support.small import batch, settings, small_model
from torch import Tensor
from torch.nn import functional

import infinity
from infinity.engine import Engine

TOTAL_STEPS = 6
MICRO_BATCHES = 2


def digest(engine: Engine) -> str:
    """Return a hash of all masters, moments and buffers."""
    hasher = hashlib.sha256()
    for name, value in engine.state_dict(master=True).items():
        hasher.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    for parameter in (p for p in engine.module.parameters() if p.requires_grad):
        for value in engine.optimizer.read_state(parameter).values():
            hasher.update(raw(value))
    return hasher.hexdigest()


def raw(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def train_and_save(folder: str, placement: dict[str, str], every: int) -> None:
    """Resume from the latest checkpoint in `folder`/saved; write `folder`/done at the end."""
    root = Path(folder)
    report(root, "start")
    nvme, saved = root / "nvme", root / "saved"
    nvme.mkdir(exist_ok=True)
    saved.mkdir(exist_ok=True)
    engine = make_engine(nvme, placement)
    if (saved / "latest").exists():
        report(root, "load")
        engine.load_checkpoint(saved)
    while engine.global_steps < TOTAL_STEPS:
        take_step(root, engine)
        if engine.global_steps % every == 0:
            report(root, f"save {engine.global_steps}")
            tag = f"{engine.global_steps}-{os.getpid()}"
            engine.save_checkpoint(saved, tag, keep_last=2)
    report(root, "end")
    result = digest(engine)
    engine.close()
    (root / "new").write_text(result)
    (root / "new").rename(root / "done")


def train_durably(folder: str, placement: dict[str, str], every: int) -> None:
    """Resume from the last committed step in `folder`/nvme; write `folder`/done at the end."""
    root = Path(folder)
    report(root, "start")
    nvme = root / "nvme"
    nvme.mkdir(exist_ok=True)
    durable = {"durable": True, "resume": "auto", "commit_every": every}
    engine = make_engine(nvme, placement, **durable)
    while engine.global_steps < TOTAL_STEPS:
        take_step(root, engine)
    report(root, "end")
    result = digest(engine)
    report(root, "close")
    engine.close()
    (root / "new").write_text(result)
    (root / "new").rename(root / "done")


def take_step(root: Path, engine: Engine) -> None:
    """Train one step; its batches follow from the step count."""
    step = engine.global_steps
    for micro in range(MICRO_BATCHES):
        report(root, f"step {step}")
        loss = engine(batch(step * MICRO_BATCHES + micro))
        engine.backward(loss)
        engine.step()


def make_engine(nvme: Path, placement: dict[str, str], **more: Any) -> Engine:
    """Return an engine with dropout from torch's generator and a schedule stepped every step."""
    torch.set_num_threads(1)
    model = small_model(0)
    model.embedding.register_forward_hook(lambda *args: functional.dropout(args[-1], 0.1))
    config = settings(nvme, placement, gradient_accumulation_steps=MICRO_BATCHES, **more)
    return infinity.initialize(
        model,
        config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )[0]


def report(folder: Path, what: str) -> None:
    """Write the next phase to a file, for statistics of the phases in which children died."""
    (folder / "phase").write_text(what)
