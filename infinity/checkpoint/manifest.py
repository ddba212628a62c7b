"""The manifest of a checkpoint: what it holds, where, and how to know that it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from os import PathLike
from typing import Any, Self

from infinity.checkpoint.layout import (
    FORMAT_NAME,
    INDEX,
    VERSION,
    file_names,
)
from infinity.checkpoint.plain import DTYPES
from infinity.checkpoint.sealed_json import LARGEST, Fields, sealed
from infinity.errors import CheckpointError
from infinity.formats import MomentFormat
from infinity.model.weight_directory import INDEX_NAME

PRECISIONS = ("bf16", "fp16", "fp32")
MAX_MANIFEST_BYTES = 512 << 20
MAX_BLOCK_BYTES = 64 << 20
MIN_BLOCK_BYTES = 4096
MAX_MOMENTS = 6
_MOMENT_FORMATS = frozenset(member.value for member in MomentFormat)


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter: `name` is its key in the files, `aliases` are the other names of a tied one.

    `dtype` is torch's name of what it computes in ("bfloat16"); `step` counts its updates.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    step: int


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A buffer; one that is not `persistent` is no part of the model's state dict."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    persistent: bool


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file: its size, and the CRC32C of every `block_bytes` of it; the last may be shorter."""

    name: str
    stream: str
    nbytes: int
    block_bytes: int
    crc32c: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. `run`, `client_state`, `config` and `plan` are opaque JSON.

    `moments` are values of `MomentFormat`; the stream "moment1" holds the first. `files` are
    grouped by stream, in the order of their bytes.
    """

    engine_version: str
    global_steps: int
    precision: str
    rule: str
    moments: tuple[str, ...]
    parameters: tuple[ParameterRecord, ...]
    buffers: tuple[BufferRecord, ...]
    run: Any
    client_state: Any
    config: Any
    plan: Any
    files: tuple[FileRecord, ...] = ()

    def to_text(self) -> str:
        """The text of manifest.json. Raises `ConfigError` for what is no JSON."""
        members: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": VERSION,
            "engine_version": self.engine_version,
            "global_steps": self.global_steps,
            "precision": self.precision,
            "rule": self.rule,
            "moments": self.moments,
            "run": self.run,
            "client_state": self.client_state,
            "config": self.config,
            "plan": self.plan,
        }
        records: dict[str, list[Any]] = {
            "parameters": [asdict(record) for record in self.parameters],
            "buffers": [asdict(record) for record in self.buffers],
            "files": [_file_members(record) for record in self.files],
        }
        return sealed(members, records)

    @classmethod
    def from_text(cls, text: str, where: str | PathLike[str]) -> Self:
        """The manifest in `text`, which was found at `where`.

        Members that are not known are ignored: later minor versions may have more. Raises
        `CheckpointError` that names `where` and what is at fault.
        """
        fields = Fields(str(where))
        found = fields.parse(text)
        if found.get("format") != FORMAT_NAME:
            fields.fail(f"its format is {found.get('format')!r:.60}, not {FORMAT_NAME!r}")
        version = fields.numbers(found, "version")
        if len(version) != 2 or version[0] != VERSION[0]:
            raise CheckpointError(
                f"{where} has the format version {'.'.join(map(str, version[:4]))}; this "
                f"infinity reads {VERSION[0]}.x",
                because="another major version of infinity wrote it, or it is damaged",
                remedy="use the version of infinity that wrote it",
            )
        fields.check_seal(text)
        manifest = cls(
            engine_version=fields.text(found, "engine_version"),
            global_steps=fields.number(found, "global_steps"),
            precision=fields.text(found, "precision"),
            rule=fields.text(found, "rule"),
            moments=fields.texts(found, "moments"),
            parameters=tuple(
                _parameter(fields, members, f"parameters[{i}]")
                for i, members in enumerate(fields.items(found, "parameters"))
            ),
            buffers=tuple(
                _buffer(fields, members, f"buffers[{i}]")
                for i, members in enumerate(fields.items(found, "buffers"))
            ),
            run=fields.member(found, "run", ""),
            client_state=fields.member(found, "client_state", ""),
            config=fields.member(found, "config", ""),
            plan=fields.member(found, "plan", ""),
            files=tuple(
                _file(fields, members, f"files[{i}]")
                for i, members in enumerate(fields.items(found, "files"))
            ),
        )
        for problem in manifest.problems():
            fields.fail(problem)
        return manifest

    def problems(self) -> Iterator[str]:
        """What contradicts itself."""
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
        yield from _file_problems(self.files)


def _file_problems(files: tuple[FileRecord, ...]) -> Iterator[str]:
    by_stream: dict[str, list[str]] = {}
    for file in files:
        by_stream.setdefault(file.stream, []).append(file.name)
    if [f.stream for f in files] != [s for s, names in by_stream.items() for _ in names]:
        yield "its files are not grouped by stream"
    for stream, names in by_stream.items():
        allowed: list[list[str]] = [[INDEX_NAME]]
        if stream != INDEX:
            allowed = [file_names(stream, len(names), numbered=True)]
            allowed += [file_names(stream, 1, numbered=False)]
        if names not in allowed:
            yield f"the files of stream {stream!r:.60} are called {names!r:.200}"


def _file_members(record: FileRecord) -> Mapping[str, Any]:
    # asdict would copy a million checksums one by one.
    return {
        "name": record.name,
        "stream": record.stream,
        "nbytes": record.nbytes,
        "block_bytes": record.block_bytes,
        "crc32c": record.crc32c,
    }


def _parameter(fields: Fields, members: Any, place: str) -> ParameterRecord:
    return ParameterRecord(
        name=fields.text(members, "name", place),
        aliases=fields.texts(members, "aliases", place),
        shape=fields.numbers(members, "shape", place),
        dtype=fields.text(members, "dtype", place),
        trained=fields.flag(members, "trained", place),
        step=fields.number(members, "step", place),
    )


def _buffer(fields: Fields, members: Any, place: str) -> BufferRecord:
    return BufferRecord(
        name=fields.text(members, "name", place),
        aliases=fields.texts(members, "aliases", place),
        shape=fields.numbers(members, "shape", place),
        dtype=fields.text(members, "dtype", place),
        persistent=fields.flag(members, "persistent", place),
    )


def _file(fields: Fields, members: Any, place: str) -> FileRecord:
    record = FileRecord(
        name=fields.text(members, "name", place),
        stream=fields.text(members, "stream", place),
        nbytes=fields.number(members, "nbytes", place),
        block_bytes=fields.number(members, "block_bytes", place),
        crc32c=fields.numbers(members, "crc32c", place, limit=2**32 - 1),
    )
    size = record.block_bytes
    if not MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES or size & (size - 1):
        fields.fail(
            f"{place}.block_bytes is {size}, no power of two from {MIN_BLOCK_BYTES} to "
            f"{MAX_BLOCK_BYTES}"
        )
    expected = -(-record.nbytes // size)
    if len(record.crc32c) != expected:
        fields.fail(
            f"{place}, {record.name!r:.200}, has {len(record.crc32c)} checksums, not {expected} "
            f"for {record.nbytes} bytes in blocks of {size}"
        )
    return record
