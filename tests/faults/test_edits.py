"""Tests of in-place edits of parameters outside `engine.materialized`: never stored, always raised.

The result of an edit must not depend on the placement, nor on whether the parameter happened to be
resident: an error is raised and the weights are unchanged, or, where the only copy was modified,
the engine has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
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
from torch import Tensor, nn

from infinity.engine import Engine
from infinity.errors import EngineFailedError, ResidencyError, TrainingError
from infinity.storage import disk
from infinity.storage.disk import sum_of_int64

IN_RAM = {**ON_DEVICE, "weights": "host"}
PLACEMENTS = {
    "disk": (ON_DISK, False),
    "mixed": (MIXED, False),
    "ram": (IN_RAM, False),
    "disk to device": (ON_DISK, True),
    "ram to device": (IN_RAM, True),
    "device": (ON_DEVICE, True),
}


def overwrite(parameter: nn.Parameter) -> None:
    parameter.data.copy_(torch.full(parameter.shape, 0.5))


def scale(parameter: nn.Parameter) -> None:
    parameter.data.mul_(1.5)


def fill(parameter: nn.Parameter) -> None:
    parameter.data.fill_(0.5)


def fill_last_element(parameter: nn.Parameter) -> None:
    parameter.data.view(-1)[-1:].fill_(0.5)


def replace(parameter: nn.Parameter) -> None:
    parameter.data = torch.full(parameter.shape, 0.5)


def transpose(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.flip(0)


def add_without_gradients(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(0.5)


EDITS = (overwrite, scale, fill, fill_last_element, replace, transpose, add_without_gradients)


REPLACING = (replace, transpose)  # assign another tensor, which leaves the stored weights unchanged
CALLS = ("forward", "module", "step", "state_dict", "save")


@contextmanager
def open_engine(path: Path, placement: str, model: nn.Module) -> Iterator[Engine]:
    """Yield an engine of `model`; ignore errors about edits that are raised when it is closed."""
    tiers, accelerator = PLACEMENTS[placement]
    arguments = {"device": FakeAccelerator(1)} if accelerator else {}
    nvme = path / "nvme"
    nvme.mkdir()
    with (
        suppress(ResidencyError),
        small_engine(nvme, tiers, model, arguments=arguments) as engine,
    ):
        yield engine


class Model(nn.Module):
    """A small model with a parameter of one element."""

    def __init__(self, edit: Callable[[nn.Parameter], None] | None = None) -> None:
        super().__init__()
        self.inner = small_model()
        self.gain = nn.Parameter(torch.ones(1))
        self.edit = edit

    def forward(self, tokens: Tensor) -> Tensor:
        if self.edit is not None:
            self.edit(self.inner.blocks[1].up.weight)
        return self.inner(tokens) * self.gain


@contextmanager
def raises_edit_error() -> Iterator[None]:
    """Expect a ResidencyError that names the remedy."""
    with pytest.raises(ResidencyError) as caught:
        yield
    assert "engine.materialized" in str(caught.value)


def assert_unedited(
    engine: Engine,
    before: dict[str, Tensor],
    placement: str,
    edit: Callable[[nn.Parameter], None],
) -> None:
    """Assert unchanged weights, or if the only copy was modified, that each call raises."""
    if placement not in ("ram", "device") or edit in REPLACING:
        engine.zero_grad()
        assert same(masters(engine), before)
        train(engine, 1)
        return
    with pytest.raises(EngineFailedError, match="its only copy"):
        masters(engine)
    with pytest.raises(EngineFailedError, match="its only copy"):
        engine(batch(0))


def make_call(engine: Engine, call: str, path: Path) -> None:
    if call == "forward":
        engine(batch(2))
    elif call == "module":
        engine.module(batch(2))
    elif call == "step":
        engine.step()
    elif call == "save":
        engine.save_checkpoint(path / "saved")
    else:
        engine.module.state_dict()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_edit_through_kept_reference_is_refused(tmp_path: Path, placement: str) -> None:
    """`model.parameters()` does not fetch; after a forward and backward many units are resident."""
    with open_engine(tmp_path, placement, Model()) as engine:
        parameters = dict(engine.module.named_parameters())
        before = masters(engine)
        for edit, name in product(EDITS, ("inner.blocks.1.up.weight", "gain")):
            for after_backward in (False, True):
                if after_backward:
                    engine.backward(engine(batch(1)))
                with raises_edit_error():
                    edit(parameters[name])
                assert same(masters(engine), before)
                engine.zero_grad()
            assert is_offloaded(parameters[name])
        train(engine, 2)


@pytest.mark.parametrize(("placement", "edit", "call"), diagonal(list(PLACEMENTS), EDITS, CALLS))
def test_edit_of_fetched_parameter_is_detected(
    tmp_path: Path, placement: str, edit: Callable[[nn.Parameter], None], call: str
) -> None:
    with open_engine(tmp_path, placement, Model()) as engine:
        train(engine, 1)
        before = masters(engine)
        engine.backward(engine(batch(1)))
        edit(engine.module.inner.blocks[1].up.weight)
        with raises_edit_error():
            make_call(engine, call, tmp_path)
        assert not (tmp_path / "saved").exists()
        assert_unedited(engine, before, placement, edit)


@pytest.mark.parametrize(("placement", "edit"), diagonal(list(PLACEMENTS), EDITS))
def test_edit_in_forward_is_detected(
    tmp_path: Path, placement: str, edit: Callable[[nn.Parameter], None]
) -> None:
    model = Model(edit)
    with open_engine(tmp_path, placement, model) as engine:
        before = masters(engine)
        with raises_edit_error():
            engine(batch(0))
        model.edit = None
        assert_unedited(engine, before, placement, edit)


def test_sum_of_int64_depends_on_every_byte_and_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_WORDS", 100)
    for size in (0, 5, 8, 8 * 1000, 8 * 1000 + 7):
        flat = torch.randint(0, 255, (size,), dtype=torch.uint8)
        before = sum_of_int64(flat)
        assert sum_of_int64(flat.clone()) == before
        for position in {0, size // 2, size - 1} if size else ():
            flat[position] += 1
            assert sum_of_int64(flat) != before
            flat[position] -= 1
        for offset in (1, 7, 100, 350):  # words in the same chunk of 100, and in later ones
            if size > 8 * offset + 8:
                swapped = flat.clone()
                swapped[:8], swapped[8 * offset :][:8] = flat[8 * offset :][:8], flat[:8]
                assert sum_of_int64(swapped) != before


@pytest.mark.parametrize("restore", [False, True])
def test_edit_before_close_is_raised_by_close(tmp_path: Path, restore: bool) -> None:
    with open_engine(tmp_path, "disk", Model()) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        scale(engine.module.inner.norm.weight)
        with raises_edit_error():
            engine.close(restore=restore)
        if restore:
            assert same(dict(engine.module.state_dict()), before)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_are_offloaded_between_calls_on_every_tier(
    tmp_path: Path, placement: str
) -> None:
    """Between calls, parameters that were not accessed by attribute are offloaded."""
    with open_engine(tmp_path, placement, Model()) as engine:
        parameters = list(engine.module.parameters())
        for call in ("forward", "backward", "step", "module", "users backward", "block"):
            if call == "forward":
                loss = engine(batch(0))
            elif call == "backward":
                engine.backward(loss)
            elif call == "step":
                engine.step()
            elif call == "module":
                loss = engine.module(batch(1))
            elif call == "users backward":
                loss.backward()
            else:
                engine.module.inner.blocks[0](torch.ones(2, 16))
            assert all(map(is_offloaded, parameters)), call


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_penalty_on_fetched_parameter_has_gradient_or_raises(
    tmp_path: Path, placement: str
) -> None:
    """A penalty outside the forward has its gradient, or raises if the weight was evicted."""

    class Returns(Model):
        def forward(self, tokens: Tensor) -> tuple[Tensor, nn.Parameter]:
            return super().forward(tokens), self.gain

    with open_engine(tmp_path, placement, Returns()) as engine:
        weight, gains, weights = engine.module.inner.norm.weight, [], []
        for penalized in (False, True):
            loss, gain = engine(batch(0))
            penalty = weight.square().sum() if penalized else 0.0
            with suppress(TrainingError) if "disk" in placement else nullcontext():
                engine.backward(loss + (gain.square().sum() + penalty if penalized else 0.0))
                gains.append(engine.gradient(gain))
                weights.append(engine.gradient(weight))
            engine.zero_grad()
            weight = engine.module.inner.norm.weight
        if len(gains) == 2:
            assert torch.allclose(gains[1] - gains[0], torch.full((1,), 2.0))
            assert torch.allclose(weights[1] - weights[0], 2 * weight, atol=1e-6)
