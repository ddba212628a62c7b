"""Weights in safetensors files: read tensor by tensor, written in shards that Hugging Face loads.

The libraries at hand want all tensors of a file in memory to write it. The format is a length, a
JSON header, and the bytes of the tensors, and shapes are known before values: so here they are
asked for one at a time. Pickles are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from infinity.errors import ConfigError, listed
from infinity.model.safetensors_file import (
    DTYPE_NAMES,
    SafetensorsFile,
    TensorFacts,
    encode_header,
)
from infinity.model.weight_directory import (
    INDEX_NAME,
    SINGLE_NAME,
    saving,
    shard_names,
    without_index,
)
from infinity.stable import FILE_MODE, open_new, write_new

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WRITE_BYTES = 4 << 20
_COMPARE_ELEMENTS = 4 << 20


class WeightFiles:
    """The tensors of one or several safetensors files, by name.

    Close it, or use `with`; the files are closed too when the object is let go of.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """`source`: a .safetensors file, an index, or a directory that holds either.

        Raises `ConfigError` that names the file, and the tensor where one is at fault.
        """
        self.facts: dict[str, TensorFacts] = {}
        self._files: dict[Path, SafetensorsFile] = {}
        files, expected = _files_of(Path(source).expanduser())
        try:
            for path in files:
                self._open(path, expected)
            if expected is not None:
                self._check_index(expected)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, expected: Mapping[str, Path] | None) -> None:
        file = self._files[path] = SafetensorsFile(path)
        for name, facts in file.facts.items():
            if expected is not None and name not in expected:
                continue  # such as buffers that are no part of the state dict
            if name in self.facts:
                raise ConfigError(
                    f"tensor {name!r} is in {self.facts[name].file} and in {path}",
                    remedy="remove the file that does not belong to the model",
                )
            self.facts[name] = facts

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
                + listed(problems),
                because="shards of different saves are mixed, or one is damaged",
            )

    def read(self, name: str) -> Tensor:
        """The tensor's values, in memory of their own.

        Raises `ConfigError`, `MachineError` or `DoesNotFitError` that name tensor and file.
        """
        return self._files[self.facts[name].file].read(name)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape and values; read in pieces."""
        one, other = self.facts[first], self.facts[second]
        if one.shape != other.shape:
            return False
        for start in range(0, one.numel, _COMPARE_ELEMENTS):
            count = min(_COMPARE_ELEMENTS, one.numel - start)
            a = self._files[one.file].read(first, start, count)
            b = self._files[other.file].read(second, start, count)
            if one.dtype is other.dtype:  # bits, so that NaN equals NaN
                a, b = a.view(torch.uint8), b.view(torch.uint8)
            if not torch.equal(a, b.to(a.dtype)):
                return False
        return True

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _files_of(source: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files to open, and what an index says lies where."""
    if source.is_dir():
        if (source / SINGLE_NAME).exists():  # before an index, as transformers does
            return [source / SINGLE_NAME], None
        if (source / INDEX_NAME).exists():
            return _indexed(source / INDEX_NAME)
        found, parts = without_index(source)
        if not found and parts:
            raise ConfigError(
                f"{source} holds {len(parts)} shard(s), {listed([p.name for p in parts])}, and no "
                f"{INDEX_NAME}",
                because="the save did not come to its end, or not all files were copied",
                remedy="save again, or copy the index too",
            )
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
        weight_map = dict(content["weight_map"])
    except OSError as error:
        raise ConfigError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index: it has no weight_map") from error
    expected: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(
                f"{index} puts tensor {name!r} into {file!r}",
                because="a shard lies beside its index, under a plain file name",
            )
        expected[name] = index.parent / file
    missing = sorted({p.name for p in expected.values() if not p.exists()})
    if missing:
        raise ConfigError(f"{index} names files that are not there: {listed(missing)}")
    return sorted(set(expected.values())), expected


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


def write_shards(
    directory: Path,
    tensors: Sequence[Outgoing],
    max_shard_bytes: int,
    beside: Callable[[Path], object] | None = None,
) -> list[Path]:
    """Write `tensors`, one at a time in memory; returns the files, the index last if there is one.

    A shard holds at most `max_shard_bytes`, or one tensor that is larger. `beside` writes more
    files, such as a config.json, into the folder it gets. All appear under their names only when
    they are complete and on stable storage; weights saved there before are replaced then, as a
    whole. Raises `DoesNotFitError` on a full disk, `MachineError` for other refusals and while
    somebody else saves there, and `ConfigError` for a dtype without a name in the format and for
    a value that its dtype cannot hold; what was there before is untouched then.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"tensor {tensor.name!r}: safetensors files hold no {tensor.dtype}")
    shards = _shards(tensors, max_shard_bytes)
    names = shard_names(len(shards))
    with saving(directory, sum(t.nbytes for t in tensors)) as folder:
        if beside is not None:
            beside(folder)
        for name, shard in zip(names, shards, strict=True):
            _write_file(folder / name, shard)
        if len(shards) > 1:
            _write_index(folder / INDEX_NAME, names, shards)
            names.append(INDEX_NAME)
    return [directory / name for name in names]


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
    with open_new(path) as file:
        file.write(encode_header((t.name, t.shape, t.dtype) for t in tensors))
        for tensor in tensors:
            _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, tensor: Outgoing) -> None:
    """In pieces: a conversion of the whole would be a second copy."""
    value = tensor.read().detach()
    assert tuple(value.shape) == tensor.shape, (tensor.name, value.shape, tensor.shape)
    flat = value.reshape(-1)
    step = _WRITE_BYTES // value.itemsize
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step].cpu()
        converted = piece.to(tensor.dtype)
        if converted is not piece:
            _check_range(tensor, piece, converted)
        file.write(converted.contiguous().view(torch.uint8).numpy().data)


def _check_range(tensor: Outgoing, piece: Tensor, converted: Tensor) -> None:
    infinite = converted.isinf()
    if infinite.any() and (lost := piece[infinite & ~piece.isinf()]).numel():
        raise ConfigError(
            f"tensor {tensor.name!r} holds {lost[0]:g}, which is beyond "
            f"{str(tensor.dtype).removeprefix('torch.')}",
            remedy="save in bf16 or fp32",
        )


def _write_index(path: Path, names: Sequence[str], shards: Sequence[Sequence[Outgoing]]) -> None:
    total = sum(t.nbytes for shard in shards for t in shard)
    placed = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    write_new(path, json.dumps(index, indent=2).encode(), FILE_MODE)
