"""Life cycle of a model that need not fit in RAM: build, train, evaluate, save, load and resume.

`python -m support.larger_than_ram JSON` runs in a separate process and prints one JSON object:
losses as hexadecimal floats, so that equal text means equal bits, and digests of saved files.

JSON: `width`, `num_layers` or the `num_experts` of a single layer, `vocab_size`, `context`,
`precision`, `path`, `save_dir`, `steps`, `micro_batches`, `host` (a budget), `placement`, and
`reload`: "initialized" (a new engine with the saved weights), "loaded" (into an existing engine),
or "".
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support import process_memory
from torch import Tensor, nn

import infinity
from infinity.model.stacks import StackRange, compute_ranges
from infinity.plan.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
import presets

NUM_STACKS = 6  # of one layer of experts
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Experts(nn.Module):
    """Experts that are multi-layer perceptrons; the matrices of a layer are one stack."""

    infinity_stacks = NAMES = tuple(f"layer{index}" for index in range(NUM_STACKS))

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        for name in self.NAMES:
            self.register_parameter(name, nn.Parameter(torch.empty(count, width, width)))
            nn.init.uniform_(getattr(self, name), -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        expert, order = torch.sort(expert, stable=True)
        counts = torch.bincount(expert, minlength=self.count).tolist()
        output = compute_ranges(self, self.compute, counts, x[order])
        return torch.zeros_like(x).index_copy(0, order, output)

    def compute(self, stack_range: StackRange, rows: Tensor) -> Tensor:
        outputs = []
        for index, x in enumerate(rows.split(stack_range.counts)):
            for name in self.NAMES:
                x = F.gelu(F.linear(x, stack_range[name][index]))
            outputs.append(x)
        return torch.cat(outputs)


class Mixture(nn.Module):
    """Model with a single layer of experts, which routes a token by its id."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.num_experts: int = job["num_experts"]
        self.embed = nn.Embedding(job["vocab_size"], job["width"])
        self.experts = Experts(self.num_experts, job["width"])
        self.head = nn.Linear(job["width"], job["vocab_size"])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        x = x + self.experts(x, tokens.flatten() % self.num_experts)
        return F.cross_entropy(self.head(x), targets.flatten())


def build(job: dict[str, Any]) -> nn.Module:
    """Return the model, with values deferred by `infinity.Init`."""
    if "num_experts" in job:
        torch.manual_seed(5)
        with infinity.Init():
            return Mixture(job)
    shape = gpt.GPTConfig(
        vocab_size=job["vocab_size"],
        context=job["context"],
        num_layers=job["num_layers"],
        num_heads=job["width"] // 64,
        width=job["width"],
    )
    with infinity.Init():
        return presets.build(shape, DTYPES[job["precision"]], seed=5)


def start(job: dict[str, Any], weights: Path | None = None) -> infinity.Engine:
    """Return an engine for a fresh model, initialized with saved `weights` if given."""
    model = build(job)
    if weights is not None:
        infinity.load_weights(model, weights)
    config: dict[str, Any] = {
        "nvme_path": job["path"],
        "precision": job["precision"],
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": job["micro_batches"],
        "chunk_size": 1 << 18,
        "prefetch_units": 1,
        "budget": {"host": job["host"]},
        "placement": job["placement"],
        "experts_per_unit": job.get("experts_per_unit", "auto"),
        "optimizer": {"type": "AdamW", "lr": 1e-3, "weight_decay": 0.1},
    }
    return infinity.initialize(model, config)[0]


def batches(job: dict[str, Any], count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tokens, targets) pairs of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 2, 1, job["context"])
    tokens = torch.randint(0, job["vocab_size"], shape, generator=generator)
    return [(pair[0], pair[1]) for pair in tokens]


@torch.no_grad()
def evaluate(engine: infinity.Engine, job: dict[str, Any]) -> str:
    """Return the loss on a batch that is not trained on."""
    engine.eval()
    loss = engine(*batches(job, 1, seed=99)[0])
    engine.train()
    return float(loss).hex()


def train(engine: infinity.Engine, job: dict[str, Any], step: int) -> list[str]:
    """Train one step and return its losses."""
    losses = []
    for tokens, targets in batches(job, job["micro_batches"], seed=step):
        loss = engine(tokens, targets)
        losses.append(float(loss.detach()).hex())
        engine.backward(loss)
        engine.step()
    return losses


def digest(directory: Path) -> str:
    """Return a hash of the saved safetensors files."""
    hasher = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                hasher.update(block)
    return hasher.hexdigest()


def layer_bytes(plan: Plan) -> Counter[str]:
    """Return bytes of weights by layer, with all ranges of its experts."""
    sizes: Counter[str] = Counter()
    for unit in plan.units:
        sizes[unit.name.partition("[")[0]] += unit.slot_bytes
    return sizes


def live(job: dict[str, Any]) -> dict[str, Any]:
    """Run the life cycle of a job and return its results."""
    saved = Path(job["save_dir"])
    losses: list[str] = []
    with start(job) as engine:
        plan = engine.plan
        for step in range(job["steps"]):
            losses += train(engine, job, step)
        norm = engine.grad_norm
        evaluated = evaluate(engine, job)
        engine.save_weights(saved, max_shard="256MiB")
        if job["reload"]:
            engine.save_checkpoint(saved / "checkpoint")
        continued = train(engine, job, job["steps"])
    del engine
    results = {
        "losses": losses,
        "onward": continued,
        "grad_norm": float(norm or 0.0).hex(),
        "evaluated": evaluated,
        "digest": digest(saved),
        "state_bytes": round(plan.precision.bytes_per_parameter * plan.num_trained),
        "tier_bytes": plan.tier_bytes,
        "largest_layer_bytes": max(layer_bytes(plan).values()),
    }
    if not job["reload"]:
        return results
    with start(job, saved if job["reload"] == "initialized" else None) as engine:
        if job["reload"] == "loaded":
            results["fresh"] = evaluate(engine, job)
            infinity.load_weights(engine, saved)
        results["loaded"] = evaluate(engine, job)
        engine.load_checkpoint(saved / "checkpoint")
        results["resumed"] = train(engine, job, job["steps"])
    return results


def main() -> None:
    """Run the job in the first argument and print its results."""
    process_memory.count_held()
    torch.set_num_threads(1)  # more threads are slower next to other tests
    print(json.dumps(live(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
