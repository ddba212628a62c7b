"""Tests of offloaded parameters on every tier: reads return values, edits are rejected."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.ranks import make_engine, on_ranks
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    is_offloaded,
    settings,
    small_engine,
    small_model,
    train,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import EngineClosedError, InfinityWarning, ResidencyError, TrainingError
from infinity.model.offloaded_parameter import OffloadedParameter
from infinity.optim.offloaded import OffloadedOptimizer

PLACES: dict[str, tuple[dict[str, str], bool]] = {
    "disk": (ON_DISK, False),
    "mixed": (MIXED, True),
    "device": (ON_DEVICE, True),
}
Parameters = dict[str, nn.Parameter]


def engine_at(path: Path, place: str, model: nn.Module | None = None, **overrides: Any) -> Any:
    placement, accelerator = PLACES[place]
    arguments = {"device": FakeAccelerator(1)} if accelerator else {}
    return small_engine(path, placement, model, arguments=arguments, **overrides)


def values_of(engine: Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


READS: dict[str, Callable[[Tensor], Any]] = {
    "p.data": lambda p: p.data + 0,
    "p.detach()": lambda p: p.detach().clone(),
    "p.clone().detach()": lambda p: p.clone().detach(),
    "p.cpu()": lambda p: p.detach().cpu(),
    "p.norm().item()": lambda p: p.norm().item(),
    "p[0]": lambda p: p.view(-1)[0].item(),
    "x.lerp_(p)": lambda p: torch.zeros(p.shape).lerp_(p.detach(), 0.5),
    "torch.equal": lambda p: torch.equal(p, torch.zeros(p.shape)),
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p])).sum().item(),
    "numpy": lambda p: p.detach().numpy().sum().item(),
    "deepcopy": lambda p: copy.deepcopy(p).detach().sum().item(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
    "of data": lambda p: copy.deepcopy(p.data).mul_(2),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).detach(),
    "save": lambda p: saved_and_loaded(p).detach(),
}


def saved_and_loaded(parameter: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"weight": parameter}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)["weight"]
    return loaded


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("gradients", [True, False])
def test_reads_return_plain_torch_values(tmp_path: Path, place: str, gradients: bool) -> None:
    plain = dict(small_model().named_parameters())
    with engine_at(tmp_path, place) as engine, torch.set_grad_enabled(gradients):
        for name, parameter in engine.module.named_parameters():
            for what, read in READS.items():
                engine(batch(0))
                assert gradients or is_offloaded(parameter)  # autograd makes it resident
                found, expected = read(parameter), read(plain[name])
                if isinstance(expected, Tensor):
                    assert torch.equal(found.cpu(), expected), (name, what)
                    if type(found) is Tensor and not gradients:
                        found.add_(1)  # the result belongs to the caller
                else:
                    assert found == expected, (name, what)
        unchanged = small_model().state_dict()
        assert all(torch.equal(v, unchanged[n]) for n, v in values_of(engine).items())


def test_metadata_access_reads_no_bytes(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DISK) as engine:
        before = engine.counters()
        for parameter in engine.module.parameters():
            assert is_offloaded(parameter)
            assert isinstance(parameter, nn.Parameter)
            assert (
                parameter.numel() == parameter.shape.numel() == torch.zeros_like(parameter).numel()
            )
            assert (parameter.grad, parameter.is_leaf, parameter.requires_grad) == (
                None,
                True,
                True,
            )
            assert str(tuple(parameter.shape)) in repr(parameter)
            assert parameter.untyped_storage().nbytes() == parameter.element_size()
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            kind(engine.module.parameters(), lr=0.1)
        assert all(map(is_offloaded, engine.module.parameters()))
        assert engine.counters() == before


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "p.data.clamp_": lambda p: p.data.clamp_(0, 1),
    "p.data.view(-1).fill_": lambda p: p.data.view(-1).fill_(0),
    "p.data[0] = 1": lambda p: p.data.__setitem__(0, 1),
    "p.data += 1": lambda p: p.data.__iadd__(1),
    "part of p.data": lambda p: p.data.chunk(2)[0].zero_(),
    "p.data = x": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "p.detach().mul_": lambda p: p.detach().mul_(2),
    "p.copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "init": lambda p: nn.init.ones_(p),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.add(p, 1, out=p),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.ones(p.numel()), [p]),
    "numpy": lambda p: p.detach().numpy().fill(1),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).zero_(),
    "overload": lambda p: torch.ops.aten.fill_.Scalar(p, 0),
    "overload of p.data": lambda p: torch.ops.aten.fill_.Scalar(p.data, 0),
    "packet": lambda p: torch.ops.aten.fill_(p, 0),
    "custom": lambda p: halve(p),
    "custom of p.data": lambda p: torch.ops.infinity_tests.halve(p.data),
}


@torch.library.custom_op("infinity_tests::halve", mutates_args={"w"})
def halve(w: Tensor) -> None:
    w.mul_(0.5)


def test_training_step_calls_no_torch_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []  # each takes microseconds, and there would be several per parameter
    dispatch = vars(OffloadedParameter)["__torch_function__"].__func__

    def count(cls: Any, func: Any, *arguments: Any) -> Any:
        calls.append(func)
        return dispatch(cls, func, *arguments)

    with small_engine(tmp_path, ON_DISK) as engine:
        train(engine, 1)
        monkeypatch.setattr(OffloadedParameter, "__torch_function__", classmethod(count))
        train(engine, 1)
        monkeypatch.undo()
    assert calls == []


@pytest.mark.parametrize("place", PLACES)
def test_edits_rejected_and_values_unchanged(tmp_path: Path, place: str) -> None:
    with engine_at(tmp_path, place) as engine:
        before = values_of(engine)
        for gradients in (True, False):
            for what, edit in EDITS.items():
                parameter = list(engine.module.parameters())[-1]
                kind = ValueError if what == "numpy" else ResidencyError  # raised by numpy
                with torch.set_grad_enabled(gradients), pytest.raises(kind):
                    edit(parameter)
                assert is_offloaded(parameter), what
        after = values_of(engine)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        train(engine, 1)


def l2(parameters: Iterable[Tensor]) -> Tensor:
    return torch.stack([p.square().sum() for p in parameters]).sum()


@pytest.mark.parametrize("place", PLACES)
def test_weight_penalty_matches_torch_or_raises(tmp_path: Path, place: str) -> None:
    plain = small_model()
    (plain(batch(0)) + 0.1 * l2(plain.parameters())).backward()
    with engine_at(tmp_path, place) as engine:
        loss = engine(batch(0)) + 0.1 * l2(engine.module.parameters())
        if place != "device":  # weights were evicted before the backward
            with pytest.raises(TrainingError, match="compute penalties on weights inside the mod"):
                engine.backward(loss)
            train(engine, 1)
            return
        engine.backward(loss)
        for name, parameter in engine.module.named_parameters():
            expected = dict(plain.named_parameters())[name].grad
            assert torch.allclose(engine.gradient(parameter).cpu(), expected, atol=1e-6), name


@pytest.mark.parametrize("place", PLACES)
def test_moving_averages_match_plain_torch(tmp_path: Path, place: str) -> None:
    """Covers `AveragedModel` and a list of averages copied into the model, as in torch_ema."""
    plain = small_model()
    average_of = get_ema_multi_avg_fn(0.9)
    expected, found = (AveragedModel(small_model(), multi_avg_fn=average_of) for _ in range(2))
    with engine_at(tmp_path, place) as engine:
        shadow = [p.clone().detach() for p in engine.module.parameters()]
        for index in range(3):
            train(engine, 1, first=index)
            plain.load_state_dict(values_of(engine))
            expected.update_parameters(plain)
            found.update_parameters(engine.module)
            with torch.no_grad():
                for mean, parameter in zip(shadow, engine.module.parameters(), strict=True):
                    mean.sub_(0.1 * (mean - parameter))
        for expected_value, found_value in zip(
            expected.module.parameters(), found.module.parameters(), strict=True
        ):
            assert torch.equal(expected_value, found_value)

        def copy_to(parameters: Iterable[nn.Parameter]) -> None:
            for mean, parameter in zip(shadow, parameters, strict=True):
                parameter.data.copy_(mean)

        with pytest.raises(ResidencyError, match=r"engine\.materialized"):
            copy_to(engine.module.parameters())
        with engine.materialized(engine.module):
            copy_to(engine.module.parameters())
        for mean, value in zip(shadow, engine.module.parameters(), strict=True):
            assert torch.equal(value.detach(), mean)


@pytest.mark.parametrize("place", PLACES)
def test_held_read_raises_after_parameter_changed(tmp_path: Path, place: str) -> None:
    """In plain torch `p.data` would follow the parameter."""
    model = small_model()
    model.norm.weight.requires_grad_(requires_grad=False)
    with engine_at(tmp_path, place, model) as engine:
        frozen, trained = model.norm.weight, next(iter(model.parameters()))
        engine(batch(0))

        def read() -> tuple[Tensor, Tensor, Tensor]:
            return frozen.detach(), trained.data, trained.detach().view(-1)[:3]

        reads = read()
        engine.backward(engine(batch(0)))
        assert all(value.isfinite().all() for value in reads)
        engine.step()
        for value in reads[1:]:
            with pytest.raises(ResidencyError, match=r"changed since[\s\S]*clone"):
                value.sum()
        assert reads[0].isfinite().all()
        reads = read()
        with engine.materialized(model.norm), torch.no_grad():
            model.norm.weight.add_(1)
        with pytest.raises(ResidencyError, match="changed since"):
            reads[0].sum()


def test_frozen_weights_usable_in_loss(tmp_path: Path) -> None:
    model = small_model()
    model.norm.requires_grad_(requires_grad=False)
    weights = list(model.norm.parameters())
    expected = [w.detach().clone() for w in weights]
    with small_engine(tmp_path, ON_DISK, model):
        x = torch.ones(weights[0].shape, requires_grad=True)
        (x * weights[0] + weights[1]).sum().backward()
        assert torch.equal(x.grad, expected[0])  # type: ignore[arg-type]
        assert all(map(is_offloaded, weights))


class StoresWeightInContext(torch.autograd.Function):
    """Function that stores a weight in `ctx` without `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight.t(), None


class HeldReferences(nn.Module):
    """Model that uses weights of all units by references other than module attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.held = [[p for p in self.inner.parameters() if p.dim() == 2]]
        self.first = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        first, in_graph = self.inner.blocks[0].up.weight, self.inner.blocks[0].down.weight
        total = self.inner(tokens)
        for weight in self.held[0]:
            total = total + 0.01 * weight.square().mean()
        with torch.no_grad():
            scale = sum(w.abs().mean() for w in self.held[0])
        x = self.first(torch.ones(2, 16))
        y = checkpoint(lambda x: x @ first.t(), x, use_reentrant=False)  # captured by the closure
        return total * scale + y.mean() + StoresWeightInContext.apply(x, in_graph).mean()


def held_references() -> HeldReferences:
    torch.manual_seed(0)
    return HeldReferences()


@pytest.mark.parametrize("place", PLACES)
def test_weights_held_by_reference_are_fetched(tmp_path: Path, place: str) -> None:
    plain = held_references()
    expected = plain(batch(0))
    expected.backward()
    with engine_at(tmp_path, place, held_references()) as engine:
        loss = engine(batch(0))
        assert torch.equal(loss.cpu(), expected)
        engine.backward(loss)
        for name, parameter in plain.named_parameters():
            offloaded = dict(engine.module.named_parameters())[name]
            assert torch.allclose(engine.gradient(offloaded).cpu(), parameter.grad, atol=1e-6), name


class MeanOfBlocks(nn.Module):
    """Model with operations that each use weights of `together` blocks."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.inner = small_model(num_blocks=6)
        self.together = together

    def forward(self, tokens: Tensor) -> Tensor:
        total = self.inner(tokens)
        weights = [block.up.weight for block in self.inner.blocks]
        for first in range(3):
            total = total + torch.stack(weights[first :: 6 // self.together]).mean(0).square().sum()
        return total


@pytest.mark.parametrize("together", [2, 3])
def test_weights_used_together_do_not_evict_each_other(tmp_path: Path, together: int) -> None:
    """There are three slots."""
    plain = MeanOfBlocks(together)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    model = MeanOfBlocks(together)
    sgd = {"type": "SGD", "lr": 1e-2}
    with engine_at(
        tmp_path, "disk", model, prefetch_units=1, optimizer=sgd, gradient_clipping=0
    ) as engine:
        for index in range(3):
            plain(batch(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            train(engine, 1, first=index)
        for name, value in engine.state_dict().items():
            assert torch.allclose(value, plain.state_dict()[name], atol=1e-6), name


def test_more_weights_together_than_slots_raise(tmp_path: Path) -> None:
    with (
        engine_at(tmp_path, "disk", MeanOfBlocks(6), prefetch_units=1) as engine,
        pytest.raises(ResidencyError, match="one operation uses weights of more units"),
    ):
        engine(batch(0))


def test_reads_on_two_ranks_return_full_values(tmp_path: Path) -> None:
    models = [small_model() for _ in range(2)]
    config = settings(tmp_path, MIXED | {"reshard_after_forward": True})

    def read(ranks: DistContext) -> list[Tensor]:
        with make_engine(ranks, models[ranks.rank], config, tmp_path) as engine, torch.no_grad():
            return [p.clone() for p in engine.module.parameters()]

    for values in on_ranks(2, read):
        for value, plain in zip(values, small_model().parameters(), strict=True):
            assert torch.equal(value, plain)


def test_closed_engine_parameters_raise_unless_restored(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DISK) as engine:
        parameters = list(engine.module.parameters())
    with pytest.raises(EngineClosedError, match="the values of the parameters with it"):
        parameters[0].norm()
    with small_engine(tmp_path, ON_DISK) as engine:
        parameters = list(engine.module.parameters())
        engine.close(restore=True)
    assert {type(p) for p in parameters} == {nn.Parameter}


def test_dropped_engine_parameters_restored_on_read(tmp_path: Path) -> None:
    model = small_model()
    parameters = dict(model.named_parameters())
    engine, *_ = infinity.initialize(model, settings(tmp_path, ON_DISK))
    train(engine, 1)
    values = values_of(engine)
    del engine
    assert all(map(is_offloaded, parameters.values()))
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach(), values[name])
    assert not any(map(is_offloaded, parameters.values()))


def test_step_of_torch_optimizer_rejected(tmp_path: Path) -> None:
    """A step of a torch optimizer would edit offloaded parameters."""
    with small_engine(tmp_path, ON_DISK) as engine:
        assert isinstance(engine.optimizer, OffloadedOptimizer)
        torch_optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
        for parameter in engine.module.parameters():
            parameter.grad = torch.ones(parameter.shape)
        with pytest.raises(ResidencyError, match=r"engine\.materialized"):
            torch_optimizer.step()


GRADIENT_READS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "p.grad": lambda model: [p.grad for p in model.parameters()],
}


@pytest.mark.parametrize("backward", ["engine.backward", "loss.backward"])
@pytest.mark.parametrize("look", GRADIENT_READS)
def test_grad_access_between_backward_and_step_warns_once(
    look: str, backward: str, tmp_path: Path
) -> None:
    """Outside of backward and step gradients are None in plain torch as well."""
    with small_engine(tmp_path, ON_DISK, gradient_accumulation_steps=1) as engine:
        for step in range(3):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                GRADIENT_READS[look](engine.module)
                loss = engine(batch(1)).square().mean()
                engine.backward(loss) if backward == "engine.backward" else loss.backward()
                before = len(found)
                GRADIENT_READS[look](engine.module)
                seen = len(found)
                engine.step()
                GRADIENT_READS[look](engine.module)
            assert (before, seen, len(found)) == (0, step == 0, step == 0)
            for warning in found:
                assert warning.category is InfinityWarning
                assert "gradient_clipping in the configuration clips" in str(warning.message)
        engine.backward(engine(batch(1)).square().mean())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.module.zero_grad()  # drops the gradients
