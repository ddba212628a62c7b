"""Tests of resuming durable runs: loads within accumulation windows, and random state."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.test_resume import SIMPLEST, Ending, Run, ending, micro_step, straight

from infinity.checkpoint.commits import Document
from infinity.checkpoint.durable_runs import read_run
from infinity.engine import Engine
from infinity.errors import CheckpointError, InfinityWarning

DISK = ("disk", "disk", "disk")
IN_RAM = ("host", "host", "host")


def durable(run: Run, **more: Any) -> Run:
    return Run({**run.config, "durable": True, "commit_every": 1, **more})


@contextmanager
def ignore_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InfinityWarning)
        yield


def differences(one: Ending, other: Ending, losses: int) -> list[str]:
    """Return the differences, comparing only the last `losses` losses."""
    one.losses[:] = one.losses[-losses:]
    other.losses[:] = other.losses[-losses:]
    return one.differences(other)


# --- loads within an accumulation window ----------------------------------------------------------

WINDOW = Run({"precision": "bf16", "gradient_accumulation_steps": 3})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save a checkpoint after four micro-batches: one of three of the second window."""
    with WINDOW.engine(tmp_path / "first", SIMPLEST, seed=1) as engine:
        for index in range(4):
            micro_step(engine, index)
        engine.save_checkpoint(tmp_path / "saved", wait=True)
    return tmp_path / "saved"


@pytest.mark.parametrize("place", [DISK, IN_RAM], ids="-".join)
@pytest.mark.parametrize("more", [0, 1, 2])
def test_load_within_window_is_committed_immediately(
    tmp_path: Path, saved: Path, place: Any, more: int
) -> None:
    """A run resumed after a crash starts from the load, not from the state before it."""
    expected = straight(tmp_path, WINDOW, 8)
    path = tmp_path / "second"
    with ignore_warnings(), durable(WINDOW).engine(path, place, seed=2) as engine:
        micro_step(engine, 70)
        engine.load_checkpoint(saved)
        for index in range(4, 4 + more):  # an incomplete window is no step
            micro_step(engine, index)
        engine.settle()
        (directory,) = path.glob("infinity-run-*")
        shutil.copytree(directory, tmp_path / "copy")
    shutil.rmtree(directory)  # undo what close() committed
    shutil.move(tmp_path / "copy", directory)
    record = read_run(directory).record
    window = Document.from_json(record.document).window
    first = 6 if more == 2 else 4
    assert record.step == (2 if more == 2 else 1)
    assert (window is None) == (more == 2)
    with ignore_warnings(), durable(WINDOW, resume="auto").engine(path, place, seed=3) as engine:
        assert engine.resumed
        assert engine.micro_step == (0 if more == 2 else 1)
        found = ending(engine, [micro_step(engine, index) for index in range(first, 8)])
    assert differences(found, expected, 8 - first) == []


@pytest.mark.parametrize("what", ["gone", "another", "damaged"])
def test_resume_requires_checkpoint_of_the_window(tmp_path: Path, saved: Path, what: str) -> None:
    path = tmp_path / "second"
    with ignore_warnings(), durable(WINDOW).engine(path, DISK, seed=2) as engine:
        engine.load_checkpoint(saved, "global_step1")
    tag = saved / "global_step1"
    if what == "gone":
        shutil.rmtree(tag)
    elif what == "another":
        shutil.rmtree(tag)
        with WINDOW.engine(tmp_path / "first", SIMPLEST, seed=5) as engine:
            micro_step(engine, 0)
            engine.save_checkpoint(saved, tag.name, wait=True)
    else:
        file = tag / "gradient.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    messages = {"gone": "there is no checkpoint", "another": "another checkpoint has that name now"}
    match = messages.get(what, r"gradient\.safetensors is damaged")
    with ignore_warnings(), pytest.raises(CheckpointError, match=match):
        durable(WINDOW, resume="auto").engine(path, DISK, seed=3)
    assert len(list(path.glob("infinity-run-*"))) == 1  # never removed
    with ignore_warnings(), durable(WINDOW).engine(path, DISK, seed=3) as engine:
        assert not engine.resumed


def test_resume_run_with_old_unit_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit outside blocks was once named "rest"; names are stored in plan.json."""
    run = durable(Run({"precision": "bf16"}), resume="auto")
    with monkeypatch.context() as before:
        before.setattr("infinity.model.partitioner.OUTSIDE", "rest")
        with run.engine(tmp_path, DISK, seed=1) as engine:
            micro_step(engine, 0)
    (directory,) = tmp_path.glob("infinity-run-*")
    assert '"name":"rest"' in (directory / "plan.json").read_text()
    with ignore_warnings(), run.engine(tmp_path, DISK, seed=2) as engine:
        assert engine.global_steps == 1


# --- random numbers -------------------------------------------------------------------------------

DROPOUT = Run({"precision": "bf16"})


def draw_random_numbers() -> None:
    torch.rand(3)
    np.random.rand()
    random.random()


def draw_nothing() -> None:
    """Draw no random numbers."""


def run_and_resume(
    root: Path, between: Callable[[Engine], None], inside: Callable[[], None]
) -> tuple[Ending, Ending]:
    """Run six steps at once, and three plus three resumed; call `inside` before each step."""
    endings = []
    for name, cuts in (("straight", (6,)), ("resumed", (3, 6))):
        step = 0
        for session, cut in enumerate(cuts):
            run = durable(DROPOUT, resume="auto")
            with run.engine(root / name, DISK, seed=1 + 10 * session) as engine:
                assert engine.global_steps == step
                if session:
                    between(engine)
                losses = []
                for step in range(step, cut):  # noqa: B020
                    inside()
                    losses.append(micro_step(engine, step))
                step = cut
                if cut == 6:
                    endings.append(ending(engine, losses))
    return endings[0], endings[1]


@pytest.mark.parametrize("inside", [draw_nothing, draw_random_numbers])
@pytest.mark.filterwarnings("ignore::infinity.errors.InfinityWarning")
def test_resume_restores_random_state(tmp_path: Path, inside: Callable[[], None]) -> None:
    """When `initialize` returns, generators have the state of the committed step."""
    one, other = run_and_resume(tmp_path, lambda engine: None, inside)
    assert differences(one, other, 3) == []


def test_random_numbers_drawn_before_loop_warn(tmp_path: Path) -> None:
    expected = r"random numbers were drawn \(torch, numpy, python\) between initialize"
    with pytest.warns(InfinityWarning, match=expected):
        one, other = run_and_resume(tmp_path, lambda engine: draw_random_numbers(), draw_nothing)
    assert differences(one, other, 3) != []


@pytest.mark.parametrize("inside", [draw_nothing, draw_random_numbers])
def test_restore_random_state_before_loop(
    tmp_path: Path, inside: Callable[[], None], recwarn: pytest.WarningsRecorder
) -> None:
    def between(engine: Engine) -> None:
        draw_random_numbers()
        assert engine.restore_random_state()

    one, other = run_and_resume(tmp_path, between, inside)
    assert differences(one, other, 3) == []
    assert not [w for w in recwarn if "random numbers" in str(w.message)]


def test_restore_random_state_without_resume(tmp_path: Path) -> None:
    with DROPOUT.engine(tmp_path, SIMPLEST, seed=1) as engine:
        before = torch.get_rng_state()
        assert not engine.restore_random_state()
        assert torch.equal(before, torch.get_rng_state())
        micro_step(engine, 0)
        engine.save_checkpoint(tmp_path / "saved", wait=True)
        torch.rand(1)
        engine.load_checkpoint(tmp_path / "saved")
        expected = torch.rand(2)
        assert engine.restore_random_state()
        assert torch.equal(expected, torch.rand(2))
