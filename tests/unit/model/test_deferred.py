"""Tests of `DeferredInitMode`: deferred values are bitwise those of an eager build."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.model.deferred_init import DeferredInitMode

SMALL = 64  # bytes; low enough to defer the tensors of the small test models


class ReinitializedModel(nn.Module):
    """Model initialized as real models are: repeatedly, through `.data`, by rejection sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.linspace(0.0, 1.0, 48))
        self.register_buffer("steps", torch.arange(0, 96, 2).float() / 96)
        self.register_buffer(
            "table", torch.tensor([[float(i * j) for i in range(9)] for j in range(9)])
        )
        self.register_buffer("mask", torch.ones(12, 12).tril().bool())
        for block in self.blocks:
            nn.init.trunc_normal_(block.weight, std=0.5, a=-0.6, b=0.6)  # rejection sampling
        nn.init.orthogonal_(self.blocks[0].weight, gain=0.7)
        self.blocks[1].weight.data.normal_(mean=0.0, std=0.02 / math.sqrt(6))
        with torch.no_grad():
            self.blocks[2].weight.mul_(0.5).add_(self.blocks[1].weight)
            self.blocks[2].weight[4:6].zero_()
            self.blocks[1].weight.copy_(self.blocks[1].weight.t() * 2)


class Generators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.a = nn.Parameter(torch.empty(40).normal_(generator=generator))
        self.b = nn.Parameter(torch.randn(7, 9))
        self.c = nn.Parameter(torch.rand(33, generator=generator).to(torch.bfloat16))
        self.d = nn.Parameter(torch.empty(10, 20, dtype=torch.float64).exponential_())


def lstm() -> nn.Module:
    return nn.LSTM(12, 12, num_layers=2)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)  # deep copies of one layer


def assigned() -> nn.Module:
    """Layer with numbers and tensors assigned to slices and masked elements."""
    layer = nn.Linear(30, 30)
    with torch.no_grad():
        layer.bias[10:20] = 1  # like the bias of a forget gate
        layer.weight[3] = 0.5
        layer.weight[torch.tensor([4, 6])] = 2
        layer.weight[layer.weight < -0.1] = 0.25
        layer.weight[:, 7] = torch.arange(30.0)
    layer.weight.data[9, 1:] = -1
    return layer


def converted() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.Conv2d(3, 6, 3), nn.BatchNorm1d(40)).bfloat16()


def weight_normed() -> nn.Module:
    """Layers with weight norm as in wav2vec2; both factors of the last layer are deferred."""
    norm = nn.utils.parametrizations.weight_norm
    first = norm(nn.Conv1d(24, 24, 3), dim=2)
    second = norm(nn.Conv1d(24, 24, 3), dim=1)
    nn.init.normal_(second.weight, std=0.1)
    third, fourth = norm(nn.Linear(24, 9)), norm(nn.Linear(24, 400))
    with torch.no_grad():
        for layer in (first, second, third, fourth):
            layer.bias.normal_().add_(layer.weight.mean())
    return nn.Sequential(first, second, third, fourth)


class Indexed(nn.Module):
    """Indices that torch converts on the device of the tensor, and accesses outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 24), nn.Linear(24, 50)
        weight, other = self.embedding.weight.data, self.head.weight.data
        weight[[1, 2]] = 0
        weight[:, [3, 5]] = weight[[4, 4], 2:4].mean()
        weight[[0, 1], [2, 3]] += 1
        weight[np.array([6, 7])] *= weight.new_tensor([2.0])
        weight[..., [True] + 23 * [False]] = weight.new([3.0])
        weight[[[8, 9], [1, 2]]] = torch.tensor([4]).type_as(weight)
        weight[range(10, 12)] = torch.tensor(5.0).to(weight)
        other.copy_(torch.from_numpy(np.sort(other)))
        other.mul_(max(other[0].tolist()))
        other.apply_(lambda value: value + 1)


class SelfAssigned(nn.Module):
    """Tensors overwritten entirely with values computed from themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 24), nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.head.weight.data.copy_(self.embedding.weight.data)
        self.experts, self.filled = (nn.Parameter(torch.empty(8, 16, 16)) for _ in range(2))
        for parameter in (self.experts, self.filled):
            nn.init.normal_(parameter)
        self.experts.data[:] = self.experts.data[0]
        self.filled.data.fill_(self.filled.data[0, 0, 0])


BUILDS: list[Callable[[], nn.Module]] = [
    ReinitializedModel, Generators, lstm, transformer, assigned, converted, weight_normed,
    SelfAssigned, Indexed,
]  # fmt: skip


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("threshold", [SMALL, 1000])
@pytest.mark.parametrize("build", BUILDS, ids=lambda b: b.__name__)
def test_deferred_values_equal_eager_build(build: Callable[[], nn.Module], threshold: int) -> None:
    torch.manual_seed(11)
    eager = build()
    after_eager = torch.rand(3)

    torch.manual_seed(11)
    with DeferredInitMode(threshold) as deferral:
        model = build()
    assert torch.equal(torch.rand(3), after_eager), "the generator must end where it would have"

    expected, found = values_of(eager), values_of(model)
    assert list(expected) == list(found)
    names = list(expected)
    random.Random(3).shuffle(names)
    deferred = 0
    for name in names:
        meta = found[name]
        assert meta.shape == expected[name].shape
        assert meta.dtype == expected[name].dtype
        if meta.is_meta:
            deferred += 1
            assert deferral.holds(meta)
            value = deferral.value(meta)
            assert torch.equal(value, expected[name]), name
            assert torch.equal(deferral.value(meta), value), "asking twice gives the same"
        else:
            assert torch.equal(meta, expected[name]), name
    assert deferred > 0
    deferral.drop_shadows()  # so that all values are computed again
    for name in (n for n in names if found[n].is_meta):
        assert torch.equal(deferral.value(found[name]), expected[name]), name


def test_values_read_through_numpy_are_read_only() -> None:
    with DeferredInitMode(SMALL):
        array = nn.Linear(30, 30).weight.detach().numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_meta_tensor_without_values_is_refused() -> None:
    with DeferredInitMode(SMALL):
        weight = nn.Linear(30, 30).weight.detach()
        with pytest.raises(ConfigError, match="which has no values"):
            weight.add_(torch.ones(30, device="meta"))


def test_value_does_not_advance_generator() -> None:
    with DeferredInitMode(SMALL) as deferral:
        layer = nn.Linear(30, 30)
    before = torch.get_rng_state()
    deferral.value(layer.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_shadows_dropped_beyond_keep_bytes_and_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.model.deferred_init.KEEP_BYTES", 10_000)
    torch.manual_seed(1)
    eager = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(20)))
    torch.manual_seed(1)
    live = []
    with DeferredInitMode(SMALL) as deferral:
        layers = []
        for _ in range(20):
            layers.append(nn.Linear(40, 40, bias=False))
            live.append(sum(s.nbytes() for s in map(_shadow, _storages(deferral)) if s is not None))
        nn.init.ones_(layers[0].weight[:1])  # its shadow was dropped and is computed again
    assert max(live) <= 10_000 + 40 * 40 * 4
    with torch.no_grad():
        eager[0].weight[:1].fill_(1)
    for layer, expected in zip(layers, eager, strict=True):
        assert torch.equal(deferral.value(layer.weight), expected.weight)
    deferral.drop_shadows()
    assert all(_shadow(s) is None for s in _storages(deferral))


def test_tensors_created_outside_are_not_held() -> None:
    outside = torch.empty(100, 100, device="meta")
    with DeferredInitMode(SMALL) as deferral:
        inside = nn.Linear(30, 30)
        total = outside + 1
    assert not deferral.holds(outside)
    assert not deferral.holds(total)
    assert deferral.holds(inside.weight)
    assert total.is_meta


def _storages(deferral: DeferredInitMode) -> list[object]:
    return list(deferral._storages.values())


def _shadow(storage: object) -> torch.UntypedStorage | None:
    return storage.shadow  # type: ignore[attr-defined,no-any-return]
