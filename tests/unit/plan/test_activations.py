"""Tests of activation estimates against bytes saved by autograd and computed by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.trainer import LiveBytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity import losses
from infinity.config.schema import load_config
from infinity.losses import chunked_cross_entropy
from infinity.model.partition import partition_model
from infinity.model.targets import target_of
from infinity.plan.activations import CHUNK_TOKENS, LOGIT_BYTES, ActivationModel, Activations
from infinity.plan.layout import (
    PRECISIONS,
    ParameterFacts,
    UnitLayout,
    lay_out,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from gpt import PRESETS, GPTConfig
from presets import build


def estimate(model: nn.Module, tokens: int, precision: str, recompute: bool = False) -> Activations:
    config = load_config({"precision": precision})
    target = target_of("test", model, {})
    cut = partition_model(model, config, [{"params": list(model.parameters())}], None)
    layouts = cut.layouts
    shape = ActivationModel(layouts, lookups=target.lookups, heads=target.heads)
    return shape.of(tokens, recompute="all" if recompute else 0)


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the bytes of distinct storages saved by autograd, excluding parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = tensor  # alive, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


WIDER = GPTConfig(vocab_size=512, context=128, num_layers=2, num_heads=4, width=256)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [PRESETS["gpt-tiny"], WIDER], ids=["tiny", "wider"])
@pytest.mark.parametrize("tied", [False, True])
def test_estimate_close_to_bytes_saved_by_autograd(
    config: GPTConfig, precision: str, tied: bool
) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    config = replace(config, tied=tied)
    model = build(config, dtype, seed=0)
    rows = 3
    tokens = torch.randint(config.vocab_size, (rows, config.context))
    measured = saved_bytes(model, lambda: model(tokens, tokens))
    found = estimate(model, tokens.numel(), precision)
    # Autograd keeps one of the three copies of the logits.
    expected = found.saved + found.logits // 3
    assert measured / 1.2 < expected < measured * 1.2


class GatedBlock(nn.Module):
    """Block as in Llama: grouped-query attention, RMS norms, gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        split = [m(y).unflatten(-1, (-1, 32)).transpose(1, 2) for m in (self.q, self.k, self.v)]
        z = F.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True)
        x = x + self.o(z.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gated(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, 256)
        self.blocks = nn.ModuleList(GatedBlock(256, 704) for _ in range(4))
        self.head = nn.Linear(256, 300, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def test_estimate_gated_blocks_with_grouped_queries() -> None:
    torch.manual_seed(0)
    model = Gated()
    tokens = torch.randint(300, (2, 128))
    measured = saved_bytes(model, lambda: model(tokens))
    found = estimate(model, tokens.numel(), "fp32")
    assert measured / 1.1 < found.saved + found.logits // 3 < measured * 1.1


def test_recompute_keeps_only_block_inputs() -> None:
    torch.manual_seed(0)
    model = Gated(checkpointing=True)
    tokens = torch.randint(300, (2, 128))
    boundaries: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args: boundaries.append(args[0].untyped_storage().nbytes())
        )
    model(tokens)
    found = estimate(model, tokens.numel(), "fp32", recompute=True)
    plain = estimate(model, tokens.numel(), "fp32")
    # The head also keeps an input.
    assert found.boundaries == sum(boundaries) + boundaries[0]
    single_block = GatedBlock(256, 704)
    x = torch.randn(2, 128, 256, requires_grad=True)
    assert found.again == pytest.approx(saved_bytes(single_block, lambda: single_block(x)), rel=0.1)
    assert found.again < plain.saved / 3
    assert found.logits == plain.logits == tokens.numel() * 300 * LOGIT_BYTES
    assert found.gradients == plain.gradients


def one_unit(
    name: str, *shapes: tuple[int, ...], first: int = 0, trained: bool = True
) -> UnitLayout:
    facts = [
        ParameterFacts(f"{name}.{i}", first + i, shape, "bfloat16", _product(shape), 2, trained, 0)
        for i, shape in enumerate(shapes)
    ]
    return lay_out(first, name, facts, PRECISIONS["bf16"])


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for side in shape:
        result *= side
    return result


def test_gpt_block_activation_bytes() -> None:
    h = 64
    shapes = [(h,), (3 * h, h), (3 * h,), (h, h), (h,), (4 * h, h), (h, 4 * h)]
    found = ActivationModel([one_unit("block", *shapes)]).of(10)
    assert found.saved == 10 * 32 * h, "32 h bytes a token; Korthikanti et al. count 34"
    assert (found.boundaries, found.logits) == (0, 0)
    assert found.gradients >= 2 * sum(_product(shape) for shape in shapes)
    assert found.flow == 10 * 2 * 5 * h, "the residual's gradient, and that of the activation"
    assert found.total == found.saved + max(found.flow, found.gradients)
    again = ActivationModel([one_unit("block", *shapes)]).of(10, recompute="all")
    assert (again.again, again.saved, again.boundaries) == (found.saved, 0, 10 * h * 2)


def test_lookup_head_and_expert_activation_bytes() -> None:
    h, vocabulary = 64, 1000
    table = one_unit("table", (vocabulary, h))
    head = one_unit("head", (vocabulary, h), first=1)
    block = one_unit("block", (h, h), first=2)
    experts = [one_unit(f"block.experts.{i}", (4 * h, h), first=3 + i) for i in range(4)]
    units = [table, head, block, *experts]
    shares = {3 + i: 0.5 for i in range(4)}
    model = ActivationModel(units, lookups={0}, heads={1}, shares=shares)
    found = model.of(8)
    assert found.logits == 8 * vocabulary * 12
    assert found.saved == 8 * 2 * (h + 2 * h + 4 * 0.5 * 5 * h)
    again = model.of(8, recompute="all")
    assert again.boundaries == 2 * 8 * h * 2, "of the block, its experts included, and the head"
    assert again.again == 8 * 2 * (2 * h + 4 * 0.5 * 5 * h)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_chunked_logits_estimate_matches_live_bytes(chunks: int, trained: bool) -> None:
    """Compares with the peak of live bytes, less the gradient of the head's input."""
    assert CHUNK_TOKENS == losses.CHUNK_TOKENS
    tokens, vocabulary, dtype = 64 * chunks, 2000, torch.bfloat16
    width = 32 if trained else 512  # a frozen head's gradient would be larger than the logits
    head = one_unit("head", (vocabulary, width), trained=trained)
    found = ActivationModel([head], heads={0}).of(tokens, logits_at_once=64)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=trained)
    with LiveBytes() as live:
        labels = torch.randint(0, vocabulary, (tokens,))
        chunked_cross_entropy(hidden, weight, labels, chunk_size=64).backward()
    counted = live.peak - hidden.numel() * dtype.itemsize
    assert 0.6 * found.logits < counted < 1.05 * found.logits


@pytest.mark.parametrize("fused", [False, True], ids=["gate and up", "one matrix for both"])
def test_gated_mlp_keeps_activation_output(fused: bool) -> None:
    h, inner = 64, 160
    into = [(2 * inner, h)] if fused else [(inner, h), (inner, h)]
    found = ActivationModel([one_unit("mlp", *into, (h, inner))]).of(10)
    sides = sum(map(sum, into)) + h + inner
    assert found.saved == 10 * 2 * (sides + inner)
    assert found.flow == 10 * 2 * (h + 2 * inner)


def test_rms_norm_keeps_fp32_and_head_norm_its_output() -> None:
    h, head = 64, 16

    def unit(names: dict[str, tuple[int, ...]], precision: str) -> UnitLayout:
        form = PRECISIONS[precision]
        facts = [
            ParameterFacts(name, i, shape, form.dtype, _product(shape), form.weight, True, 0)
            for i, (name, shape) in enumerate(names.items())
        ]
        return lay_out(0, "block", facts, form)

    q = {"block.attn.q.weight": (h, h)}
    for precision, item in (("bf16", 2), ("fp32", 4)):
        plain = ActivationModel([unit(q, precision)]).of(10).saved
        rms = unit({"block.norm.weight": (h,), **q}, precision)
        assert ActivationModel([rms]).of(10).saved == plain + 10 * h * (4 - item)
        layer = unit({"block.norm.weight": (h,), "block.norm.bias": (h,), **q}, precision)
        assert ActivationModel([layer]).of(10).saved == plain
        heads = unit({**q, "block.attn.q_norm.weight": (head,)}, precision)
        assert ActivationModel([heads]).of(10).saved == plain + 10 * h * (4 + item)


def test_no_units_need_no_bytes() -> None:
    assert ActivationModel([]).of(8).total == 0
    assert ActivationModel([]).of(8, recompute="all").total == 0
