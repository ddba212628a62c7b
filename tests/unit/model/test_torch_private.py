"""Tests of the behaviour of private torch functions that the residency mechanism relies on."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from infinity.model.torch_private import (
    DispatchMode,
    after_backward,
    backward_task,
    call_without_torch_function,
    decomposed_weight_norm,
    drop_flat_weight_refs,
    inside_backward,
    inside_function_transform,
    is_backward_code,
    is_meta_scalar,
    is_weight_norm,
    restore_flat_weights,
    storage_address,
    storage_use_count,
    tensor_without_memory,
    top_saved_tensors_hooks,
)


def test_storage_use_count_includes_views_and_aliases() -> None:
    base = torch.zeros(8)
    assert storage_use_count(base) == 1
    view = base[2:4]
    assert storage_use_count(base) == storage_use_count(view) == 2
    alias = view.detach().view(torch.int32)
    assert storage_use_count(base) == 3
    del view, alias
    assert storage_use_count(base) == 1


class NoStorage(torch.Tensor):
    """Tensor subclass without storage."""

    @classmethod
    def __torch_function__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_without_torch_function(call, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ones(2)


def test_tensor_without_memory_has_strides_and_no_address() -> None:
    tensor = tensor_without_memory(NoStorage, (2, 3), torch.bfloat16, "cpu", (1, 2))
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert not tensor.is_contiguous()
    assert storage_address(tensor) == 0
    real = torch.zeros(4)
    assert storage_address(real[1:]) == real.data_ptr()
    assert type(tensor + 1) is torch.Tensor  # results are not wrapped in the subclass


def test_rnn_weak_references_dropped_for_swap_and_renewed() -> None:
    rnn = torch.nn.GRU(4, 4)
    names = dict(rnn.named_parameters())
    weight, other = rnn.weight_hh_l0, torch.nn.Parameter(torch.ones(12, 4))
    with pytest.raises(RuntimeError, match="weak"):
        torch.utils.swap_tensors(weight, other)
    renew = drop_flat_weight_refs(rnn)
    torch.utils.swap_tensors(weight, other)
    renew()
    x, twin = torch.ones(2, 3, 4), copy.deepcopy(rnn)
    assert rnn.weight_hh_l0 is weight
    replaced = {name: p.detach() + 1 for name, p in names.items()}
    call = torch.func.functional_call
    with restore_flat_weights(rnn):
        found = call(rnn, replaced, (x,))[0]
    assert torch.equal(found, call(twin, replaced, (x,))[0])
    assert all(
        flat_weight is p for flat_weight, p in zip(rnn._flat_weights, names.values(), strict=True)
    )


def test_storage_use_count_ignores_python_references() -> None:
    base = torch.zeros(8)
    same = base
    wrapper = base.untyped_storage()
    del wrapper
    assert storage_use_count(same) == 1


def test_storage_use_count_is_per_storage() -> None:
    memory = bytearray(64)
    first = torch.frombuffer(memory, dtype=torch.uint8)
    second = torch.frombuffer(memory, dtype=torch.uint8)
    view = first[:8]
    assert (storage_use_count(first), storage_use_count(second)) == (2, 1)
    del view


def test_storage_use_count_includes_views_saved_by_autograd() -> None:
    weight = torch.ones(4, requires_grad=True)
    slot = torch.ones(4)
    product = (weight * slot[:]).sum()
    assert storage_use_count(slot) == 2
    product.backward()
    del product
    gc.collect()
    assert storage_use_count(slot) == 1


def test_saved_leaf_detected_only_by_version() -> None:
    """Autograd saves the tensor itself, so the use count of its storage does not change."""
    weight = torch.nn.Parameter(torch.ones(4))
    slot = torch.full((4,), 2.0)
    weight.data = slot[:]
    product = (weight * weight).sum()
    assert storage_use_count(slot) == 2
    weight.data = torch.zeros(4)
    torch.autograd.graph.increment_version(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_storage_use_count_includes_parameter_data() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    slot = torch.ones(4)
    parameter.data = slot[:]
    assert storage_use_count(slot) == 2
    parameter.data = torch.zeros(4)
    assert storage_use_count(slot) == 1


def test_top_saved_tensors_hooks_returns_innermost_pair() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert top_saved_tensors_hooks() is None
    with saved_tensors_hooks(pack, unpack):
        assert top_saved_tensors_hooks() == (pack, unpack)
        with saved_tensors_hooks(other, unpack):
            assert top_saved_tensors_hooks() == (other, unpack)
        assert top_saved_tensors_hooks() == (pack, unpack)
    assert top_saved_tensors_hooks() is None


def test_top_saved_tensors_hooks_inside_checkpoint() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(top_saved_tensors_hooks())
        return x * x

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
    assert seen[0] is not None


def test_inside_function_transform_detects_grad_and_vmap() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(inside_function_transform())
        return (x * x).sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    function(torch.ones(2))
    assert seen == [False, True, True, False]


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_function__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(is_weight_norm(call))
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm_anywhere_matches_torch(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    v = torch.randn(6, 8, 5, generator=generator).to(dtype)
    g = torch.norm_except_dim(v, 2, dim) * 1.5
    with _Calls() as calls:
        expected = torch._weight_norm(v, g, dim)
    assert calls.seen == [True]
    assert torch.equal(decomposed_weight_norm(v, g, dim), expected)
    turned, others = v.transpose(0, 2), g.transpose(0, 2)
    expected = torch._weight_norm(turned, others, 2 - dim)
    assert torch.equal(decomposed_weight_norm(turned, others, 2 - dim), expected)
    with _Calls() as calls:
        _ = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(4, 4, 3), dim=2).weight
    assert any(calls.seen)
    with pytest.raises(RuntimeError, match="same device"):  # or remove the workaround
        torch._weight_norm(v.to("meta"), g, dim)


def test_number_written_to_part_of_meta_tensor_detected() -> None:
    found = []

    class Seen(DispatchMode):
        def __torch_dispatch__(
            self, call: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.append(is_meta_scalar(call, kwargs or {}))
            return call(*args, **(kwargs or {}))

    on_meta, on_cpu = torch.empty(4, device="meta"), torch.empty(4)
    with Seen():
        on_meta[torch.tensor([1])] = 2.0  # for [1], torch 2.15 calls `fill_` without a tensor
    assert any(found)
    found.clear()
    with Seen():
        on_cpu[1] = 2.0
        torch.empty(3, device="meta")
    assert not any(found)


def test_runs_backward_and_after_backward_callbacks() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    tasks: list[int] = []

    def hook(_: torch.Tensor) -> None:
        tasks.append(backward_task())
        frame = sys._getframe()
        while frame is not None and not is_backward_code(frame.f_code):
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(frame is not None and inside_backward())
        after_backward(lambda: seen.append(weight.grad is not None))

    weight.register_hook(hook)
    for start in (lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss])):
        weight.grad = None
        start((weight * 2).sum())
    assert seen == [True] * 4
    assert not inside_backward()
    assert len({*tasks, backward_task()}) == 3  # pairwise different
