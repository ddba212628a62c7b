"""Tests of saving weights with killed saves, concurrent saves, symlinks and foreign files."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import forked

from infinity.cli.doctor import _write as write_machine_file
from infinity.cli.init import _write as write_preset
from infinity.common.files import TEMPORARY_NAME, atomic_write
from infinity.errors import ConfigError, DoesNotFitError, InfinityError, MachineError
from infinity.model.weight_directory import INDEX_NAME, SINGLE_NAME
from infinity.model.weight_files import TensorToWrite, WeightFiles, write_shards
from infinity.profiling.trace_recorder import Trace
from infinity.train.directory import RunDirectory
from infinity.train.metrics import Metrics

NAMES = "abc"
MAX_SHARD = {"one file": 48, "two shards": 32, "three shards": 16}
CASES = [
    ("one file", "one file"),
    ("one file", "two shards"),
    ("two shards", "one file"),
    ("two shards", "two shards"),
    ("two shards", "three shards"),
    ("three shards", "two shards"),
]
QUICK = [case for case in CASES if len({*case}) > 1][:3]  # the others are marked big
MODELS = {"nothing": 0, "old": 1, "new": 2, "next": 3}


def save(
    directory: Path, model: str, form: str, on_read: Callable[[str], object] = str
) -> list[Path]:
    """Save a model of three tensors, whose values identify the model."""

    def read(name: str) -> torch.Tensor:
        on_read(name)
        return torch.full((4,), float(MODELS[model]))

    def write_config(folder: Path) -> None:
        (folder / "config.json").write_text(model)

    tensors = [
        TensorToWrite(n, (4,), torch.float32, lambda n=n: read(n))  # type: ignore[misc]
        for n in NAMES
    ]
    return write_shards(directory, tensors, MAX_SHARD[form], write_extra=write_config)


def loaded_model(directory: Path) -> str:
    """Return which model is complete, read by WeightFiles and as transformers does."""
    by_transformers: dict[str, torch.Tensor] = {}
    if (directory / SINGLE_NAME).is_file():
        by_transformers = load_file(directory / SINGLE_NAME)
    elif (directory / INDEX_NAME).is_file():
        weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
        by_transformers = {
            name: load_file(directory / file)[name] for name, file in weight_map.items()
        }
    try:
        with WeightFiles(directory) as files:
            by_weight_files = {name: files.read(name) for name in files.facts}
    except ConfigError:
        by_weight_files = {}
    assert by_weight_files.keys() == by_transformers.keys()
    assert by_weight_files.keys() in (set(), set(NAMES))
    values = {
        v
        for tensors in (by_weight_files, by_transformers)
        for t in tensors.values()
        for v in t.tolist()
    }
    assert len(values) <= 1, "a mix of models"
    return next(name for name, value in MODELS.items() if value == max(values, default=0))


def run_in_child(body: Callable[[], object]) -> int:
    """Run `body` in a child; return its wait status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def before_every_call(callback: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `strike` before each system call that changes files, from now on."""

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                callback(name, args)
            return call(*args, **options)

        return wrapper

    for name in ("open", "mkdir", "rename", "unlink", "rmdir", "fsync", "fchmod"):
        setattr(os, name, wrap(name, getattr(os, name)))


def die_before_call(number: int) -> None:
    remaining = itertools.count(number, -1)

    def die_at_zero(name: str, args: tuple[Any, ...]) -> None:
        if next(remaining) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    before_every_call(die_at_zero)


def killed_at_every_call(root: Path, before: str | None, after: str) -> list[str]:
    """Return the models found after kills before the 1st, 2nd, ... call of a save, and none."""
    torch.set_num_threads(1)
    start, found = root / "start", []
    start.mkdir()
    if before is not None:
        save(start, "old", before)
    (start / "config.json").touch()
    for number in range(1000):
        folder = root / str(number)
        shutil.copytree(start, folder)

        def body(folder: Path = folder, number: int = number) -> None:
            die_before_call(number)
            save(folder, "new", after)

        status = run_in_child(body)
        found.append(loaded_model(folder))
        files = save(folder, "next", [*MAX_SHARD][number % 3])
        assert loaded_model(folder) == "next"
        assert {p.name for p in folder.iterdir()} == {"config.json", *(f.name for f in files)}
        shutil.rmtree(folder)
        if status == 0:
            return found
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    raise AssertionError("a save of more than 1000 calls")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "two shards"),
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.big) for case in CASES if case not in QUICK),
    ],
    ids=str,
)
def test_killed_save_leaves_old_or_new_weights(
    tmp_path: Path, before: str | None, after: str
) -> None:
    found = forked.call(killed_at_every_call, tmp_path, before, after)
    old = "old" if before else "nothing"
    assert found == [old] * found.count(old) + ["new"] * found.count("new")
    assert min(found.count(old), found.count("new")) > 3, found


# --- power loss: each change since the last sync may be on the disk or not ------------------------


def record_calls(root: Path, before: str, after: str) -> list[tuple[str, str, str]]:
    """Return the calls of a save in `root/folder`; copy it to `root/filled` at the first rename."""
    torch.set_num_threads(1)
    folder, calls = root / "folder", []
    save(folder, "old", before)
    (folder / "config.json").unlink()

    def relative_name(path: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        return os.path.relpath(path, folder)

    def record_call(name: str, args: tuple[Any, ...]) -> None:
        if name == "rename" and not (root / "filled").exists():
            shutil.copytree(folder, root / "filled")
        if name in ("rename", "unlink", "fsync") and (name != "unlink" or len(args) == 1):
            calls.append(
                (name, relative_name(args[0]), relative_name(args[1]) if len(args) > 1 else "")
            )

    def body() -> None:
        before_every_call(record_call)
        save(folder, "new", after)
        (root / "calls").write_text(json.dumps(calls))

    assert run_in_child(body) == 0
    return [tuple(call) for call in json.loads((root / "calls").read_text())]


def surviving_calls(
    calls: list[tuple[str, str, str]], end: int
) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the calls that may be on the disk if power is lost before `end`: any since a sync."""
    syncs = [i for i, call in enumerate(calls[:end]) if call[:2] == ("fsync", ".")]
    num_safe = syncs[-1] + 1 if syncs else 0
    unsynced = [call for call in calls[num_safe:end] if call[0] != "fsync"]
    for survives in itertools.product((True, False), repeat=len(unsynced)):
        yield calls[:num_safe] + [
            call for call, survived in zip(unsynced, survives, strict=True) if survived
        ]


@pytest.mark.parametrize(("before", "after"), CASES, ids=str)
def test_power_loss_leaves_old_or_new_weights(tmp_path: Path, before: str, after: str) -> None:
    calls = forked.call(record_calls, tmp_path, before, after)
    first = next(i for i, call in enumerate(calls) if call[0] == "rename")
    synced = {path for name, path, _ in calls[:first] if name == "fsync"}
    assert {path for name, path, _ in calls if name == "rename"} <= synced, "contents first"
    calls, found, tried = calls[first:], set(), set()
    for end in range(len(calls) + 1):
        for survived in surviving_calls(calls, end):
            changes = [call for call in survived if call[0] != "fsync"]
            if str(changes) in tried:
                continue
            tried.add(str(changes))
            folder = tmp_path / "replayed"
            shutil.copytree(tmp_path / "filled", folder)
            for name, path, target in changes:
                if name == "rename":
                    os.rename(folder / path, folder / target)
                else:
                    (folder / path).unlink(missing_ok=True)
            found.add(loaded_model(folder))
            shutil.rmtree(folder)
    assert found == {"old", "new"}


# --- concurrent saves ----------------------------------------------------------------------------


def try_save(directory: Path) -> str:
    try:
        save(directory, "next", "two shards")
    except MachineError as error:
        return error.what
    return "it was let in"


def test_concurrent_save_is_refused(tmp_path: Path) -> None:
    """A save is refused at every tensor of the first, in the same and in another process."""
    messages: list[str] = []

    def try_both(name: str) -> None:
        messages.append(try_save(tmp_path))
        messages.append(forked.call(try_save, tmp_path))

    save(tmp_path, "old", "three shards")
    files = save(tmp_path, "new", "three shards", try_both)
    assert messages == [f"{tmp_path}: weights are being saved there already"] * 6
    assert loaded_model(tmp_path) == "new"
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", *(f.name for f in files)}
    save(tmp_path, "next", "two shards")
    assert loaded_model(tmp_path) == "next"


def test_save_without_flock_fchmod_and_owner_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_enosys(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    for module, call in ((fcntl, "flock"), (os, "fchmod")):
        monkeypatch.setattr(module, call, raise_enosys)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    files = save(tmp_path, "new", "one file")
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", *(f.name for f in files)}


def deny_call(patch: pytest.MonkeyPatch, call: str, target: Path) -> None:
    """Make a system call raise EPERM if it would create or remove `target`."""
    original = getattr(os, call)

    def deny(*paths: Any, **options: Any) -> None:
        if paths[-1] == target:
            raise PermissionError(errno.EPERM, "not yours", str(target))
        original(*paths, **options)

    patch.setattr(os, call, deny)


@pytest.mark.parametrize(
    ("call", "name"), [("rename", "config.json"), ("rename", INDEX_NAME), ("unlink", SINGLE_NAME)]
)
def test_save_failing_at_commit_keeps_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    before = save(tmp_path, "old", "one file" if name == SINGLE_NAME else "two shards")
    with monkeypatch.context() as patch:
        deny_call(patch, call, tmp_path / name)
        with pytest.raises(MachineError, match=r"cannot be saved: not yours \(errno 1\)\s+because"):
            save(tmp_path, "new", "three shards")
    assert loaded_model(tmp_path) == "old"
    if call == "rename":
        assert {p.name for p in tmp_path.iterdir()} == {"config.json", *(f.name for f in before)}
    save(tmp_path, "next", "three shards")
    assert len(list(tmp_path.iterdir())) == 5


def test_old_shard_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = save(tmp_path, "old", "two shards")[0]
    deny_call(monkeypatch, "unlink", shard)
    with pytest.raises(MachineError, match=rf"are saved; of older ones {shard} is left"):
        save(tmp_path, "new", "two shards")
    assert loaded_model(tmp_path) == "new"


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    """A single file of another name in the directory is loaded without the shards."""
    save(tmp_path, "old", "two shards")
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(ConfigError, match=r"2 shard\(s\), model-.*, and no model.*index"):
        WeightFiles(tmp_path)
    save(tmp_path / "other", "new", "one file")
    (tmp_path / "other" / SINGLE_NAME).rename(tmp_path / "other.safetensors")
    with WeightFiles(tmp_path) as files:
        assert {facts.file.name for facts in files.facts.values()} == {"other.safetensors"}


# --- symlinks and modes --------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Target of symlinks, which must not be changed."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"
    assert not path.is_symlink()


@pytest.mark.parametrize("form", MAX_SHARD)
def test_save_does_not_follow_symlinks(tmp_path: Path, victim: Path, form: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shards = [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002")]
    for name in (SINGLE_NAME, INDEX_NAME, "config.json", *shards):
        (folder / name).symlink_to(victim)
        (folder / f".{name}.new").symlink_to(victim)
    save(folder, "new", form)
    assert loaded_model(folder) == "new"
    assert not (folder / "config.json").is_symlink()
    (folder / ".infinity-saving.lock").symlink_to(victim)
    with pytest.raises(MachineError, match="cannot be saved"):
        save(folder, "next", form)
    assert loaded_model(folder) == "new"


WRITERS: dict[str, Callable[[Path], object]] = {
    "machine file": lambda path: write_machine_file(path, "text"),
    "preset": lambda path: write_preset(path, "text", True),
    "trace": lambda path: Trace(path).close(),
    "metrics": lambda path: Metrics(path, after=0).close(),
    "run directory": lambda path: _write_in_run_directory(path),
}


def _write_in_run_directory(path: Path) -> None:
    directory = RunDirectory(path.parent, resume=False)
    try:
        directory.write(path.name, "text")
    finally:
        directory.close()


@pytest.mark.parametrize("what", WRITERS)
def test_other_writers_do_not_follow_symlinks(tmp_path: Path, victim: Path, what: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "config.yaml"
    names = (f".{path.name}.new", f"{path.name}.partial", f"{path.stem}.partial")
    if what != "run directory":  # it must be empty
        for name in names:
            (folder / name).symlink_to(victim)
    before = os.umask(0)
    try:
        WRITERS[what](path)
        assert path.stat().st_mode & 0o777 == 0o644
        path.unlink()
        for special in (victim, Path("/dev/null")):
            path.symlink_to(special)
            with pytest.raises(InfinityError):
                WRITERS[what](path)
            path.unlink()
    finally:
        os.umask(before)


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o022, 0o644), (0o077, 0o600)])
def test_saved_weights_are_not_writable_by_others(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        for form in MAX_SHARD:
            files = save(tmp_path / "new", "new", form)
            for file in (*files, tmp_path / "new" / "config.json"):
                assert file.stat().st_mode & 0o777 == mode
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o775 & ~umask
    finally:
        os.umask(before)


def test_atomic_write_replaces_file_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            (temporary,) = (p for p in tmp_path.iterdir() if p != path)
            assert TEMPORARY_NAME.fullmatch(temporary.name)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    for special in (tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"), atomic_write(special):
            pass
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_killed_saves_are_removed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers may be as large as the model, so they are removed before free space is checked."""
    (tmp_path / f".infinity-saving-{16 * '0'}").mkdir()
    (tmp_path / "model-00000000-00001-of-00002.safetensors").touch()

    def usage(path: Path) -> Any:
        assert [p.name for p in path.iterdir()] == [".infinity-saving.lock"]
        return type("Usage", (), {"free": 0})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(DoesNotFitError):
        save(tmp_path, "new", "one file")
    assert list(tmp_path.iterdir()) == []
