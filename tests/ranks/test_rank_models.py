"""Tests of generate(), compiled blocks, routed experts and overflows on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp16_reference import LossScaleSettings, train_half
from support.internals import components
from support.models import CASES, Batch
from support.ranks import make_engine, on_ranks, together, train_ranks
from support.trainer import make_config, same_bits, train_reference
from torch import Tensor, nn

from infinity.distributed.context import DistContext

ON_DISK = ("disk", "disk", "disk")
WIDTH = 16


# --- generate() ----------------------------------------------------------------------------------


def llama_with_prompt(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny Llama, and the prompt of a rank."""
    families = pytest.importorskip("support.families").FAMILIES
    prompt = families["llama"].batches(seed + 1)[seed]
    prompt.pop("labels")
    return families["llama"].build().eval(), prompt


def generate(model: Any, prompt: dict[str, Any], tokens: int) -> Tensor:
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    found: Tensor = model.generate(**prompt, pad_token_id=0, **options)
    return found


def test_generate_uses_prompt_of_each_rank(tmp_path: Path) -> None:
    models = [llama_with_prompt(rank) for rank in range(2)]
    expected = [generate(*llama_with_prompt(rank), tokens=5) for rank in range(2)]

    def work(ranks: DistContext) -> list[Tensor]:
        model, prompt = models[ranks.rank]
        with make_engine(ranks, model, make_config(ON_DISK), tmp_path) as engine:
            engine.eval()
            first = generate(engine.module, prompt, 5)
            with torch.inference_mode():
                return [first, generate(engine.module, prompt, 5)]

    for rank, found in enumerate(on_ranks(2, work)):
        assert all(torch.equal(tokens, expected[rank]) for tokens in found)


def test_generate_with_unequal_lengths_raises_on_all_ranks(tmp_path: Path) -> None:
    models = [llama_with_prompt(rank) for rank in range(2)]

    def work(ranks: DistContext) -> None:
        model, prompt = models[ranks.rank]
        with make_engine(ranks, model, make_config(ON_DISK), tmp_path) as engine:
            generate(engine.module, prompt, 3 + ranks.rank)
            list(engine.state_dict().values())  # tensors are read one by one

    results, errors = together(2, work)
    assert not results, errors
    for error in errors.values():
        assert "ranks do different things: reads weight of unit" in str(error)
        assert "uses unit" in str(error)


# --- compiled blocks -----------------------------------------------------------------------------


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build_stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def test_compiled_blocks_match_single_rank_bitwise(tmp_path: Path) -> None:
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    batches = [Batch((torch.randn(4, WIDTH, generator=generator),)) for _ in range(6)]
    config = make_config(ON_DISK)
    expected = train_reference(build_stack(), batches, {**config, "gradient_accumulation_steps": 2})
    models = [build_stack() for _ in range(2)]

    def work(ranks: DistContext) -> dict[str, Tensor]:
        with make_engine(ranks, models[ranks.rank], config, tmp_path) as engine:
            components(engine).forwards.compile_units(backend="eager")
            assert components(engine).forwards.num_compiled == 3
            for batch in batches[ranks.rank :: 2]:
                engine.backward(batch.call(engine))
                engine.step()
            return {n: v.clone() for n, v in engine.state_dict(master=True).items()}

    try:
        for found in on_ranks(2, work):
            assert all(same_bits(found[n], value) for n, value in expected.masters.items())
        assert dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    finally:
        dynamo.reset()


# --- experts -------------------------------------------------------------------------------------


def test_routed_experts_match_single_rank_bitwise() -> None:
    """Every batch routes some tokens to each expert; which ones may differ."""
    case, count, micro_batches = CASES["routed"], 2, 2
    usable = [b for b in case.batches(200) if len((b.args[0] % 4).unique()) == 4]
    batches = usable[: 3 * count * micro_batches]
    assert len(batches) == 3 * count * micro_batches
    config = make_config(ON_DISK, precision="bf16", gradient_accumulation_steps=micro_batches)
    one = {**config, "gradient_accumulation_steps": count * micro_batches}
    expected = train_reference(case.build(), batches, one, groups=case.groups)
    found = train_ranks(count, case.build, batches, config, groups=case.groups)
    assert found.differences(expected) == []


# --- overflow on one rank ------------------------------------------------------------------------


class ScaledLoss(nn.Module):
    """Model whose loss is scaled by a factor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build_stack()

    def forward(self, x: Tensor, factor: float) -> Tensor:
        out: Tensor = self.body(x) * factor
        return out


def build_scaled_loss() -> nn.Module:
    torch.manual_seed(0)
    return ScaledLoss()


def test_overflow_on_one_rank_is_skipped_by_all() -> None:
    count, scale_settings = 3, LossScaleSettings(initial=2.0**8, window=2, hysteresis=1)
    config = make_config(ON_DISK, precision="fp16")
    config["loss_scale"] = {"initial_power": 8, "window": 2, "hysteresis": 1}
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(7 * count):
        overflows = number in (1 * count + 2, 2 * count, 5 * count + 1)  # each time on another rank
        x = torch.randn(4, WIDTH, generator=generator).half()
        batches.append(Batch((x, 1e4 if overflows else 1.0)))
    one = {**config, "gradient_accumulation_steps": count}
    expected = train_half(build_scaled_loss(), batches, one, scale_settings)
    assert expected.overflows == [False, True, True, False, False, True, False]
    found = train_ranks(count, build_scaled_loss, batches, config)
    assert found.differences(expected) == []
    scales = {one.report and one.report.loss_scale for one in found.of_ranks}
    assert scales == {expected.scales[-1]}
