"""Tests of `generate()` on an offloaded model: tokens of the plain model, predicted bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILIES
from support.small import ON_DISK, settings

import infinity

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 5
GENERATORS = ("llama", "qwen3", "gpt2", "mixtral", "t5", "bart", "whisper", "mamba", "rwkv")


def config(path: Path, prefetch_units: int = 1, **more: Any) -> dict[str, Any]:
    return settings(path, ON_DISK, prefetch_units=prefetch_units, **more)


def prompt(name: str) -> dict[str, Any]:
    batch = FAMILIES[name].batches(1)[0]
    batch.pop("labels")
    return batch


def generate(model: Any, name: str, tokens: int = TOKENS, **more: Any) -> torch.Tensor:
    given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **more}
    found: torch.Tensor = model.generate(**prompt(name), pad_token_id=0, **given)
    return found


@pytest.mark.parametrize("name", GENERATORS)
def test_greedy_tokens_equal_plain_model(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    expected = generate(family.build().eval(), name)
    engine, *_ = infinity.initialize(family.build(), config(tmp_path, prefetch_units=0))
    with engine:
        engine.eval()
        assert torch.equal(generate(engine.module, name), expected)
        with torch.inference_mode():
            assert torch.equal(generate(engine.module, name), expected)


def test_beam_search_and_sampling_equal_plain_model(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    plain = family.build().eval()
    engine, *_ = infinity.initialize(family.build(), config(tmp_path))
    with engine:
        engine.eval()
        for more in ({"num_beams": 3}, {"do_sample": True, "top_k": 8}):
            found = []
            for model in (plain, engine.module):
                torch.manual_seed(4)
                found.append(generate(model, "llama", **more))
            assert torch.equal(*found)


def deep(blocks: int = 8) -> Any:
    family = FAMILIES["llama"]
    facts = family.config()
    facts.num_hidden_layers = blocks
    torch.manual_seed(0)
    return type(family.build())(facts).eval()


@pytest.mark.parametrize("prefetch_units", [0, 1, 2, 3])
def test_token_reads_only_units_without_slot(prefetch_units: int, tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(deep(), config(tmp_path, prefetch_units))
    with engine:
        generate(engine.module, "llama", 3)
        before, tokens = engine.counters(), 14  # full periods of the eviction pattern
        generate(engine.module, "llama", tokens)
        moved = engine.counters()["disk_read"] - before["disk_read"]
        unit = max(u.slot_bytes for u in engine.plan.units)
        # LRU eviction would read every block again for every token. Prefetched units do not
        # count as resident.
        (blocks,) = (c for c in engine.plan.slot_classes if len(c.members) == 8)
        assert blocks.count == 2 + prefetch_units
        everything = 8 * blocks.slot_bytes
        stays = (blocks.count - 1 - prefetch_units) * blocks.slot_bytes
        assert stays > 0
        assert moved <= tokens * (everything - stays) + unit
        assert engine.counters()["disk_write"] == before["disk_write"]


def test_fitting_model_read_once(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(deep(), config(tmp_path, prefetch_units=8))
    with engine:
        before = engine.counters()["disk_read"]
        generate(engine.module, "llama", 20)
        once = sum(unit.slot_bytes for unit in engine.plan.units)
        assert engine.counters()["disk_read"] - before == once


@pytest.mark.parametrize("moment", ["between steps", "between forward and backward"])
def test_training_unchanged_by_generate(moment: str, tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    states, mispredictions = [], []
    for interrupted in (False, True):
        engine, *_ = infinity.initialize(family.build(), config(tmp_path, prefetch_units=0))
        with engine:
            for batch in family.batches(4):
                loss = engine(**batch).loss
                if interrupted and moment != "between steps":
                    generate(engine.module, "llama")
                engine.backward(loss)
                engine.step()
                if interrupted and moment == "between steps":
                    generate(engine.module, "llama")
            assert engine.last_report is not None
            mispredictions.append(engine._cycles.training.mispredictions)
            states.append(dict(engine.state_dict(master=True)))
    assert [n for n in states[0] if not torch.equal(states[0][n], states[1][n])] == []
    assert (
        mispredictions[1] == mispredictions[0]
    )  # the training cycle is not taken for a shorter one
