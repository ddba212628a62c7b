"""Memory use of building, saving and loading models larger than the planned RAM.

`main(path, kind)` runs in a separate process; `kind` is llama or mixtral. It returns, for 2, 4 and
14 layers: bytes of the model (fp32), of the plan's slots and of its transfer buffers, the growth of
the peak while it was loaded and saved again, and the tensors in which both saves differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support import process_memory

import infinity
from infinity.model.weight_files import WeightFiles


def facts(kind: str, num_layers: int) -> Any:
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
             "vocab_size": 512, "num_hidden_layers": num_layers}  # fmt: skip
    if kind == "llama":
        return hf.LlamaConfig(**shape, intermediate_size=2560)
    return hf.MixtralConfig(**shape, intermediate_size=512, num_local_experts=4)


def config(path: Path) -> dict[str, Any]:
    return {
        "nvme_path": str(path),
        "precision": "fp32",
        "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
        "optimizer": {"type": "SGD", "lr": 1e-3, "momentum": 0.0},  # little to write
        "chunk_size": 1 << 18,
        "prefetch_units": 0,
        "seed": 1,
        "cpu": {"num_threads": 1},
    }


def load_and_save(path: Path, kind: str, num_layers: int) -> dict[str, Any]:
    """Build and save a model, then measure the peak while it is loaded and saved again."""
    engine, *_ = infinity.from_config(facts(kind, num_layers), config(path))
    infinity.save_pretrained(engine, path / "first", max_shard="50MiB")
    model_bytes = sum(4 * p.numel() for p in engine.module.parameters())
    engine.close()
    peak = process_memory.Peak()
    engine, *_ = infinity.from_pretrained(path / "first", config(path))
    infinity.save_pretrained(engine, path / "second", max_shard="50MiB")
    slots = sum(c.count * c.slot_bytes for c in engine.plan.slot_classes)
    buffers = sum(engine.plan.memory["host"][name] for name in ("staging", "saving"))
    engine.close()
    grown = peak.grown
    first, second = WeightFiles(path / "first"), WeightFiles(path / "second")
    differing = set(first.facts) ^ set(second.facts)
    differing |= {name for name in first.facts if not first.read(name).equal(second.read(name))}
    return {
        "model_bytes": model_bytes,
        "slot_bytes": slots,
        "buffer_bytes": buffers,
        "grown_bytes": grown,
        "different": sorted(differing),
    }


def main(path: Path, kind: str) -> list[dict[str, Any]]:
    """Load and save three models; the first one also pays for imports and caches."""
    process_memory.count_held()
    torch.set_num_threads(1)
    return [load_and_save(path, kind, num_layers) for num_layers in (2, 4, 14)]
