"""Crashes of checkpoint writers, and checks of the remaining files.

They run in a child of `support.forked` that forks again: its forks have imported everything and
inherit no thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.checkpoint_files import Sample, content, same_content, sample, save
from support.forked import kill_at_line

from infinity.checkpoint.directory import checkpoints, find_tag, remove_stale
from infinity.checkpoint.reader import CheckpointReader

SHARD = 3000
FOREIGN = ("foreign.tmp", "notes", ".theirs.infinity-lock")
# Calls that change the file system. A crash before any other call leaves the same state as a crash
# before the next of these.
_CALLS = ("open", "mkdir", "rename", "unlink", "rmdir", "ftruncate")


def write_foreign_files(root: Path) -> None:
    """Write files of another program, which must survive."""
    root.mkdir()
    for name in FOREIGN[:2]:
        (root / name).mkdir()
        (root / name / "manifest.json").write_text("mine")
    (root / FOREIGN[2]).write_text("mine")


def content_of(tag: str) -> Sample:
    """Return the content of the checkpoint with this tag."""
    return sample(int(tag), moments=("fp32",), global_steps=int(tag))


def save_next(root: Path, keep_last: int | None) -> str:
    """Write the next checkpoint; return its tag."""
    tags = [int(one.tag) for one in checkpoints(root) if one.tag.isdigit()]
    tag = str(max(tags, default=0) + 1)
    save(root, tag, content_of(tag), SHARD, keep_last=keep_last)
    return tag


def check(root: Path, acknowledged: str | None) -> str:
    """Check that all checkpoints are complete and stale files are removed.

    `acknowledged` is the tag of the last save that is known to have returned. Returns the kinds of
    stale files found, for statistics.
    """
    names = sorted(os.listdir(root))
    tag = find_tag(root, None)
    if acknowledged is not None:
        assert tag is not None, names
        assert int(tag) >= int(acknowledged), (tag, acknowledged)
    if tag is not None:
        with CheckpointReader(root, tag) as reader:  # also removes stale files
            assert list(reader.verify()) == []
        assert same_content(content(root, tag), content_of(tag).content)
    remove_stale(root)
    remaining = sorted(os.listdir(root))
    for one in checkpoints(root):
        if one.tag.isdigit():  # complete, even where `latest` does not name it yet
            assert same_content(content(root, one.tag), content_of(one.tag).content)
    library_names = [name for name in remaining if name not in (*FOREIGN, "latest")]
    assert all(name.isdigit() for name in library_names), remaining
    for name in FOREIGN[:2]:
        assert (root / name / "manifest.json").read_text() == "mine"
    assert (root / FOREIGN[2]).read_text() == "mine"
    kinds = {"lock": "infinity-lock", "tmp": ".tmp", "new": "infinity-new"}
    stale = [k for k, end in kinds.items() if any(n.endswith(end) for n in set(names) - {*FOREIGN})]
    return "+".join(stale) or "nothing"


def fork(body: Callable[[int], Any]) -> tuple[int, int]:
    """Run `body` in a child with the writing end of a pipe; return its id and the reading end."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receiving)
            body(sending)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    return child, receiving


def kill_often(root: Path, moments: list[int | float]) -> Counter[str]:
    """Kill children that save in a loop, after seconds (float) or at a library line (int)."""
    write_foreign_files(root)
    seen: Counter[str] = Counter()
    acknowledged = None
    for moment in moments:
        child, pipe = fork(partial(loop, root, moment))
        os.read(pipe, 1)  # the child has started
        if isinstance(moment, float):
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        with os.fdopen(pipe) as report:
            saved = report.read().split()
        acknowledged = saved[-1] if saved else acknowledged
        seen[check(root, acknowledged)] += 1
    return seen


def loop(root: Path, moment: float, sending: int) -> None:
    os.write(sending, b"\n")
    if isinstance(moment, int):
        kill_at_line(moment)
    while True:
        os.write(sending, f"{save_next(root, 3)}\n".encode())


def die_at_every_call(parent: Path) -> Counter[str]:
    """Exit before each system call of a save and its pruning, one call per attempt."""
    seen: Counter[str] = Counter()
    before = parent / "before"
    write_foreign_files(before)
    for _ in range(2):
        save_next(before, None)
    for number in range(10_000):
        root = parent / f"at-{number}"
        shutil.copytree(before, root)
        child, pipe = fork(partial(die_before, root, number))
        os.close(pipe)
        _, status = os.waitpid(child, 0)
        found = check(root, "2")
        if os.waitstatus_to_exitcode(status) == 0:
            return seen
        assert os.waitstatus_to_exitcode(status) == 9, status
        seen[found] += 1
        save_next(root, 1)  # training goes on
        check(root, "3")
        shutil.rmtree(root)
    raise AssertionError("a save of more than 10,000 calls")


def die_before(root: Path, number: int, _: int) -> None:
    left, original_open = number, os.open

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal left
            if call is not original_open or args[1] & os.O_CREAT:
                if left == 0:
                    os._exit(9)
                left -= 1
            return call(*args, **options)

        return wrapper

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    save_next(root, 1)
