"""A short run of a GPT that says what its plan promised and what it took.

`python -m support.measured_run JSON` does one run after the other and prints what it found, a JSON
list. JSON: a list of objects with `width`, `num_layers`, `vocab_size`, `tokens`, `micro_batches`,
`steps`, `path`, `init` (build under `infinity.Init`), `fake` (a device with memory of its own,
which here is RAM as well), and `config`, which is added to the run's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
from torch import nn

import infinity
from infinity.model.shapes import target_of
from infinity.plan.activations import ActivationModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
import presets
from support.fake_accelerator import FakeAccelerator


@cache
def process_bytes() -> int:
    """What a process of torch holds before it does anything: a build for CUDA more than twice."""
    code = "import support.larger_than_ram as _; print(open('/proc/self/statm').read().split()[1])"
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tests, stdout=PIPE, check=True)
    return int(done.stdout) * os.sysconf("SC_PAGESIZE")


def peak() -> int:
    """Bytes of RAM this process has held at most, since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell VmHWM")


def forget_peak() -> bool:
    """Begin anew; False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def on_disk(path: Path) -> int:
    """Bytes of all files below."""
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


def build(job: dict[str, Any]) -> nn.Module:
    """The model, with its values or without."""
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
    """Steps over random tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(job["steps"] * job["micro_batches"]):
        size = (1, job["tokens"])
        tokens = torch.randint(0, job["vocab_size"], size, generator=generator)
        tokens = tokens.to(engine.device)
        engine.backward(engine(tokens, tokens))
        engine.step()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run, and tell; a run of no steps is only initialised."""
    model = build(job)
    facts = target_of("gpt", model, {})
    config = {
        "nvme_path": job["path"],
        "precision": "fp32",
        "gradient_accumulation_steps": job["micro_batches"],
        "cpu": {"num_threads": 1},
        **job["config"],
    }
    clears = forget_peak()
    device = FakeAccelerator(1) if job["fake"] else "cpu"
    with infinity.initialize(model, config, device=device)[0] as engine:
        initialised = peak()
        clears = forget_peak() and clears
        train(engine, job)
        report = engine.last_report
        plan = engine.plan
        shape = ActivationModel(plan.units, lookups=facts.lookups, heads=facts.heads)
        activations = shape.of(job["tokens"])
        return {
            "clears": clears,
            "initialised": initialised,
            "peak": peak(),
            "planned": {tier: sum(parts.values()) for tier, parts in plan.memory.items()},
            "memory": plan.memory,
            "activations": activations.total,
            "on_disk": on_disk(Path(job["path"])),
            "forecast": engine.forecast(),
            "moved": report and report.moved,
            "placement": {
                field: sorted({placement.of_field(field).value for placement in plan.placements})
                for field in ("weight", "state", "gradient")
            },
        }


def main() -> None:
    """All runs."""
    torch.set_num_threads(1)
    print(json.dumps([measure(job) for job in json.loads(sys.argv[1])]), flush=True)


if __name__ == "__main__":
    main()
