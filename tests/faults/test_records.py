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
MORE: dict[str, Any] = {
    "placement": PLACEMENTS["moments in RAM"],
    "commit_every": 1,
    "io": {"weights": [2, 1], "block_size": 4096},
}
FIRST = (*COMMIT_NAMES, "checksums.bin", "plan.json", "run.json", "lock", "state.bin")
FILES = [*((0, name) for name in FIRST), (1, "run.json"), (1, "lock"), (1, "state.bin")]


# --- kinds of damage -----------------------------------------------------------------------------


@dataclass
class Scene:
    """File to damage, with other versions of it."""

    path: Path
    base: Path  # the same file at the start of the recording
    other_run: Path
    choose: random.Random


def flip(scene: Scene) -> None:
    """Flip one bit, in a nonzero byte if there is one (zeros may be padding)."""
    data = bytearray(scene.path.read_bytes())
    used = [i for i, byte in enumerate(data) if byte] or range(len(data))
    if used:
        data[scene.choose.choice(used)] ^= 1 << scene.choose.randrange(8)
        scene.path.write_bytes(data)


def cut(scene: Scene) -> None:
    os.truncate(scene.path, scene.choose.randrange(scene.path.stat().st_size or 1))


def empty(scene: Scene) -> None:
    scene.path.write_bytes(b"")


def lose(scene: Scene) -> None:
    scene.path.unlink()


def set_back(scene: Scene) -> None:
    shutil.copyfile(scene.base, scene.path)


def exchange(scene: Scene) -> None:
    """Replace by the file of another run of the same model at the same step."""
    shutil.copyfile(scene.other_run, scene.path)


def swap(scene: Scene) -> None:
    """Exchange with another file of the same directory."""
    other = scene.choose.choice([p for p in sorted(scene.path.parent.iterdir()) if p != scene.path])
    aside = scene.path.with_name("aside")
    for one, two in ((scene.path, aside), (other, scene.path), (aside, other)):
        one.rename(two)


def fail(scene: Scene) -> None:
    """Nothing here: `failing` makes reads of the file raise EIO."""


@contextmanager
def failing(path: Path) -> Iterator[None]:
    pread = os.pread

    def refuse(descriptor: int, *rest: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return pread(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        yield


DAMAGES: list[Callable[[Scene], None]] = [flip, cut, empty, lose, set_back, exchange, swap, fail]


# --- recorded runs -------------------------------------------------------------------------------


@dataclass
class Recorded:
    """Drives at the start of the recording, the log of writes, and the drives of another run."""

    drives: list[Path]
    files: list[Path]
    log: list[Entry]
    step: int  # committed at the start of the recording
    other: Path

    def moment(self, root: Path, at: int) -> list[Path]:
        """Return a copy of the drives as after a kill when `at` log entries were done."""
        made, files = copies(self.drives, root)
        there = {str(run): files[str(base)] for run, base in self._names()}
        for entry in self.log[:at]:
            if entry.what == "write":
                put(there, entry, 0, len(entry.data))
        return made

    def _names(self) -> Iterator[tuple[Path, Path]]:
        for drive in self.drives:
            for base in drive.rglob("*"):
                yield drive.parent.parent / "run" / base.relative_to(drive.parent), base

    def committed(self, at: int) -> int:
        """Return the last step whose commit was complete in both record files at entry `at`."""
        held = [CommitRecord.from_bytes((self.files[0] / n).read_bytes()) for n in COMMIT_NAMES]
        over = written = min(record.step for record in held if record is not None)
        for entry in (e for e in self.log[:at] if e.path.endswith(COMMIT_NAMES[1])):
            if entry.what == "sync":
                over = written
            elif (record := CommitRecord.from_bytes(entry.data)) is not None:
                written = record.step
        return over

    def moments(self) -> list[int]:
        """Return positions around each write and sync of a small file, and some others."""
        small = {
            i + after
            for i, entry in enumerate(self.log)
            for after in (0, 1)
            if not entry.path.endswith("state.bin") and entry.what != "mark"
        }
        return sorted(small | set(range(0, len(self.log) + 1, 5)))


def train(paths: list[Path], steps: int, shift: int = 0, **more: Any) -> list[State]:
    """Train with the batches of `shift` steps later; return the state after each step."""
    states = []
    with durable_engine(paths, gated(), **MORE, **more) as engine:
        for _ in range(steps):
            step(engine, shift)
            states.append(state_of(engine))
    return states


def record(root: Path, base: list[Path] | None) -> Recorded:
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
            with durable_engine(paths, gated(), **MORE) as engine:
                step(engine)
        shutil.copytree(root / "run", root / "base")
        with_files = [root / "base" / path.name for path in paths]
        recorder.active = True
        with durable_engine(paths, gated(), **MORE, resume="auto") as engine:
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
    one = record(tmp_path_factory.mktemp("closed"), None)
    synced = [i for i, e in enumerate(one.log) if e.what == "sync" and "commit-a" in e.path]
    between = one.moment(tmp_path_factory.mktemp("between"), synced[0] + 1)
    other = record(tmp_path_factory.mktemp("killed"), between)
    return {"closed": one, "killed": other}


# --- files of several times and histories --------------------------------------------------------


@dataclass
class Histories:
    """A run continued twice from the same commit, with other batches the second time.

    `states` are the expected states by step: first that of the run, then that of the fork.
    """

    run: Recorded
    fork: list[Path]
    states: dict[int, list[State]]

    def source(self, root: Path, choose: random.Random) -> list[Path]:
        if choose.random() < 0.4:
            return self.fork
        return self.run.moment(root, choose.choice([0, len(self.run.log), *self.run.moments()]))


@pytest.fixture(scope="module")
def histories(runs: dict[str, Recorded], tmp_path_factory: pytest.TempPathFactory) -> Histories:
    run, root = runs["closed"], tmp_path_factory.mktemp("fork")
    fork = run.moment(root, 0)
    with durable_engine(fork, gated(), **MORE, resume="auto") as engine:
        first = engine.global_steps
    states = {n: [undisturbed(n)] for n in range(first + STEPS + 1)}
    for number, state in enumerate(train(fork, STEPS, shift=7, resume="auto"), first + 1):
        states[number].append(state)
    return Histories(run, fork, states)


def replace_files(paths: list[Path], others: list[Path], files: list[tuple[int, str]]) -> None:
    """Replace files of a run, given by drive and name, by those of other drives."""
    for drive, name in files:
        (here,), (there,) = paths[drive].iterdir(), others[drive].iterdir()
        shutil.copyfile(there / name, here / name)


def mix(
    histories: Histories, root: Path, choose: random.Random, files: list[tuple[int, str]]
) -> str:
    """Replace files by those of another time or history; return the error, or "exact"."""
    paths = histories.run.moment(root / "here", choose.choice(histories.run.moments()))
    replace_files(paths, histories.source(root / "there", choose), files)
    problems, said = problems_of(paths), "exact"
    try:
        with durable_engine(paths, gated(), **MORE, resume="auto") as engine:
            found = state_of(engine)
            right = [equal(found, state) for state in histories.states[engine.global_steps]]
            assert any(right), f"silently wrong: {files}"
    except InfinityError as error:
        said = str(error)
    assert bool(problems) == (said != "exact"), (problems, said)  # verify and resume agree
    return said


def problems_of(paths: list[Path]) -> list[str]:
    """Return the problems that `infinity checkpoint verify` finds."""
    (directory,) = paths[0].iterdir()
    try:
        with DurableReader(directory, paths) as reader:
            return list(reader.verify())
    except InfinityError as error:
        return [str(error)]


# Records two commits older or newer than the state; then two drives of different times.
PAIRS = [
    [(0, name) for name in COMMIT_NAMES],
    [(0, "checksums.bin"), (0, "state.bin"), (1, "state.bin")],
    [(0, name) for name in ("checksums.bin", *COMMIT_NAMES)],
    [(1, "state.bin")],
]


@pytest.mark.parametrize("files", PAIRS)
@pytest.mark.parametrize("ahead", ["records", "state"])
def test_records_newer_or_older_than_state_are_refused(
    histories: Histories, tmp_path: Path, files: list[tuple[int, str]], ahead: str
) -> None:
    times = [0, len(histories.run.log)]
    (paths, other) = (
        histories.run.moment(tmp_path / str(at), at)
        for at in (times if ahead == "records" else reversed(times))
    )
    replace_files(paths, other, files)
    assert problems_of(paths)
    assert go_on(paths, 0, 0) != "exact"


def many_mixed(histories: Histories, root: Path, seeds: range) -> Counter[str]:
    def one(seed: int) -> str:
        choose = random.Random(seed)
        files = choose.sample(FILES, choose.choice((2, 2, 2, 3, 4)))
        said = mix(histories, root / str(seed), choose, files)
        shutil.rmtree(root / str(seed))
        return "exact" if said == "exact" else "refused"

    return many(seeds, one)


def test_mixed_files_resume_exactly_or_are_refused(histories: Histories, tmp_path: Path) -> None:
    seen = many_mixed(histories, tmp_path, range(24))
    assert seen.keys() == {"exact", "refused"}


@pytest.mark.big
@pytest.mark.timeout(7200)
def test_mixed_files_resume_exactly_or_are_refused_many_seeds(
    histories: Histories, tmp_path: Path
) -> None:
    many_mixed(histories, tmp_path, range(24, 3000))


# --- the tests -----------------------------------------------------------------------------------


def go_on(paths: list[Path], at_least: int, to: int) -> str:
    """Resume and train to step `to`; return "exact" or the error message."""
    try:
        with durable_engine(paths, gated(), **MORE, resume="auto") as engine:
            found = engine.global_steps
            assert at_least <= found <= at_least + 1
            assert equal(state_of(engine), undisturbed(found)), "silently wrong"
            while engine.global_steps < to:
                step(engine)
            assert equal(state_of(engine), undisturbed(engine.global_steps)), "wrong later"
    except InfinityError as error:
        return str(error)
    return "exact"


@pytest.mark.parametrize("begun", ["closed", "killed"])
def test_kill_without_damage_loses_no_commit(
    runs: dict[str, Recorded], tmp_path: Path, begun: str
) -> None:
    run = runs[begun]
    for at in run.moments()[::8]:
        paths = run.moment(tmp_path / str(at), at)
        assert go_on(paths, run.committed(at), 0) == "exact"
        shutil.rmtree(tmp_path / str(at))


def damage_one(
    run: Recorded, file: tuple[int, str], root: Path, choose: random.Random, moments: int | None
) -> Counter[str]:
    """Apply every kind of damage to a file, each at `moments` random moments (None: at all)."""
    (drive, name), seen, all_moments = file, Counter(), run.moments()
    for damage in DAMAGES:
        for at in all_moments if moments is None else choose.sample(all_moments, moments):
            paths = run.moment(root, at)
            path = next(paths[drive].iterdir()) / name
            (other,) = (run.other / f"other{drive}").iterdir()
            damage(Scene(path, run.files[drive] / name, other / name, choose))
            with failing(path) if damage is fail else nullcontext():
                said = go_on(paths, run.committed(at), run.step + STEPS)
            if name in COMMIT_NAMES and damage is not swap:
                assert said == "exact", (damage.__name__, at, said)  # the other copy is intact
            assert len(list(paths[drive].iterdir())) == 1, "begun anew, or removed"
            seen["exact" if said == "exact" else "refused"] += 1
            shutil.rmtree(root)
    return seen


@pytest.mark.parametrize(
    ("begun", "file"),
    [*(("closed", file) for file in FILES), *(("killed", (0, name)) for name in COMMIT_NAMES)],
)
def test_damaged_file_resumes_exactly_or_is_refused(
    runs: dict[str, Recorded], tmp_path: Path, begun: str, file: tuple[int, str]
) -> None:
    """After a kill between the two records only these are damaged here."""
    moments = 3 if begun == "killed" else 1
    choose = random.Random(f"{begun} {file}")
    seen = damage_one(runs[begun], file, tmp_path / "copy", choose, moments)
    assert seen["refused"] or file[1] in COMMIT_NAMES, "or the damage is none"


@pytest.mark.big
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("begun", ["closed", "killed"])
def test_damaged_file_resumes_exactly_or_is_refused_at_all_moments(
    runs: dict[str, Recorded], tmp_path: Path, begun: str, file: tuple[int, str]
) -> None:
    damage_one(runs[begun], file, tmp_path / "copy", random.Random(f"{begun} {file}"), None)
