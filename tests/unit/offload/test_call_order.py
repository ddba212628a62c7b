"""Tests of engine calls in unusual orders: a correct result or a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.small import ON_DEVICE, ON_DISK, batch, masters, same, small_engine
from torch import Tensor

from infinity.errors import EngineClosedError, ResidencyError


def masters_with_a_stray_backward(path: Path, placement: dict[str, str]) -> dict[str, Tensor]:
    with small_engine(path, placement) as engine:
        engine.backward(engine(batch(1)))
        engine.module.blocks[0].up.weight.sum().backward()  # only one parameter of a unit
        engine.step()
        return masters(engine)


def test_torch_backward_gradients_reach_update(tmp_path: Path) -> None:
    expected = masters_with_a_stray_backward(tmp_path, ON_DEVICE)
    assert same(masters_with_a_stray_backward(tmp_path, ON_DISK), expected)


@pytest.mark.parametrize("placement", [ON_DEVICE, {**ON_DEVICE, "weights": "host"}])
def test_state_dict_right_after_step_is_complete(tmp_path: Path, placement: dict[str, str]) -> None:
    found = []
    for delay_s in (0.0, 0.03):
        device = FakeAccelerator(1, max_delay_s=delay_s)
        with small_engine(tmp_path, placement, arguments={"device": device}) as engine:
            engine.backward(engine(batch(0)))
            engine.step()
            names = list(engine.state_dict())
            found.append({n: engine.state_dict(master=True)[n] for n in reversed(names)})
    assert same(found[0], found[1])


def test_edit_between_forward_and_backward_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        loss = engine(batch(0))
        weight = engine.module.blocks[0].down.weight
        with engine.materialized(weight), torch.no_grad():
            weight.mul_(3)
        with pytest.raises(RuntimeError, match="updated after this graph was made"):
            engine.backward(loss)


@pytest.mark.parametrize("placement", [ON_DEVICE, ON_DISK])
def test_read_between_forward_and_backward_has_no_effect(
    tmp_path: Path, placement: dict[str, str]
) -> None:
    found = []
    for reads in (False, True):
        with small_engine(tmp_path, placement) as engine:
            loss = engine(batch(0))
            if reads:
                with engine.materialized(engine.module):
                    pass
            engine.backward(loss)
            engine.step()
            found.append(masters(engine))
    assert same(found[0], found[1])


def test_sibling_of_materialized_parameter_raises(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        up = engine.module.blocks[1].up
        with engine.materialized(up.weight), torch.no_grad():
            up.weight.fill_(7)
            with pytest.raises(ResidencyError, match="materialize the whole module"):
                _ = up.bias
        assert bool((engine.state_dict()["blocks.1.up.weight"] == 7).all())


@pytest.mark.parametrize("placement", [ON_DEVICE, ON_DISK])
def test_load_state_dict_on_submodule_takes_effect(
    tmp_path: Path, placement: dict[str, str]
) -> None:
    with small_engine(tmp_path, placement) as engine, torch.no_grad():
        block = engine.module.blocks[2]
        block.load_state_dict({n: v * 0 + 0.25 for n, v in block.state_dict().items()})
        assert bool((block.down.weight == 0.25).all())


@pytest.mark.parametrize("placement", [ON_DEVICE, ON_DISK])
def test_parameters_and_lazy_values_raise_after_close(
    tmp_path: Path, placement: dict[str, str]
) -> None:
    with small_engine(tmp_path, placement) as engine:
        module, state = engine.module, engine.state_dict()
        engine.backward(engine(batch(0)))
        engine.step()
    for use in (lambda: next(module.parameters()), module.state_dict, lambda: module(batch(0))):
        with pytest.raises(EngineClosedError, match=r"close\(restore=True\)"):
            use()
    with pytest.raises(EngineClosedError):
        _ = state["norm.weight"]
