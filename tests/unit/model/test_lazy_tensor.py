"""Tests of `LazyTensor`: deferred operations, reads on demand, initialization of an engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError
from infinity.model.lazy_tensor import LazyTensor
from infinity.model.torch_private import tensor_without_memory


class Source:
    """Source of values that counts its reads."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        self.values = self.values.to(dtype)
        self.reads = 0

    def read(self) -> Tensor:
        self.reads += 1
        return self.values.clone()

    def lazy_tensor(self) -> LazyTensor:
        return LazyTensor(tuple(self.values.shape), self.values.dtype, self.read)


def test_tensor_without_memory_reports_shape_dtype_and_device() -> None:
    tensor = tensor_without_memory(LazyTensor, (1 << 20, 1 << 20), torch.bfloat16)
    assert type(tensor) is LazyTensor
    assert (tensor.shape, tensor.dtype) == ((1 << 20, 1 << 20), torch.bfloat16)
    assert tensor.device == torch.device("cpu")
    assert not tensor.is_meta


def test_operations_are_deferred_without_reads() -> None:
    sources = [Source(4, 6) for _ in range(3)]
    stacked = torch.stack([s.lazy_tensor() for s in sources]).transpose(1, 2).contiguous()
    doubled = torch.cat([stacked, stacked], dim=1)
    chunks = doubled.chunk(3, dim=0)
    weight = nn.Parameter(chunks[1][0, 2:5])
    assert isinstance(weight, LazyTensor)
    assert isinstance(weight, nn.Parameter)
    assert [s.reads for s in sources] == [0, 0, 0]
    real = torch.stack([s.values for s in sources]).transpose(1, 2)
    expected = torch.cat([real, real], dim=1).chunk(3, dim=0)[1][0, 2:5]
    assert torch.equal(weight.read(), expected)
    assert weight.read().untyped_storage().nbytes() == expected.numel() * 4


def test_float_cast_keeps_values_and_int_cast_converts() -> None:
    source = Source(8)
    half = source.lazy_tensor().to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert torch.equal(half.read(), source.values)
    integers = (source.lazy_tensor() * 10).to(torch.int32)
    assert torch.equal(integers.read(), (source.values * 10).to(torch.int32))


def test_value_queries_read_the_source() -> None:
    source, other = Source(5), Source(5)
    assert torch.equal(source.lazy_tensor(), other.lazy_tensor())
    assert not torch.equal(source.lazy_tensor(), other.lazy_tensor() + 1)
    assert source.lazy_tensor().sum().item() == source.values.sum().item()
    target = torch.zeros(7)
    target[:5] = source.lazy_tensor()
    assert torch.equal(target[:5], source.values)


def test_in_place_edits_apply_to_temporaries_only() -> None:
    source = Source(3)
    temporary = source.lazy_tensor() * 2
    assert temporary.add_(1) is temporary
    assert torch.equal(temporary.read(), source.values * 2 + 1)
    weight = nn.Parameter(source.lazy_tensor())
    with pytest.raises(ConfigError, match="in place"):
        weight.data.zero_()
    with pytest.raises(ConfigError, match="in place"):
        source.lazy_tensor().mul_(2)
    weight.data = weight.data * 3
    assert torch.equal(weight.read(), source.values * 3)


def test_engine_reads_each_lazy_parameter_once() -> None:
    sources = {"weight": Source(4, 4), "bias": Source(4)}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name, source in sources.items():
        setattr(model[0], name, nn.Parameter(source.lazy_tensor()))
    model[1].weight = model[0].weight
    weight = model[0].weight
    groups = [{"params": [weight], "lr": 0.1}, {"params": [model[0].bias, model[1].bias]}]
    engine, *_ = infinity.initialize(model, {"precision": "fp32"}, model_parameters=groups)
    with engine:
        assert model[0].weight is weight is model[1].weight
        assert type(weight) is nn.Parameter
        assert [s.reads for s in sources.values()] == [1, 1]
        state = engine.state_dict()
        for name, source in sources.items():
            assert torch.equal(state[f"0.{name}"], source.values)
