"""Planned and measured memory of short runs of a GPT.

`measure(jobs)` runs jobs sequentially in a separate process. A job has `width`, `num_layers`,
`vocab_size`, `tokens`, `micro_batches`, `steps`, `path`, `init` (build under `infinity.Init`),
`fake` (use the fake accelerator, whose memory is RAM too), `host` (a budget beyond the memory of
the process, or None) and `config` (additional entries).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import infinity
from infinity.model.partition import PROCESS_BASE_BYTES
from infinity.model.targets import target_of
from infinity.plan.activations import ActivationModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
import presets
from support import process_memory
from support.fake_accelerator import FakeAccelerator


def build(job: dict[str, Any]) -> nn.Module:
    """Return the model, with values deferred by `infinity.Init` if the job has `init`."""
    shape = gpt.GPTConfig(
        vocab_size=job["vocab_size"],
        context=job["tokens"],
        num_layers=job["num_layers"],
        num_heads=job["width"] // 64,
        width=job["width"],
    )
    if not job["init"]:
        return presets.build(shape, torch.float32, seed=1)
    with infinity.Init():
        return presets.build(shape, torch.float32, seed=1)


def train(engine: infinity.Engine, job: dict[str, Any]) -> None:
    """Train on random tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(job["steps"] * job["micro_batches"]):
        size = (1, job["tokens"])
        tokens = torch.randint(0, job["vocab_size"], size, generator=generator)
        tokens = tokens.to(engine.device)
        engine.backward(engine(tokens, tokens))
        engine.step()


def measure(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return bytes of each run; peaks are relative to the memory held before."""
    process_memory.count_held()
    torch.set_num_threads(1)
    return [_measure(job) for job in jobs]


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    gc.collect()  # the model of the previous run
    peak = process_memory.Peak()
    model = build(job)
    facts = target_of("gpt", model, {})
    config = {
        "nvme_path": job["path"],
        "precision": "fp32",
        "gradient_accumulation_steps": job["micro_batches"],
        "cpu": {"num_threads": 1},
        **job["config"],
    }
    if job["host"] is not None:
        process = max(psutil.Process().memory_info().rss, PROCESS_BASE_BYTES)
        config["budget"] = {"host": job["host"] + process}
    peak.reset()
    device = FakeAccelerator(1) if job["fake"] else "cpu"
    with infinity.initialize(model, config, device=device)[0] as engine:
        initialized = peak.grown
        peak.reset()
        train(engine, job)
        report = engine.last_report
        plan = engine.plan
        shape = ActivationModel(plan.units, lookups=facts.lookups, heads=facts.heads)
        memory = {tier: dict(sizes) for tier, sizes in plan.memory.items()}
        del memory["host"]["process"]  # held before
        return {
            "initialized": initialized,
            "peak": peak.grown,
            "memory": memory,
            "activations": shape.of(job["tokens"]).total,
            "on_disk": sum(p.stat().st_size for p in Path(job["path"]).rglob("*") if p.is_file()),
            "forecast": engine.forecast(),
            "moved": report and report.moved,
            "placement": {
                field: sorted({placement.of_field(field).value for placement in plan.placements})
                for field in ("weight", "state", "gradient")
            },
        }
