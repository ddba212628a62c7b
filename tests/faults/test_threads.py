"""Tests of engines used by several threads, and of engines dropped without close()."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.leaks import descriptors, native_threads, threads
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from support.waiting import wait_until
from torch import Tensor

import infinity
from infinity.engine import Engine
from infinity.errors import EngineClosedError, ResidencyError
from infinity.storage.reservations import PROCESS


def in_other_thread(do: Callable[[], Any]) -> BaseException | None:
    """Run a call in another thread and wait for it; return the exception it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def engine_calls(engine: Engine, path: Path) -> dict[str, Callable[[], Any]]:
    module = engine.module
    weight = next(iter(module.parameters()))
    return {
        "engine": lambda: engine(batch(5)),
        "module": lambda: module(batch(5)),
        "block": lambda: module.blocks[0](torch.ones(2, 16)),
        "weight": lambda: module.norm.weight,
        "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "step": engine.step,
        "optimizer": engine.optimizer.step,
        "zero_grad": engine.zero_grad,
        "optimizer.zero_grad": engine.optimizer.zero_grad,
        "read_state": lambda: engine.optimizer.read_state(weight),
        "state_dict": engine.state_dict,
        "module.state_dict": module.state_dict,
        "load_state_dict": lambda: engine.load_state_dict({}),
        "materialized": lambda: engine.materialized(module).__enter__(),
        "gradient": lambda: engine.gradient(weight),
        "save": lambda: engine.save_checkpoint(path / "second"),
        "load": lambda: engine.load_checkpoint(path / "second"),
        "settle": engine.settle,
        "eval": engine.eval,
        "close": engine.close,
    }


class CallsFromOtherThread:
    """Hook that makes all calls from another thread, once, while a call is in progress."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self.engine, self.path = engine, path
        self.outcomes: dict[str, BaseException | None] = {}

    def __call__(self, *_: Any) -> None:
        if not self.outcomes:
            for name, call in engine_calls(self.engine, self.path).items():
                self.outcomes[name] = in_other_thread(call)

    def state_dict(self) -> dict[str, Any]:
        """Called during a save, as registered state."""
        self()
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Required of registered state."""

    def assert_refused(self) -> None:
        assert self.outcomes
        for name, error in self.outcomes.items():
            assert isinstance(error, ResidencyError), (name, error)
            assert "'second' used the engine" in str(error), name
        assert self.engine.module.training
        assert not (self.path / "second").exists()


@pytest.mark.parametrize("placement", [ON_DISK, ON_DEVICE])
@pytest.mark.parametrize("during", ["forward", "module", "backward", "users_backward", "save"])
def test_call_from_second_thread_during_a_call_is_refused(
    tmp_path: Path, placement: dict[str, str], during: str
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with small_engine(nvme, placement) as engine:
        losses = train(engine, 3)
        expected = masters(engine)
    with small_engine(nvme, placement) as engine:
        intruder = CallsFromOtherThread(engine, tmp_path)
        found = train(engine, 1)
        block = engine.module.blocks[1]
        if during in ("forward", "module"):
            handle = block.register_forward_hook(intruder)
        else:

            def add_backward_hook(module: Any, args: Any, output: Tensor) -> None:
                if "backward" in during and output.requires_grad:
                    output.register_hook(intruder)

            handle = block.register_forward_hook(add_backward_hook)
        loss = engine.module(batch(1)) if during == "module" else engine(batch(1))
        if during == "users_backward":
            loss.backward()
        else:
            engine.backward(loss)
        if during == "save":
            engine.register_state("intruder", intruder)
            engine.save_checkpoint(tmp_path / "first", wait=True)
        handle.remove()
        engine.step()
        found += [float(loss.detach()), *train(engine, 1, first=2)]
        intruder.assert_refused()
        assert found == losses
        assert same(masters(engine), expected)


def test_engine_call_inside_scheduler_step_is_refused(tmp_path: Path) -> None:
    """The scheduler is stepped inside `engine.step()`."""
    errors: list[ResidencyError] = []

    def factor(step: int) -> float:
        if step:
            with pytest.raises(ResidencyError, match="from inside a step") as caught:
                engines[0](batch(7))
            errors.append(caught.value)
        return 1.0

    engines: list[Engine] = []
    schedule = {"lr_scheduler": lambda it: torch.optim.lr_scheduler.LambdaLR(it, factor)}
    with small_engine(tmp_path, arguments=schedule) as engine:
        engines.append(engine)
        train(engine, 2)
        assert len(errors) == 2
        engines.clear()


def test_calls_may_move_between_threads(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        losses = train(engine, 3)
        expected = masters(engine)
    found: list[float] = []
    with small_engine(tmp_path) as engine:
        pending_losses: list[Tensor] = []
        for index in range(3):
            assert (
                in_other_thread(lambda index=index: pending_losses.append(engine(batch(index))))
                is None
            )
            loss = pending_losses.pop()
            engine.backward(loss) if index % 2 else in_other_thread(lambda: engine.backward(loss))  # noqa: B023
            assert in_other_thread(engine.step) is None
            found.append(float(loss.detach()))
        assert found == losses
        assert same(masters(engine), expected)
        assert in_other_thread(engine.close) is None


def test_failed_backward_releases_the_engine(tmp_path: Path) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("the user's own")

    with small_engine(tmp_path) as engine:
        handle = engine.module.blocks[0].register_forward_hook(
            lambda module, args, output: output.register_hook(fail) and None
        )
        loss = engine.module(batch(0))
        with pytest.raises(ValueError, match="the user's own"):
            loss.backward()
        handle.remove()
        assert in_other_thread(engine.zero_grad) is None
        assert in_other_thread(lambda: train(engine, 1)) is None


@pytest.mark.parametrize("placement", [ON_DISK, MIXED, ON_DEVICE])
def test_unlocked_threads_get_errors_and_exact_results(
    tmp_path: Path, placement: dict[str, str]
) -> None:
    """One thread trains and retries refused calls; the other evaluates continuously."""
    with small_engine(tmp_path, placement) as engine:
        losses = train(engine, 6)
        expected = masters(engine)
    finished, errors, counts = threading.Event(), [], {"ran": 0, "refused": 0}
    with small_engine(tmp_path, placement) as engine:

        def evaluate() -> None:
            while not finished.is_set():
                try:
                    with torch.no_grad():
                        engine(batch(3))
                    counts["ran"] += 1
                except ResidencyError:
                    counts["refused"] += 1
                except BaseException as error:
                    errors.append(error)
                    return

        def retry(call: Callable[[], Any]) -> Any:
            while True:
                with suppress(ResidencyError):
                    return call()

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            found = []
            for index in range(6):
                loss = retry(lambda index=index: engine(batch(index)))
                retry(lambda loss=loss: engine.backward(loss))
                retry(engine.step)
                found.append(float(loss.detach()))
        finally:
            finished.set()
            thread.join()
        assert not errors
        assert found == losses
        assert same(masters(engine), expected)


# --- engines dropped without close() -------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "tier", "reads_state"),
    diagonal(
        ["made", "forward", "backward", "step", "reached", "saving"],
        ["disk", "device", "accelerator"],
        [False, True],
    ),
)
def test_dropped_engine_releases_everything_but_weights(
    tmp_path: Path, tier: str, when: str, reads_state: bool
) -> None:
    before, reserved = (threads(), native_threads(), descriptors()), PROCESS.ram()
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    model = small_model()
    arguments = {"device": FakeAccelerator(1)} if tier == "accelerator" else {}
    placement = ON_DEVICE if tier == "device" else ON_DISK
    config = settings(nvme, placement, step_log=str(tmp_path / "step_log"))
    engine = infinity.initialize(model, config, **arguments)[0]
    optimizer = engine.optimizer
    held: list[Any] = []
    if when in ("backward", "step", "saving"):
        engine.backward(engine(batch(0)))
    if when in ("step", "saving"):
        engine.step()
    if when == "saving":
        engine.save_checkpoint(tmp_path / "saved")
    if when == "forward":
        held.append(engine(batch(0)))
    if when == "reached":
        held.append(model.norm.weight)
    expected = {} if not reads_state else {n: v.clone() for n, v in engine.state_dict().items()}
    weights = sum(unit.shard_bytes for unit in engine.plan.units)
    assert PROCESS.ram() - reserved > weights
    del engine
    assert PROCESS.ram() - reserved <= weights
    with pytest.raises(EngineClosedError, match="was dropped"):
        optimizer.step()
    if reads_state:
        assert same(dict(model.state_dict()), expected)
        assert all(type(module._parameters) is dict for module in model.modules())
        copy.deepcopy(model)(batch(0)).backward()
    else:
        del model
    assert PROCESS.ram() == reserved
    # Joined threads stay in /proc a little longer, also those of earlier tests.
    for count, previous in zip((threads, native_threads, descriptors), before, strict=True):
        assert wait_until(lambda count=count, previous=previous: count() <= previous), (
            count() - previous
        )
    assert not os.listdir(nvme)
    assert "Engine" not in {type(getattr(x, "_infinity_engine", None)).__name__ for x in held}
