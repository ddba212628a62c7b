"""Recorder of changes to a directory tree, and simulation of power loss.

Files are distinguished from their names, as on a disk: the bytes of a file are safe once it was
synced, a name once its directory was. Other changes may be lost: bytes by sectors, in any order;
names of a directory in order, so that any number of the last changes is missing.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint.blocks import BlockWriter
from infinity.storage.disk import Disk

SECTOR = 512
# Functions of `os` that change names or sizes, or may create files; the library uses no others.
CALLS = (
    *("open", "mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir"),
    *("write", "pwrite", "ftruncate", "truncate", "posix_fallocate", "fsync", "fdatasync"),
)


@dataclass
class Event:
    """Entry of the log.

    `what` is "bytes" (new sectors and size of a file), "names" (changed names of a directory and
    the files they refer to), "sync" (of a file or a directory) or "mark".
    """

    what: str
    of: int = 0
    size: int = 0
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    names: dict[str, int | None] = field(default_factory=dict)
    text: str = ""


class RecordedTree:
    """Log of all changes below `root` inside of `recording`.

    Files and directories are numbered; `root` is 0. Files that exist at the start are safe.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Event] = []
        self._numbers: dict[int, int] = {os.stat(root).st_ino: 0}
        self._directories: dict[int, dict[str, int]] = {0: {}}
        self._seen: dict[int, tuple[int, int]] = {}  # number -> (mtime, size)
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.RLock()
        self.num_safe = 0  # number of events for files that existed at the start

    @contextmanager
    def recording(self, before: Callable[[str], None] = lambda name: None) -> Iterator[None]:
        """Record changes; `before` is called with the name of each call first, and may raise."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._recorded(name, getattr(os, name), before))
            sync, finish = Disk.sync, BlockWriter.finish

            def sync_disk(disk: Disk) -> None:
                self.look()
                sync(disk)
                for file in disk._files:
                    self._synced(file.path)

            def finish_writer(writer: BlockWriter) -> None:
                finish(writer)  # syncs the file natively
                self.look()
                self._synced(str(writer.path))

            patch.setattr(Disk, "sync", sync_disk)
            patch.setattr(BlockWriter, "finish", finish_writer)
            if not self.log:
                self.look()
                self.num_safe = len(self.log)
            yield
            self.look()

    def mark(self, text: str) -> None:
        """Log a text, for a promise that was made to the user."""
        with self._lock:
            self.look()
            self.log.append(Event("mark", text=text))

    def _recorded(self, name: str, call: Callable[..., Any], before: Callable[[str], None]) -> Any:
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            on_main_thread = threading.current_thread() is threading.main_thread()
            if on_main_thread and not str(arguments[0]).startswith("/proc"):
                before(name)
            if name in ("fsync", "fdatasync"):
                self.look()
                path = os.readlink(f"/proc/self/fd/{arguments[0]}")
                call(*arguments)
                return self._synced(path)
            result = call(*arguments, **keywords)
            if name not in ("open", "write", "pwrite") or (
                name == "open" and arguments[1] & os.O_CREAT
            ):
                self.look()
            return result

        return recorded

    def _synced(self, path: str) -> None:
        with self._lock:
            try:
                number = self._numbers.get(os.stat(path).st_ino)
            except OSError:
                return  # the file has no name any more
            if number is not None:
                self.log.append(Event("sync", number))

    # --- detection of changes ----------------------------------------------------------------

    def look(self) -> None:
        """Log the changes since the last look."""
        with self._lock:
            inodes: set[int] = set()
            self._look_into(self.root, 0, inodes)
            self._numbers = {i: n for i, n in self._numbers.items() if i in inodes or n == 0}

    def _look_into(self, path: Path, number: int, inodes: set[int]) -> None:
        try:
            with os.scandir(path) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        now: dict[str, int] = {}
        children = []
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            inodes.add(status.st_ino)
            child = self._numbers.get(status.st_ino)
            if child is None:
                child = self._numbers[status.st_ino] = 1 + max(self._all_numbers(), default=0)
                if entry.is_dir(follow_symlinks=False):
                    self._directories[child] = {}
                else:
                    self._bytes[child] = b""
            now[entry.name] = child
            children.append((Path(entry.path), child, status))
        before = self._directories[number]
        if now != before:
            names = {name: now.get(name) for name in now.keys() | before.keys()}
            names = {name: child for name, child in names.items() if child != before.get(name)}
            self.log.append(Event("names", number, names=names))
            self._directories[number] = now
        for child_path, child, status in children:
            if child in self._directories:
                self._look_into(child_path, child, inodes)
            elif self._seen.get(child) != (status.st_mtime_ns, status.st_size):
                self._seen[child] = (status.st_mtime_ns, status.st_size)
                self._compare(child_path, child)

    def _all_numbers(self) -> set[int]:
        return {*self._directories, *self._bytes}

    def _compare(self, path: Path, number: int) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        old = self._bytes[number]
        sectors = [(start, data[start : start + SECTOR]) for start in range(0, len(data), SECTOR)]
        pieces = [(start, new) for start, new in sectors if new != old[start : start + SECTOR]]
        if pieces or len(data) != len(old):
            self.log.append(Event("bytes", number, len(data), pieces))
            self._bytes[number] = data

    # --- state after a crash -----------------------------------------------------------------

    def marks(self, cut: int) -> list[str]:
        """Return the texts marked before `cut`."""
        return [event.text for event in self.log[:cut] if event.what == "mark"]

    def left(self, cut: int, target: Path, choose: random.Random | None) -> None:
        """Write to `target` the state that a power loss after `cut` events leaves.

        With `choose` None it is the state after a kill: no change is lost.
        """
        synced = {e.of: i for i, e in enumerate(self.log[:cut]) if e.what == "sync"}
        contents: dict[int, bytearray] = {}
        names: dict[int, dict[str, int]] = {0: {}}
        unsynced: dict[int, list[Event]] = {}
        for index, event in enumerate(self.log[:cut]):
            if event.what not in ("bytes", "names"):
                continue
            safe = choose is None or index < max(self.num_safe, synced.get(event.of, -1))
            if not safe:
                unsynced.setdefault(event.of, []).append(event)
            elif event.what == "names":
                _rename(names.setdefault(event.of, {}), event)
            else:
                _write(contents.setdefault(event.of, bytearray()), event, event.pieces)
        for number, events in unsynced.items():
            assert choose is not None
            if events[0].what == "names":
                for event in events[: choose.randint(0, len(events))]:
                    _rename(names.setdefault(number, {}), event)
                continue
            for event in events:
                fate = choose.choice(("lost", "whole", "torn"))
                if fate != "lost":
                    written = [p for p in event.pieces if fate == "whole" or choose.random() < 0.5]
                    _write(contents.setdefault(number, bytearray()), event, written)
        self._make(target, 0, names, contents)

    def _make(
        self,
        path: Path,
        number: int,
        names: dict[int, dict[str, int]],
        contents: dict[int, bytearray],
    ) -> None:
        path.mkdir(mode=0o700, parents=True)
        for name, child in names.get(number, {}).items():
            if child in self._directories:
                self._make(path / name, child, names, contents)
            else:
                (path / name).write_bytes(contents.get(child, b""))


def _rename(names: dict[str, int], event: Event) -> None:
    for name, number in event.names.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _write(data: bytearray, event: Event, pieces: list[tuple[int, bytes]]) -> None:
    del data[event.size :]
    data.extend(bytes(event.size - len(data)))
    for start, piece in pieces:
        data[start : start + len(piece)] = piece
