"""Tests of transformers' model families: equal bits from disk and RAM, close to plain torch.

`infinity/` has no code for a specific family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.families import FAMILIES, Family
from support.small import ON_DEVICE, ON_DISK, settings
from torch import Tensor, nn

import infinity
from infinity.config.schema import load_config
from infinity.integrations.huggingface.meta import find_target
from infinity.model.partition import groups_of, partition_model

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 2
# One of each kind, and those with state, convolutions, or several submodels.
SOME = ("llama", "gpt2", "bert", "modernbert", "t5", "whisper", "mixtral", "deepseek_v3", "llava",
        "convnext", "mamba", "rwkv", "wav2vec2")  # fmt: skip
CHECKPOINTED = ("llama", "bert", "t5", "whisper", "mixtral", "vit")
# A gradient of rounding noise only (the key bias under a softmax) is far below `eps`: it must not
# become a step, which would differ between any two implementations.
OPTIMIZER = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}


@dataclass
class Trained:
    losses: list[float]
    state: dict[str, Tensor]


def train(
    family: Family,
    path: Path,
    placement: dict[str, str],
    model: nn.Module | None = None,
    **more: Any,
) -> Trained:
    config = settings(path, placement, prefetch_units=1, optimizer=OPTIMIZER, **more)
    engine, *_ = infinity.initialize(model or family.build(), config)
    with engine:
        losses = []
        dtype = torch.bfloat16 if config["precision"] == "bf16" else torch.float32
        for batch in family.batches(STEPS, dtype):
            loss = family.loss(engine(**batch))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return Trained(losses, dict(engine.state_dict(master=True)))


@cache
def train_plain(name: str) -> Trained:
    family = FAMILIES[name]
    model = family.build()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses = []
    for batch in family.batches(STEPS):
        loss = family.loss(model(**batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, model.state_dict())


def assert_same_bits(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert list(one.state) == list(other.state)
    assert [n for n in one.state if not torch.equal(one.state[n], other.state[n])] == []


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.big) for n in FAMILIES]
)
def test_training_from_disk_equals_ram_and_matches_torch(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    on_disk = train(family, tmp_path, ON_DISK)
    assert_same_bits(on_disk, train(family, tmp_path, ON_DEVICE))
    plain = train_plain(name)
    assert on_disk.losses == pytest.approx(plain.losses, rel=1e-5)
    for key, value in plain.state.items():
        torch.testing.assert_close(on_disk.state[key], value, rtol=1e-4, atol=1e-5, msg=key)
    start = dict(family.build().named_parameters())
    moved = [key for key, p in start.items() if not torch.equal(on_disk.state[key], p)]
    assert len(moved) >= 0.9 * len(start)


@pytest.mark.parametrize("name", FAMILIES)
def test_build_under_init_equals_plain_build(name: str, tmp_path: Path) -> None:
    """Its units also equal those planned from the config alone."""
    family = FAMILIES[name]
    with infinity.Init(threshold_bytes=128):
        model: nn.Module = family.build()
    assert sum(p.is_meta for p in model.parameters()) > 5
    settings: dict[str, Any] = {"precision": "fp32", "placement": ON_DEVICE}
    engine, *_ = infinity.initialize(model, settings)
    with engine:
        found, expected = engine.state_dict(), family.build().state_dict()
        assert sorted(found) == sorted(expected)
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
        model.config.architectures = [family.model]  # as `save_pretrained` does
        model.config.save_pretrained(tmp_path)
        target, config = find_target(str(tmp_path)), load_config(settings)
        cut = partition_model(target.module, config, groups_of(target.module, config), None)
        assert cut.layouts == engine.plan.units


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_recomputes_without_changes(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model: Any = family.build()
    model.gradient_checkpointing_enable()
    forwards: list[str] = []
    linear = next(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".0." in n)
    model.get_submodule(linear).register_forward_hook(lambda *args: forwards.append(linear))
    on_disk = train(family, tmp_path, ON_DISK, model)
    assert len(forwards) == 2 * STEPS
    model = family.build()
    model.gradient_checkpointing_enable()
    assert_same_bits(on_disk, train(family, tmp_path, ON_DEVICE, model))
    # Recompute sums the gradients of shared parameters (T5's biases) in another order.
    assert on_disk.losses == pytest.approx(train_plain(name).losses, rel=1e-5)


@pytest.mark.parametrize("layers", [(2, 2), (3, 2)])
def test_encoder_decoder_moved_bytes_equal_plan(layers: tuple[int, int], tmp_path: Path) -> None:
    """The first blocks are treated like the others: recomputed, with inputs saved on disk."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_heads=4, vocab_size=500, num_layers=layers[0],
        num_decoder_layers=layers[1], dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    saved = {"checkpoint": "units", "offload": "disk", "tokens": 4 * 32, "min_bytes": 1}
    engine, *_ = infinity.initialize(model, settings(tmp_path, ON_DISK, activations=saved))
    with engine:
        assert len(engine.plan.saved.sizes) == sum(layers)
        tokens = torch.randint(1, 500, (4, 32))
        for _ in range(3):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        assert engine.last_report.moved == engine.forecast()


@pytest.mark.parametrize(
    "name", [n if n in CHECKPOINTED else pytest.param(n, marks=pytest.mark.big) for n in FAMILIES]
)
def test_training_in_bf16_from_disk_equals_ram(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    plain, one, other = (family.build(torch.bfloat16) for _ in range(3))
    on_disk = train(family, tmp_path, ON_DISK, one, precision="bf16")
    (batch,) = family.batches(1, torch.bfloat16)
    assert on_disk.losses[0] == pytest.approx(family.loss(plain(**batch)).item(), rel=1e-3)
    assert_same_bits(on_disk, train(family, tmp_path, ON_DEVICE, other, precision="bf16"))
