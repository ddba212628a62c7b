"""A small language model with tied weights, and engines for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support import fault_injection
from support.waiting import wait_until
from torch import Tensor, nn
from torch.nn import functional

from infinity.engine import Engine
from infinity.model.offloaded_parameter import OffloadedParameter

VOCABULARY = 50
WIDTH = 16
ON_DISK = {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"}
ON_DEVICE = {"weights": "device", "optimizer_state": "device", "gradients": "device"}
MIXED = {"weights": "disk", "optimizer_state": "host", "gradients": "host"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """Embedding, blocks, a norm, and a head tied to the embedding."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.tensor(0.5))

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.features(tokens)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def is_offloaded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, OffloadedParameter)


def small_model(seed: int = 0, **kwargs: Any) -> SmallModel:
    torch.manual_seed(seed)
    return SmallModel(**kwargs)


def batch(index: int, device: torch.device | str = "cpu") -> Tensor:
    """Return tokens that depend on `index` only, not on the global generator."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator).to(device)


def settings(path: Path, placement: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "nvme_path": str(path),
        "precision": "fp32",
        "placement": placement or ON_DISK,
        "chunk_size": 2048,
        "optimizer": {"lr": 1e-2},
        "cpu": {"num_threads": 1},
        **more,
    }


@contextmanager
def small_engine(
    path: Path,
    placement: dict[str, str] | None = None,
    model: nn.Module | None = None,
    *,
    engine_class: type[Engine] | None = None,
    arguments: dict[str, Any] | None = None,
    **more: Any,
) -> Iterator[Engine]:
    """Yield an engine for a small model; then close it and check that it leaks nothing."""
    threads = set(threading.enumerate())
    config = settings(path, placement, **more)
    model = small_model() if model is None else model
    arguments = {"engine_class": engine_class, **(arguments or {})}
    engine, *_ = fault_injection.initialize(model, config, **arguments)
    try:
        yield engine
    finally:
        engine.close()
    assert_nothing_left(path, threads)
    device = arguments.get("device")
    assert not getattr(device, "violations", []), device


def assert_nothing_left(path: Path, threads: set[threading.Thread]) -> None:
    """Assert that there is no scratch directory and no thread besides `threads`."""
    assert not list(path.iterdir())
    assert wait_until(lambda: set(threading.enumerate()) <= threads), threading.enumerate()


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Train `steps` optimizer steps over batches `first`, `first + 1`, ...; return the losses."""
    losses = []
    for index in range(first, first + steps * engine.plan.micro_batches):
        loss = engine(batch(index))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def masters(engine: Engine) -> dict[str, Tensor]:
    return dict(Engine.state_dict(engine, master=True).items())  # by names of the user's module


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Return whether two states have equal names, dtypes and bits."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )
