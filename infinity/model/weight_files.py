"""Reader and writer of weights in safetensors files, one tensor in memory at a time.

The safetensors library needs all tensors of a file in memory to write it. The header contains only
names, shapes and dtypes, so this module writes it first, and then reads and writes one tensor after
the other. Shards and index are those that Hugging Face loads. Pickles are rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from infinity.common.files import FILE_MODE, open_new, write_new
from infinity.errors import ConfigError, listed
from infinity.model.quantized import dequantize, pack_parts
from infinity.model.safetensors_file import DTYPE_NAMES, SafetensorsFile, TensorEntry, encode_header
from infinity.model.weight_directory import (
    INDEX_NAME,
    SINGLE_NAME,
    files_without_index,
    saving,
    shard_names,
)
from infinity.types import DOUBLE_BLOCK, FP8_BLOCK, MXFP4_BLOCK, NF4_BLOCK, FrozenFormat

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_COMPARE_ELEMENTS = 4 << 20


# Suffixes of tensors that store a quantized matrix.
_NF4_STATE = ".quant_state.bitsandbytes__nf4"  # NF4 of bitsandbytes
_BLOCKS, _SCALES = "_blocks", "_scales"  # MXFP4 of gpt-oss
_SCALE_INV = "_scale_inv"  # FP8 of DeepSeek-V3, a scale per square
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Quantized matrix or stack stored in several tensors, in the order of `FrozenFormat.parts`."""

    form: FrozenFormat
    shape: tuple[int, ...]
    names: tuple[str, ...]
    facts: tuple[TensorEntry, ...]
    mean: Tensor | None


class WeightFiles:
    """The tensors of one or several safetensors files, by name.

    A context manager; the files are closed on exit, by `close`, or when garbage-collected.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """Open `source`: a .safetensors file, an index, or a directory with either.

        Raises `ConfigError` that names the file, and the tensor if one is invalid.
        """
        self.facts: dict[str, TensorEntry] = {}
        self._files: dict[Path, SafetensorsFile] = {}
        # Quantized tensors by name.
        self._packed: dict[str, _Packed] = {}
        # Name, index and values of the last result of `matrix`.
        self._cached_matrix = ("", 0, torch.empty(0))
        files, expected = _files_of(Path(source).expanduser())
        try:
            for path in files:
                self._open(path, expected)
            if expected is not None:
                self._check_index(expected)
            self._join_quantized()
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, expected: Mapping[str, Path] | None) -> None:
        file = self._files[path] = SafetensorsFile(path)
        for name, facts in file.facts.items():
            if expected is not None and name not in expected:
                continue  # such as buffers that are not in the state dict
            if name in self.facts:
                raise ConfigError(
                    f"tensor {name!r} is in {self.facts[name].file} and in {path}",
                    remedy="remove the file that does not belong to the model",
                )
            self.facts[name] = facts

    def _check_index(self, expected: Mapping[str, Path]) -> None:
        problems = []
        for name, file in expected.items():
            facts = self.facts.get(name)
            if facts is None:
                problems.append(f"{name!r} should be in {file.name}")
            elif facts.file != file:
                problems.append(f"{name!r} is in {facts.file.name}, not in {file.name}")
        if problems:
            raise ConfigError(
                f"the index and its files disagree about {len(problems)} tensor(s): "
                + listed(problems),
                because="shards of different saves are mixed, or one is damaged",
            )

    @property
    def quantized(self) -> bool:
        """True if any matrix is quantized; `read` dequantizes it to fp32."""
        return bool(self._packed)

    def _join_quantized(self) -> None:
        """Replace the tensors of each quantized matrix by one entry. Raises `ConfigError`."""
        for name, facts in list(self.facts.items()):
            stem = name.removesuffix(_BLOCKS)
            if name.endswith(_NF4_STATE):
                self._join_nf4(name.removesuffix(_NF4_STATE))
            elif name.endswith(_SCALE_INV):
                self._join_native(FrozenFormat.FP8, name.removesuffix(_SCALE_INV), ("", _SCALE_INV))
            elif stem != name and stem + _SCALES in self.facts and facts.dtype is torch.uint8:
                self._join_native(FrozenFormat.MXFP4, stem, (_BLOCKS, _SCALES))
            elif facts.dtype is torch.float8_e4m3fn and f"{name}_scale" in self.facts:
                raise _unknown_format(name, f"it is scaled by {name}_scale")

    def _join_nf4(self, name: str) -> None:
        by_suffix = {
            key.removeprefix(name): key for key in self.facts if key.startswith(name + ".")
        }
        try:
            state = json.loads(bytes(self._read(by_suffix[_NF4_STATE]).tolist()))
            shape = tuple(map(int, state["shape"]))
            nested = ".nested_absmax" in by_suffix
            expected = {"quant_type": "nf4", "blocksize": NF4_BLOCK}
            expected |= {"nested_blocksize": DOUBLE_BLOCK} if nested else {}
            if len(shape) != 2 or any(state[key] != value for key, value in expected.items()):
                raise ValueError(f"{state} is not {expected}")
            offsets = [float(state["nested_offset"])] if nested else []
            mean = torch.tensor(offsets, dtype=torch.float32, device="cpu") if nested else None
            form = FrozenFormat.NF4_DOUBLE if nested else FrozenFormat.NF4
            names = [name, by_suffix[".absmax"], *([by_suffix[".nested_absmax"]] if nested else [])]
            sizes = [self.facts[n].numel * self.facts[n].dtype.itemsize for n in names]
            if sizes != list(form.parts(shape))[: len(sizes)]:
                raise ValueError(f"parts of {sizes} bytes do not make a matrix {shape}")
        except (KeyError, TypeError, ValueError) as error:
            raise _unknown_format(name, f"{error!r:.200}") from error
        self._replace_entries(name, form, shape, names, by_suffix.values(), mean)

    def _join_native(self, form: FrozenFormat, name: str, suffixes: tuple[str, str]) -> None:
        names = [name + suffix for suffix in suffixes]
        try:
            codes, scales = (self.facts[n] for n in names)
            if form is FrozenFormat.MXFP4:  # rows of blocks of the transposed matrix
                *stack_shape, rows, blocks, _ = codes.shape
                shape = (*stack_shape, blocks * MXFP4_BLOCK, rows)
                grid: tuple[int, ...] = (*stack_shape, rows, blocks)
                valid = codes.shape == (*grid, MXFP4_BLOCK // 2) and scales.dtype is torch.uint8
            else:
                shape = codes.shape
                grid = (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))
                valid = codes.dtype is torch.float8_e4m3fn and scales.dtype in _SCALE_DTYPES
            if not valid or not form.fits(shape) or scales.shape != grid:
                raise ValueError(
                    f"{codes.dtype} of shape {codes.shape}, and {scales.dtype} of {scales.shape}"
                )
        except (KeyError, ValueError) as error:
            raise _unknown_format(name, f"{error!r:.200}") from error
        self._replace_entries(name, form, shape, names, names, None)

    def _replace_entries(
        self,
        name: str,
        form: FrozenFormat,
        shape: tuple[int, ...],
        names: Sequence[str],
        replaced: Iterable[str],
        mean: Tensor | None,
    ) -> None:
        """Add the entry of a quantized tensor, and delete those of the tensors that store it."""
        facts = tuple(self.facts[n] for n in names)
        self._packed[name] = _Packed(form, shape, tuple(names), facts, mean)
        for key in replaced:
            del self.facts[key]
        first = facts[0]
        self.facts[name] = TensorEntry(shape, torch.float32, first.file, first.offset)

    def packed(self, name: str, form: FrozenFormat, index: int) -> Tensor | None:
        """Return the packed bytes of one matrix of a tensor; None if it is not in this format."""
        packed = self._packed.get(name)
        if packed is None or packed.form is not form:
            return None
        parts = []
        count = prod(packed.shape[:-2])
        for part_name, facts in zip(packed.names, packed.facts, strict=True):
            part_numel = facts.numel // count
            part = self._files[facts.file].read(part_name, index * part_numel, part_numel)
            scales_fp8 = form is FrozenFormat.FP8 and part_name != packed.names[0]
            parts.append(part.float() if scales_fp8 else part)
        parts += [] if packed.mean is None else [packed.mean]
        return pack_parts(form, packed.shape[-2:], parts)

    def matrix(self, name: str, index: int) -> Tensor:
        """Return the fp32 values of one matrix of a quantized tensor; the last result is cached."""
        if self._cached_matrix[:2] != (name, index):
            self._cached_matrix = ("", 0, torch.empty(0))
            entry = self._packed[name]
            value = torch.empty(entry.shape[-2:], dtype=torch.float32, device="cpu")
            packed = self.packed(name, entry.form, index)
            assert packed is not None
            dequantize(packed, entry.form, value)
            self._cached_matrix = (name, index, value)
        return self._cached_matrix[2]

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory, dequantized to fp32 if it is quantized.

        Raises `ConfigError`, `MachineError` or `DoesNotFitError` that name tensor and file.
        """
        packed = self._packed.get(name)
        if packed is None:
            return self._read(name)
        value = torch.empty(packed.shape, dtype=torch.float32, device="cpu")
        for index, matrix in enumerate(value.view(-1, *packed.shape[-2:])):
            matrix.copy_(self.matrix(name, index))
        return value

    def pieces(self, name: str, first: int, count: int) -> list[Callable[[], Tensor]]:
        """Return functions that read `count` elements from `first` in order, flat.

        They raise the errors of `read`.
        """
        if name not in self._packed:
            return [partial(self._read, name, first, count)]
        numel = prod(self._packed[name].shape[-2:])
        end = first + count
        reads: list[Callable[[], Tensor]] = []
        while first < end:
            index, skip = divmod(first, numel)
            reads.append(PackedMatrix(self, name, index, skip, min(numel - skip, end - first)))
            first += numel - skip
        return reads

    def _read(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        return self._files[self.facts[name].file].read(name, first, count)

    def equal(self, first: str, second: str) -> bool:
        """Return True if two tensors have equal shapes and values; read in chunks."""
        first_facts, second_facts = self.facts[first], self.facts[second]
        if first_facts.shape != second_facts.shape:
            return False
        if self._packed.keys() & {first, second}:
            return torch.equal(self.read(first), self.read(second))
        for start in range(0, first_facts.numel, _COMPARE_ELEMENTS):
            count = min(_COMPARE_ELEMENTS, first_facts.numel - start)
            a, b = self._read(first, start, count), self._read(second, start, count)
            if first_facts.dtype is second_facts.dtype:  # bits, so that NaN equals NaN
                a, b = a.view(torch.uint8), b.view(torch.uint8)
            if not torch.equal(a, b.to(a.dtype)):
                return False
        return True

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Deferred read of a tensor of `files`, complete or in chunks; a `lazy_tensor.ChunkedRead`."""

    files: WeightFiles
    name: str

    def __call__(self) -> Tensor:
        return self.files.read(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.files.facts[self.name].shape

    def pieces(self, first: int, count: int) -> list[Callable[[], Tensor]] | None:
        """Return functions that read `count` elements from `first` in order, flat."""
        return self.files.pieces(self.name, first, count)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Deferred read of elements of a quantized matrix of `files`; a `lazy_tensor.PackedRead`."""

    files: WeightFiles
    name: str
    index: int
    first: int
    count: int

    def __call__(self) -> Tensor:
        """Read the fp32 values, flat."""
        return self.files.matrix(self.name, self.index).view(-1)[self.first :][: self.count]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the matrix."""
        return self.files.facts[self.name].shape[-2:]

    def packed(self, form: FrozenFormat) -> Tensor | None:
        """Return the packed bytes; None for an incomplete matrix or another format."""
        complete = self.first == 0 and self.count == prod(self.shape)
        return self.files.packed(self.name, form, self.index) if complete else None


def _unknown_format(name: str, detail: str) -> ConfigError:
    return ConfigError(
        f"tensor {name!r} is quantized in a way that is not known: {detail}",
        because="of files that are quantized these are read: bitsandbytes' NF4 in blocks of 64, "
        "MXFP4 of gpt-oss, and FP8 (e4m3) with a scale for each square of 128",
        remedy="give the original weights, and frozen.format in the configuration",
    )


def _files_of(source: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Return the files to open, and the file of each tensor if there is an index."""
    if source.is_dir():
        if (source / SINGLE_NAME).exists():  # before an index, as transformers does
            return [source / SINGLE_NAME], None
        if (source / INDEX_NAME).exists():
            return _read_index(source / INDEX_NAME)
        files, shards = files_without_index(source)
        if not files and shards:
            raise ConfigError(
                f"{source} holds {len(shards)} shard(s), {listed([p.name for p in shards])}, and "
                f"no {INDEX_NAME}",
                because="the save did not come to its end, or not all files were copied",
                remedy="save again, or copy the index too",
            )
        if not files:
            pickles = sorted(p.name for p in source.iterdir() if p.suffix in _PICKLES)
            because = f"there are only pickles: {', '.join(pickles[:3])}" if pickles else None
            remedy = "convert them to safetensors: loading a pickle runs code" if pickles else None
            raise ConfigError(f"{source} holds no .safetensors", because=because, remedy=remedy)
        return files, None
    if source.suffix == ".json":
        return _read_index(source)
    if source.suffix in _PICKLES:
        raise ConfigError(
            f"{source} looks like a pickle",
            because="loading a pickle runs code",
            remedy="convert it to safetensors",
        )
    return [source], None


def _read_index(index: Path) -> tuple[list[Path], dict[str, Path]]:
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
                because="a shard is in the directory of its index, under a plain file name",
            )
        expected[name] = index.parent / file
    missing = sorted({p.name for p in expected.values() if not p.exists()})
    if missing:
        raise ConfigError(f"{index} names files that are not there: {listed(missing)}")
    return sorted(set(expected.values())), expected


@dataclass(frozen=True)
class TensorToWrite:
    """Tensor to write: name, shape, dtype, and a function that reads its values."""

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
    tensors: Sequence[TensorToWrite],
    max_shard_bytes: int,
    write_extra: Callable[[Path], object] | None = None,
) -> list[Path]:
    """Write `tensors` as shards; return the files, the index last if there is one.

    One tensor at a time is in memory. A shard has at most `max_shard_bytes`, or a single larger
    tensor. `write_extra` writes other files, such as a config.json, into the folder that it
    receives. Older weights in the directory are replaced atomically, when the new ones are complete
    and on stable storage; if writing fails, they are unchanged.

    Raises:
        ConfigError: The format has no such dtype, or a value overflows its dtype.
        DoesNotFitError: The disk is full.
        MachineError: Another system error, or another process saves there.
    """
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"tensor {tensor.name!r}: safetensors files hold no {tensor.dtype}")
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    names = shard_names(len(shards))
    weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    total_size = sum(t.nbytes for t in tensors)
    with saving(directory, total_size) as folder:
        if write_extra is not None:
            write_extra(folder)
        for name, shard in zip(names, shards, strict=True):
            _write_file(folder / name, shard)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            write_new(folder / INDEX_NAME, json.dumps(index, indent=2).encode(), FILE_MODE)
            names.append(INDEX_NAME)
    return [directory / name for name in names]


def _write_file(path: Path, tensors: Sequence[TensorToWrite]) -> None:
    with open_new(path) as file:
        file.write(encode_header((t.name, t.shape, t.dtype) for t in tensors))
        for tensor in tensors:
            _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, tensor: TensorToWrite) -> None:
    """Convert and write in chunks: converting the full tensor would need a second copy."""
    value = tensor.read().detach()
    assert tuple(value.shape) == tensor.shape, (tensor.name, value.shape, tensor.shape)
    flat = value.reshape(-1)
    step = (4 << 20) // value.itemsize
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step].cpu()
        converted = chunk.to(tensor.dtype)
        if converted is not chunk:
            _check_overflow(tensor, chunk, converted)
        file.write(converted.contiguous().view(torch.uint8).numpy().data)


def _check_overflow(tensor: TensorToWrite, chunk: Tensor, converted: Tensor) -> None:
    infinite = converted.isinf()
    if not infinite.any():
        return
    overflowed = chunk[infinite & ~chunk.isinf()]
    if overflowed.numel():
        raise ConfigError(
            f"tensor {tensor.name!r} holds {overflowed[0]:g}, which is beyond "
            f"{str(tensor.dtype).removeprefix('torch.')}",
            remedy="save in bf16 or fp32",
        )
