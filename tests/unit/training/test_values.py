"""Tests of reading, loading and materializing full values from and to every tier."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
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
    batch,
    is_offloaded,
    masters,
    same,
    small_engine,
    small_model,
    train,
)
from torch import Tensor

from infinity.engine import Engine
from infinity.errors import ConfigError, EngineClosedError, ResidencyError, TrainingError

PLACEMENTS = {"disk": ON_DISK, "mixed": MIXED, "device": ON_DEVICE}
every_placement = pytest.mark.parametrize(
    "placement", list(PLACEMENTS.values()), ids=list(PLACEMENTS)
)
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def values(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.state_dict().items())


@every_placement
@every_precision
def test_initial_values_equal_model(
    tmp_path: Path, placement: dict[str, str], precision: str
) -> None:
    plain = small_model().state_dict()
    with small_engine(tmp_path, placement, precision=precision) as engine:
        assert same(masters(engine), dict(plain))
        assert list(engine.state_dict()) == [*(k for k in plain if k != "offset"), "offset"]
        compute = torch.bfloat16 if precision == "bf16" else torch.float32
        state = values(engine)
        assert {v.dtype for k, v in state.items() if k != "offset"} == {compute}
        assert all(torch.allclose(state[k].float(), plain[k], rtol=2**-8) for k in plain)


def test_state_dict_reads_units_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine(tmp_path) as engine:
        read: list[int] = []
        store = components(engine).store
        original = store.read
        monkeypatch.setattr(store, "read", lambda u, k: read.append(u) or original(u, k))
        state = engine.state_dict()
        assert len(state) == len(list(state))
        assert not read
        _ = state["blocks.1.up.weight"], state["blocks.1.down.weight"]
        assert len(set(read)) == len(read) == 1
        with pytest.raises(KeyError):
            _ = state["nothing"]


@every_placement
@every_precision
def test_module_state_dict_is_full(
    tmp_path: Path, placement: dict[str, str], precision: str
) -> None:
    with small_engine(tmp_path, placement, precision=precision) as engine:
        train(engine, 2)
        assert same(dict(engine.module.state_dict()), values(engine))
        sub = engine.module.blocks[1].state_dict(prefix="b.")
        assert torch.equal(sub["b.up.weight"], engine.state_dict()["blocks.1.up.weight"])


def test_saved_module_state_loads_into_plain_model(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    with small_engine(folder) as engine:
        train(engine, 2)
        torch.save(engine.module.state_dict(), tmp_path / "state.pt")
        expected = values(engine)
        engine_loss = engine(batch(7)).detach()
    plain = small_model(seed=9)
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same(dict(plain.state_dict()), expected)
    assert torch.equal(plain(batch(7)), engine_loss)


def test_saving_or_copying_module_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(ResidencyError):
            torch.save(engine.module, io.BytesIO())
        with pytest.raises(ResidencyError):
            copy.deepcopy(engine.module)


def load_by_engine(engine: Engine, state: dict[str, Tensor]) -> None:
    engine.load_state_dict(state)


def load_by_module(engine: Engine, state: dict[str, Tensor]) -> None:
    engine.module.load_state_dict(state)


@every_placement
@every_precision
@pytest.mark.parametrize("load", [load_by_engine, load_by_module])
def test_loaded_fp32_values_become_exact_masters(
    tmp_path: Path, placement: dict[str, str], precision: str, load: Callable[[Engine, Any], None]
) -> None:
    other = dict(small_model(seed=5).state_dict())
    other["offset"] = torch.tensor(2.25)
    with small_engine(tmp_path, placement, precision=precision) as engine:
        train(engine, 1)
        load(engine, other)
        assert same(masters(engine), other)
        assert engine.module.offset == 2.25
        if precision == "fp32":
            plain = small_model(seed=5)
            assert torch.equal(engine(batch(0)), plain(batch(0)))
        else:
            assert engine(batch(0)).isfinite()


@pytest.mark.parametrize("load", [load_by_engine, load_by_module])
def test_bf16_round_trip_keeps_residuals(
    tmp_path: Path, load: Callable[[Engine, Any], None]
) -> None:
    with small_engine(tmp_path, precision="bf16") as engine:
        train(engine, 2)
        before = masters(engine)
        load(engine, values(engine))
        assert same(masters(engine), before)
        edited = values(engine)
        edited["norm.weight"] = edited["norm.weight"].clone()
        edited["norm.weight"][0] = 5.0
        load(engine, edited)
        after = masters(engine)
        assert after["norm.weight"][0] == 5.0
        assert torch.equal(after["norm.weight"][1:], before["norm.weight"][1:])
        assert torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])


def test_load_error_lists_all_mismatches(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        before = masters(engine)
        state = {k: v + 1 for k, v in before.items()}
        del state["norm.bias"]
        state["extra"] = torch.zeros(1)
        state["norm.weight"] = torch.zeros(3)
        with pytest.raises(ConfigError) as caught:
            engine.load_state_dict(state)
        text = str(caught.value)
        assert "missing 'norm.bias'" in text
        assert "unexpected 'extra'" in text
        assert "'norm.weight' has shape (3,), not (16,)" in text
        with pytest.raises(RuntimeError, match=r"Missing key.*norm\.bias[\s\S]*Unexpected.*extra"):
            engine.module.load_state_dict(
                {k: v for k, v in before.items() if k != "norm.bias"} | {"extra": torch.zeros(1)}
            )
        assert same(masters(engine), before)


def test_non_strict_load_takes_matching_names(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        before = masters(engine)
        value = torch.full((16,), 3.0)
        engine.load_state_dict({"norm.weight": value, "extra": value}, strict=False)
        expected = before | {"norm.weight": value}
        assert same(masters(engine), expected)
        result = engine.module.load_state_dict({"norm.bias": value, "extra": value}, strict=False)
        assert "extra" in result.unexpected_keys
        assert same(masters(engine), expected | {"norm.bias": value})
        assert engine(batch(0)).isfinite()


@every_placement
@every_precision
@pytest.mark.parametrize("accelerator", [False, True])
def test_materialized_edits_persist_and_are_used(
    tmp_path: Path, placement: dict[str, str], precision: str, accelerator: bool
) -> None:
    arguments = {"device": FakeAccelerator(1)} if accelerator else {}
    with small_engine(tmp_path, placement, precision=precision, arguments=arguments) as engine:
        train(engine, 1)
        weight = engine.module.blocks[1].down.weight
        before = engine(batch(3)).detach()
        with engine.materialized(weight), torch.no_grad():
            assert weight.isfinite().all()
            weight.zero_()
        with engine.materialized(engine.module.blocks[1].down), torch.no_grad():
            engine.module.blocks[1].down.bias.fill_(0.5)
        state = values(engine)
        assert not state["blocks.1.down.weight"].any()
        assert (state["blocks.1.down.bias"] == 0.5).all()
        after = engine(batch(3)).detach()
        assert not torch.equal(before, after)
        plain = small_model()
        plain.load_state_dict(state)
        if precision == "bf16":
            plain.bfloat16()
        assert torch.equal(after, plain(batch(3)).detach())
        train(engine, 1, first=4)


def test_materialized_accepts_module_parameter_or_list(tmp_path: Path) -> None:
    plain = small_model()
    with small_engine(tmp_path) as engine:
        module = engine.module
        with engine.materialized(module):
            for parameter, plain_parameter in zip(
                module.parameters(), plain.parameters(), strict=True
            ):
                assert torch.equal(parameter, plain_parameter)
        with engine.materialized([module.norm, module.blocks[0].up.bias]):
            assert torch.equal(module.norm.weight, plain.norm.weight)
            assert torch.equal(module.blocks[0].up.bias, plain.blocks[0].up.bias)
        with pytest.raises(ConfigError, match="does not belong"):
            engine.materialized(torch.nn.Parameter(torch.ones(1)))
        assert all(map(is_offloaded, module.parameters()))


def test_materialized_masters_are_fp32_and_exact(tmp_path: Path) -> None:
    with small_engine(tmp_path, precision="bf16") as engine:
        train(engine, 1)
        before = masters(engine)
        norm = engine.module.norm
        with engine.materialized(norm, master=True), torch.no_grad():
            assert norm.weight.dtype is torch.float32
            assert torch.equal(norm.weight, before["norm.weight"])
            norm.weight.mul_(1.0001)
        assert norm.weight.dtype is torch.bfloat16
        after = masters(engine)
        assert torch.equal(after["norm.weight"], before["norm.weight"] * 1.0001)
        assert torch.equal(after["norm.bias"], before["norm.bias"])


def test_materialized_read_changes_nothing(tmp_path: Path) -> None:
    with small_engine(tmp_path, precision="bf16") as engine:
        train(engine, 2)
        before = masters(engine)
        with engine.materialized(engine.module):
            pass
        assert same(masters(engine), before)


def test_nested_materialized_raises_outer_stays_valid(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        norm = engine.module.norm
        with engine.materialized(norm):
            with pytest.raises(ResidencyError, match="materialized already"):  # noqa: SIM117
                with engine.materialized(norm.weight):
                    pass
            with torch.no_grad():
                norm.weight.fill_(2.0)
            with engine.materialized(engine.module.blocks[0]):
                assert engine.module.blocks[0].up.weight.isfinite().all()
        assert (engine.state_dict()["norm.weight"] == 2.0).all()


def test_fully_materialized_unit_can_compute(tmp_path: Path) -> None:
    plain = small_model()
    with small_engine(tmp_path) as engine:
        block = engine.module.blocks[0]
        x = torch.randn(2, 16)
        with engine.materialized(block), torch.no_grad():
            assert torch.equal(block(x), plain.blocks[0](x))
        with engine.materialized(block.up.weight), torch.no_grad():  # noqa: SIM117
            with pytest.raises(ResidencyError, match="some of its parameters are materialized"):
                block(x)
        assert engine(batch(0)).isfinite()


def test_exception_in_materialized_keeps_edits(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(ValueError, match="mine"), engine.materialized(engine.module.norm):  # noqa: PT012
            with torch.no_grad():
                engine.module.norm.weight.fill_(4.0)
            raise ValueError("mine")
        assert (engine.state_dict()["norm.weight"] == 4.0).all()
        assert len(train(engine, 1)) == 1


@pytest.mark.parametrize("placement", [ON_DISK, MIXED])
def test_edit_outside_materialized_raises(tmp_path: Path, placement: dict[str, str]) -> None:
    with small_engine(tmp_path, placement) as engine:
        before = values(engine)
        with torch.no_grad():
            engine.module.blocks[0].up.weight.add_(1.0)
        with pytest.raises(ResidencyError, match=r"blocks\.0\.up\.weight.* edited in place"):
            train(engine, 2)
        assert same(values(engine), before) or engine.global_steps == 1
        assert all(torch.isfinite(torch.tensor(train(engine, 2))))


def test_gradient_matches_plain_torch(tmp_path: Path) -> None:
    plain = small_model()
    loss = plain(batch(0)) / 2 + plain(batch(1)) / 2
    loss.backward()
    with small_engine(tmp_path, gradient_accumulation_steps=2) as engine:
        with pytest.raises(Exception, match="has no gradient in this window"):
            engine.gradient(engine.module.norm.weight)
        engine.backward(engine(batch(0)))
        engine.step()
        engine.backward(engine(batch(1)))
        for parameter, plain_parameter in zip(
            engine.module.parameters(), plain.parameters(), strict=True
        ):
            assert parameter.grad is None
            assert torch.allclose(
                engine.gradient(parameter), plain_parameter.grad, rtol=1e-4, atol=1e-7
            )
        with pytest.raises(Exception, match="does not belong"):
            engine.gradient(torch.nn.Parameter(torch.ones(1)))
        engine.step()


def test_step_uses_gradients_set_without_backward(tmp_path: Path) -> None:
    """As in loops that compute gradients by `torch.autograd.grad`."""
    results = []
    for sets in (True, False):
        with small_engine(tmp_path) as engine:
            parameters = list(engine.module.parameters())
            for index in range(3):
                loss = engine(batch(index))
                if sets:
                    gradients = torch.autograd.grad(loss, parameters)
                    engine.set_gradient(parameters[0], torch.ones_like(gradients[0]))
                    engine.optimizer.zero_grad()  # drops it
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        engine.set_gradient(parameter, gradient)
                else:
                    engine.backward(loss)
                engine.step()
            results.append(values(engine))
            with pytest.raises(TrainingError, match="without a backward"):
                engine.step()
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


def test_gradient_of_frozen_parameter_raises(tmp_path: Path) -> None:
    model = small_model()
    model.norm.requires_grad_(False)
    with small_engine(tmp_path, model=model) as engine:
        engine.backward(engine(batch(0)))
        weight = model.norm.weight
        for call in (engine.gradient, lambda p: engine.set_gradient(p, torch.ones_like(p))):
            with pytest.raises(ConfigError, match=r"'norm.weight' is frozen"):
                call(weight)


@pytest.mark.parametrize("read", ["state_dict", "module", "materialized", "attribute"])
def test_reads_wait_for_optimizer_pass(tmp_path: Path, read: str) -> None:
    with small_engine(tmp_path, ON_DEVICE) as engine:
        train(engine, 1)
        expected = values(engine)["blocks.2.up.weight"]
    slow = {"io": {"slow_bytes_per_s": 5_000_000}}
    with small_engine(tmp_path, **slow) as engine:
        train(engine, 1)
        weight = components(engine).partition.parameters[
            components(engine).partition.names.index("blocks.2.up.weight")
        ]
        if read == "state_dict":
            value = engine.state_dict()["blocks.2.up.weight"]
        elif read == "module":
            value = engine.module.state_dict()["blocks.2.up.weight"]
        elif read == "materialized":
            with engine.materialized(weight):
                value = weight.detach().clone()
        else:
            value = engine.module.blocks[2].up.weight.detach().clone()
        assert torch.equal(value, expected)


@every_placement
@pytest.mark.parametrize("accelerator", [False, True])
def test_state_dict_read_after_close_raises(
    tmp_path: Path, placement: dict[str, str], accelerator: bool
) -> None:
    arguments = {"device": FakeAccelerator(1)} if accelerator else {}
    with small_engine(tmp_path, placement, arguments=arguments) as engine:
        state = engine.state_dict(master=True)
    with pytest.raises(EngineClosedError, match="read values before close"):
        state["blocks.1.down.weight"]
