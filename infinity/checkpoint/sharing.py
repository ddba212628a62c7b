"""Files of a checkpoint that are those of the one before: shared rather than written again.

A file is shared by a reflink where the file system has them, else by a hard link. It must lie in a
checkpoint below the same root, be no link, and be the very file that this process wrote there:
same inode, size and time of change. Whatever is not so, the caller writes the bytes instead.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from infinity import _aio
from infinity.checkpoint.layout import BLOCK_BYTES, Shard, TensorSpec, check_tag, is_our_file
from infinity.checkpoint.manifest import FileRecord
from infinity.stable import FILE_MODE

_FICLONE = 0x40049409  # ioctl: share all blocks of another file
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Written:
    """A checkpoint that this process wrote: what its streams hold, and which files they are.

    `identities` are by file name; see `identity`.
    """

    root: Path
    tag: str
    specs: Mapping[str, Sequence[TensorSpec]]
    files: Sequence[FileRecord]
    identities: Mapping[str, Identity]


def checksums(data: Tensor) -> tuple[int, ...]:
    """CRC32C of every `BLOCK_BYTES` of bytes (uint8, 1-D, on the CPU)."""
    first, size = data.data_ptr(), data.numel()
    return tuple(
        _aio.crc32c(first + start, min(BLOCK_BYTES, size - start))
        for start in range(0, size, BLOCK_BYTES)
    )


def identity(facts: os.stat_result) -> Identity:
    """What tells a file that nobody wrote to since: device, inode, size, time of the last write."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def share(
    before: Written, stream: str, shards: Sequence[Shard], root: Path, directory: Path
) -> tuple[FileRecord, ...] | None:
    """Make the files of a stream in `directory` out of those of a checkpoint before.

    Their bytes are on stable storage; the names in `directory` are not yet. Returns their records;
    None, and nothing in `directory`, where any of them cannot be shared. Never raises `OSError`.
    """
    records = tuple(record for record in before.files if record.stream == stream)
    there = [(r.name, r.nbytes, r.block_bytes) for r in records]
    if before.root != root or there != [(s.name, s.nbytes, BLOCK_BYTES) for s in shards]:
        return None
    if tuple(before.specs.get(stream, ())) != tuple(t for s in shards for t in s.tensors):
        return None
    made: list[str] = []
    source = target = -1
    try:
        source = _open_checkpoint(root, before.tag)
        target = os.open(directory, _DIRECTORY | os.O_NOFOLLOW)
        for record in records:
            _share_file(record.name, before.identities[record.name], source, target, made)
    except OSError:
        for name in made:
            with suppress(OSError):
                os.unlink(name, dir_fd=target)
        return None
    finally:
        for descriptor in (source, target):
            if descriptor >= 0:
                os.close(descriptor)
    return records


def _open_checkpoint(root: Path, tag: str) -> int:
    above = os.open(root, _DIRECTORY)
    try:
        found = os.open(check_tag(tag), _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)
    if os.fstat(found).st_uid != os.geteuid():
        os.close(found)
        raise PermissionError(f"{root / tag} belongs to another user")
    return found


def _share_file(name: str, wanted: Identity, source: int, target: int, made: list[str]) -> None:
    """One file; what was made is noted, also where this raises `OSError`."""
    assert is_our_file(name), name
    old = os.open(name, _OLD_FILE, dir_fd=source)
    try:
        facts = os.fstat(old)
        if not stat.S_ISREG(facts.st_mode) or identity(facts) != wanted:
            raise OSError(f"{name} is not the file that was written")
        made.append(name)
        if _clone(old, name, target):
            if identity(os.fstat(old)) != wanted:
                raise OSError(f"{name} was written to meanwhile")
            return
    finally:
        os.close(old)
    os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    facts = os.stat(name, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISREG(facts.st_mode) or identity(facts) != wanted:
        raise OSError(f"{name} was exchanged meanwhile")


def _clone(old: int, name: str, target: int) -> bool:
    """A new file over the same blocks, on stable storage; whether the file system has that."""
    new = os.open(name, _NEW_FILE, FILE_MODE, dir_fd=target)
    try:
        fcntl.ioctl(new, _FICLONE, old)
        os.fsync(new)
        return True
    except OSError:
        os.unlink(name, dir_fd=target)
        return False
    finally:
        os.close(new)
