"""Tests of resident and offloaded parameters: placeholders, fetching on access, rejected copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    Block,
    SmallModel,
    batch,
    is_offloaded,
    masters,
    same,
    small_engine,
    small_model,
    train,
)
from torch import nn

from infinity.engine import Engine
from infinity.errors import ResidencyError
from infinity.model.parameter_map import ParameterMap
from infinity.model.parameters import placeholder
from infinity.offload.bound_units import BoundUnits
from infinity.offload.saved_tensors import SavedTensors
from infinity.offload.slots import Residency

CPU = torch.device("cpu")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def resident(engine: Engine) -> set[str]:
    """Return the names of the units whose parameters are bound."""
    entries = components(engine).prefetcher.ledger.entries
    return {u.name for u in engine.plan.units if entries[u.index].bound}


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_placeholder_is_nan(dtype: torch.dtype) -> None:
    stand_in = placeholder(torch.Size([3, 4]), dtype, CPU)
    assert (stand_in.shape, stand_in.dtype, stand_in.stride()) == ((3, 4), dtype, (0, 0))
    assert stand_in.untyped_storage().nbytes() == dtype.itemsize
    assert stand_in.isnan().all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_placeholder_is_dtype_max(dtype: torch.dtype) -> None:
    stand_in = placeholder(torch.Size([2, 2]), dtype, CPU)
    assert (stand_in == torch.iinfo(dtype).max).all()


def test_placeholder_of_bool_scalar_and_empty_shapes() -> None:
    assert bool(placeholder(torch.Size([2]), torch.bool, CPU).all())
    assert placeholder(torch.Size([]), torch.float32, CPU).isnan()
    assert placeholder(torch.Size([0, 3]), torch.float32, CPU).shape == (0, 3)


def test_placeholder_made_in_inference_mode_is_normal_tensor() -> None:
    with torch.inference_mode():
        stand_in = placeholder(torch.Size([2]), torch.float32, CPU)
    assert not stand_in.is_inference()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_keep_shape_and_dtype(tmp_path: Path, precision: str) -> None:
    plain = dict(small_model().named_parameters())
    with small_engine(tmp_path, precision=precision) as engine:
        for trained in range(2):
            for name, parameter in engine.module.named_parameters():
                assert parameter.shape == plain[name].shape
                assert parameter.dtype is (torch.bfloat16 if precision == "bf16" else torch.float32)
                assert parameter.requires_grad
            if not trained:
                train(engine, 1)


@pytest.mark.parametrize("placement", [ON_DISK, MIXED, ON_DEVICE])
def test_attribute_access_fetches_parameter(tmp_path: Path, placement: dict[str, str]) -> None:
    plain = small_model()
    with small_engine(tmp_path, placement) as engine:
        module = engine.module
        assert torch.equal(module.blocks[1].up.weight, plain.blocks[1].up.weight)
        assert "blocks.1" in resident(engine)
        assert torch.equal(module.get_parameter("norm.bias"), plain.norm.bias)
        assert torch.equal(module.head.weight, plain.embedding.weight)  # tied


def test_attribute_access_fetches_on_accelerator(tmp_path: Path) -> None:
    plain = small_model()
    fake = FakeAccelerator(3)
    with small_engine(tmp_path, arguments={"device": fake}) as engine:
        for index in (2, 0, 1, 2):
            weight = engine.module.blocks[index].up.weight
            assert torch.equal(weight, plain.blocks[index].up.weight)
    assert not fake.violations


def test_weight_used_by_another_module_fetched(tmp_path: Path) -> None:
    """A module computes with the weight of another module, accessed by attribute."""

    class Borrower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8, bias=False)
            self.c = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.c(self.a(x)), self.b.weight).square().mean()

    torch.manual_seed(0)
    model = Borrower()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8)
    plain(x).backward()
    with small_engine(tmp_path, model=model) as engine:
        loss = engine(x)
        assert torch.equal(loss, plain(x))
        engine.backward(loss)
        for parameter, plain_parameter in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(engine.gradient(parameter), plain_parameter.grad)


def test_tied_weight_gradients_summed(tmp_path: Path) -> None:
    plain = small_model()
    plain(batch(0)).backward()
    with small_engine(tmp_path) as engine:
        engine.backward(engine(batch(0)))
        grad = engine.gradient(engine.module.embedding.weight)
        assert torch.allclose(grad, plain.embedding.weight.grad, rtol=0, atol=1e-7)


def test_eviction_invalidates_tensors_saved_by_autograd(tmp_path: Path) -> None:
    """Tensors saved by autograd outside the engine's hooks must not read another unit's bytes."""
    with small_engine(tmp_path) as engine:
        weight = engine.module.blocks[0].up.weight
        saved = (weight * weight).sum()  # outside the engine's hooks: autograd saves the leaf
        unit = next(u.index for u in engine.plan.units if u.name == "blocks.0")
        components(engine).prefetcher.drop(unit)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


def test_slot_not_reused_while_alias_alive(tmp_path: Path) -> None:
    plain = small_model(num_blocks=6)
    with (
        small_engine(tmp_path, model=small_model(num_blocks=6), prefetch_units=1) as engine,
        torch.no_grad(),
    ):
        alias = engine.module.blocks[0].up.weight.detach()[1:3]
        for index in (1, 2, 3, 4, 5):
            assert engine.module.blocks[index].up.weight.isfinite().all()
        assert torch.equal(alias, plain.blocks[0].up.weight[1:3])


def test_no_free_slot_error_names_units_and_holders(tmp_path: Path) -> None:
    with (
        small_engine(tmp_path, model=small_model(num_blocks=6), prefetch_units=0) as engine,
        torch.no_grad(),
    ):
        blocks = engine.module.blocks
        aliases = [blocks[i].up.weight.detach() for i in range(2)]
        refusal = pytest.raises(ResidencyError, match=r"no slot is free for unit 'blocks\.\d'")
        with refusal as caught:
            for index in range(2, 6):
                aliases.append(blocks[index].up.weight.detach())
        assert "blocks.0" in str(caught.value)
        assert "blocks.1" in str(caught.value)
        del aliases, caught
        gc.collect()
        assert engine(batch(0)).isfinite()


def test_backward_of_graph_before_update_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        loss = engine(batch(0))
        other = engine(batch(1))
        engine.backward(loss)
        engine.step()
        with pytest.raises(RuntimeError, match="were updated after this graph was made"):
            engine.backward(other)
        assert engine.micro_step == 0
        assert len(train(engine, 2)) == 2


def test_saved_tensors_hold_no_slot(tmp_path: Path) -> None:
    """After a forward the graph references no slot; only bound parameters do."""
    with small_engine(tmp_path, prefetch_units=1) as engine:
        loss = engine(batch(0))
        prefetcher = components(engine).prefetcher
        for slot in prefetcher.ledger.slots:
            if slot.owner is not None:
                entry = prefetcher.ledger.entries[slot.owner]
                assert entry.num_aliases == 0
            else:
                assert slot.is_free()
        engine.backward(loss)


def test_inplace_edit_of_saved_activation_raises(tmp_path: Path) -> None:
    class Editor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).sigmoid()
            loss = (y * y).sum()
            with torch.no_grad():
                y.add_(1)
            return loss

    with small_engine(tmp_path, model=Editor()) as engine:
        loss = engine(torch.randn(2, 4))
        with pytest.raises(RuntimeError, match="inplace operation"):
            engine.backward(loss)
        assert isinstance(components(engine).hooks.saved, SavedTensors)


# --- parameter map -------------------------------------------------------------------------------


def test_replacing_adding_or_removing_parameters_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        norm = engine.module.norm
        with pytest.raises(ResidencyError, match=r"cannot be replaced or added[\s\S]*materialized"):
            norm.weight = nn.Parameter(torch.ones(16))
        with pytest.raises(ResidencyError, match="cannot be replaced or added"):
            norm.register_parameter("extra", nn.Parameter(torch.ones(16)))
        with pytest.raises(ResidencyError, match="cannot be removed"):
            del norm.weight
        with pytest.raises(ResidencyError):
            torch.nn.utils.parametrizations.weight_norm(engine.module.blocks[0].up)
        with pytest.raises(ResidencyError):
            norm._parameters.clear()
        with pytest.raises(ResidencyError):
            norm._parameters.pop("weight")
        with pytest.raises(ResidencyError):
            norm._parameters.update(weight=None)
        with pytest.raises(ResidencyError):
            norm._parameters.setdefault("other", None)
        with pytest.raises(ResidencyError):
            norm._parameters.popitem()
        norm.weight = norm.weight  # assigning the same object is allowed
        assert len(train(engine, 1)) == 1


def test_parameter_map_get_and_contains(tmp_path: Path) -> None:
    plain = small_model()
    with small_engine(tmp_path) as engine:
        parameters = engine.module.norm._parameters
        assert "weight" in parameters
        assert "missing" not in parameters
        assert torch.equal(parameters.get("weight"), plain.norm.weight)
        with pytest.raises(AttributeError, match="missing"):
            _ = engine.module.norm.missing


def test_copy_deepcopy_and_pickle_raise(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        for module in (engine.module, engine.module.blocks[1].up, engine.module.norm):
            with pytest.raises(ResidencyError, match=r"engine\.state_dict\(\)"):
                copy.deepcopy(module)
            with pytest.raises(ResidencyError, match=r"close\(restore=True\)"):
                pickle.dumps(module)
            with pytest.raises(ResidencyError):
                torch.save(module, io.BytesIO())
            with pytest.raises(ResidencyError):
                module._parameters.copy()
            with pytest.raises(ResidencyError):
                copy.copy(module._parameters)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.to("meta"),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
    ],
)
def test_moving_or_casting_module_raises(tmp_path: Path, move: object) -> None:
    with small_engine(tmp_path) as engine:
        for module in (engine.module, engine.module.blocks[0], engine.module.norm):
            with pytest.raises(ResidencyError, match=r"cannot be moved or cast[\s\S]*precision"):
                move(module)  # type: ignore[operator]
        assert len(train(engine, 1)) == 1


def test_move_to_same_device_and_dtype_is_noop(tmp_path: Path) -> None:
    with small_engine(tmp_path) as other:
        expected = train(other, 2)
    with small_engine(tmp_path) as engine:
        losses = train(engine, 1)
        for module in (engine.module, engine.module.blocks[0], engine.module.blocks[0].norm):
            assert module.to("cpu") is module.cpu() is module.float() is module
            assert module.to(torch.device("cpu"), torch.float32, non_blocking=True) is module
        assert losses + train(engine, 1, first=1) == expected


# --- modules added later -------------------------------------------------------------------------


def test_adding_module_with_parameters_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        model = engine.module
        with pytest.raises(ResidencyError, match=r"'blocks\.1\.up' becomes a Linear[\s\S]*before"):
            model.blocks[1].up = nn.Linear(16, 32)
        with pytest.raises(ResidencyError, match=r"'blocks\.3' .* 6 parameters .*norm\.weight"):
            model.blocks.append(Block(16))
        model.blocks[0].add_module("more", nn.Sequential(nn.GELU()))
        with pytest.raises(ResidencyError, match=r"'blocks\.0\.more\.1' becomes"):
            model.blocks[0].more.append(nn.Linear(2, 2))
        head, model.head = model.head, nn.Identity()
        model.head = head
        assert len(train(engine, 1)) == 1
    model.head = nn.Linear(16, 3)  # after close it is an ordinary module
    assert all(type(m._modules) is dict for m in model.modules())


def test_resized_parameter_error_gives_both_shapes(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        engine.module.embedding.weight.data = torch.zeros(60, 16)
        with pytest.raises(ResidencyError, match=r"from \(50, 16\) to \(60, 16\)[\s\S]*restore"):
            train(engine, 1)


# --- close ---------------------------------------------------------------------------------------


def test_close_restores_plain_dicts_and_removes_hooks(tmp_path: Path) -> None:
    model = small_model()
    with small_engine(tmp_path, model=model) as engine:
        assert all(isinstance(m._parameters, ParameterMap) for m in model.modules())
        train(engine, 1)
        engine.close(restore=True)
    for module in model.modules():
        assert type(module._parameters) is dict
        assert "_apply" not in module.__dict__
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
            module._forward_hooks_always_called,
            module._backward_hooks,
        ):
            assert not hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert parameter.isfinite().all()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    copy.deepcopy(model)
    model.double()


@pytest.mark.parametrize("placement", [ON_DISK, MIXED, ON_DEVICE])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_close_with_restore_restores_values(
    tmp_path: Path, placement: dict[str, str], precision: str
) -> None:
    model = small_model()
    with small_engine(tmp_path, placement, model=model, precision=precision) as engine:
        train(engine, 2)
        values = {k: v.clone() for k, v in engine.state_dict().items()}
        engine.close(restore=True)
    assert same(dict(model.state_dict()), values)
    loss = model(batch(9))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.head.weight is model.embedding.weight


def test_restored_model_can_be_trained_again(tmp_path: Path) -> None:
    model = small_model()
    with small_engine(tmp_path, model=model) as engine:
        train(engine, 2)
        engine.close(restore=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with small_engine(tmp_path, model=model) as engine:
        after = masters(engine)
        assert same(after, before)
        train(engine, 1)


def test_module_registered_twice_owned_once(tmp_path: Path) -> None:
    class SharedModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).square().mean()

    model = SharedModule()
    with small_engine(tmp_path, model=model) as engine:
        x = torch.randn(2, 8)
        engine.backward(engine(x))
        engine.step()
        engine.close(restore=True)
    assert type(model.first._parameters) is dict


def test_frozen_parameters_of_any_dtype_unchanged(tmp_path: Path) -> None:
    class MixedDtypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.table = nn.Parameter(torch.arange(6, dtype=torch.int64), requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([True, False] * 4), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.a(x) * self.scale) * self.mask).square().mean() + self.table.sum()

    torch.manual_seed(0)
    model = MixedDtypes()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 8)
    with small_engine(tmp_path, model=model) as engine:
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        assert torch.equal(engine.module.table, plain.table)
        assert torch.equal(engine.module.mask, plain.mask)
        assert torch.equal(engine.module.scale, plain.scale)
        state = engine.state_dict()
        assert state["table"].dtype is torch.int64
        assert state["mask"].dtype is torch.bool


def test_bound_parameters_share_slot_memory(tmp_path: Path) -> None:
    """Bound parameters, and only those, share memory with their unit's slot."""
    with small_engine(tmp_path, prefetch_units=1, model=SmallModel(num_blocks=5)) as engine:
        prefetcher = components(engine).prefetcher
        engine.backward(engine(batch(0)))
        for unit, entry in zip(engine.plan.units, prefetcher.ledger.entries, strict=True):
            for segment in unit.segments:
                parameter = components(engine).partition.parameters[segment.parameter]
                if entry.bound:
                    assert entry.residency is Residency.RESIDENT
                    storage = entry.slot.memory.untyped_storage()
                    assert parameter.untyped_storage().data_ptr() == storage.data_ptr()
                else:
                    assert is_offloaded(parameter)


@pytest.mark.parametrize("placement", [ON_DISK, ON_DEVICE])
def test_scalar_and_empty_parameters_trained(tmp_path: Path, placement: dict[str, str]) -> None:
    class ScalarAndEmpty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.frozen = nn.Parameter(torch.tensor(3.0), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.a(x).square().mean() * self.scale * self.frozen
            return loss + self.empty.sum()

    with small_engine(tmp_path, placement, model=ScalarAndEmpty()) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()
        state = engine.state_dict()
        assert state["scale"].shape == ()
        assert state["scale"] < 2.0
        assert state["frozen"] == 3.0
        assert state["empty"].shape == (0, 3)


def test_view_outliving_eviction_keeps_losses_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another thread inspects this thread's frames during the eviction."""
    more: dict[str, Any] = {"model": small_model(num_blocks=8)}
    with small_engine(tmp_path, ON_DISK, **more) as engine:
        expected = train(engine, 3)
    aliases: list[Any] = []
    evict = BoundUnits.evict

    def evict_with_alias(self: Any, unit: int) -> None:
        aliases[:] = [self._entries[unit].slot.memory.detach()]
        evict(self, unit)

    monkeypatch.setattr(BoundUnits, "evict", evict_with_alias)
    more = {"model": small_model(num_blocks=8)}
    with small_engine(tmp_path, ON_DISK, **more) as engine:
        assert train(engine, 3) == expected
        assert aliases
        aliases.clear()


def test_alias_of_weights_keeps_values_before_update(tmp_path: Path) -> None:
    """The slot is not reused while an alias exists, although its unit has been updated since."""
    aliases: list[torch.Tensor] = []

    def add_alias(module: Any, args: Any, output: Any) -> None:
        aliases.append(module.up.weight.detach())

    with small_engine(tmp_path, ON_DISK, model=small_model(num_blocks=8)) as engine:
        hook = engine.module.blocks[2].register_forward_hook(add_alias)
        engine.backward(engine(batch(0)))
        hook.remove()
        before = aliases[0].clone()
        engine.step()
        assert len(train(engine, 3)) == 3
        assert torch.equal(aliases[0], before)
        assert not torch.equal(engine.module.blocks[2].up.weight, before)
        aliases.clear()
        assert len(train(engine, 1)) == 1


class EmptyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(0, 0), nn.Linear(0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_empty_unit_does_not_affect_loss(tmp_path: Path) -> None:
    """Saved weights are identified by their address, which an empty unit does not have."""
    losses = []
    for blocks in ([], [EmptyBlock()]):
        model = small_model()
        for block in blocks:
            model.blocks.insert(1, block)
        in_ram = {"weights": "device", "optimizer_state": "host", "gradients": "host"}
        device = {"device": FakeAccelerator(1)}
        with small_engine(tmp_path, in_ram, model, arguments=device) as engine:
            train(engine, 2)
            losses.append(engine(batch(2)).item())
    assert losses[0] == losses[1]
