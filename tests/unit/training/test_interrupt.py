"""Tests of interrupts and other exceptions in engine calls.

The first Ctrl-C raises at the end of the engine's call, the second at once. After an exception in
`backward` the accumulation window is discarded (`micro_step` is 0); after one in a forward nothing
is lost; a `step` either completes, or the window is discarded.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection
from support.backward_thread import backward_on_a_thread
from support.fake_accelerator import FakeAccelerator
from support.grids import diagonal
from support.internals import components
from support.small import (
    ON_DISK,
    assert_nothing_left,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from torch import Tensor

import infinity
from infinity.engine import Engine
from infinity.errors import EngineFailedError, ResidencyError
from infinity.model.parameter_map import LostParameters
from infinity.offload.sigint import DEFERRAL

STEPS = 3
WINDOW_OF_TWO = {"gradient_accumulation_steps": 2}


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_from_thread() -> None:
    """Send SIGINT to the process, as a terminal does; Python handles it in the main thread."""
    thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
    thread.start()
    thread.join()


def assert_restored(engine: Engine) -> None:
    """Assert that between calls all hook stacks are empty and SIGINT has its default handler."""
    hooks = components(engine).hooks
    assert hooks.saved.depth == 0
    assert not hooks._forwards
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.is_autocast_cache_enabled()
    assert all(entry.forward_depth == 0 for entry in components(engine).prefetcher.ledger.entries)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Tensor]]:
    with small_engine(tmp_path_factory.mktemp("plain"), **WINDOW_OF_TWO) as engine:
        return train(engine, STEPS), masters(engine)


# --- first interrupt ------------------------------------------------------------------------------


def inject(engine: Engine, name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Run `action` in the middle of each call of this kind; return a function that undoes it."""
    block, internals = engine.module.blocks[1], components(engine)
    if name == "forward":
        return block.up.register_forward_hook(lambda *_: action() and None).remove
    if name == "backward":
        return block.up.weight.register_hook(lambda _: action() and None).remove
    owner, method = {
        "step": (internals.gradients, "square_sum"),
        "commit": (internals.prefetcher, "make_pending"),
        "save": (internals.saver, "start"),
        "load": (internals.gradients, "reset"),
        "read": (engine._values, "_load"),
    }[name]
    plain = getattr(owner, method)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        action()
        return plain(*args, **kwargs)

    setattr(owner, method, wrapper)
    return lambda: setattr(owner, method, plain)


@contextmanager
def interrupt_once(engine: Engine, name: str, send: Callable[[], None] = ctrl_c) -> Iterator[None]:
    """Interrupt the call in the block once; assert that it raises at its end."""
    interrupted: list[int] = []
    undo = inject(
        engine, name, lambda: send() if not interrupted and not interrupted.append(1) else None
    )
    with pytest.raises(KeyboardInterrupt):
        yield
    undo()
    assert interrupted
    assert_restored(engine)


@pytest.mark.parametrize(
    ("device", "send"),
    diagonal(["cpu", "fake", "backward on a thread"], [ctrl_c, interrupt_from_thread]),
)
def test_interrupt_raised_at_end_of_call(
    tmp_path: Path,
    device: str,
    send: Callable[[], None],
    undisturbed: tuple[list[float], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = {} if device == "cpu" else {"device": FakeAccelerator(1)}
    if device == "backward on a thread":
        backward_on_a_thread(monkeypatch)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with small_engine(nvme, arguments=arguments, **WINDOW_OF_TWO) as engine:
        losses = [float(engine(batch(index)).detach()) for index in range(1)]
        with interrupt_once(engine, "forward", send):  # only its result is lost
            engine(batch(0))
        loss = engine(batch(0))
        with interrupt_once(engine, "backward", send):
            engine.backward(loss)
        engine.step()
        for name in ("step", "commit"):
            loss = engine(batch(len(losses)))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            with interrupt_once(engine, name, send):
                engine.step()
            if len(losses) < 4:
                losses.append(float((loss := engine(batch(len(losses)))).detach()))
                engine.backward(loss)
                engine.step()
        with interrupt_once(engine, "save", send):
            engine.save_checkpoint(tmp_path / "saved", "one", wait=True)
        for index in range(4, 2 * STEPS):
            losses.append(float((loss := engine(batch(index))).detach()))
            engine.backward(loss)
            engine.step()
        with interrupt_once(engine, "read", send):
            engine.state_dict()["norm.weight"]
        assert (losses, same(masters(engine), undisturbed[1])) == (undisturbed[0], True)
        with interrupt_once(engine, "load", send):
            engine.load_checkpoint(tmp_path / "saved", "one")
        assert engine.global_steps == 2
        assert train(engine, 1, first=4) == losses[4:]
        assert same(masters(engine), undisturbed[1])


def test_interrupt_deferred_in_module_and_torch_backward(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with interrupt_once(engine, "forward"):
            engine.module(batch(0))
        loss = engine(batch(0))
        with interrupt_once(engine, "backward"):
            loss.backward()
        engine.step()
        assert engine.global_steps == 1


def test_interrupt_in_materialized_block_keeps_edit(tmp_path: Path) -> None:
    """Interrupts in the block, which is user code, and on entry."""
    with small_engine(tmp_path) as engine:
        with pytest.raises(KeyboardInterrupt), engine.materialized(engine.module.norm):  # noqa: PT012
            with torch.no_grad():
                engine.module.norm.weight.fill_(3.0)
            ctrl_c()
        assert (engine.state_dict()["norm.weight"] == 3.0).all()
        with interrupt_once(engine, "read"), engine.materialized(engine.module.norm):
            pytest.fail("the block is not entered")
        assert engine(batch(0)).isfinite()


# --- second interrupt -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "durable"),
    diagonal(["forward", "backward", "step", "commit", "save", "load", "read"], [False, True]),
)
def test_second_interrupt_ends_call_and_engine(
    tmp_path: Path,
    name: str,
    durable: bool,
    undisturbed: tuple[list[float], dict[str, Tensor]],
) -> None:
    nvme, threads = tmp_path / "nvme", set(threading.enumerate())
    nvme.mkdir()
    more: dict[str, Any] = {"durable": True, "resume": "auto"} if durable else {}
    model = small_model()
    engine, *_ = fault_injection.initialize(model, settings(nvme, ON_DISK, **WINDOW_OF_TWO, **more))
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved", "one", wait=True)
    undo = inject(engine, name, lambda: (ctrl_c(), ctrl_c(), pytest.fail("the call continued")))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        train(engine, 1, first=2)
        engine.save_checkpoint(tmp_path / "saved", "two")
        engine.load_checkpoint(tmp_path / "saved", "one")
        engine.state_dict()["norm.weight"]
    undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step = 2 if name in ("forward", "backward", "step") else engine.global_steps + 1
    calls: tuple[Callable[[], Any], ...] = (
        lambda: engine(batch(0)), engine.step, engine.settle, lambda: engine.state_dict(),
        lambda: model(batch(0)), lambda: engine.save_checkpoint(tmp_path / "saved", "three"),
        lambda: engine.load_checkpoint(tmp_path / "saved", "one"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(EngineFailedError, match=f"in step {step}[\\s\\S]*resume"):
            call()
    engine.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.is_autocast_cache_enabled()
    assert type(model._parameters) is LostParameters
    if not durable:
        assert_nothing_left(nvme, threads)
        return
    with persistent_engine(nvme, **WINDOW_OF_TWO, **more) as engine:
        assert engine.resumed
        assert engine.global_steps in (1, 2)
        train(engine, STEPS - engine.global_steps, first=2 * engine.global_steps)
        assert same(masters(engine), undisturbed[1])


@contextmanager
def persistent_engine(path: Path, **more: Any) -> Iterator[Engine]:
    """Yield an engine without removing its directory."""
    engine, *_ = infinity.initialize(small_model(1), settings(path, ON_DISK, **more))
    with engine:
        yield engine


@pytest.mark.parametrize("wait", ["for an update", "for a gradient", "for a save", "for a disk"])
def test_second_interrupt_ends_blocking_wait(tmp_path: Path, wait: str) -> None:
    """The main thread blocks in a lock or in native code that is never released."""
    nvme, gate = tmp_path / "nvme", threading.Event()
    nvme.mkdir()
    with small_engine(nvme, arguments={"device": FakeAccelerator(1)}, **WINDOW_OF_TWO) as engine:
        internals = components(engine)
        if wait == "for an update":
            internals.optimizer_pass.updates.before_change = lambda unit: gate.wait() and None
            train(engine, 1)
            call: Callable[[], Any] = engine.settle
        elif wait == "for a gradient":
            internals.gradients._worker.put(lambda: gate.wait() and None)
            call = lambda: engine.gradient(engine.module.norm.weight)  # noqa: E731
        elif wait == "for a save":
            copy = internals.saver._copy
            internals.saver._copy = lambda put, *, frozen: (gate.wait(), copy(put, frozen=frozen))[
                1
            ]
            engine.save_checkpoint(tmp_path / "saved", "one")
            call = engine.finish_saving
        else:
            store, read = internals.store, internals.store.read
            store.read = lambda *a: (gate.wait(), read(*a))[1]
            call = lambda: engine.state_dict()["norm.weight"]  # noqa: E731

        def send_interrupts() -> None:
            while not gate.wait(0.1):
                if DEFERRAL._calls:  # while the call is running
                    os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=send_interrupts)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            gate.set()
            thread.join()
        with pytest.raises(EngineFailedError, match="resume"):
            engine.settle()


def test_interrupted_close_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    engine, *_ = infinity.initialize(small_model(), settings(tmp_path))
    train(engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(components(engine).binding, "free", lambda unit: (ctrl_c(), ctrl_c()))
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()
    assert_nothing_left(tmp_path, threads)


# --- signal handlers ------------------------------------------------------------------------------


def test_user_signal_handlers_preserved(tmp_path: Path) -> None:
    handled: list[str] = []

    def user_handler(signum: int, frame: object) -> None:
        handled.append("mine")

    def late_handler(signum: int, frame: object) -> None:
        handled.append("late")

    before = signal.signal(signal.SIGINT, user_handler)
    try:
        with small_engine(tmp_path) as engine:
            seen: list[Any] = []
            undo = inject(engine, "forward", lambda: (ctrl_c(), seen.append(list(handled))))
            engine(batch(0))
            assert (seen, handled) == ([[]], ["mine"])  # handled once, at the end
            assert signal.getsignal(signal.SIGINT) is user_handler
            undo()
            undo = inject(engine, "forward", lambda: signal.signal(signal.SIGINT, late_handler))
            engine(batch(0))
            assert signal.getsignal(signal.SIGINT) is late_handler  # set by the user's forward
            undo()
            for handler in (signal.SIG_IGN, signal.SIG_DFL):
                signal.signal(signal.SIGINT, handler)
                undo = inject(
                    engine,
                    "forward",
                    lambda: seen.append(signal.getsignal(signal.SIGINT)),
                )
                engine(batch(0))
                undo()
                assert seen[-1] is handler
            signal.signal(signal.SIGINT, user_handler)
            undo = inject(engine, "forward", lambda: seen.append(signal.getsignal(signal.SIGINT)))
            thread = threading.Thread(target=engine, args=(batch(0),))
            thread.start()
            thread.join()
            assert seen[-1] is user_handler
            undo()
    finally:
        signal.signal(signal.SIGINT, before)


def test_failed_backward_does_not_defer_interrupts(tmp_path: Path) -> None:
    """As when `loss.backward()` raised. A nested call of another engine does not end deferral."""

    def fail(_: Tensor) -> None:
        raise ValueError("the user's own")

    (tmp_path / "other").mkdir()
    (tmp_path / "this").mkdir()
    with small_engine(tmp_path / "other") as other, small_engine(tmp_path / "this") as engine:
        loss = engine(batch(0))
        handle = engine.module.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(ValueError, match="own"):
            loss.backward()
        handle.remove()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        undo = inject(engine, "forward", lambda: (ctrl_c(), other(batch(0))))
        with pytest.raises(KeyboardInterrupt):
            engine(batch(0))
        undo()
        assert not DEFERRAL._calls
        engine.zero_grad()
        assert train(other, 1) == train(engine, 1)


# --- ordinary exceptions --------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_exception_restarts_window_at_most(
    tmp_path: Path, moment: str, undisturbed: tuple[list[float], dict[str, Tensor]]
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("the device's own")

    with small_engine(tmp_path, **WINDOW_OF_TWO) as engine:
        losses = []
        for step in range(STEPS):
            failed = 0
            while engine.global_steps == step:
                index = 2 * engine.global_steps + engine.micro_step
                undo = inject(engine, moment, fail) if not failed and index % 2 else None
                try:
                    loss = engine(batch(index))
                    engine.backward(loss)
                except torch.OutOfMemoryError:
                    failed = 1
                    assert undo is not None
                    undo()
                    assert_restored(engine)
                    assert engine.micro_step == (moment == "forward")
                    if moment == "backward":
                        losses.pop()
                        with pytest.raises(infinity.InfinityError, match="without a backward"):
                            engine.step()
                    continue
                losses.append(float(loss.detach()))
                engine.step()
        assert losses == undisturbed[0]
        assert same(masters(engine), undisturbed[1])


def test_interrupted_initialize_leaves_nothing(tmp_path: Path) -> None:
    for after in range(1, 5):
        threads = set(threading.enumerate())
        seen = {"calls": 0}

        def progress(done: int, total: int, what: str) -> None:
            seen["calls"] += 1  # noqa: B023
            if seen["calls"] == after:  # noqa: B023
                ctrl_c()

        model = small_model()
        with pytest.raises(KeyboardInterrupt):
            infinity.initialize(model, settings(tmp_path), progress=progress)
        assert_nothing_left(tmp_path, threads)
        assert type(model._parameters) is dict
        assert not model.blocks[0]._forward_pre_hooks


def test_unmaterialized_edit_raises_at_step_and_training_continues(tmp_path: Path) -> None:
    """A commit that raises must not leave units waiting for an update forever."""
    with small_engine(tmp_path) as engine:
        engine.backward(engine(batch(0)))
        with torch.no_grad():
            engine.module.blocks[0].up.weight.add_(1.0)
        with pytest.raises(ResidencyError, match=r"edited in place[\s\S]*materialized"):  # noqa: PT012
            engine.step()
            engine(batch(1))
        for index in range(2, 4):
            loss = engine(batch(index))
            assert loss.isfinite()
            engine.backward(loss)
            engine.step()
