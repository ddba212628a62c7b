"""Tests of `engine.train_batch`: equivalence to three calls, accepted batches, and failures."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import components
from support.small import ON_DEVICE, ON_DISK, SmallModel, batch, masters, same, small_engine
from torch import Tensor, nn
from torch.nn import functional

from infinity.engine import Engine
from infinity.errors import TrainingError
from infinity.integrations.deepspeed import DeepSpeedEngine
from infinity.training.batches import iter_micro_batches, train_micro_batch

STEPS = 3
Train = Callable[[Engine, Tensor], Tensor]


class RecordingEngine(DeepSpeedEngine):
    """Engine that stores the gradients of the last update."""

    gradients: tuple[Tensor, ...] = ()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        if self.is_gradient_accumulation_boundary():
            self.gradients = tuple(map(self.gradient, self.module.parameters()))
        super().step(lr_kwargs)


def step_tokens(engine: Engine, step: int) -> Tensor:
    """Return the tokens of a step, two sequences per micro-batch."""
    count = engine._window.length
    return torch.cat([batch(step * count + i) for i in range(count)])


def by_three_calls(engine: Engine, tokens: Tensor) -> Tensor:
    total = torch.zeros(())
    for micro_batch in tokens.split(2):
        loss = engine(micro_batch)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    return total / engine._window.length


def by_one_call(engine: Engine, tokens: Tensor) -> Tensor:
    return engine.train_batch(tokens)


def by_iterator(engine: Engine, tokens: Tensor) -> Tensor:
    source = iter([*tokens.split(2), "next"])
    loss = engine.train_batch(source)
    assert next(source) == "next"
    return loss


def train_steps(
    path: Path, train: Train, placement: dict[str, str], length: int | None = None, **config: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Return what each step reported, except for times, and the final masters."""
    seen: list[Any] = []
    with small_engine(path, placement, engine_class=RecordingEngine, **config) as engine:
        if length is not None:
            engine.set_gradient_accumulation_steps(length)
        for step in range(STEPS):
            loss = train(engine, step_tokens(engine, step))
            assert (loss.dtype, loss.shape, loss.requires_grad) == (torch.float32, (), False)
            report = engine.last_report
            facts = (
                report.step, str(report.grad_norm), report.clip_factor, report.skipped,
                report.loss_scale, report.non_finite, report.moved, engine.micro_steps,
            )  # fmt: skip
            gradients = [g.nan_to_num().tolist() for g in engine.gradients]
            seen.append((loss.item(), facts, gradients))
        return seen, masters(engine)


@pytest.mark.parametrize(
    ("placement", "config", "length"),
    [
        (ON_DEVICE, {"gradient_accumulation_steps": 1}, None),
        (ON_DISK, {"gradient_accumulation_steps": 1, "precision": "bf16"}, None),
        (ON_DEVICE, {"gradient_accumulation_steps": 4, "precision": "bf16"}, None),
        (ON_DISK, {"gradient_accumulation_steps": 4}, None),
        (ON_DISK, {"gradient_accumulation_steps": 2}, 3),
        (
            ON_DISK,
            {
                "gradient_accumulation_steps": 4,
                "precision": "fp16",
                "loss_scale": {"initial_power": 18, "hysteresis": 1},
            },
            None,
        ),
    ],
)
def test_train_batch_equals_forward_backward_step(
    tmp_path: Path, placement: dict[str, str], config: dict[str, Any], length: int | None
) -> None:
    seen, expected = train_steps(tmp_path, by_three_calls, placement, length, **config)
    assert len({loss for loss, _, _ in seen}) == STEPS
    for way in (by_one_call, by_iterator):
        again, found = train_steps(tmp_path, way, placement, length, **config)
        assert again == seen
        assert same(found, expected)
    if config.get("precision") == "fp16":
        assert {facts[3] for _, facts, _ in seen} == {True, False}  # one was skipped


class Features(nn.Module):
    """Language model that returns logits; the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = SmallModel()

    def forward(self, tokens: Tensor, ignored: Any = None) -> Tensor:
        return self.inner.head(self.inner.features(tokens))


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def test_loss_fn_forms_give_same_losses(tmp_path: Path) -> None:
    found = []
    for way in (
        by_three_calls,
        lambda engine, x: engine.train_batch((x, x), next_token),
        lambda engine, x: engine.train_batch([x, "ignored", x], next_token),
        lambda engine, x: engine.train_batch(x, loss_fn=next_token),
        lambda engine, x: engine.train_batch(
            {"tokens": x}, lambda logits, inputs: next_token(logits, inputs["tokens"])
        ),
    ):
        model = None if way is by_three_calls else Features()
        with small_engine(tmp_path, model=model, gradient_accumulation_steps=2) as engine:
            found.append([way(engine, step_tokens(engine, step)).item() for step in range(STEPS)])
    assert found == [found[0]] * len(found)


# --- accepted batches ----------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


def test_micro_batches_are_views_in_order() -> None:
    x, y, scale = torch.arange(24).view(6, 4), torch.arange(6), torch.tensor(2.0)
    data = UserDict(pair=Pair(x, [y]), scale=scale, name="n", more=({"x": x}, None))
    micro_batches = list(iter_micro_batches(data, 3))
    assert torch.equal(torch.cat([micro_batch["pair"].x for micro_batch in micro_batches]), x)
    assert torch.equal(torch.cat([micro_batch["pair"].y[0] for micro_batch in micro_batches]), y)
    for number, micro_batch in enumerate(micro_batches):
        assert micro_batch.keys() == data.keys()
        assert type(micro_batch["pair"]) is Pair
        assert micro_batch["pair"].x.data_ptr() == x[2 * number].data_ptr()
        assert torch.equal(micro_batch["more"][0]["x"], micro_batch["pair"].x)
        assert micro_batch["scale"] is scale
        assert (micro_batch["name"], micro_batch["more"][1]) == ("n", None)
    uneven = (x, y[:5])
    assert list(iter_micro_batches(uneven, 1)) == [uneven]  # nothing to cut


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(10, 2), r"10 samples cannot be cut into 4 .*\n.*try: 8 or 12 samples"),
        (torch.zeros(3), r"3 samples.*\n.*try: 4 samples"),
        (torch.zeros(0, 2), r"0 samples.*\n.*try: 4 samples"),
        ({"x": torch.zeros(8, 2), "y": [torch.zeros(4)]}, r"shape \(8, 2\), \(4,\) cannot be cut"),
        ((torch.zeros(()), "x"), "without a tensor of"),
        (torch.utils.data.DataLoader([1]), r"got a DataLoader.*\n.*iter\(loader\)"),
    ],
)
def test_indivisible_batch_rejected_with_sizes(data: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        iter_micro_batches(data, 4)


class FixedOutputEngine:
    """Stand-in for an engine whose model returns a fixed output."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.backward = self.losses = [].append

    def __call__(self, *args: Any) -> Any:
        return self.output

    def step(self) -> None:
        pass


class WithLoss:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: (x, 1), lambda x: [x], lambda x: {"loss": x}, WithLoss]
)
@pytest.mark.parametrize("loss", [torch.tensor(1.5), torch.tensor([1.5], dtype=torch.bfloat16)])
def test_loss_found_in_model_output(form: Any, loss: Tensor) -> None:
    found = train_micro_batch(FixedOutputEngine(form(loss)), torch.zeros(1), None)
    assert torch.equal(found, torch.tensor(1.5))
    assert found.dtype is torch.float32


@pytest.mark.parametrize(
    ("output", "description"),
    [
        (torch.zeros(2, 3), r"a Tensor of shape \(2, 3\)"),
        ((torch.zeros(2, 3),), r"a tuple with one of shape \(2, 3\)"),
        ({"logits": torch.zeros(1)}, "a dict with 'logits'"),
        (WithLoss(None), "a WithLoss"),
        ((), "a tuple"),
        (None, "a NoneType"),
    ],
)
def test_output_without_loss_raises_with_type(output: Any, description: str) -> None:
    with pytest.raises(TrainingError, match=rf"no loss, but {description}(?s:.*)loss_fn"):
        train_micro_batch(FixedOutputEngine(output), torch.zeros(1), None)


def test_unaccepted_target_asks_for_loss_fn(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(TrainingError, match=r"does not take the 3 elements(?s:.*)loss_fn"):
            engine.train_batch((batch(0), torch.zeros(4), torch.zeros(4)))
        assert not engine._window.is_open


def test_loss_fn_needs_inputs_and_target() -> None:
    with pytest.raises(TrainingError, match="1 elements, and a loss_fn"):
        train_micro_batch(FixedOutputEngine(None), [torch.zeros(1)], next_token)


# --- failures ------------------------------------------------------------------------------------


def fails_in_backward(loss: Tensor) -> Tensor:
    def refuse(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    loss.register_hook(refuse)
    return loss


@pytest.mark.parametrize("placement", [ON_DEVICE, ON_DISK])
def test_failed_train_batch_leaves_no_trace(tmp_path: Path, placement: dict[str, str]) -> None:
    def clean(engine: Engine, tokens: Tensor) -> Tensor:
        return engine.train_batch((tokens, tokens), next_token)

    def after_failures(engine: Engine, tokens: Tensor) -> Tensor:
        calls = 0

        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("on purpose")
            loss = next_token(logits, targets)
            return fails_in_backward(loss) if calls == 4 else loss

        micro_batches = [(micro_batch, micro_batch) for micro_batch in tokens.split(2)]
        failures: list[tuple[type[Exception], str, Any]] = [
            (RuntimeError, "on purpose", (tokens, tokens)),
            (RuntimeError, "on purpose", (tokens, tokens)),
            (
                TrainingError,
                "ended: 2 of the 3 micro-batches of this step",
                iter(micro_batches[:2]),
            ),
            (
                TrainingError,
                "on meta, the engine",
                iter([micro_batches[0], (tokens.to("meta"), tokens)]),
            ),
            (IndexError, "out of range", iter([micro_batches[0], (tokens + 1000, tokens)])),
        ]
        for kind, message, data in failures:
            with pytest.raises(kind, match=message):
                engine.train_batch(data, loss_fn)
            assert (engine.micro_step, engine._window.is_open) == (0, False)
            assert not components(engine).gradients.arrived()
        return clean(engine, tokens)

    found = []
    for way in (clean, after_failures):
        with small_engine(tmp_path, placement, Features(), gradient_accumulation_steps=3) as engine:
            losses = [way(engine, step_tokens(engine, step)).item() for step in range(2)]
            assert engine.global_steps == 2
            found.append((losses, masters(engine)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_train_batch_in_open_window_rejected(tmp_path: Path) -> None:
    with small_engine(
        tmp_path, engine_class=DeepSpeedEngine, gradient_accumulation_steps=2
    ) as engine:
        engine(batch(0)).backward()
        with pytest.raises(TrainingError, match="micro_step is 0 of 2, and a backward has been"):
            engine.train_batch(step_tokens(engine, 0))
        engine.step()
        with pytest.raises(TrainingError, match=r"micro_step is 1 of 2\n(?s:.*)zero_grad"):
            engine.train_batch(step_tokens(engine, 0))
        assert engine.micro_step == 1
        Engine.zero_grad(engine)
        with engine.no_sync(), pytest.raises(TrainingError, match="set by hand"):
            engine.train_batch(step_tokens(engine, 0))
        engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(TrainingError, match=r"set_gradient_accumulation_boundary\(None\)"):
            engine.train_batch(step_tokens(engine, 0))
        engine.set_gradient_accumulation_boundary(None)
        engine.train_batch(step_tokens(engine, 0))
        assert engine.global_steps == 1
