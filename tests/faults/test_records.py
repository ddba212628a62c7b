"""Tests of damage to files of a durable run at any point of a step: exact resume, or an error.

The writes of a run on two drives are recorded. Each test reproduces the drives after a kill at some
write, damages one file or replaces several by those of another time or history of the same run, and
resumes with `resume: auto`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.durable import (
    PLACEMENTS,
    Entry,
    Recorder,
    State,
    copies,
    durable_engine,
    equal,
    gated,
    put,
    state_of,
    step,
    undisturbed,
)
from support.seeds import many

from infinity.checkpoint.commits import COMMIT_NAMES, CommitRecord
from infinity.checkpoint.durable_reader import DurableReader
from infinity.errors import InfinityError

STEPS = 2  # recorded steps
OPTIONS: dict[str, Any] = {
    "placement": PLACEMENTS["moments in RAM"],
    "commit_every": 1,
    "io": {"weights": [2, 1], "block_size": 4096},
}
PRIMARY_FILES = (*COMMIT_NAMES, "checksums.bin", "plan.json", "run.json", "lock", "state.bin")
FILES = [*((0, name) for name in PRIMARY_FILES), (1, "run.json"), (1, "lock"), (1, "state.bin")]


# --- kinds of damage -----------------------------------------------------------------------------


@dataclass
class DamagedFile:
    """File to damage, with other versions of it."""

    path: Path
    base: Path  # the same file at the start of the recording
    other_run: Path
    rng: random.Random


def flip(target: DamagedFile) -> None:
    """Flip one bit, in a nonzero byte if there is one (zeros may be padding)."""
    data = bytearray(target.path.read_bytes())
    used = [i for i, byte in enumerate(data) if byte] or range(len(data))
    if used:
        data[target.rng.choice(used)] ^= 1 << target.rng.randrange(8)
        target.path.write_bytes(data)


def truncate(target: DamagedFile) -> None:
    os.truncate(target.path, target.rng.randrange(target.path.stat().st_size or 1))


def empty(target: DamagedFile) -> None:
    target.path.write_bytes(b"")


def remove(target: DamagedFile) -> None:
    target.path.unlink()


def restore_old(target: DamagedFile) -> None:
    shutil.copyfile(target.base, target.path)


def copy_from_other_run(target: DamagedFile) -> None:
    """Replace by the file of another run of the same model at the same step."""
    shutil.copyfile(target.other_run, target.path)


def swap_files(target: DamagedFile) -> None:
    """Exchange with another file of the same directory."""
    other = target.rng.choice([p for p in sorted(target.path.parent.iterdir()) if p != target.path])
    temporary = target.path.with_name("temporary")
    for source, destination in ((target.path, temporary), (other, target.path), (temporary, other)):
        source.rename(destination)


def fail_reads(target: DamagedFile) -> None:
    """Nothing here: `failing_reads` makes reads of the file raise EIO."""


@contextmanager
def failing_reads(path: Path) -> Iterator[None]:
    pread = os.pread

    def refuse(descriptor: int, *args: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return pread(descriptor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        yield


DAMAGES: list[Callable[[DamagedFile], None]] = [
    flip,
    truncate,
    empty,
    remove,
    restore_old,
    copy_from_other_run,
    swap_files,
    fail_reads,
]


# --- recorded runs -------------------------------------------------------------------------------


@dataclass
class Recorded:
    """Drives at the start of the recording, the log of writes, and the drives of another run."""

    drives: list[Path]
    files: list[Path]
    log: list[Entry]
    step: int  # committed at the start of the recording
    other: Path

    def copy_at(self, root: Path, position: int) -> list[Path]:
        """Return a copy of the drives as after a kill when `position` log entries were done."""
        copied, files = copies(self.drives, root)
        paths_by_name = {str(run): files[str(base)] for run, base in self._run_and_base_paths()}
        for entry in self.log[:position]:
            if entry.what == "write":
                put(paths_by_name, entry, 0, len(entry.data))
        return copied

    def _run_and_base_paths(self) -> Iterator[tuple[Path, Path]]:
        for drive in self.drives:
            for base in drive.rglob("*"):
                yield drive.parent.parent / "run" / base.relative_to(drive.parent), base

    def committed(self, position: int) -> int:
        """Return the last step whose commit was complete in both record files at `position`."""
        records = [CommitRecord.from_bytes((self.files[0] / n).read_bytes()) for n in COMMIT_NAMES]
        complete = written = min(record.step for record in records if record is not None)
        for entry in (e for e in self.log[:position] if e.path.endswith(COMMIT_NAMES[1])):
            if entry.what == "sync":
                complete = written
            elif (record := CommitRecord.from_bytes(entry.data)) is not None:
                written = record.step
        return complete

    def positions(self) -> list[int]:
        """Return positions around each write and sync of a small file, and some others."""
        small = {
            i + after
            for i, entry in enumerate(self.log)
            for after in (0, 1)
            if not entry.path.endswith("state.bin") and entry.what != "mark"
        }
        return sorted(small | set(range(0, len(self.log) + 1, 5)))


def train(paths: list[Path], steps: int, shift: int = 0, **options: Any) -> list[State]:
    """Train with the batches of `shift` steps later; return the state after each step."""
    states = []
    with durable_engine(paths, gated(), **OPTIONS, **options) as engine:
        for _ in range(steps):
            step(engine, shift)
            states.append(state_of(engine))
    return states


def record_run(root: Path, base: list[Path] | None) -> Recorded:
    """Record a run resumed from `base`, or from a new run after one step."""
    paths, other = (
        [root / "run" / f"d{n}" for n in range(2)],
        [root / f"other{n}" for n in range(2)],
    )
    for path, source in zip(paths, base or [None, None], strict=True):
        if source is None:
            path.mkdir(parents=True)
        else:
            shutil.copytree(source, path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder = Recorder(monkeypatch)
        if base is None:
            with durable_engine(paths, gated(), **OPTIONS) as engine:
                step(engine)
        shutil.copytree(root / "run", root / "base")
        with_files = [root / "base" / path.name for path in paths]
        recorder.active = True
        with durable_engine(paths, gated(), **OPTIONS, resume="auto") as engine:
            first = engine.global_steps
            for _ in range(STEPS):
                step(engine)
        recorder.active = False
    for path in other:
        path.mkdir()
    train(other, first)
    (there,) = other[0].iterdir()
    files = [next(drive.iterdir()) for drive in with_files]
    return Recorded(with_files, files, recorder.log, first, there.parent.parent)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """Record a run resumed after a close, and one after a kill between the two commit records."""
    closed = record_run(tmp_path_factory.mktemp("closed"), None)
    synced = [i for i, e in enumerate(closed.log) if e.what == "sync" and "commit-a" in e.path]
    between = closed.copy_at(tmp_path_factory.mktemp("between"), synced[0] + 1)
    killed = record_run(tmp_path_factory.mktemp("killed"), between)
    return {"closed": closed, "killed": killed}


# --- files of several times and histories --------------------------------------------------------


@dataclass
class Histories:
    """A run continued twice from the same commit, with other batches the second time.

    `states` are the expected states by step: first that of the run, then that of the fork.
    """

    run: Recorded
    fork: list[Path]
    states: dict[int, list[State]]

    def source(self, root: Path, rng: random.Random) -> list[Path]:
        if rng.random() < 0.4:
            return self.fork
        return self.run.copy_at(root, rng.choice([0, len(self.run.log), *self.run.positions()]))


@pytest.fixture(scope="module")
def histories(runs: dict[str, Recorded], tmp_path_factory: pytest.TempPathFactory) -> Histories:
    run, root = runs["closed"], tmp_path_factory.mktemp("fork")
    fork = run.copy_at(root, 0)
    with durable_engine(fork, gated(), **OPTIONS, resume="auto") as engine:
        first = engine.global_steps
    states = {n: [undisturbed(n)] for n in range(first + STEPS + 1)}
    for number, state in enumerate(train(fork, STEPS, shift=7, resume="auto"), first + 1):
        states[number].append(state)
    return Histories(run, fork, states)


def replace_files(paths: list[Path], sources: list[Path], files: list[tuple[int, str]]) -> None:
    """Replace files of a run, given by drive and name, by those of other drives."""
    for drive, name in files:
        (target,), (source,) = paths[drive].iterdir(), sources[drive].iterdir()
        shutil.copyfile(source / name, target / name)


def resume_mixed(
    histories: Histories, root: Path, rng: random.Random, files: list[tuple[int, str]]
) -> str:
    """Replace files by those of another time or history; return the error, or "exact"."""
    paths = histories.run.copy_at(root / "here", rng.choice(histories.run.positions()))
    replace_files(paths, histories.source(root / "there", rng), files)
    problems, result = problems_of(paths), "exact"
    try:
        with durable_engine(paths, gated(), **OPTIONS, resume="auto") as engine:
            found = state_of(engine)
            right = [equal(found, state) for state in histories.states[engine.global_steps]]
            assert any(right), f"silently wrong: {files}"
    except InfinityError as error:
        result = str(error)
    assert bool(problems) == (result != "exact"), (problems, result)  # verify and resume agree
    return result


def problems_of(paths: list[Path]) -> list[str]:
    """Return the problems that `infinity checkpoint verify` finds."""
    (directory,) = paths[0].iterdir()
    try:
        with DurableReader(directory, paths) as reader:
            return list(reader.verify())
    except InfinityError as error:
        return [str(error)]


# Records two commits older or newer than the state; then two drives of different times.
MIXED_FILES = [
    [(0, name) for name in COMMIT_NAMES],
    [(0, "checksums.bin"), (0, "state.bin"), (1, "state.bin")],
    [(0, name) for name in ("checksums.bin", *COMMIT_NAMES)],
    [(1, "state.bin")],
]


@pytest.mark.parametrize("files", MIXED_FILES)
@pytest.mark.parametrize("ahead", ["records", "state"])
def test_records_newer_or_older_than_state_are_refused(
    histories: Histories, tmp_path: Path, files: list[tuple[int, str]], ahead: str
) -> None:
    times = [0, len(histories.run.log)]
    (paths, other) = (
        histories.run.copy_at(tmp_path / str(position), position)
        for position in (times if ahead == "records" else reversed(times))
    )
    replace_files(paths, other, files)
    assert problems_of(paths)
    assert resume_and_train(paths, 0, 0) != "exact"


def resume_many_mixed(histories: Histories, root: Path, seeds: range) -> Counter[str]:
    def one(seed: int) -> str:
        rng = random.Random(seed)
        files = rng.sample(FILES, rng.choice((2, 2, 2, 3, 4)))
        result = resume_mixed(histories, root / str(seed), rng, files)
        shutil.rmtree(root / str(seed))
        return "exact" if result == "exact" else "refused"

    return many(seeds, one)


def test_mixed_files_resume_exactly_or_are_refused(histories: Histories, tmp_path: Path) -> None:
    seen = resume_many_mixed(histories, tmp_path, range(24))
    assert seen.keys() == {"exact", "refused"}


@pytest.mark.big
@pytest.mark.timeout(7200)
def test_mixed_files_resume_exactly_or_are_refused_many_seeds(
    histories: Histories, tmp_path: Path
) -> None:
    resume_many_mixed(histories, tmp_path, range(24, 3000))


# --- the tests -----------------------------------------------------------------------------------


def resume_and_train(paths: list[Path], first: int, to: int) -> str:
    """Resume and train to step `to`; return "exact" or the error message."""
    try:
        with durable_engine(paths, gated(), **OPTIONS, resume="auto") as engine:
            found = engine.global_steps
            assert first <= found <= first + 1
            assert equal(state_of(engine), undisturbed(found)), "silently wrong"
            while engine.global_steps < to:
                step(engine)
            assert equal(state_of(engine), undisturbed(engine.global_steps)), "wrong later"
    except InfinityError as error:
        return str(error)
    return "exact"


@pytest.mark.parametrize("run_name", ["closed", "killed"])
def test_kill_without_damage_loses_no_commit(
    runs: dict[str, Recorded], tmp_path: Path, run_name: str
) -> None:
    run = runs[run_name]
    for position in run.positions()[::8]:
        paths = run.copy_at(tmp_path / str(position), position)
        assert resume_and_train(paths, run.committed(position), 0) == "exact"
        shutil.rmtree(tmp_path / str(position))


def damage_file(
    run: Recorded, file: tuple[int, str], root: Path, rng: random.Random, num_positions: int | None
) -> Counter[str]:
    """Apply every kind of damage to a file, each at `num_positions` positions (None: at all)."""
    (drive, name), seen, positions = file, Counter(), run.positions()
    for damage in DAMAGES:
        for position in (
            positions if num_positions is None else rng.sample(positions, num_positions)
        ):
            paths = run.copy_at(root, position)
            path = next(paths[drive].iterdir()) / name
            (other,) = (run.other / f"other{drive}").iterdir()
            damage(DamagedFile(path, run.files[drive] / name, other / name, rng))
            with failing_reads(path) if damage is fail_reads else nullcontext():
                result = resume_and_train(paths, run.committed(position), run.step + STEPS)
            if name in COMMIT_NAMES and damage is not swap_files:
                assert result == "exact", (
                    damage.__name__,
                    position,
                    result,
                )  # the other copy is intact
            assert len(list(paths[drive].iterdir())) == 1, "begun anew, or removed"
            seen["exact" if result == "exact" else "refused"] += 1
            shutil.rmtree(root)
    return seen


@pytest.mark.parametrize(
    ("run_name", "file"),
    [*(("closed", file) for file in FILES), *(("killed", (0, name)) for name in COMMIT_NAMES)],
)
def test_damaged_file_resumes_exactly_or_is_refused(
    runs: dict[str, Recorded], tmp_path: Path, run_name: str, file: tuple[int, str]
) -> None:
    """After a kill between the two records only these are damaged here."""
    num_positions = 3 if run_name == "killed" else 1
    rng = random.Random(f"{run_name} {file}")
    seen = damage_file(runs[run_name], file, tmp_path / "copy", rng, num_positions)
    assert seen["refused"] or file[1] in COMMIT_NAMES, "or the damage is none"


@pytest.mark.big
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("run_name", ["closed", "killed"])
def test_damaged_file_resumes_exactly_or_is_refused_at_all_moments(
    runs: dict[str, Recorded], tmp_path: Path, run_name: str, file: tuple[int, str]
) -> None:
    damage_file(runs[run_name], file, tmp_path / "copy", random.Random(f"{run_name} {file}"), None)
