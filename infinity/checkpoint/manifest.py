"""Manifest of a checkpoint: tensors, the files that hold them, and checksums.

A stream is a sequence of tensors. It is split into safetensors files between tensors, so any
safetensors reader can read each file separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import FailFast
from torch import Tensor

from infinity.checkpoint.plain import DTYPES, dtype_name
from infinity.common.checksummed_json import seal, unseal
from infinity.common.parsed_json import LARGEST, Count, Counts, Flag, Text, Texts, made
from infinity.errors import CheckpointError, ConfigError
from infinity.model.safetensors_file import DTYPE_NAMES, encode_header
from infinity.model.weight_directory import INDEX_NAME
from infinity.types import FrozenFormat, MomentFormat, can_store

FORMAT_NAME = "torch-infinity-checkpoint"
VERSION = (1, 0)
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
BLOCK_BYTES = 1 << 20
MAX_SHARD_BYTES = 5 << 30

MODEL, FROZEN, BUFFERS = "model", "frozen", "buffers"
RESIDUAL, MASTER, GRADIENT = "residual", "master", "gradient"
INDEX = "index"  # stream of the file INDEX_NAME; it holds no tensors

_STREAM_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FILE_NAME = re.compile(r"([a-z][a-z0-9_]{0,63})(?:-([0-9]{5,9})-of-([0-9]{5,9}))?\.safetensors")
_MAX_TAG_BYTES = 200
TEMPORARY_SUFFIX = ".tmp"


class TensorSpec(NamedTuple):
    """Tensor in a stream; its bytes are its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def quantized(self, form: str) -> TensorSpec:
        """Return the spec of its bytes in a `FrozenFormat`; for "" the spec itself."""
        if not form:
            return self
        return TensorSpec(self.name, (FrozenFormat(form).nbytes(self.shape),), torch.uint8)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a stream: its name, its safetensors header, and its tensors."""

    name: str
    header: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file, including the header."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def moment_stream(index: int) -> str:
    """Return the name of a moment's stream; `index` starts at 1."""
    return f"moment{index}"


def cut(
    stream: str, tensors: Sequence[TensorSpec], max_shard_bytes: int, *, numbered: bool
) -> list[Shard]:
    """Split a stream into files of at least one tensor each; no files if it has no tensors.

    `numbered`: a single file is "model-00001-of-00001.safetensors" and not "model.safetensors".
    Raises `ConfigError` for an invalid stream name, an unsupported dtype and duplicate names.
    """
    if _STREAM_NAME.fullmatch(stream) is None or stream == INDEX:
        raise ConfigError(f"{stream!r} is not a valid name of a stream")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"tensor {tensor.name!r}: safetensors does not support {tensor.dtype}"
            )
        if tensor.name in seen:
            raise ConfigError(f"tensor {tensor.name!r} is in the stream {stream!r} twice")
        seen.add(tensor.name)
    groups: list[list[TensorSpec]] = []
    size = 0
    for tensor in tensors:
        if not groups or size + tensor.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    names = file_names(stream, len(groups), numbered=numbered)
    return [
        Shard(name, encode_header(group), tuple(group))
        for name, group in zip(names, groups, strict=True)
    ]


def file_names(stream: str, count: int, *, numbered: bool) -> list[str]:
    if count == 1 and not numbered:
        return [f"{stream}.safetensors"]
    return [f"{stream}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def is_checkpoint_file_name(name: str) -> bool:
    """Return True if a checkpoint may contain a file of this name."""
    return name in (MANIFEST_NAME, INDEX_NAME) or _FILE_NAME.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """Return `tag` if it is a valid name of a checkpoint's directory; raises `ConfigError`."""
    problem = None
    if not isinstance(tag, str) or not tag:
        problem = "is not a string" if not isinstance(tag, str) else "is empty"
    elif "/" in tag or not tag.isprintable() or tag != tag.strip():
        problem = "has a slash, a space at its ends, or a character that cannot be printed"
    elif tag.startswith(".") or tag == LATEST_NAME or tag.endswith(TEMPORARY_SUFFIX):
        problem = f"begins with a dot, ends with {TEMPORARY_SUFFIX!r} or is {LATEST_NAME!r}"
    elif (length := len(tag.encode())) > _MAX_TAG_BYTES:
        problem = f"has {length} bytes, more than {_MAX_TAG_BYTES}"
    if problem is not None:
        raise ConfigError(
            f"the tag {tag!r:.80} {problem}",
            because="a tag names a directory",
            remedy='choose one like "global_step100"',
        )
    return tag


PRECISIONS = ("bf16", "fp16", "fp32")
MAX_MANIFEST_BYTES = 512 << 20
MAX_BLOCK_BYTES = 64 << 20
MIN_BLOCK_BYTES = 4096
MAX_MOMENTS = 6
_RECORD_MEMBERS = ("parameters", "buffers", "files")  # of a manifest: tuples of records
_MOMENT_FORMATS = frozenset(member.value for member in MomentFormat)


@dataclass(frozen=True)
class ParameterRecord:
    """Parameter: `name` is its key in the files, `aliases` are the other names of a tied one.

    `dtype` is torch's name of its compute dtype ("bfloat16"); `step` counts its updates; `form` is
    the `FrozenFormat` of its bytes, "" if they are of `dtype`.
    """

    name: Text
    aliases: Texts
    shape: Counts
    dtype: Text
    trained: Flag
    step: Count
    form: Text = ""

    @property
    def spec(self) -> TensorSpec:
        """Spec of its tensor in a stream."""
        return TensorSpec(self.name, self.shape, DTYPES[self.dtype]).quantized(self.form)


@dataclass(frozen=True)
class BufferRecord:
    """Buffer; one that is not `persistent` is not in the model's state dict."""

    name: Text
    aliases: Texts
    shape: Counts
    dtype: Text
    persistent: Flag

    @classmethod
    def of(cls, names: Sequence[str], value: Tensor, *, persistent: bool) -> Self:
        """Return the record of a buffer with these names, the first of which is its key."""
        dtype = dtype_name(value.dtype)
        return cls(names[0], tuple(names[1:]), tuple(value.shape), dtype, persistent)

    @property
    def spec(self) -> TensorSpec:
        """Spec of its tensor in the stream of buffers."""
        return TensorSpec(self.name, self.shape, getattr(torch, self.dtype))


@dataclass(frozen=True)
class FileRecord:
    """File: its size, and the CRC32C of every block of `block_bytes`; the last may be shorter."""

    name: Text
    stream: Text
    nbytes: Count
    block_bytes: Count
    crc32c: Counts


@dataclass(frozen=True)
class _Version:
    version: Counts


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint. `run`, `client_state`, `config` and `plan` are opaque JSON.

    `moments` are values of `MomentFormat`; the stream "moment1" holds the first. `files` are
    grouped by stream, in byte order.
    """

    engine_version: Text
    global_steps: Count
    precision: Text
    rule: Text
    moments: Texts
    parameters: Annotated[tuple[ParameterRecord, ...], FailFast()]
    buffers: Annotated[tuple[BufferRecord, ...], FailFast()]
    run: Any
    client_state: Any
    config: Any
    plan: Any
    files: Annotated[tuple[FileRecord, ...], FailFast()] = ()

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json. Raises `ConfigError` for values that JSON lacks."""
        # Not `asdict`, which would copy a million checksums one by one.
        members = {
            name: [vars(record) for record in value] if name in _RECORD_MEMBERS else value
            for name, value in vars(self).items()
        }
        return seal({"format": FORMAT_NAME, "version": VERSION, **members})

    @classmethod
    def from_bytes(cls, data: bytes, where: str | PathLike[str]) -> Self:
        """Return the manifest in `data`, which was read from `where`.

        Unknown members are ignored: later minor versions may add some. Raises `CheckpointError`
        that names `where` and the problem.
        """
        try:
            members = unseal(data)
            if members.get("format") != FORMAT_NAME:
                raise ValueError(
                    f"its format is {members.get('format')!r:.60}, not {FORMAT_NAME!r}"
                )
            version = made(_Version, members).version
            if len(version) == 2 and version[0] == VERSION[0]:
                manifest = made(cls, members)
                for problem in manifest.problems():
                    raise ValueError(problem)
                return manifest
        except ValueError as error:
            raise CheckpointError(
                f"{where} is not sound: {error}",
                because="it is damaged, was changed, or was written by something else",
                remedy="use another checkpoint: infinity checkpoint verify DIR --all lists the "
                "sound ones",
            ) from None
        raise CheckpointError(
            f"{where} has the format version {'.'.join(map(str, version[:4]))}; this "
            f"infinity reads {VERSION[0]}.x",
            because="another major version of infinity wrote it, or it is damaged",
            remedy="use the version of infinity that wrote it",
        )

    def problems(self) -> Iterator[str]:
        """Yield contradictions and values out of range."""
        if self.precision not in PRECISIONS:
            yield f"its precision is {self.precision!r:.60}, not one of {', '.join(PRECISIONS)}"
        if len(self.moments) > MAX_MOMENTS:
            yield f"it has {len(self.moments)} moments, more than {MAX_MOMENTS}"
        for name in self.moments:
            if name not in _MOMENT_FORMATS:
                yield f"the moment format {name!r:.60} is unknown"
        seen: set[str] = set()
        records: list[ParameterRecord | BufferRecord] = [*self.parameters, *self.buffers]
        for record in records:
            for name in (record.name, *record.aliases):
                if name in seen:
                    yield f"{name!r:.200} is in it twice"
                seen.add(name)
            if record.dtype not in DTYPES:
                yield f"{record.name!r:.200} has the dtype {record.dtype!r:.60}"
            if not record.name or prod(n for n in record.shape if n) > LARGEST // 16:
                yield f"{record.name!r:.200} has the shape {record.shape!r:.60}"
        for p in self.parameters:
            if p.form and not can_store(p.form, p.shape, trained=p.trained):
                yield f"{p.name!r:.200} has the format {p.form!r:.60}"
        yield from _file_problems(self.files)


def _file_problems(files: tuple[FileRecord, ...]) -> Iterator[str]:
    by_stream: dict[str, list[str]] = {}
    for i, file in enumerate(files):
        by_stream.setdefault(file.stream, []).append(file.name)
        size = file.block_bytes
        if not MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES or size & (size - 1):
            yield (
                f"files[{i}].block_bytes is {size}, not a power of two from {MIN_BLOCK_BYTES} to "
                f"{MAX_BLOCK_BYTES}"
            )
            continue
        expected = -(-file.nbytes // size)
        if len(file.crc32c) != expected:
            yield (
                f"files[{i}], {file.name!r:.200}, has {len(file.crc32c)} checksums, not "
                f"{expected} for {file.nbytes} bytes in blocks of {size}"
            )
        if max(file.crc32c, default=0) >= 1 << 32:
            yield f"files[{i}].crc32c holds {max(file.crc32c)}, which is not a CRC32C"
    if [f.stream for f in files] != [s for s, names in by_stream.items() for _ in names]:
        yield "its files are not grouped by stream"
    for stream, names in by_stream.items():
        allowed: list[list[str]] = [[INDEX_NAME]]
        if stream != INDEX:
            allowed = [file_names(stream, len(names), numbered=True)]
            allowed += [file_names(stream, 1, numbered=False)]
        if names not in allowed:
            yield f"the files of stream {stream!r:.60} are called {names!r:.200}"
