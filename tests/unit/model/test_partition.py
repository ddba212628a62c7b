"""Tests of the automatic partition of modules into units."""

from __future__ import annotations

import pytest
import torch
from support.small import SmallModel
from torch import nn

from infinity.errors import ConfigError
from infinity.model.partitioner import OUTSIDE, PACKED_SHARE, Partitioner, UnitModules


def cut_by_name(model: nn.Module) -> dict[str, UnitModules]:
    cuts = Partitioner(model).cut()
    assert len({c.name for c in cuts}) == len(cuts)
    return {c.name: c for c in cuts}


def assert_each_parameter_once(model: nn.Module, cuts: list[UnitModules]) -> None:
    indices = sorted(i for c in cuts for i in c.parameters)
    assert indices == list(range(len(list(model.parameters()))))


def share(model: nn.Module, cut: UnitModules) -> float:
    sizes = [p.numel() for p in model.parameters()]
    return sum(sizes[i] for i in cut.parameters) / sum(sizes)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.out = nn.Linear(8, 8)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))
        self.norm = nn.LayerNorm(8)


class UnevenCnn(nn.Module):
    """Convolutions of pairwise different shapes."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 24, 32, 48, 64, 64, 40, 24]
        layers = [nn.Conv2d(a, b, 3) for a, b in zip(widths[:-1], widths[1:], strict=True)]  # noqa: RUF007
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(24, 10)


def test_repeated_blocks_and_large_embedding_are_units() -> None:
    model = SmallModel(num_blocks=3)
    cuts = cut_by_name(model)
    assert set(cuts) == {"embedding", "blocks.0", "blocks.1", "blocks.2", OUTSIDE}
    assert cuts["blocks.1"].modules == [model.blocks[1]]
    assert cuts[OUTSIDE].modules == [model.norm]
    assert_each_parameter_once(model, list(cuts.values()))


def test_units_come_in_module_order() -> None:
    firsts = [c.parameters[0] for c in Partitioner(SmallModel()).cut()]
    assert firsts == sorted(firsts)


def test_tied_weight_belongs_to_one_unit() -> None:
    model = SmallModel()
    cutter = Partitioner(model)
    assert "head.weight" not in cutter.names
    assert_each_parameter_once(model, cutter.cut())


def test_reused_block_is_one_unit() -> None:
    block = nn.Linear(8, 8)
    model = nn.ModuleDict(
        {"a": nn.ModuleList([block, nn.Linear(8, 8), block]), "b": nn.Linear(8, 2)}
    )
    cuts = Partitioner(model).cut()
    assert_each_parameter_once(model, cuts)
    assert sum(block in c.modules for c in cuts) == 1


def test_half_block_sized_layers_are_separate_units_in_deep_model() -> None:
    """Together they would form the largest unit, which determines the size of every buffer."""
    deep = nn.ModuleDict(
        {
            "embedding": nn.Embedding(12, 8),  # 96 elements, 1 % of the model
            "blocks": nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(150)),
            "norm": nn.LayerNorm(8),
            "head": nn.Linear(8, 12, bias=False),
        }
    )
    cutter = Partitioner(deep)
    cuts = cutter.cut()
    assert [cut.name for cut in cuts if not cut.name.startswith("blocks")] == [
        "embedding",
        OUTSIDE,
        "head",
    ]
    assert max(sum(cutter.parameters[i].numel() for i in cut.parameters) for cut in cuts) == 96
    assert_each_parameter_once(deep, cuts)


def test_leftovers_packed_into_units_of_at_most_block_size() -> None:
    deep = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(100)),
            **{f"w{m}": nn.Linear(m, 1, bias=False) for m in (30, 31, 29, 28, 27, 9)},
        }
    )
    cutter = Partitioner(deep)
    sizes = {
        cut.name: sum(cutter.parameters[i].numel() for i in cut.parameters)
        for cut in cutter.cut()
        if not cut.name.startswith("blocks")
    }
    assert sizes == {OUTSIDE: 30 + 31, f"{OUTSIDE}.1": 29 + 28, f"{OUTSIDE}.2": 27 + 9}


def test_each_expert_is_a_unit() -> None:
    model = Routed()
    cuts = cut_by_name(model)
    experts = [n for n in cuts if ".experts." in n]
    assert experts == [f"blocks.{b}.experts.{e}" for b in range(2) for e in range(4)]
    block = cuts["blocks.0"]  # the remaining parameters of the block: router and output
    names = Partitioner(model).names
    assert [names[i] for i in block.parameters] == [
        "blocks.0.router.weight",
        "blocks.0.router.bias",
        "blocks.0.out.weight",
        "blocks.0.out.bias",
    ]
    assert_each_parameter_once(model, list(cuts.values()))


def test_large_untied_head_is_separate_unit() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.LayerNorm(8), nn.Linear(8, 100))
    assert set(cut_by_name(model)) == {"0", "2", OUTSIDE}


def test_small_leftovers_share_units_of_bounded_size() -> None:
    model = nn.ModuleDict({"big": nn.Linear(64, 64)})
    for index in range(40):
        model[f"small{index:02}"] = nn.Linear(4, 5 + index)  # pairwise different and small
    cuts = Partitioner(model).cut()
    assert_each_parameter_once(model, cuts)
    leftovers = [c for c in cuts if c.name.startswith(OUTSIDE)]
    assert len(leftovers) >= 2
    assert all(share(model, c) <= 1 / PACKED_SHARE for c in leftovers)


def test_unequal_convolutions_split_into_several_units() -> None:
    model = UnevenCnn()
    cuts = Partitioner(model).cut()
    assert_each_parameter_once(model, cuts)
    assert len(cuts) >= 4
    largest = max(p.numel() for p in model.parameters()) / sum(
        p.numel() for p in model.parameters()
    )
    assert max(share(model, c) for c in cuts) <= max(largest * 1.05, 1 / PACKED_SHARE)


def test_lstm_is_one_unit() -> None:
    model = nn.ModuleDict(
        {"e": nn.Embedding(50, 8), "lstm": nn.LSTM(8, 16, 2), "h": nn.Linear(16, 50)}
    )
    cuts = cut_by_name(model)
    assert "lstm" in cuts
    assert len(cuts["lstm"].parameters) == 8
    assert_each_parameter_once(model, list(cuts.values()))


def test_torch_transformer_encoder_layers_are_units() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    model = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False)
    cuts = cut_by_name(model)
    assert set(cuts) == {"layers.0", "layers.1", "layers.2", OUTSIDE}
    assert_each_parameter_once(model, list(cuts.values()))


def test_encoder_and_decoder_layers_are_units() -> None:
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    cuts = cut_by_name(model)
    blocks = {n for n in cuts if not n.startswith(OUTSIDE)}
    assert blocks == {f"encoder.layers.{i}" for i in range(2)} | {
        f"decoder.layers.{i}" for i in range(3)
    }


class DenseBlock(nn.Module):
    """Layer whose MLP has `width` outputs."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "k", "v", "o")})
        self.mlp = nn.Linear(8, width)
        if bias:
            self.positions = nn.Embedding(4, 2)


@pytest.mark.parametrize(
    "blocks",
    [
        [DenseBlock(16, bias=True), DenseBlock(16)],
        [DenseBlock(16), DenseBlock(32), DenseBlock(64)],
        [DenseBlock(16)],
    ],
    ids=["the first has a bias", "perceptrons of several widths", "one alone"],
)
def test_slightly_different_blocks_of_list_are_units(blocks: list[nn.Module]) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(8, 3)})
    cuts = cut_by_name(model)
    names = {f"layers.{i}" for i in range(len(blocks))}
    assert {name for name, cut in cuts.items() if cut.is_block} == names
    assert_each_parameter_once(model, list(cuts.values()))


def test_only_equal_submodules_are_experts() -> None:
    """A list with a single submodule or unequal ones stays in the unit of its block."""

    class Mlp(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.gate, self.down = (nn.Linear(8, n) for n in (8, 8, width))

    class Block(nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Mlp(width) for width in widths)
            self.out = nn.Linear(8, 8)

    for widths, experts in (((16, 16), 2), ((16, 32), 0), ((16,), 0)):
        cuts = cut_by_name(nn.ModuleList(Block(*widths) for _ in range(2)))
        assert sum(".parts." in name for name in cuts) == 2 * experts


def test_stages_and_stacks_split_into_inner_blocks() -> None:
    def stage(width: int) -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width)) for _ in range(2)])

    model = nn.ModuleDict({"stages": nn.ModuleList(stage(width) for width in (8, 16, 32))})
    assert {n for n, c in cut_by_name(model).items() if c.is_block} == {
        f"stages.{i}.{j}" for i in range(3) for j in range(2)
    }
    pair = nn.ModuleDict(
        {name: nn.ModuleList(DenseBlock(16) for _ in range(n)) for name, n in (("a", 2), ("b", 3))}
    )
    assert all(cut.name.count(".") == 1 for cut in Partitioner(pair).cut() if cut.is_block)


def test_single_layer_is_one_unit() -> None:
    cuts = Partitioner(nn.Linear(4, 4)).cut()
    assert len(cuts) == 1
    assert cuts[0].parameters == [0, 1]


def test_root_parameters_belong_to_a_unit() -> None:
    model = SmallModel()
    model.scale = nn.Parameter(torch.ones(3))
    assert_each_parameter_once(model, Partitioner(model).cut())


def test_equal_norms_are_not_blocks() -> None:
    model = nn.Sequential(*[nn.LayerNorm(8) for _ in range(64)], nn.Linear(8, 8))
    assert all(len(c.modules) > 1 for c in Partitioner(model).cut() if c.name.startswith(OUTSIDE))


def test_explicit_units_by_name_module_and_group() -> None:
    model = SmallModel(num_blocks=4)
    cuts = Partitioner(model).cut(["blocks.0", model.blocks[1], ["blocks.2", "blocks.3"]])
    names = [c.name for c in cuts]
    assert names[:1] == ["embedding"]
    assert {"blocks.0", "blocks.1", "blocks.2+blocks.3"} < set(names)
    assert_each_parameter_once(model, cuts)


def test_explicit_units_may_be_partial() -> None:
    model = SmallModel(num_blocks=2)
    cuts = Partitioner(model).cut(["blocks"])
    assert_each_parameter_once(model, cuts)
    assert "blocks" in [c.name for c in cuts]
    assert_each_parameter_once(model, Partitioner(model).cut([]))


@pytest.mark.parametrize("spec", ["block.0", nn.Linear(2, 2), ["blocks.0", "nothing"]])
def test_unknown_explicit_unit_rejected(spec: object) -> None:
    with pytest.raises(
        ConfigError, match=r"which is not a module of the model[\s\S]*named_modules"
    ):
        Partitioner(SmallModel()).cut([spec])  # type: ignore[list-item]
