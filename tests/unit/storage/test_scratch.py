"""Tests of scratch directories: privacy, locks, and cleanup of killed runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.leaks import descriptors

from infinity.common.checksummed_json import read_sealed, write_sealed
from infinity.storage import run_dir as module
from infinity.storage.run_dir import Scratch, remove_dead_runs

# Empty packages: importing `infinity/__init__.py`, mainly torch, would take seconds per process.
EMPTY_PACKAGES = """
import sys, types
for name in ("infinity", "infinity.storage"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{root}/{name.replace('.', '/')}"]
"""
ROOT = Path(module.__file__).resolve().parent.parent.parent
RUN = (
    f"root = {str(ROOT)!r}{EMPTY_PACKAGES}"
    """
import sys, time
from infinity.storage.run_dir import Scratch
scratch = Scratch.create(sys.argv[1])
scratch.path("state").write_bytes(b"x" * 4096)
print(scratch.directory, flush=True)
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
sys.stdin.read()
scratch.remove()
"""
)


@contextmanager
def live_run(root: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(root), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def killed_runs(root: Path, count: int) -> list[Path]:
    """Start `count` runs and kill them together, since each start removes killed runs."""
    with ExitStack() as stack:
        runs = [stack.enter_context(live_run(root)) for _ in range(count)]
    assert all((directory / "state").exists() for _, directory in runs)
    return [directory for _, directory in runs]


def killed_run(root: Path) -> Path:
    return killed_runs(root, 1)[0]


def edit_record(directory: Path, **changes: object) -> None:
    path = directory / "run.json"
    facts = module.RECORD_FORMAT, module.RECORD_VERSION
    write_sealed(path, *facts, read_sealed(path, *facts) | changes)


def names_in(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_scratch_directory_is_private_and_has_record(tmp_path: Path) -> None:
    with Scratch.create(tmp_path) as scratch:
        assert names_in(tmp_path) == [scratch.directory.name]
        assert scratch.directory.name.startswith(f"infinity-run-{os.getpid()}-")
        assert stat.S_IMODE(scratch.directory.stat().st_mode) == 0o700
        record = json.loads((scratch.directory / "run.json").read_text())
        assert record["pid"] == os.getpid()
        assert record["durable"] is False
        assert record["version"] == module.RECORD_VERSION
        assert scratch.path("state") == scratch.directory / "state"
        for name in ("a/b", "..", "", "lock", "run.json"):
            with pytest.raises(AssertionError):
                scratch.path(name)
    assert names_in(tmp_path) == []


def test_remove_deletes_everything_and_is_idempotent(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    before = descriptors()
    scratch = Scratch.create(tmp_path)
    assert descriptors() - before
    scratch.path("weights").write_bytes(b"x" * 10)
    (scratch.directory / "sub").mkdir()
    (scratch.directory / "sub" / "file").write_text("x")
    scratch.path("link").symlink_to(outside)
    scratch.remove()
    scratch.remove()
    assert names_in(tmp_path) == ["outside"]
    assert names_in(outside) == ["keep"]
    assert descriptors() <= before


def test_two_scratch_directories_in_one_process(tmp_path: Path) -> None:
    first, second = Scratch.create(tmp_path), Scratch.create(tmp_path)
    assert first.directory != second.directory
    assert remove_dead_runs(tmp_path) == []
    first.remove()
    assert second.directory.is_dir()
    second.remove()
    assert names_in(tmp_path) == []


def test_cleanup_does_not_lock_durable_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank or process may be about to resume it."""
    durable, other = Scratch.create(tmp_path), Scratch.create(tmp_path)
    durable.keep({})
    durable.remove()
    other._lock.close()  # as a kill does
    locked: list[str] = []

    class RecordingLock(module.LockFile):
        def __init__(self, path: Path, *, dir_fd: int, **options: bool) -> None:
            locked.append(Path(os.readlink(f"/proc/self/fd/{dir_fd}")).name)
            super().__init__(path, dir_fd=dir_fd, **options)

    monkeypatch.setattr(module, "LockFile", RecordingLock)
    assert remove_dead_runs(tmp_path) == [other.directory]
    assert locked == [other.directory.name]
    assert names_in(tmp_path) == [durable.directory.name]


def test_next_run_removes_killed_run_but_not_live_one(tmp_path: Path) -> None:
    with live_run(tmp_path) as (process, live):
        killed = killed_run(tmp_path)
        scratch = Scratch.create(tmp_path)
        assert not killed.exists()
        assert (live / "state").stat().st_size == 4096
        assert remove_dead_runs(tmp_path) == []
        scratch.remove()
        process.communicate()  # closes stdin: the run removes its directory
        assert process.returncode == 0
    assert names_in(tmp_path) == []


def test_cleanup_keeps_durable_and_unreadable_runs(tmp_path: Path) -> None:
    durable, broken, plain = killed_runs(tmp_path, 3)
    edit_record(durable, durable=True)
    (broken / "run.json").write_text('{"durable": fal')
    assert remove_dead_runs(tmp_path) == [plain]
    assert (durable / "state").exists()
    assert (broken / "state").exists()
    edit_record(durable, durable=False)
    (broken / "run.json").unlink()  # data without a record is never removed
    assert remove_dead_runs(tmp_path) == [durable]
    assert (broken / "state").exists()


def test_interrupted_removal_is_completed(tmp_path: Path) -> None:
    first, second, third = killed_runs(tmp_path, 3)
    (first / "state").unlink()
    for name in ("state", "run.json"):
        (second / name).unlink()
    for name in ("state", "run.json", "lock"):
        (third / name).unlink()
    assert remove_dead_runs(tmp_path) == sorted([first, second, third])
    assert names_in(tmp_path) == []


def test_cleanup_ignores_other_names(tmp_path: Path) -> None:
    killed = killed_run(tmp_path)
    others = {}
    for name in (
        "infinity-run-1-xyz",
        "infinity-run-1-0123456789abcdef0",
        "xinfinity-run-1-0123456789abcdef",
        "infinity-run-1-0123456789abcdef\n",
        "infinity-run--0123456789abcdef",
        "data",
    ):
        others[name] = tmp_path / name
        shutil.copytree(killed, others[name])
    link_target = tmp_path / "elsewhere"
    shutil.copytree(killed, link_target)
    link = tmp_path / "infinity-run-2-0123456789abcdef"
    link.symlink_to(link_target)
    (tmp_path / "infinity-run-3-0123456789abcdef").write_text("a file")
    assert remove_dead_runs(tmp_path) == [killed]
    assert all((path / "state").exists() for path in others.values())
    assert (link_target / "state").exists()
    assert link.is_symlink()


def test_symlinked_lock_or_record_is_not_followed(tmp_path: Path) -> None:
    first, second = killed_runs(tmp_path, 2)
    for directory, name in ((first, "lock"), (second, "run.json")):
        target = tmp_path / f"target-{name}"
        (directory / name).rename(target)
        (directory / name).symlink_to(target)
    assert remove_dead_runs(tmp_path) == []


def test_cleanup_ignores_directory_of_other_user(tmp_path: Path) -> None:
    killed = killed_run(tmp_path)
    try:
        os.chown(killed, 65534, 65534)
    except PermissionError as error:
        pytest.skip(f"files cannot be given to another user here: {error}")
    assert remove_dead_runs(tmp_path) == []
    os.chown(killed, 0, 0)
    assert remove_dead_runs(tmp_path) == [killed]


def test_incomplete_directory_is_removed_only_when_old(tmp_path: Path) -> None:
    names = [f".infinity-new-1-{digit * 16}" for digit in "abc"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[1] / "lock").touch()
    (tmp_path / names[2] / "lock").touch()
    (tmp_path / names[2] / "run.json").write_text('{"pid')
    assert remove_dead_runs(tmp_path) == []
    long_ago_s = time.time() - 3600
    for name in names:
        os.utime(tmp_path / name, (long_ago_s, long_ago_s))
    assert remove_dead_runs(tmp_path) == [tmp_path / name for name in names]


def test_directory_is_locked_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record = module.write_record
    removed: list[list[Path]] = []

    def clean_up_concurrently(path: Path) -> None:
        # As a second process starting at this moment.
        removed.append(remove_dead_runs(tmp_path))
        write_record(path)
        removed.append(remove_dead_runs(tmp_path))

    monkeypatch.setattr(module, "write_record", clean_up_concurrently)
    Scratch.create(tmp_path).remove()
    assert removed == [[], []]


def test_concurrent_starts_with_killed_runs(tmp_path: Path) -> None:
    killed_runs(tmp_path, 3)
    script = RUN.replace("sys.stdin.read()", "assert scratch.path('state').exists()")
    script = script.replace(
        "scratch = ", "for _ in range(40): Scratch.create(sys.argv[1]).remove()\nscratch = "
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.DEVNULL)
        for _ in range(4)
    ]
    assert [run.wait(600) for run in runs] == [0] * 4
    assert names_in(tmp_path) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_removes_nothing(tmp_path: Path) -> None:
    scratch = Scratch.create(tmp_path)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            scratch.remove()
            if scratch.directory.is_dir() and remove_dead_runs(tmp_path) == []:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert scratch.directory.is_dir()
    assert remove_dead_runs(tmp_path) == []  # the exit of the child did not release the lock
    scratch.remove()
    assert names_in(tmp_path) == []


def test_child_without_fork_hook_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scratch.create(tmp_path) as scratch:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            scratch.remove()
        assert (scratch.directory / "run.json").exists()
    assert names_in(tmp_path) == []


def test_orphaned_worker_does_not_keep_run_locked(tmp_path: Path) -> None:
    with live_run(tmp_path, "with a worker") as (process, directory):
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            assert remove_dead_runs(tmp_path) == []
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert remove_dead_runs(tmp_path) == [directory]
        finally:
            os.kill(worker, signal.SIGKILL)
