"""Atomic writer of checkpoints: complete under its name, or absent.

All files are written to `ROOT/TAG.tmp` and synced, the manifest last; then the directory is renamed
to TAG, and then `latest` is replaced. Files of a writer that died are removed by the next one.
"""

from __future__ import annotations

import json
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import infinity._aio as _aio
from infinity.checkpoint.blocks import WRITES_IN_FLIGHT, BlockWriter, Pool
from infinity.checkpoint.directory import (
    TagLock,
    new_latest_name,
    prune,
    refusal,
    remove_stale,
    remove_temporary,
)
from infinity.checkpoint.manifest import (
    BLOCK_BYTES,
    BUFFERS,
    FROZEN,
    INDEX,
    LATEST_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_SHARD_BYTES,
    MODEL,
    TEMPORARY_SUFFIX,
    FileRecord,
    Manifest,
    Shard,
    TensorSpec,
    check_tag,
    cut,
)
from infinity.checkpoint.manifest_check import problems as disagreements
from infinity.checkpoint.shared_files import Written, checksums, identity, share
from infinity.common.files import (
    FILE_MODE,
    FOLDER_MODE,
    SHARED_FOLDER_MODE,
    free_bytes,
    open_new,
    sync_directory,
    write_new,
)
from infinity.common.sizes import format_size
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    InfinityError,
    MachineError,
    listed,
)
from infinity.model.weight_directory import INDEX_NAME


def files_of(
    streams: Mapping[str, Sequence[TensorSpec]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[Shard]]:
    """Return the files of all streams; raises as `cut` does."""
    # Hugging Face looks for model.safetensors before it looks for an index of several files.
    several = any(streams.get(stream) for stream in (FROZEN, BUFFERS))
    return {
        stream: cut(stream, specs, max_shard_bytes, numbered=several and stream == MODEL)
        for stream, specs in streams.items()
    }


def temporary_directory(root: Path, tag: str) -> Path:
    """Return the directory of a checkpoint while it is written."""
    return root.expanduser().absolute() / f"{tag}{TEMPORARY_SUFFIX}"


_SPARE_BYTES = 1 << 20  # manifest, index and directories, without the checksums
_BYTES_PER_CHECKSUM = 11  # decimal, with a separator


class CheckpointWriter:
    """Writer of one checkpoint, from start to end; used by one thread at a time.

    After an error in `write` or `finish` no files of it are left on disk.
    """

    def __init__(
        self,
        root: Path,
        tag: str,
        streams: Mapping[str, Sequence[TensorSpec]],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        before: Written | None = None,
        same: Sequence[str] = (),
    ) -> None:
        """Create `ROOT/TAG.tmp`, and ROOT if only that is missing.

        `streams`: the tensors to write, in byte order. `same` names streams whose bytes are
        identical in `before`; their files are shared with it if possible (`shares`), and must not
        be written then. Raises `ConfigError` for an invalid tag, name, dtype or size,
        `CheckpointError` if the tag exists or is being written, `DoesNotFitError` if the disk has
        too few free bytes, `MachineError` if the directory cannot be written.
        """
        check_tag(tag)
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes}, not at least 1")
        self.root = Path(root).expanduser().absolute()
        self.tag = tag
        self.path = self.root / tag
        self._temporary = temporary_directory(root, tag)
        self._specs = {stream: tuple(specs) for stream, specs in streams.items()}
        files = files_of(self._specs, max_shard_bytes)
        self._streams = {stream: _StreamFiles(shards) for stream, shards in files.items()}
        self.written: Written | None = None  # set by `finish`
        self._previous = before
        self._unchanged = same
        self._engine: _aio.Engine | None = None
        self._pool: Pool | None = None
        self._lock: TagLock | None = None
        self._identity: tuple[int, int] | None = None
        self._outcome: str | None = None
        self._created_root = False
        with self._aborting():
            self._begin()

    def _begin(self) -> None:
        if not self.root.is_dir():
            try:
                self.root.mkdir(SHARED_FOLDER_MODE)
                self._created_root = True
                sync_directory(self.root.parent)
            except FileExistsError:
                raise MachineError(
                    f"{self.root} is not a directory",
                    remedy="save to a directory, or to a name that is not taken",
                ) from None
            except FileNotFoundError as error:
                raise MachineError(
                    f"the directory {self.root.parent} does not exist",
                    remedy=f"mkdir -p {self.root}",
                ) from error
        remove_stale(self.root)
        self._lock = TagLock(self.root, self.tag)
        if os.path.lexists(self.path):
            if not self.path.is_dir():
                raise CheckpointError(
                    f"{self.path} is not a directory",
                    because="the checkpoint would be saved there, and a file is never replaced",
                    remedy="save with another tag, or move that file first",
                )
            raise CheckpointError(
                f"the checkpoint {self.path} exists already",
                because="a checkpoint is never overwritten",
                remedy="save with another tag, or remove that directory first",
            )
        remove_temporary(self.root, self.tag)
        self._temporary.mkdir(FOLDER_MODE)
        self._identity = _identity(self._temporary)
        if self._previous is not None:
            for name, stream in self._streams.items():
                if name in self._unchanged and stream.missing:
                    stream.shared = share(
                        self._previous, name, stream.shards, self.root, self._temporary
                    )
        self._check_free_space()
        self._engine = _aio.Engine(block_size=BLOCK_BYTES, queue_depth=WRITES_IN_FLIGHT)
        self._pool = Pool(self._engine, BLOCK_BYTES, len(self._streams))

    def shares(self, stream: str) -> bool:
        """Return True if a stream is complete, with the files of the previous checkpoint."""
        files = self._streams.get(stream)
        return files is not None and files.shared is not None

    def discard_shared_files(self, stream: str) -> None:
        """Remove the shared files of a stream, which is written instead. Raises like `write`."""
        with self._aborting():
            files = self._streams[stream]
            for record in files.shared or ():
                (self._temporary / record.name).unlink()
            files.shared = None

    def create_sparse_files(self, streams: Iterable[str]) -> None:
        """Create sparse files for streams that `RangeWriter`s fill; raises like `write`.

        Their records must be passed to `adopt` before `finish`.
        """
        with self._aborting():
            for shard in (shard for name in streams for shard in self._streams[name].shards):
                with open_new(self._temporary / shard.name) as file:
                    os.ftruncate(file.fileno(), shard.nbytes)

    def adopt(self, records: Mapping[str, tuple[FileRecord, ...]]) -> None:
        """Mark streams as complete, with these files."""
        for name, files in records.items():
            self._streams[name].shared = files

    @property
    def nbytes(self) -> int:
        """Bytes to write, without manifest and index."""
        return sum(s.nbytes for s in self._streams.values() if s.shared is None)

    def _check_free_space(self) -> None:
        checksums = self.nbytes // BLOCK_BYTES * _BYTES_PER_CHECKSUM
        needed = self.nbytes + checksums + _SPARE_BYTES
        free = free_bytes(self.root)
        if free < needed:
            raise DoesNotFitError(
                f"the checkpoint {self.path} needs {format_size(needed)}, but "
                f"only {format_size(free)} are free: {format_size(needed - free)} are missing",
                remedy="free disk space, save to another drive, or keep fewer (keep_last)",
            )

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort if the block fails; translate system errors."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise refusal("saving", self.path, error, self.nbytes) from error
            raise

    def write(self, stream: str, data: Tensor) -> None:
        """Write the next bytes of a stream; they are copied before this returns.

        `data`: uint8, 1-D, on the CPU, of any length. Raises `ConfigError` for more bytes than the
        stream lacks, `DoesNotFitError` or `MachineError` if the disk refuses.
        """
        self._check_open()
        with self._aborting():
            files = self._streams.get(stream)
            if files is None:
                raise ConfigError(f"{stream!r} is not a stream of this checkpoint")
            if data.dtype is not torch.uint8 or data.dim() != 1 or data.device.type != "cpu":
                raise ConfigError(
                    f"the stream {stream!r} takes 1-D uint8 tensors on the CPU, not "
                    f"{data.dim()}-D {data.dtype} on {data.device}"
                )
            missing = 0 if files.shared is not None else files.missing
            if data.numel() > missing:
                raise ConfigError(
                    f"{data.numel()} bytes for the stream {stream!r}, which lacks {missing}"
                )
            assert self._pool is not None
            files.write(data.detach(), self._temporary, self._pool)

    def finish(
        self, manifest: Manifest, *, save_latest: bool = True, keep_last: int | None = None
    ) -> Path:
        """Publish the checkpoint; return its directory.

        `manifest.files` is filled in. With `save_latest` the file `latest` names it; with
        `keep_last` all but that number of checkpoints are removed. Raises `ConfigError` if bytes
        are missing or the manifest has other tensors, and like `write`.
        """
        self._check_open()
        with self._aborting():
            try:
                is_valid = keep_last is None or operator.index(keep_last) >= 1
            except TypeError:
                is_valid = False
            if not is_valid:
                raise ConfigError(f"keep_last is {keep_last!r}, not an integer of at least 1")
            self._check_complete(manifest)
            records = self._finish_files()
            files = {r.name: identity(os.lstat(self._temporary / r.name)) for r in records}
            if index := _index_text(manifest, self._streams).encode():
                write_new(self._temporary / INDEX_NAME, index, FILE_MODE)
                sums = checksums(torch.frombuffer(bytearray(index), dtype=torch.uint8))
                records.append(FileRecord(INDEX_NAME, INDEX, len(index), BLOCK_BYTES, sums))
            data = replace(manifest, files=tuple(records)).to_bytes()
            if len(data) > MAX_MANIFEST_BYTES:
                raise ConfigError(
                    f"data other than tensors comes to {format_size(len(data))}, more "
                    f"than {format_size(MAX_MANIFEST_BYTES)}",
                    because="client_state and registered states become text in the manifest",
                    remedy="register large tensors as buffers, or save them in a separate file",
                )
            write_new(self._temporary / MANIFEST_NAME, data, FILE_MODE)
            sync_directory(self._temporary)
            self._publish(save_latest=save_latest)
        self.written = Written(self.root, self.tag, self._specs, tuple(records), files)
        if keep_last is not None:
            try:
                prune(self.root, keep_last, protected_tags=(self.tag,))
            except InfinityError as error:
                raise MachineError(
                    f"{self.path} was saved, but older checkpoints are left: {error.what}",
                    because=error.because,
                    remedy=error.remedy,
                ) from error
        return self.path

    def _check_open(self) -> None:
        if self._outcome is not None:
            raise ConfigError(f"the checkpoint {self.path} was {self._outcome}")

    def _check_complete(self, manifest: Manifest) -> None:
        problems = [
            f"the stream {name!r} lacks {stream.missing} of {stream.nbytes} bytes"
            for name, stream in self._streams.items()
            if stream.missing and stream.shared is None
        ]
        problems += manifest.problems()
        if not problems:
            problems += disagreements(manifest, self._specs)
        if problems:
            message = listed(problems, separator="; ")
            raise ConfigError(f"the checkpoint {self.path} is not complete: {message}")

    def _finish_files(self) -> list[FileRecord]:
        records: list[FileRecord] = []
        for name, stream in self._streams.items():
            assert self._pool is not None
            if stream.shared is not None:
                records += stream.shared
                continue
            for shard, crc32c in stream.finish(self._temporary, self._pool):
                record = FileRecord(shard.name, name, shard.nbytes, BLOCK_BYTES, tuple(crc32c))
                records.append(record)
        return records

    def _publish(self, *, save_latest: bool) -> None:
        if _identity(self._temporary) != self._identity or os.path.lexists(self.path):
            raise CheckpointError(
                f"the checkpoint {self.path} cannot be published",
                because="another program made or replaced a directory during the save",
            )
        new_latest = self.root / new_latest_name(self.tag)
        if save_latest:  # written first, so that a full disk is detected before the renames
            new_latest.unlink(missing_ok=True)
            write_new(new_latest, f"{self.tag}\n".encode(), FILE_MODE)
        os.rename(self._temporary, self.path)
        self._identity = None
        sync_directory(self.root)
        if save_latest:
            os.rename(new_latest, self.root / LATEST_NAME)
            sync_directory(self.root)
        self._outcome = "finished"
        self._close()
        assert self._lock is not None
        self._lock.release()

    def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.drop()
        for stream in self._streams.values():
            stream.drop()
        engine, self._engine = self._engine, None
        if engine is not None:
            with suppress(OSError):
                engine.close()

    def abort(self) -> None:
        """Remove all written files. Idempotent; after `finish` it does nothing."""
        if self._outcome is not None:
            return
        self._outcome = "aborted"
        self._close()
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            if _identity(self._temporary) == self._identity:
                remove_temporary(self.root, self.tag)
        except FileNotFoundError:
            pass
        except OSError:
            lock.close()  # the next writer tries again
        lock.release()
        if self._created_root:
            with suppress(OSError):
                self.root.rmdir()


def _identity(path: Path) -> tuple[int, int]:
    info = os.lstat(path)
    return (info.st_dev, info.st_ino) if stat.S_ISDIR(info.st_mode) else (-1, -1)


class _StreamFiles:
    """Files of one stream, of which at most one is open."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.nbytes = sum(shard.nbytes for shard in shards)
        self.missing = sum(t.nbytes for shard in shards for t in shard.tensors)
        self.shared: tuple[FileRecord, ...] | None = None  # complete files from elsewhere
        self._done: list[Sequence[int]] = []  # checksums of the complete files
        self._file: BlockWriter | None = None

    def write(self, data: Tensor, directory: Path, pool: Pool) -> None:
        done = 0
        while done < data.numel():
            file = self._file
            if file is None or not file.remaining:
                file = self._open_next(directory, pool)
            count = min(file.remaining, data.numel() - done)
            file.append(data[done : done + count])
            done += count
            self.missing -= count

    def _open_next(self, directory: Path, pool: Pool) -> BlockWriter:
        # Not as soon as it is full: `finish` syncs the last files of all streams together, so
        # that the drive does not idle while there is more to write.
        if self._file is not None:
            self._complete(self._file)
        shard = self.shards[len(self._done)]
        file = self._file = BlockWriter(directory / shard.name, shard.nbytes, pool)
        file.append(torch.frombuffer(bytearray(shard.header), dtype=torch.uint8))
        return file

    def _complete(self, file: BlockWriter) -> None:
        file.finish()
        self._done.append(file.crc32c)
        self._file = None

    def finish(self, directory: Path, pool: Pool) -> Iterator[tuple[Shard, Sequence[int]]]:
        """Complete all files, including those without elements; return them with checksums."""
        while len(self._done) < len(self.shards):
            self._complete(self._file or self._open_next(directory, pool))
        return zip(self.shards, self._done, strict=True)

    def drop(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.drop()
        self._file = None


def _index_text(manifest: Manifest, streams: Mapping[str, _StreamFiles]) -> str:
    """Return the Hugging Face index of the state dict's tensors as JSON; "" if there are none."""
    persistent = {b.name for b in manifest.buffers if b.persistent}
    weight_map: dict[str, str] = {}
    total = 0
    for name in (MODEL, FROZEN, BUFFERS):
        for shard in streams[name].shards if name in streams else ():
            for tensor in shard.tensors:
                if name != BUFFERS or tensor.name in persistent:
                    weight_map[tensor.name] = shard.name
                    total += tensor.nbytes
    if not weight_map:
        return ""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
