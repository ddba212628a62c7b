"""Which bytes of a checkpoint lie in which file: streams, shards, names and headers.

A stream is a sequence of tensors. It is cut into safetensors files between tensors, so every file
can be read alone, by anything that reads safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from infinity.errors import ConfigError
from infinity.model.safetensors_file import DTYPE_NAMES, encode_header
from infinity.model.weight_directory import INDEX_NAME

FORMAT_NAME = "torch-infinity-checkpoint"
VERSION = (1, 0)
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
BLOCK_BYTES = 1 << 20
MAX_SHARD_BYTES = 5 << 30

MODEL, FROZEN, BUFFERS = "model", "frozen", "buffers"
RESIDUAL, MASTER, GRADIENT = "residual", "master", "gradient"
INDEX = "index"  # the stream that INDEX_NAME is counted to; it holds no tensors

_STREAM = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FILE = re.compile(r"([a-z][a-z0-9_]{0,63})(?:-([0-9]{5,9})-of-([0-9]{5,9}))?\.safetensors")
_TAG_BYTES = 200
TEMPORARY_SUFFIX = ".tmp"


class TensorSpec(NamedTuple):
    """A tensor that a stream holds; its bytes are its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a stream: its name, what stands before the tensors, and the tensors."""

    name: str
    header: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def moment_stream(index: int) -> str:
    """The stream of a moment, counted from 1."""
    return f"moment{index}"


def cut(
    stream: str, tensors: Sequence[TensorSpec], max_shard_bytes: int, *, numbered: bool
) -> list[Shard]:
    """The files of a stream; none if it has no tensors. A shard holds at least one tensor.

    `numbered`: a single file is "model-00001-of-00001.safetensors" and not "model.safetensors".
    Raises `ConfigError` for a name or a dtype that the format does not know, and for names twice.
    """
    if _STREAM.fullmatch(stream) is None or stream == INDEX:
        raise ConfigError(f"{stream!r} is no name for a stream of tensors")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"tensor {tensor.name!r}: safetensors files hold no {tensor.dtype}")
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
    """What the files of a stream are called."""
    if count == 1 and not numbered:
        return [f"{stream}.safetensors"]
    return [f"{stream}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def is_our_file(name: str) -> bool:
    """Whether a checkpoint may contain a file of this name."""
    return name in (MANIFEST_NAME, INDEX_NAME) or _FILE.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """`tag`, if it can be the name of a checkpoint's directory; raises `ConfigError`."""
    problem = None
    if not isinstance(tag, str) or not tag:
        problem = "is no text" if not isinstance(tag, str) else "is empty"
    elif "/" in tag or not tag.isprintable() or tag != tag.strip():
        problem = "has a slash, a space at its ends, or a character that cannot be printed"
    elif tag.startswith(".") or tag == LATEST_NAME or tag.endswith(TEMPORARY_SUFFIX):
        problem = f"begins with a dot, ends with {TEMPORARY_SUFFIX!r} or is {LATEST_NAME!r}"
    else:
        try:
            length = len(tag.encode())
        except UnicodeEncodeError:
            problem = "is no text"
        else:
            if length > _TAG_BYTES:
                problem = f"has {length} bytes, more than {_TAG_BYTES}"
    if problem is not None:
        raise ConfigError(
            f"the tag {tag!r:.80} {problem}",
            because="a tag names a directory",
            remedy='choose one like "global_step100"',
        )
    return tag
