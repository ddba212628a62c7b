"""Files of the previous checkpoint that a new one shares instead of writing them again.

A file is shared by a reflink where the file system supports them, else by a hard link. It must be
in a checkpoint below the same root, not be a link, and be the file that this process wrote there:
same inode, size and modification time. Otherwise the caller writes the bytes.
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

import infinity._aio as _aio
from infinity.checkpoint.manifest import BLOCK_BYTES, FileRecord, Shard, TensorSpec, check_tag
from infinity.common.files import open_new

_FICLONE = 0x40049409  # ioctl: share all blocks of another file
_SOURCE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Written:
    """Checkpoint that this process wrote: the tensors of its streams, and its files.

    `identities` are by file name; see `identity`.
    """

    root: Path
    tag: str
    specs: Mapping[str, Sequence[TensorSpec]]
    files: Sequence[FileRecord]
    identities: Mapping[str, Identity]


def checksums(data: Tensor) -> tuple[int, ...]:
    """Return the CRC32C of every `BLOCK_BYTES` of `data` (uint8, 1-D, on the CPU)."""
    first, size = data.data_ptr(), data.numel()
    return tuple(
        _aio.crc32c(first + start, min(BLOCK_BYTES, size - start))
        for start in range(0, size, BLOCK_BYTES)
    )


def identity(facts: os.stat_result) -> Identity:
    """Return a key of an unchanged file: device, inode, size, modification time."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def share(
    before: Written, stream: str, shards: Sequence[Shard], root: Path, directory: Path
) -> tuple[FileRecord, ...] | None:
    """Create the files of a stream in `directory` from those of the previous checkpoint.

    Their bytes are on stable storage; the names in `directory` are not yet. Returns their records;
    None, with no file left in `directory`, if any cannot be shared. Never raises `OSError`.
    """
    records = tuple(record for record in before.files if record.stream == stream)
    old_files = [(r.name, r.nbytes, r.block_bytes) for r in records]
    if before.root != root or old_files != [(s.name, s.nbytes, BLOCK_BYTES) for s in shards]:
        return None
    if tuple(before.specs.get(stream, ())) != tuple(t for s in shards for t in s.tensors):
        return None
    created: list[Path] = []
    try:
        source = root / check_tag(before.tag)
        if source.is_symlink():
            raise OSError(f"{source} is not the directory that was written")
        for record in records:
            created.append(directory / record.name)
            _share_file(source / record.name, created[-1], before.identities[record.name])
    except OSError:
        for path in created:
            with suppress(OSError):
                path.unlink()
        return None
    return records


def _share_file(old: Path, new: Path, expected: Identity) -> None:
    """Share one file; raises `OSError` unless its identity is `expected`, before and after."""
    descriptor = os.open(old, _SOURCE_FLAGS)
    try:
        if identity(os.fstat(descriptor)) != expected:
            raise OSError(f"{old} is not the file that was written")
        if _clone(descriptor, new):
            info = os.fstat(descriptor)
        else:
            os.link(old, new, follow_symlinks=False)
            info = os.lstat(new)
        if not stat.S_ISREG(info.st_mode) or identity(info) != expected:
            raise OSError(f"{old} was replaced or written by another program")
    finally:
        os.close(descriptor)


def _clone(old: int, new: Path) -> bool:
    """Create and sync a reflink; return False if the file system does not support them."""
    with open_new(new) as file:
        try:
            fcntl.ioctl(file.fileno(), _FICLONE, old)
            os.fsync(file.fileno())
            return True
        except OSError:
            new.unlink()
            return False
