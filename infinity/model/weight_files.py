"""Weights in safetensors files: read tensor by tensor, written in shards that Hugging Face loads.

Reading goes through the safetensors library, which checks a header against the file before
anything is allocated; pickles are refused. Writing is ours, because the library wants all tensors
of a file in memory: the format is a length, a JSON header, and the bytes of the tensors
(https://huggingface.co/docs/safetensors), and shapes are known before values.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infinity.errors import ConfigError, DoesNotFitError, MachineError
from infinity.sizes import format_size

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HEADER_ALIGN = 8
_WRITE_BYTES = 8 << 20

# safetensors names of dtypes; the ones torch can hold and models use.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a file, known from the header alone."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class WeightFiles:
    """The tensors of one or several safetensors files, by name. Close it, or use `with`."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """`source`: a .safetensors file, an index, or a directory that holds either.

        Raises `ConfigError` that names the file, and the tensor where one is at fault.
        """
        self._open: dict[Path, Any] = {}
        self.facts: dict[str, TensorFacts] = {}
        expected: dict[str, Path] | None = None
        files, expected = _files_of(Path(source).expanduser())
        try:
            for file in files:
                self._read_header(file)
            if expected is not None:
                self._check_index(expected)
        except BaseException:
            self.close()
            raise

    def _read_header(self, file: Path) -> None:
        try:
            # The library's own context manager ends with the file; ours ends with `close`.
            handle = safe_open(file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
            self._open[file] = handle
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                if name in self.facts:
                    raise ConfigError(
                        f"tensor {name!r} is in {self.facts[name].file} and in {file}",
                        remedy="remove the file that does not belong to the model",
                    )
                part = handle.get_slice(name)
                self.facts[name] = TensorFacts(tuple(part.get_shape()), part.get_dtype(), file)
        except SafetensorError as error:
            raise ConfigError(
                f"{file} is not a sound safetensors file: {error}",
                because="it is truncated, damaged, or something else",
                remedy="download or save it again",
            ) from error
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error

    def _check_index(self, expected: Mapping[str, Path]) -> None:
        problems = []
        for name, file in expected.items():
            found = self.facts.get(name)
            if found is None:
                problems.append(f"{name!r} should be in {file.name}")
            elif found.file != file:
                problems.append(f"{name!r} is in {found.file.name}, not in {file.name}")
        if problems:
            raise ConfigError(
                f"the index and its files disagree about {len(problems)} tensor(s): "
                + _listed(problems),
                because="shards of different saves are mixed, or one is damaged",
            )

    def read(self, name: str) -> Tensor:
        """The tensor's values, in memory of their own."""
        facts = self.facts[name]
        try:
            value = self._open[facts.file].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ConfigError(f"tensor {name!r} of {facts.file} cannot be read: {error}") from error
        assert isinstance(value, Tensor)
        return value.clone()

    def close(self) -> None:
        """Let go of the files."""
        while self._open:
            _, handle = self._open.popitem()
            handle.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _files_of(source: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to open, and what an index says lies where."""
    if source.is_dir():
        if (source / INDEX_NAME).exists():
            return _indexed(source / INDEX_NAME)
        if (source / SINGLE_NAME).exists():
            return [source / SINGLE_NAME], None
        found = sorted(source.glob("*.safetensors"))
        if not found:
            pickles = sorted(p.name for p in source.iterdir() if p.suffix in _PICKLES)
            because = f"there are only pickles: {', '.join(pickles[:3])}" if pickles else None
            remedy = "convert them to safetensors: loading a pickle runs code" if pickles else None
            raise ConfigError(f"{source} holds no .safetensors", because=because, remedy=remedy)
        return found, None
    if source.suffix == ".json":
        return _indexed(source)
    if source.suffix in _PICKLES:
        raise ConfigError(
            f"{source} looks like a pickle",
            because="loading a pickle runs code",
            remedy="convert it to safetensors",
        )
    return [source], None


def _indexed(index: Path) -> tuple[list[Path], dict[str, Path]]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        listed = dict(content["weight_map"])
    except OSError as error:
        raise ConfigError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is not an index: it has no weight_map") from error
    expected: dict[str, Path] = {}
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(
                f"{index} puts tensor {name!r} into {file!r}",
                because="a shard lies beside its index, under a plain file name",
            )
        expected[name] = index.parent / file
    missing = sorted({p.name for p in expected.values() if not p.exists()})
    if missing:
        raise ConfigError(f"{index} names files that are not there: {_listed(missing)}")
    return sorted(set(expected.values())), expected


def _listed(items: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written: its name, shape and dtype, and where its values come from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_shards(directory: Path, tensors: Sequence[Outgoing], max_shard_bytes: int) -> list[Path]:
    """Write `tensors`, one at a time in memory; returns the files, the index last if there is one.

    A shard holds at most `max_shard_bytes`, or one tensor that is larger. Files appear under their
    names only when all of them are complete and on stable storage; weights saved there before are
    replaced then. Raises `DoesNotFitError` on a full disk and `MachineError` for other refusals;
    what was there before is untouched then.
    """
    shards = _shards(tensors, max_shard_bytes)
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    new = [(directory / f".{name}.new", directory / name) for name in names]
    index = (directory / f".{INDEX_NAME}.new", directory / INDEX_NAME)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for (path, _), shard in zip(new, shards, strict=True):
            _write_file(path, shard)
        if len(shards) > 1:
            _write_index(index[0], names, shards)
            new.append(index)
        for path, final in new:
            path.replace(final)
        kept = {final.name for _, final in new}
        for old in directory.iterdir():
            ours = old.name in (SINGLE_NAME, INDEX_NAME) or _SHARD_NAME.fullmatch(old.name)
            if ours and old.name not in kept:
                old.unlink()
        _sync_directory(directory)
    except BaseException as error:
        for path, _ in [*new, index]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _refusal(directory, error, sum(t.nbytes for t in tensors)) from error
        raise
    return [final for _, final in new]


def _shards(tensors: Sequence[Outgoing], max_shard_bytes: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_file(path: Path, tensors: Sequence[Outgoing]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, tensor: Outgoing) -> None:
    value = tensor.read().detach().cpu().to(tensor.dtype).contiguous()
    assert tuple(value.shape) == tensor.shape, (tensor.name, value.shape, tensor.shape)
    flat = value.reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _WRITE_BYTES):
        file.write(flat[start : start + _WRITE_BYTES].numpy().tobytes())


def _write_index(path: Path, names: Sequence[str], shards: Sequence[Sequence[Outgoing]]) -> None:
    total = sum(t.nbytes for shard in shards for t in shard)
    placed = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": placed}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(directory: Path, error: OSError, nbytes: int) -> MachineError | DoesNotFitError:
    because = f"{error.strerror} (errno {error.errno})"
    if error.errno in (28, 122):
        return DoesNotFitError(
            f"{directory}: the disk is full; the weights need {format_size(nbytes)}",
            because=because,
            remedy="free space there, or save somewhere else",
        )
    return MachineError(f"{directory}: the weights cannot be saved", because=because)
