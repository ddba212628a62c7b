"""What lies below a root: checkpoints, `latest`, and the removal of old ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint import ownership
from infinity.checkpoint.layout import (
    FORMAT_NAME,
    LATEST_NAME,
    MANIFEST_NAME,
    TEMPORARY_SUFFIX,
    check_tag,
    is_our_file,
)
from infinity.checkpoint.refusals import refusal
from infinity.errors import CheckpointError, ConfigError
from infinity.sizes import format_size

_MAX_LATEST_BYTES = 4096
_BEGIN = f'{{\n"format": "{FORMAT_NAME}"'.encode()


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint below a root: its tag, when its manifest was written, and its size."""

    tag: str
    written_ns: int
    nbytes: int


def find_tag(root: Path, tag: str | None) -> str | None:
    """`tag`, or without one what `latest` names; None if there is no `latest`.

    Raises `ConfigError` for a tag that cannot be one, `CheckpointError` for a `latest` that is
    damaged, `MachineError` if it cannot be read.
    """
    if tag is not None:
        return check_tag(tag)
    path = Path(root).expanduser() / LATEST_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            text = file.read(_MAX_LATEST_BYTES).decode()
        return check_tag(text.removesuffix("\n"))
    except FileNotFoundError:
        return None
    except (ConfigError, UnicodeDecodeError) as error:
        reason = error.what if isinstance(error, ConfigError) else "it is no text"
        raise CheckpointError(
            f"{path} does not name a checkpoint: {reason}",
            remedy="name the tag, and save again or write the tag into that file",
        ) from None
    except OSError as error:
        if os.path.islink(path):
            raise CheckpointError(f"{path} is a symbolic link, which is not followed") from None
        raise refusal("reading", path, error) from error


def no_latest(root: Path) -> str:
    """Why `find_tag` found nothing there, in words; told too where `root` is a tag's directory."""
    why = f"{root} has no checkpoint that is called the latest"
    if not (root / MANIFEST_NAME).is_file():
        return why
    whole = root.absolute()
    call = f'load_checkpoint("{whole.parent}", tag="{whole.name}")'
    return f"{why}, but is a checkpoint itself: {call}"


def checkpoints(root: Path) -> list[Found]:
    """All checkpoints below `root`, the last written first. Raises `MachineError`."""
    found = []
    try:
        for entry in os.scandir(root):
            with suppress(OSError, ConfigError):
                if entry.is_dir(follow_symlinks=False) and check_tag(entry.name):
                    found += _found(Path(entry.path))
    except OSError as error:
        raise refusal("reading", root, error) from error
    return sorted(found, key=lambda one: (-one.written_ns, one.tag))


def tags(root: Path) -> list[str]:
    """Names of the directories that have a manifest, sound or not, and what `latest` names.

    The last written first. Raises `MachineError`.
    """
    found: dict[str, int] = {}
    try:
        for entry in os.scandir(root):
            with suppress(OSError, ConfigError):
                if entry.is_dir(follow_symlinks=False):
                    facts = os.lstat(Path(entry.path) / MANIFEST_NAME)
                    found[check_tag(entry.name)] = -facts.st_mtime_ns
    except OSError as error:
        raise refusal("reading", root, error) from error
    latest = find_tag(root, None)
    if latest is not None:
        found.setdefault(latest, 0)
    return sorted(found, key=lambda tag: (found[tag], tag))


def _found(directory: Path) -> list[Found]:
    """The checkpoint in a directory, if there is nothing there but one of ours."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(directory / MANIFEST_NAME, flags), "rb") as file:
        if file.read(len(_BEGIN)) != _BEGIN:
            return []
        written_ns = os.fstat(file.fileno()).st_mtime_ns
    with os.scandir(directory) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
    return [Found(directory.name, written_ns, sum(sizes))]


def prune(
    root: Path, keep: int, *, keep_too: Sequence[str] = (), dry_run: bool = False
) -> list[Found]:
    """Remove all but the last `keep` checkpoints; returns what was removed, or would be.

    Never what `latest` names, nor a tag in `keep_too`, nor a directory that holds anything else
    but a checkpoint. Raises `ConfigError` for `keep` below 1, `MachineError` if the system
    refuses; what was removed before stays removed.
    """
    if keep < 1:
        raise ConfigError(f"at least 1 checkpoint is kept, not {keep}")
    root = Path(root).expanduser()
    kept = {find_tag(root, None), *keep_too}
    found = checkpoints(root)
    others = [one for one in found if one.tag not in kept]
    room = max(keep - (len(found) - len(others)), 0)
    doomed = [one for one in others[room:] if _is_ours_alone(root / one.tag)]
    if not dry_run:
        for one in doomed:
            _remove(root, one)
    return doomed


def discard(root: Path, tag: str) -> None:
    """Remove a checkpoint, if there is one and nothing else is in its directory.

    Raises `MachineError` if the system refuses.
    """
    with suppress(FileNotFoundError):
        for one in _found(root / tag):
            if _is_ours_alone(root / tag):
                _remove(root, one)


def _is_ours_alone(directory: Path) -> bool:
    with os.scandir(directory) as entries:
        return all(is_our_file(e.name) and e.is_file(follow_symlinks=False) for e in entries)


def _remove(root: Path, one: Found) -> None:
    """Renamed first: what is half removed must not look like a checkpoint."""
    lock = ownership.TagLock(root, one.tag)
    try:
        ownership.remove_temporary(root, one.tag)
        os.rename(root / one.tag, root / f"{one.tag}{TEMPORARY_SUFFIX}")
        ownership.remove_temporary(root, one.tag)
        lock.release()
    except OSError as error:
        doing = f"removing the checkpoint of {format_size(one.nbytes)} in"
        raise refusal(doing, root / one.tag, error) from error
    finally:
        lock.let_go()
