"""Engines with durable scratch files, and simulated and real crashes of their disks."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fault_injection
from support.internals import components
from support.models import VOCAB, Stacked
from support.small import batch, settings, small_model
from torch import Tensor, nn

import infinity
from infinity.checkpoint.commits import SmallFile
from infinity.engine import Engine
from infinity.storage.disk import Disk

State = dict[tuple[int, str], Tensor]
SECTOR = 512
PLACEMENTS = {
    "all on disk": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
    "weights in RAM": {"weights": "device", "optimizer_state": "disk", "gradients": "host"},
    "moments in RAM": {"weights": "disk", "optimizer_state": "host", "gradients": "disk"},
    "all in RAM": {"weights": "device", "optimizer_state": "host", "gradients": "host"},
}


class Gated(nn.Module):
    """Model with frozen parameters and a branch that only every other batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model(num_blocks=2)
        self.extra = nn.Linear(16, 16)
        self.fixed = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.rare = nn.Linear(16, 16)
        self.mixed = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.mixed[0].requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.fixed(self.extra(self.inner.features(tokens)))
        if int(tokens.sum()) % 2:
            x = x + self.rare(x)
        return self.inner(tokens) + self.mixed(x).float().square().mean()


def gated() -> Gated:
    torch.manual_seed(3)
    return Gated()


class StackedForBatch(Stacked):
    """`Stacked` model that accepts the tokens of `batch`."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens % VOCAB)


def stacked() -> Stacked:
    torch.manual_seed(3)
    return StackedForBatch()


@contextmanager
def durable_engine(path: Path | list[Path], model: nn.Module, **more: Any) -> Iterator[Engine]:
    """Yield an engine whose steps are committed to `path`."""
    config = settings(Path("unused"), more.pop("placement", None), **{"durable": True, **more})
    config["nvme_path"] = [str(p) for p in path] if isinstance(path, list) else str(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", infinity.errors.InfinityWarning)
        engine, *_ = fault_injection.initialize(model, config, poison=None)
    with engine:
        yield engine


def step_uncommitted(engine: Engine) -> None:
    """Train the next step, whose commit fails while it writes its document."""

    def fail() -> bytes:
        raise RuntimeError("no document")

    engine._checkpoints.document = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError, match="no document"):
        step(engine)
    del engine._checkpoints.document


def step(engine: Engine, shift: int = 0) -> None:
    """Train the next step; batches follow the step count, `shift` steps later."""
    loss = engine(batch(engine.global_steps + shift))
    engine.backward(loss)
    engine.step()


def state_of(engine: Engine) -> State:
    """Return all stored state: weights (frozen ones included), residuals, moments."""
    engine.settle()
    store = components(engine).store
    kinds = engine.plan.precision.kinds
    return {
        (unit.index, kind.value): store.read(unit.index, kind).clone()
        for unit in engine.plan.units
        for kind in kinds
    }


_undisturbed_states: dict[tuple[Any, ...], State] = {}


def undisturbed(
    steps: int,
    precision: str = "fp32",
    build: Callable[[], nn.Module] = gated,
    experts: int | str = "auto",
) -> State:
    """Return the state after `steps` steps without a disk; it does not depend on placement."""
    key = precision, build, experts
    if (*key, steps) not in _undisturbed_states:
        config = settings(Path("unused"), PLACEMENTS["all in RAM"], precision=precision)
        del config["nvme_path"]
        config["experts_per_unit"] = experts
        with infinity.initialize(build(), config)[0] as engine:
            for number in range(max(steps, 5) + 1):
                _undisturbed_states[*key, number] = state_of(engine)
                step(engine)
    return _undisturbed_states[*key, steps]


def equal(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# --- recorded disk writes and simulated power loss ------------------------------------------------


@dataclass
class Entry:
    """Log entry: a write (its data, and when its end was observed), a sync, or a mark."""

    what: str
    path: str = ""
    offset: int = 0
    data: bytes = b""
    done_at: int | None = None  # length of the log when the end of the write was observed


class Recorder:
    """Recorder of every write and sync of state and small files while it is active."""

    def __init__(self, monkeypatch: Any) -> None:
        self.log: list[Entry] = []
        self.active = False
        recorder = self
        submit, sync = Disk._submit, Disk.sync
        write, sync_small = SmallFile.write, SmallFile.sync

        def submit_recorded(disk: Disk, op: int, pieces: Any, *arguments: Any) -> Any:
            entries = recorder._record(disk, pieces) if op == infinity._aio.WRITE else []
            ticket = submit(disk, op, pieces, *arguments)
            return RecordedTicket(ticket, entries, recorder) if entries else ticket

        def sync_recorded(disk: Disk) -> None:
            sync(disk)
            for file in disk._files:
                recorder.add(Entry("sync", file.path))

        def write_recorded(file: SmallFile, offset: int, data: bytes) -> None:
            entry = Entry("write", str(file.path), offset, bytes(data))
            recorder.add(entry)
            write(file, offset, data)
            entry.done_at = len(recorder.log)

        def sync_small_recorded(file: SmallFile) -> None:
            sync_small(file)
            recorder.add(Entry("sync", str(file.path)))

        monkeypatch.setattr(Disk, "_submit", submit_recorded)
        monkeypatch.setattr(Disk, "sync", sync_recorded)
        monkeypatch.setattr(SmallFile, "write", write_recorded)
        monkeypatch.setattr(SmallFile, "sync", sync_small_recorded)

    def add(self, entry: Entry) -> None:
        if self.active:
            self.log.append(entry)

    def mark(self, text: str) -> None:
        self.add(Entry("mark", text))

    def _record(self, disk: Disk, pieces: Any) -> list[Entry]:
        if not self.active:
            return []
        entries = []
        for extent, buffer in pieces:
            data, start = buffer.numpy().tobytes(), 0
            for piece in disk._stripes.pieces(extent.offset, extent.nbytes):
                path = disk._files[piece.path_index].path
                entries.append(
                    Entry("write", path, piece.offset, data[start : start + piece.nbytes])
                )
                start += piece.nbytes
        self.log.extend(entries)
        return entries


@dataclass
class RecordedTicket:
    """Ticket that records in the log when its end was observed."""

    ticket: Any
    entries: list[Entry] = field(default_factory=list)
    recorder: Recorder | None = None

    def done(self) -> bool:
        return bool(self.ticket.done())

    def wait(self) -> None:
        self.ticket.wait()
        for entry in self.entries:
            if entry.done_at is None and self.recorder is not None:
                entry.done_at = len(self.recorder.log)


def crashed(log: list[Entry], cut: int, base: dict[str, Path], choose: random.Random) -> None:
    """Apply a log up to `cut` to copies of the files (original path -> copy) as a power loss may.

    Copies have the contents from before the log. Writes whose end was observed before a sync that
    comes before the cut are applied. Of every other write all sectors, none or some are applied, in
    any order.
    """
    synced: dict[str, int] = {}
    for position, entry in enumerate(log[:cut]):
        if entry.what == "sync":
            synced[entry.path] = position
    unsynced = []
    for entry in log[:cut]:
        if entry.what != "write":
            continue
        if entry.done_at is not None and entry.done_at <= synced.get(entry.path, -1):
            put(base, entry, 0, len(entry.data))
        else:
            unsynced.append(entry)
    choose.shuffle(unsynced)
    for entry in unsynced:
        fate = choose.choice(("lost", "whole", "torn"))
        for start in range(0, len(entry.data), SECTOR):
            if fate == "whole" or (fate == "torn" and choose.random() < 0.5):
                put(base, entry, start, SECTOR)


def put(base: dict[str, Path], entry: Entry, start: int, nbytes: int) -> None:
    with open(base[entry.path], "r+b") as file:
        file.seek(entry.offset + start)
        file.write(entry.data[start : start + nbytes])


def copies(originals: list[Path], root: Path) -> tuple[list[Path], dict[str, Path]]:
    """Copy nvme paths below `root`; return the copies, and each file's copy by original path."""
    targets, files = [], {}
    for number, original in enumerate(originals):
        target = root / f"copy{number}"
        shutil.copytree(original, target)
        targets.append(target)
        for file in original.rglob("*"):
            files[str(file)] = target / file.relative_to(original)
    return targets, files


# --- children that are killed ---------------------------------------------------------------------


def train_and_log(
    root: str, more: dict[str, Any], extra: int | None, build: Callable[[], nn.Module] = gated
) -> None:
    """Resume from the last commit in `root`/nvme, for `extra` steps or until killed.

    Appends each step to `root`/told and saves the final state to `root`/state.pt.
    """
    torch.set_num_threads(1)
    step_log = os.open(Path(root) / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with durable_engine(Path(root) / "nvme", build(), resume="auto", **more) as engine:
        first = engine.global_steps
        os.write(step_log, f"{first}\n".encode())
        while extra is None or engine.global_steps < first + extra:
            step(engine)
            os.write(step_log, f"{engine.global_steps}\n".encode())
        state = state_of(engine)
    torch.save(state, Path(root) / "state.pt")
