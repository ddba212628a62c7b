"""KeyboardInterrupt at any point of engine(), backward() or step(), and then the same bits.

The rule a loop follows: the next micro-batch is number
`global_steps * micro_batches + micro_step`. After an exception in `backward` the
accumulation window starts over (`micro_step` is 0); after one in a forward nothing was lost; a
`step` has happened, or the window starts over. (Struck between `backward` and `step`, a loop may
still call `step`.)

Two ways to strike: a real timer signal, and a trace function that raises at a chosen line of the
library, which reaches narrow places that a timer hardly ever meets and names them when it fails.
Quickly: a few signals, and every function of the library once; at length: any line, often.
"""

from __future__ import annotations

import _weakrefset
import gc
import inspect
import linecache
import os
import queue
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import pytest
import torch
from support import fake_accelerator
from support.fake_accelerator import FakeAccelerator
from support.small import (
    MIXED,
    ON_DEVICE,
    ON_DISK,
    SmallModel,
    assert_nothing_left,
    batch,
    masters,
    poison,
    same,
    settings,
    small_engine,
    small_model,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.engine import Engine
from infinity.errors import PresenceError
from infinity.training.recovery import Recovery

LIBRARY = str(Path(infinity.__file__).parent)
DEAF = {weakref.__file__, _weakrefset.__file__, fake_accelerator.__file__}
STEP = inspect.unwrap(Engine.step).__code__
CALLS = {inspect.unwrap(Engine.__call__).__code__, inspect.unwrap(Engine.backward).__code__, STEP}


def _line_of_try(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if line.strip() == "try:")


STEP_BEGINS = _line_of_try(Engine.step)


def inside_a_call(frame: FrameType | None) -> bool:
    """Whether the frame runs on behalf of engine(), backward() or step().

    On the doorstep of step() the interruption is still the loop's own: the gradients are there,
    and it may call step() again.
    """
    while frame is not None:
        if frame.f_code in CALLS:
            return frame.f_code is not STEP or frame.f_lineno > STEP_BEGINS
        frame = frame.f_back
    return False


def leaves_a_block(frame: FrameType) -> bool:
    """Whether the line is a `with`: on its way out no signal strikes before a lock is released."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def is_deaf(frame: FrameType | None) -> bool:
    """Whether no signal is raised here, or to no effect.

    A handler that put a strike off may be interrupted itself; what was struck is below it. Python
    drops what is raised in a finalizer, or as garbage is collected (hypothesis, too, has a function
    called then, `gc_callback`), and makes a RuntimeError of it where a condition has let go of its
    lock and not begun to wait, or waited and not taken it again. What a fake device does in Python
    a driver does in C.
    """
    if frame is not None and frame.f_code is threading.Condition.wait.__code__:
        line = linecache.getline(threading.__file__, frame.f_lineno)
        if "waiter.acquire(" not in line:
            return True
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__del__", "gc_callback", "_handle") or code.co_filename in DEAF:
            return True
        frame = frame.f_back
    return False


def may_be_struck(frame: FrameType) -> bool:
    """Whether a signal could strike at this line of the library, to an effect."""
    return inside_a_call(frame) and not (leaves_a_block(frame) or is_deaf(frame))


class TimerStrikes:
    """Raises from a signal handler, a random time after `arm`, once the engine is in a call.

    The signal is sent by a thread: pytest-timeout owns SIGALRM. The handler asks it to try again by
    a queue in C: anything in Python could be struck itself, and then raise where none may.
    """

    def __init__(self, seed: int, longest_s: float, most: int = sys.maxsize) -> None:
        self.random = random.Random(seed)
        self.longest_s = longest_s
        self.most = most  # strikes, and then no more
        self.struck: list[str] = []
        self.armed = False
        self._delays: queue.SimpleQueue[float] = queue.SimpleQueue()  # seconds; negative: the end
        self._sender = threading.Thread(target=self._send, daemon=True)

    def arm(self) -> None:
        if len(self.struck) >= self.most:
            return
        self.armed = True
        self._delays.put(self.random.uniform(1e-5, self.longest_s))

    def _send(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while (delay_s := self._delays.get()) >= 0:
            time.sleep(delay_s)
            signal.pthread_kill(main, signal.SIGUSR1)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.armed:
            return
        if not inside_a_call(frame) or is_deaf(frame):
            self._delays.put(1e-4)
            return
        self.armed = False
        assert frame is not None
        self.struck.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        raise KeyboardInterrupt

    def __enter__(self) -> TimerStrikes:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        self._sender.start()
        gc.disable()  # an exception in what the collector calls goes nowhere
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.armed = False
        self._delays.put(-1.0)
        self._sender.join()
        signal.signal(signal.SIGUSR1, self._before)
        gc.enable()


class LineStrikes:
    """Raises at the n-th line of the library that runs inside a call, counted from `arm`.

    `span` is one whole window; `choose` gives n. Only this thread is traced, as only the main
    thread is struck by signals.
    """

    def __init__(self, choose: Callable[[], int], most: int = sys.maxsize) -> None:
        self.choose = choose
        self.most = most  # strikes, and then no more
        self.struck: list[str] = []
        self.lines = 0
        self._at = sys.maxsize

    def arm(self) -> None:
        if len(self.struck) >= self.most:
            return
        self._at = self.lines + self.choose()
        sys.settrace(self._trace)  # Python drops a trace function that raised

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event != "line":
            return self._trace
        self.lines += 1
        if self.lines >= self._at and may_be_struck(frame):
            self._at = sys.maxsize
            self._strike(frame)
        return self._trace

    def _strike(self, frame: FrameType) -> NoReturn:
        name = os.path.relpath(frame.f_code.co_filename, LIBRARY)
        self.struck.append(f"{name}:{frame.f_lineno} ({frame.f_code.co_name})")
        raise KeyboardInterrupt

    def __enter__(self) -> LineStrikes:
        self._before = sys.gettrace()
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)


class EachFunctionStrikes(LineStrikes):
    """Strikes every function of the library that this thread runs inside a call, once each.

    Where it does so is drawn: at the first few lines that run, or after some more. Functions that
    have been struck are not traced any more, so that this ends soon.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(lambda: 0)
        self._random = random.Random(seed)
        self._left: dict[CodeType, int] = {}  # lines to run before the strike; negative: struck

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "call":
            if code not in self._left and code.co_filename.startswith(LIBRARY):
                lines = {line for _, _, line in code.co_lines() if line}
                self._left[code] = self._random.randrange(len(lines))
            return self._trace if self._left.get(code, -1) >= 0 else None
        if event == "line" and self._left[code] >= 0:
            if self._left[code] == 0 and may_be_struck(frame):
                self._left[code] = -1
                self._strike(frame)
            self._left[code] = max(0, self._left[code] - 1)
        return self._trace


class LineStrikesTwice(LineStrikes):
    """Strikes again at a random line of what the first strike makes the engine take back."""

    def __init__(self, seed: int, most: int = sys.maxsize) -> None:
        chosen = random.Random(seed)
        super().__init__(lambda: chosen.randint(1, 15_000), most)
        self._chosen = chosen
        self._mend = Recovery.mend
        self.num_lines: list[int] = []  # of the recoveries that ran to their end
        self.inside: list[str] = []  # where a recovery was struck

    def _mend_struck(self, recovery: Recovery, error: BaseException | None = None) -> None:
        if not recovery.left:
            return
        before, struck = self.lines, len(self.struck)
        self._at = self.lines + self._chosen.randint(1, max(self.num_lines, default=100))
        sys.settrace(self._trace)
        try:
            self._mend(recovery, error)
            self.num_lines.append(self.lines - before)
        finally:
            self.inside += self.struck[struck:]

    def __enter__(self) -> LineStrikesTwice:
        super().__enter__()
        mine = self._mend_struck
        Recovery.mend = lambda *given: mine(*given)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        Recovery.mend = self._mend  # type: ignore[method-assign]
        super().__exit__(*exc_info)


def assert_restored(engine: Engine) -> None:
    """Between two calls no stack of ours or of torch's holds anything."""
    hooks = engine._parts.hooks
    assert hooks.saved.depth == 0
    assert len(hooks.saved._stack) == 0
    assert not hooks._inside
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.is_autocast_cache_enabled()
    assert all(entry.entered == 0 for entry in engine._parts.mover.entries)


def next_index(engine: Engine) -> int:
    return engine.global_steps * engine.plan.micro_batches + engine.micro_step


def train_through(
    engine: Engine, steps: int, strikes: TimerStrikes | LineStrikes | None = None
) -> dict[int, float]:
    """Losses by micro-batch; an interruption is followed by the rule of this module."""
    losses: dict[int, float] = {}
    if strikes is not None:
        strikes.arm()
    while engine.global_steps < steps:
        index = next_index(engine)
        try:
            loss = engine(batch(index))
            losses[index] = float(loss.detach())
            engine.backward(loss)
            engine.step()
        except KeyboardInterrupt:
            assert strikes is not None
            where = strikes.struck[-1]
            if isinstance(strikes, LineStrikesTwice):
                next_index(engine)  # whatever is read first mends what is left
            try:
                assert_restored(engine)
            except AssertionError as error:
                raise AssertionError(f"after a strike at {where}") from error
            strikes.arm()
    return losses


class Checkpointed(SmallModel):
    """Recomputes every block in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.norm(x)


def no_recompute() -> nn.Module:
    return small_model()


def recompute() -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(use_reentrant=False)


def recompute_reentrant() -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(use_reentrant=True)


STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "disk": {"homes": ON_DISK},
    "disk_bf16_two": {"homes": ON_DISK, "precision": "bf16", "gradient_accumulation_steps": 2},
    "mixed_three": {"homes": MIXED, "gradient_accumulation_steps": 3},
    "device": {"homes": ON_DEVICE, "gradient_accumulation_steps": 2},
    "slow_disk": {"homes": ON_DISK, "io": {"slow_bytes_per_s": 60_000_000}, "look_ahead": 0},
}
_undisturbed: dict[tuple[object, ...], tuple[dict[int, float], dict[str, Tensor]]] = {}


def undisturbed(
    path: Path, build: Callable[[], nn.Module], **more: Any
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Losses and masters of a run without strikes, on the device: placement changes no bit."""
    more = {k: v for k, v in more.items() if k not in ("homes", "io", "look_ahead")}
    key = (build.__name__, *sorted(more.items()))
    if key not in _undisturbed:
        with small_engine(path, ON_DEVICE, build(), **more) as engine:
            _undisturbed[key] = train_through(engine, STEPS), masters(engine)
    return _undisturbed[key]


@contextmanager
def explained(strikes: TimerStrikes | LineStrikes) -> Iterator[None]:
    """Name the places that were struck when something fails afterwards."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"struck at: {strikes.struck[-4:]}")
        raise


def run_struck(
    path: Path,
    build: Callable[[], nn.Module],
    strikes: TimerStrikes | LineStrikes,
    *,
    fake_seed: int | None = None,
    fake: FakeAccelerator | None = None,
    **more: Any,
) -> None:
    """Train under strikes, and compare with an undisturbed run."""
    losses, expected = undisturbed(path, build, **more)
    if fake_seed is not None:
        fake = FakeAccelerator(fake_seed)
    arguments = {"device": fake} if fake is not None else {}
    with (
        explained(strikes),
        small_engine(path, model=build(), arguments=arguments, **more) as engine,
    ):
        with strikes:
            seen = train_through(engine, STEPS, strikes)
        assert seen == losses
        assert engine.global_steps == STEPS
        assert engine.skipped_steps == 0
        assert same(masters(engine), expected)
    if fake is not None:
        assert not fake.violations, fake.violations[:3]


# Python itself loses an exception in a callback of its garbage collector (hypothesis has one there)
# or of a weak reference: such a strike has not happened, and is no fault of ours.
may_be_lost = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function (gc_cumulative_time|WeakSet)"
    ":pytest.PytestUnraisableExceptionWarning"
)


@may_be_lost
@pytest.mark.parametrize("case", CASES)
def test_a_timer_strikes_and_the_bits_stay(tmp_path: Path, case: str) -> None:
    run_struck(tmp_path, no_recompute, TimerStrikes(0, longest_s=0.02, most=4), **CASES[case])


@may_be_lost
def test_a_timer_strikes_an_accelerator_and_the_bits_stay(tmp_path: Path) -> None:
    strikes = TimerStrikes(1, longest_s=0.02, most=4)
    run_struck(tmp_path, no_recompute, strikes, fake_seed=1, **CASES["disk_bf16_two"])


@may_be_lost
@pytest.mark.big
@pytest.mark.parametrize("seed", range(1, 17))
@pytest.mark.parametrize("case", CASES)
def test_a_timer_strikes_at_length(tmp_path: Path, case: str, seed: int) -> None:
    strikes = TimerStrikes(seed, longest_s=0.02 if seed % 2 else 0.05)
    fake_seed = seed if seed % 3 == 0 else None
    run_struck(tmp_path, no_recompute, strikes, fake_seed=fake_seed, **CASES[case])


@pytest.mark.parametrize(
    ("case", "build", "fake_seed"),
    [
        ("disk_bf16_two", no_recompute, None),
        pytest.param("mixed_three", recompute_reentrant, None, marks=pytest.mark.big),
        pytest.param("disk_bf16_two", recompute, 3, marks=pytest.mark.big),
    ],
)
def test_every_function_may_be_struck(
    tmp_path: Path, case: str, build: Callable[[], nn.Module], fake_seed: int | None
) -> None:
    strikes = EachFunctionStrikes(1)
    run_struck(tmp_path, build, strikes, fake_seed=fake_seed, **CASES[case])
    assert len(strikes.struck) >= 150


def any_line(seed: int, among: int = 15_000) -> LineStrikes:
    """At a random line of the next window or so (one is 5 000 to 12 000 lines)."""
    chosen = random.Random(seed)
    return LineStrikes(lambda: chosen.randint(1, among))


@pytest.mark.parametrize(("case", "fake_seed"), [("disk_bf16_two", 20), ("mixed_three", None)])
def test_what_a_strike_takes_back_may_be_struck_too(
    tmp_path: Path, case: str, fake_seed: int | None
) -> None:
    strikes = LineStrikesTwice(60, most=12)
    run_struck(tmp_path, no_recompute, strikes, fake_seed=fake_seed, **CASES[case])
    assert len(strikes.inside) >= 2


@pytest.mark.big
@pytest.mark.parametrize("seed", range(300))
def test_any_line_may_be_struck_at_length(tmp_path: Path, seed: int) -> None:
    case = list(CASES)[seed % len(CASES)]
    build = (no_recompute, recompute, recompute_reentrant)[seed % 3]
    fake_seed = seed if seed % 4 == 0 else None
    run_struck(tmp_path, build, any_line(seed), fake_seed=fake_seed, **CASES[case])


@pytest.mark.big
@pytest.mark.parametrize("seed", range(60, 92))
def test_what_a_strike_takes_back_may_be_struck_too_at_length(tmp_path: Path, seed: int) -> None:
    case = ("disk_bf16_two", "mixed_three")[seed % 2]
    build = (no_recompute, recompute, recompute_reentrant)[seed % 3]
    fake_seed = seed if seed % 4 == 0 else None
    strikes = LineStrikesTwice(seed)
    run_struck(tmp_path, build, strikes, fake_seed=fake_seed, **CASES[case])


# --- single points -------------------------------------------------------------------------------


def interrupt_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but its first call ends in an interruption after it has done its work."""
    state = {"left": 1}

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if state["left"]:
            state["left"] = 0
            raise KeyboardInterrupt
        return result

    return wrapped


def test_a_forward_that_is_interrupted_loses_nothing(tmp_path: Path) -> None:
    with small_engine(tmp_path, gradient_accumulation_steps=2) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        gradient = engine.gradient(engine.module.norm.weight).clone()
        handle = engine.module.blocks[1].up.register_forward_hook(interrupt_once(lambda *_: None))
        with pytest.raises(KeyboardInterrupt):
            engine(batch(1))
        handle.remove()
        assert_restored(engine)
        assert engine.micro_step == 1
        assert torch.equal(engine.gradient(engine.module.norm.weight), gradient)


def test_a_backward_that_is_interrupted_starts_the_window_over(tmp_path: Path) -> None:
    with small_engine(tmp_path, gradient_accumulation_steps=2) as engine:
        engine.backward(engine(batch(0)))
        engine.step()
        loss = engine(batch(1))
        weight = engine.module.blocks[1].up.weight
        handle = weight.register_hook(interrupt_once(lambda gradient: None))
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        handle.remove()
        assert_restored(engine)
        assert (engine.micro_step, engine.global_steps) == (0, 0)
        with pytest.raises(infinity.InfinityError, match="has no gradient in this window"):
            engine.gradient(engine.module.norm.weight)
        with pytest.raises(infinity.InfinityError, match="without a backward"):
            engine.step()


def may_be_taken(lock: threading.Condition) -> bool:
    """Whether another thread gets it: the one that holds it may take it again anyway."""
    taken = []

    def take() -> None:
        taken.append(lock.acquire(timeout=20))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


@pytest.mark.parametrize("call", ["forward", "backward", "step"])
def test_a_lock_that_was_taken_and_not_entered_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A signal may strike between the two, where no `with` gives it back."""
    with small_engine(tmp_path) as engine:
        changed = engine._parts.mover.changed
        take = interrupt_once(lambda *_: changed.acquire() and None)
        block = engine.module.blocks[1]
        if call == "forward":
            block.register_forward_hook(take)
        elif call == "backward":
            block.up.weight.register_hook(take)
        else:
            update = engine._stepper.update
            monkeypatch.setattr(engine._stepper, "update", lambda *a: (update(*a), take()))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            engine.backward(engine(batch(0)))
            engine.step()
        assert engine.global_steps == (call == "step")
        assert may_be_taken(changed)


def test_an_interruption_while_the_sweep_is_slow(tmp_path: Path) -> None:
    """The sweep goes on behind an interrupted forward, and its update is not lost."""
    losses, expected = undisturbed(tmp_path, no_recompute)
    with small_engine(tmp_path, io={"slow_bytes_per_s": 20_000_000}, look_ahead=0) as engine:
        seen: dict[int, float] = {}
        while engine.global_steps < STEPS:
            index = engine.global_steps
            loss = engine(batch(index))
            seen[index] = float(loss.detach())
            engine.backward(loss)
            engine.step()
            with any_line(index, among=800) as strikes:
                strikes.arm()
                try:
                    engine(batch(99))
                except KeyboardInterrupt:
                    assert_restored(engine)
        assert seen == losses
        assert same(masters(engine), expected)


def test_close_after_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    for seed in range(3):
        threads = set(threading.enumerate())
        model = small_model()
        engine, *_ = infinity.initialize(model, settings(tmp_path), poison=poison)
        with any_line(seed) as strikes, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            strikes.arm()
            for index in range(50):
                loss = engine(batch(index))
                engine.backward(loss)
                engine.step()
        engine.close()
        assert_nothing_left(tmp_path, threads)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert type(model._parameters) is dict


def test_an_interrupted_initialize_leaves_nothing(tmp_path: Path) -> None:
    for after in range(1, 5):
        threads = set(threading.enumerate())
        seen = {"calls": 0}

        def progress(done: int, total: int, what: str) -> None:
            seen["calls"] += 1  # noqa: B023
            if seen["calls"] == after:  # noqa: B023
                raise KeyboardInterrupt

        model = small_model()
        with pytest.raises(KeyboardInterrupt):
            infinity.initialize(model, settings(tmp_path), progress=progress)
        assert_nothing_left(tmp_path, threads)
        assert type(model._parameters) is dict
        assert not model.blocks[0]._forward_pre_hooks


def test_an_interrupted_materialized_block_writes_its_edits(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        with pytest.raises(KeyboardInterrupt), engine.materialized(engine.module.norm):  # noqa: PT012
            with torch.no_grad():
                engine.module.norm.weight.fill_(3.0)
            raise KeyboardInterrupt
        assert (engine.state_dict()["norm.weight"] == 3.0).all()
        assert engine(batch(0)).isfinite()


def test_an_ordinary_exception_in_a_forward_is_no_different(tmp_path: Path) -> None:
    losses, expected = undisturbed(tmp_path, no_recompute)

    def fail(*_: object) -> None:
        raise ValueError("the user's own")

    with small_engine(tmp_path) as engine:
        seen = {}
        for index in range(STEPS):
            handle = engine.module.blocks[index % 3].register_forward_hook(fail)
            with pytest.raises(ValueError, match="the user's own"):
                engine(batch(index))
            handle.remove()
            assert_restored(engine)
            loss = engine(batch(index))
            seen[index] = float(loss.detach())
            engine.backward(loss)
            engine.step()
        assert seen == losses
        assert same(masters(engine), expected)


def test_an_edit_outside_is_refused_at_the_step_and_training_can_go_on(tmp_path: Path) -> None:
    """The commit of a step that raises must not leave units waiting for an update for ever."""
    with small_engine(tmp_path) as engine:
        engine.backward(engine(batch(0)))
        with torch.no_grad():
            engine.module.blocks[0].up.weight.add_(1.0)
        with pytest.raises(PresenceError, match=r"edited in place[\s\S]*materialized"):  # noqa: PT012
            engine.step()
            engine(batch(1))
        for index in range(2, 4):
            loss = engine(batch(index))
            assert loss.isfinite()
            engine.backward(loss)
            engine.step()
