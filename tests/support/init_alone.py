"""Memory use of initializing a model much larger than the planned RAM.

`measure_initialization(path, way)` runs in a separate process and returns bytes: of the model
(fp32), of its largest tensor, of the plan's reservations, and the growth of the peak while the
model was built and while it was initialized.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support import process_memory
from torch import nn

import infinity
from infinity.model.meta_init import remember_values

WIDTH, NUM_LAYERS = 1536, 32


def build(width: int = WIDTH, num_layers: int = NUM_LAYERS) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    for layer in model:
        if not layer.weight.is_meta:
            nn.init.trunc_normal_(layer.weight, std=0.02)
    return model


def without_values(way: str, **size: int) -> nn.Module:
    if way == "real":
        return build(**size)
    if way == "init":
        with infinity.Init():
            return build(**size)
    with torch.device("meta"):
        model = build(**size)
    if way == "read":
        shapes = {name: p.shape for name, p in model.named_parameters()}
        remember_values(model, {n: (lambda s=s: torch.ones(s)) for n, s in shapes.items()})
    return model


def start(model: nn.Module, config: Mapping[str, Any]) -> infinity.Engine:
    """Return an engine with everything on disk; `config` overrides entries."""
    config = {
        "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
        "optimizer": {"type": "SGD", "lr": 1e-3, "momentum": 0.0},  # little to write
        "chunk_size": 1 << 19,
        "budget": {"device": 32 << 20},
        "cpu": {"num_threads": 1},
        **config,
    }
    engine: infinity.Engine = infinity.initialize(model, config)[0]
    return engine


def measure_initialization(path: Path, way: str) -> dict[str, int]:
    """Return numbers of bytes; `way` is init, meta, read or real."""
    process_memory.count_held()
    torch.set_num_threads(1)
    config = {"nvme_path": str(path)}
    small = without_values(way, width=256, num_layers=4)
    start(small, config).close()  # warm-up: allocations made once per process
    peak = process_memory.Peak()
    model = without_values(way)
    built = peak.grown
    peak.reset()
    with start(model, config) as engine:
        initialized = peak.grown
        memory = engine.plan.memory
        planned = sum(memory["device"].values()) + sum(memory["host"].values())
        return {
            "model": 4 * sum(p.numel() for p in model.parameters()),
            "largest": 4 * WIDTH * WIDTH,
            "planned": planned - memory["host"]["process"],
            "built": built,
            "initialized": initialized,
        }
