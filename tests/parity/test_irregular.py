"""Tests of less regular uses of autograd and of unusual models, against plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.models import CASES, LENGTH, VOCAB, Batch, Block, Checkpointing
from support.trainer import (
    Run,
    cast_frozen,
    make_config,
    make_device,
    same_bits,
    train,
    train_on,
    train_reference,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import infinity
from infinity.errors import InfinityError, TrainingError

DISK = ("disk", "disk", "disk")
SETUPS = [
    ("cpu", ("device", "device", "device")),
    ("cpu", DISK),
    ("fake", DISK),
    ("fake", ("host", "disk", "device")),
]
SOME_SETUPS = SETUPS[1::2]  # `test_axes.py` covers every placement
Gradients = dict[str, Tensor]


def plain_gradients(
    build: Callable[[], nn.Module], use: Callable[[Callable[..., Any], Callable[..., Any]], None]
) -> Gradients:
    """Run `use(model, backward)` in plain torch; return the flat gradients by name."""
    model = build()
    cast_frozen(model, torch.float32)
    use(model, lambda loss, **kwargs: loss.backward(**kwargs))
    return {
        name: p.grad.reshape(-1).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def engine_gradients(
    build: Callable[[], nn.Module],
    use: Callable[[Callable[..., Any], Callable[..., Any]], None],
    setup: tuple[str, tuple[str, str, str]],
) -> Gradients:
    """Do the same with the engine, in its second step (after an optimizer pass with lr 0)."""
    device, placement = setup
    model = build()
    config = make_config(placement, optimizer={"lr": 0.0}, prefetch_units=1)
    with Run(model, config, device=make_device(device)) as run:
        engine = run.engine
        engine.backward(Batch((ids(9),)).call(engine))
        engine.step()
        use(engine, engine.backward)
        found = {}
        for name, parameter in model.named_parameters():
            try:
                found[name] = engine.gradient(parameter).reshape(-1)
            except TrainingError:
                continue
        return found


def assert_same(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not same_bits(actual[name], expected[name])] == []


def ids(seed: int, size: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (size, LENGTH), generator=torch.Generator().manual_seed(seed))


def retain_graph(model: Callable[..., Any], backward: Callable[..., Any]) -> None:
    loss = model(ids(1))
    backward(loss, retain_graph=True)
    backward(loss)


def two_forwards(model: Callable[..., Any], backward: Callable[..., Any]) -> None:
    first, second = model(ids(1)), model(ids(2, size=3))
    backward(first + second)


def two_forwards_two_backwards(model: Callable[..., Any], backward: Callable[..., Any]) -> None:
    first, second = model(ids(1)), model(ids(2, size=3))
    backward(first)
    backward(second)


def no_grad_forward_between(model: Callable[..., Any], backward: Callable[..., Any]) -> None:
    first = model(ids(1))
    with torch.no_grad():
        model(ids(5))
    backward(first)


USES = [retain_graph, two_forwards, two_forwards_two_backwards, no_grad_forward_between]


@pytest.mark.parametrize(("use", "setup"), diagonal(USES, SETUPS[::-1]))
def test_gradients_equal_plain_torch(use: Any, setup: Any) -> None:
    build = CASES["gpt"].build
    assert_same(engine_gradients(build, use, setup), plain_gradients(build, use))


class Spectral(nn.Module):
    """Model whose weights autograd saves as conjugated and negated views."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.pairs = nn.ParameterList([nn.Parameter(torch.randn(8, 2)) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block, pair in zip(self.blocks, self.pairs, strict=True):
            weight = torch.view_as_complex(pair).conj()
            turned = torch.complex(x, x.flip(-1)) * weight
            x = block(turned.real) * weight.imag + turned.imag
        return x.square().mean()


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return Spectral()


@pytest.mark.parametrize("setup", SOME_SETUPS, ids=str)
def test_conjugated_weights_match_plain_torch(setup: Any) -> None:
    def use(model: Callable[..., Any], backward: Callable[..., Any]) -> None:
        backward(model(ids(1)))

    assert_same(engine_gradients(spectral, use, setup), plain_gradients(spectral, use))


class Recurrent(nn.Module):
    """RNNs with two weights that are recomputed from others at each access."""

    def __init__(self, parametrize: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(
            [nn.LSTM(8, 8, 2, batch_first=True), nn.GRU(8, 4, bidirectional=True, batch_first=True)]
        )
        for rnn in self.blocks:
            for name in ("weight_ih_l0", "weight_hh_l0"):
                parametrize(rnn, name)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for rnn in self.blocks:
            x = rnn(x)[0]
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


PARAMETRIZED: list[Any] = [
    parametrizations.orthogonal,
    parametrizations.spectral_norm,
    parametrizations.weight_norm,
    nn.utils.weight_norm,
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize(("parametrize", "setup"), diagonal(PARAMETRIZED, SETUPS))
def test_parametrized_rnn_weights_match_plain_torch(
    parametrize: Any, setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the engine is closed; and `flatten_parameters` is never called."""
    device, placement = setup
    build = seeded(lambda: Recurrent(parametrize))
    plain, model = build(), build()
    batches, config = [Batch((ids(i),)) for i in range(3)], make_config(placement)
    expected = train_reference(plain, batches, config)
    with torch.no_grad():  # on some processors, torch rounds differently with gradients
        loss = plain.eval()(ids(7))
    calls: list[nn.Module] = []
    with Run(model, config, device=make_device(device)) as run:
        with monkeypatch.context() as patched:
            patched.setattr(nn.RNNBase, "flatten_parameters", lambda rnn: calls.append(rnn))
            assert train_on(run.engine, batches).differences(expected) == []
            with torch.no_grad():
                assert same_bits(run.engine.eval()(ids(7)).cpu(), loss)
        assert calls == []
        run.engine.close(restore=True)
    twins = zip(model.named_buffers(), plain.buffers(), strict=True)
    assert [
        name for (name, buffer), reference in twins if not same_bits(buffer.cpu(), reference)
    ] == []
    new_weights = {name: p.detach() + 1 for name, p in plain.named_parameters()}
    call = torch.func.functional_call
    assert same_bits(call(model, new_weights, (ids(8),)), call(plain, new_weights, (ids(8),)))


class HoldsWeight(nn.Module):
    """Model that reads a weight by attribute, and uses it after other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, small.WIDTH)
        self.blocks = nn.ModuleList([small.Block(small.WIDTH) for _ in range(6)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        held = self.blocks[0].up.weight
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, held).square().mean()


def test_weight_held_across_blocks_is_refetched(tmp_path: Path) -> None:
    """The weight has been evicted by then, and is fetched again."""
    torch.manual_seed(0)
    settings = small.settings(tmp_path, small.ON_DISK, prefetch_units=0)
    model = HoldsWeight()
    expected = model(ids(1))
    expected.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    engine, *_ = infinity.initialize(model, settings)
    with engine:
        loss = engine(ids(1))
        assert torch.equal(loss, expected)
        engine.backward(loss)
        for name, parameter in model.named_parameters():
            assert torch.equal(engine.gradient(parameter), grads[name]), name


@pytest.mark.parametrize("setup", SOME_SETUPS, ids=str)
def test_unequal_micro_batches_match_plain_torch(setup: tuple[str, tuple[str, str, str]]) -> None:
    device, placement = setup
    case = CASES["gpt"]
    config = make_config(placement, precision="bf16", gradient_accumulation_steps=3)
    batches = [Batch((ids(i, size=1 + i % 4),)) for i in range(15)]
    expected = train_reference(case.build(), batches, config)
    run = train(case.build(), batches, config, device=make_device(device))
    assert run.differences(expected) == []


class PartlyUsed(nn.Module):
    """Model that uses only the requested branches, and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor, which: list[int]) -> Tensor:
        x = self.embed(tokens)
        for index in which:
            x = x + self.branches[index](x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("setup", "micro_batches"), diagonal(SOME_SETUPS, [1, 2]))
def test_parameters_without_gradient_stay_unchanged(setup: Any, micro_batches: int) -> None:
    """No weight decay and no step count, as in torch if `grad` is None."""
    device, placement = setup
    config = make_config(
        placement,
        gradient_accumulation_steps=micro_batches,
        optimizer={"weight_decay": 0.5},
    )
    uses = [[0], [1], [0, 1], [], [2, 0], [1]]
    batches = [Batch((ids(i), uses[i % len(uses)])) for i in range(7 * micro_batches)]
    build = seeded(PartlyUsed)
    initial = {name: p.detach().clone() for name, p in build().named_parameters()}
    expected = train_reference(build(), batches, config)
    run = train(build(), batches, config, device=make_device(device))
    assert run.differences(expected) == []
    for name in ("never.weight", "never.bias"):
        assert same_bits(run.masters[name], initial[name])


def seeded(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return kind()

    return build


@pytest.mark.parametrize("setup", SOME_SETUPS, ids=str)
def test_eval_between_steps_does_not_change_training(
    setup: tuple[str, tuple[str, str, str]],
) -> None:
    device, placement = setup
    config = make_config(placement, precision="bf16", gradient_accumulation_steps=2)
    case = CASES["gpt"]
    batches = case.batches(20)
    expected = train_reference(case.build(), batches, config)
    losses, held_out = [], set()
    with Run(case.build(), config, device=make_device(device)) as run:
        for number, batch in enumerate(batches):
            loss = batch.call(run.engine)
            if number % 3 == 0:
                with torch.no_grad():
                    held_out.add(case.batch(100).call(run.engine).item())
            run.engine.backward(loss)
            run.engine.step()
            losses.append(loss.item())
            if number % 4 == 1:
                run.engine.eval()
                with torch.no_grad():
                    held_out.add(case.batch(100).call(run.engine).item())
                run.engine.train()
        masters = run.masters()
    assert losses == expected.losses
    assert all(same_bits(masters[k], v) for k, v in expected.masters.items())
    assert len(held_out) > 5


@pytest.mark.parametrize(
    ("setup", "mode"),
    diagonal([("fake", DISK), ("fake", ("host",) * 3), ("cpu", DISK)], ["none", "non_reentrant"]),
)
def test_mispredicted_prefetch_matches_plain_torch(
    mode: str, setup: tuple[str, tuple[str, str, str]]
) -> None:
    """Each batch routes to other experts than the last; at times all prefetches are wrong."""
    device, placement = setup
    case = CASES["routed"]
    config = make_config(placement, prefetch_units=3, gradient_accumulation_steps=3)
    batches = case.batches(30)
    checkpointing = Checkpointing(mode, "inside")
    expected = train_reference(case.build(checkpointing), batches, config)
    run = train(case.build(checkpointing), batches, config, device=make_device(device))
    assert run.differences(expected) == []


@pytest.mark.parametrize(("weights", "seed"), diagonal(["host", "disk"], range(2)))
def test_slot_evicted_while_filled_matches_plain_torch(weights: str, seed: int) -> None:
    """Slots are not poisoned here: to poison one would wait for the copy that fills it."""
    case = CASES["routed"]
    config = make_config((weights, "host", "host"), prefetch_units=3, gradient_accumulation_steps=3)
    batches = case.batches(18)
    expected = train_reference(case.build(), batches, config)
    fake = FakeAccelerator(seed, max_delay_s=0.02)
    run = train(case.build(), batches, config, device=fake, poison=None)
    assert run.differences(expected) == []


class Nested(nn.Module):
    """Model with a block that uses units of its own size during its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)  # small, so that it gets another slot class
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(2))

    def forward(self, tokens: Tensor, which: list[int]) -> Tensor:
        x = self.embed(tokens).repeat(1, 1, 4)
        for block in self.blocks:
            x = block(x, which)
        logits = x[..., :16] @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class NestedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.linear = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        x = self.linear(x).tanh()
        self.num_calls += 1
        time.sleep(0.001 * (self.num_calls % 7))  # let the optimizer pass make progress
        for index in which:
            x = x + self.experts[index](x).tanh()
        return x


@pytest.mark.parametrize(("device", "prefetch_units"), diagonal(["cpu", "fake"], [0, 1]))
def test_fetch_while_optimizer_pass_fills_last_slot(prefetch_units: int, device: str) -> None:
    """The requested unit had no gradient, so it has no pending update that would free a slot."""
    build = seeded(Nested)
    config = make_config(DISK, prefetch_units=prefetch_units, io={"slow_bytes_per_s": 8 << 20})
    batches = [Batch((ids(i), [i % 4])) for i in range(10)]
    expected = train_reference(build(), batches, config)
    run = train(build(), batches, config, device=make_device(device))
    assert run.differences(expected) == []


class OddShapes(nn.Module):
    """Model with parameters of odd shapes and strides, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.strided = nn.Parameter(torch.randn(16, 16).t())
        self.blocks = nn.ModuleList(Block(Checkpointing("non_reentrant")) for _ in range(3))
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain + self.empty.sum()
        for block in self.blocks:
            x = nn.functional.dropout(block.run(x), 0.2)
        x = x @ self.strided + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


@pytest.mark.parametrize(("setup", "precision"), diagonal(SOME_SETUPS, ["fp32", "bf16"]))
def test_odd_parameters_and_dropout_match_plain_torch(setup: Any, precision: str) -> None:
    device, placement = setup
    config = make_config(placement, precision=precision, gradient_accumulation_steps=2)
    batches = [Batch((ids(i),)) for i in range(8)]
    torch.manual_seed(5)
    expected = train_reference(seeded(OddShapes)(), batches, config)
    torch.manual_seed(5)
    run = train(seeded(OddShapes)(), batches, config, device=make_device(device))
    assert run.differences(expected) == []


def weight_penalty_outside_call(model: Any, backward: Callable[..., Any]) -> None:
    """Add weight penalties computed outside the engine call, before and after the forward."""
    module = getattr(model, "module", model)
    penalty = module.blocks[0].up.weight.pow(2).sum()
    loss = model(ids(1))
    backward(loss + 0.1 * penalty + 0.1 * module.blocks[3].down.weight.abs().pow(3).sum())


@pytest.mark.parametrize("setup", SOME_SETUPS, ids=str)
def test_weight_penalty_outside_engine_call_matches_or_raises(setup: Any) -> None:
    """Autograd saves a leaf as itself, which pins nothing: the result is correct, or an error."""
    build, use = CASES["gpt"].build, weight_penalty_outside_call
    problem = None
    try:
        assert_same(engine_gradients(build, use, setup), plain_gradients(build, use))
    except (RuntimeError, InfinityError) as error:
        problem = error
    if problem is not None:
        assert "modified by an inplace operation" in str(problem)
        assert setup[1][0] != "device"
