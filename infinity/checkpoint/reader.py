"""Readers of stored state: their common interface, and the reader of a checkpoint.

All data is verified before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

import infinity._aio as _aio
from infinity.checkpoint.blocks import BlockReader, ChangedError, WrongBytesError, regular_file_size
from infinity.checkpoint.directory import refusal, remove_stale
from infinity.checkpoint.manifest import (
    BLOCK_BYTES,
    BUFFERS,
    FROZEN,
    INDEX,
    MANIFEST_NAME,
    MASTER,
    MAX_MANIFEST_BYTES,
    MODEL,
    RESIDUAL,
    FileRecord,
    Manifest,
    ParameterRecord,
    TensorSpec,
    check_tag,
)
from infinity.checkpoint.manifest_check import problems as disagreements
from infinity.checkpoint.plain import DTYPES
from infinity.common.crc32c import crc32c
from infinity.common.files import read_small
from infinity.common.sizes import format_size
from infinity.errors import CheckpointError, ConfigError, DoesNotFitError, MachineError, listed
from infinity.model.quantized import dequantize
from infinity.model.safetensors_file import SafetensorsFile, TensorEntry
from infinity.model.weight_files import TensorToWrite
from infinity.types import FrozenFormat


class StateReader:
    """Tensors by stream and name, and the manifest that describes them. A context manager.

    Subclasses read the files of a checkpoint, or the extents of a durable run. Used by one thread
    at a time.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest
        self._specs: dict[str, dict[str, TensorSpec]] = {}  # by stream and name, in byte order

    @property
    def verified(self) -> bool:
        """True if all data has checksums."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes that `verify` reads."""
        raise NotImplementedError

    def verify(self, seen: Callable[[int], None] | None = None) -> Iterator[str]:
        """Read everything; yield every problem, naming file, bytes and tensors.

        `seen` is called with the size in bytes of each range that was read, sound or damaged.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the files; idempotent."""
        raise NotImplementedError

    def _fill(self, stream: str, name: str, first_byte: int, target: Tensor) -> None:
        """Implement `read_into` for a valid range of a tensor's bytes."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- streams -----------------------------------------------------------------------------

    @property
    def streams(self) -> Sequence[str]:
        """Streams that have tensors."""
        return tuple(self._specs)

    def names(self, stream: str) -> Sequence[str]:
        """Return the tensors of a stream in byte order; none if it does not exist."""
        return tuple(self._specs.get(stream, ()))

    def facts(self, stream: str, name: str) -> TensorSpec:
        """Return shape and dtype of a tensor. Raises `CheckpointError` if it does not exist."""
        spec = self._specs.get(stream, {}).get(name)
        if spec is None:
            raise CheckpointError(
                f"{self.directory} has no tensor {name!r} in the stream {stream!r}",
                because=f"it has {len(self._specs.get(stream, ()))} in that stream",
            )
        return spec

    def read_into(self, stream: str, name: str, first_byte: int, target: Tensor) -> None:
        """Fill `target` (uint8, 1-D, on the CPU) with bytes of a tensor, from `first_byte` on.

        Data with a checksum is verified before it is copied. Raises `CheckpointError` that names
        file, tensor and offset, `MachineError` if the drive refuses, `ConfigError` for a range
        outside the tensor. After an error the content of `target` is undefined.
        """
        nbytes = self.facts(stream, name).nbytes
        if target.dtype is not torch.uint8 or target.dim() != 1 or target.device.type != "cpu":
            raise ConfigError(
                f"the target is {target.dtype} on {target.device}, not uint8 in 1-D on cpu"
            )
        if not 0 <= first_byte <= first_byte + target.numel() <= nbytes:
            raise ConfigError(
                f"bytes {first_byte} to {first_byte + target.numel()} of tensor {name!r}, which "
                f"has {nbytes}"
            )
        if target.numel():
            self._fill(stream, name, first_byte, target)

    def read(self, stream: str, name: str) -> Tensor:
        """Return a full tensor in new memory. Raises as `read_into`, and `DoesNotFitError`."""
        facts = self.facts(stream, name)
        flat = _allocate(name, facts.numel, facts.dtype)
        self.read_into(stream, name, 0, flat.view(torch.uint8))
        return flat.view(facts.shape)

    # --- the model ---------------------------------------------------------------------------

    @cached_property
    def quantized(self) -> Mapping[str, ParameterRecord]:
        """Parameters that are stored quantized, by name."""
        return {record.name: record for record in self.manifest.parameters if record.form}

    def weight(self, name: str) -> Tensor:
        """Return the weight of a parameter in its compute dtype."""
        stored = self.read(FROZEN if name in self._specs.get(FROZEN, ()) else MODEL, name)
        record = self.quantized.get(name)
        if record is None:
            return stored
        value = _allocate(name, prod(record.shape), DTYPES[record.dtype]).view(record.shape)
        dequantize(stored, FrozenFormat(record.form), value)
        return value

    def master(self, name: str) -> Tensor:
        """Return a trained parameter's fp32 master, or a frozen one's value, in its shape.

        The master of a bf16 weight is joined from weight and residual, that of an fp16 weight is in
        a separate stream, and that of an fp32 weight is the weight.
        """
        if name in self._specs.get(MASTER, ()):
            return self.read(MASTER, name)
        if name not in self._specs.get(RESIDUAL, ()):
            return self.weight(name)
        facts = self.facts(MODEL, name)
        master = _allocate(name, facts.numel, torch.float32)
        weight = torch.empty(min(_JOIN_ELEMENTS, facts.numel), dtype=torch.bfloat16)
        residual = torch.empty_like(weight, dtype=torch.int16)
        for first in range(0, facts.numel, _JOIN_ELEMENTS):
            count = min(_JOIN_ELEMENTS, facts.numel - first)
            for stream, buffer in ((MODEL, weight), (RESIDUAL, residual)):
                self.read_into(stream, name, 2 * first, buffer[:count].view(torch.uint8))
            master[first : first + count] = join(weight[:count], residual[:count])
        return master.view(facts.shape)

    def outgoing(self, dtype: torch.dtype | None) -> Sequence[TensorToWrite]:
        """Return the tensors of the model's state dict, tied ones once; each is read when needed.

        Parameters are converted to `dtype`: fp32 gives the exact masters, other dtypes are rounded
        once from the masters, None keeps the compute dtype. Buffers are not converted.
        """
        tensors = []
        for parameter in self.manifest.parameters:
            compute_dtype = DTYPES[parameter.dtype]
            out_dtype = (
                dtype if dtype is not None and compute_dtype in _CONVERTED else compute_dtype
            )
            read = self.master if out_dtype is not compute_dtype else self.weight
            get = partial(read, parameter.name)
            tensors.append(TensorToWrite(parameter.name, parameter.shape, out_dtype, get))
        for buffer in self.manifest.buffers:
            if buffer.persistent:
                get = partial(self.read, BUFFERS, buffer.name)
                tensors.append(TensorToWrite(buffer.name, buffer.shape, DTYPES[buffer.dtype], get))
        return tensors


def damaged(what: str) -> CheckpointError:
    """Return the error for bytes that differ from the written ones."""
    return CheckpointError(
        what,
        because="a drive, a copy or another program changed it, or it is of another checkpoint",
        remedy="infinity checkpoint verify DIR --all lists the sound checkpoints, and all "
        "damage in the others",
    )


class CheckpointReader(StateReader):
    """An open checkpoint.

    The manifest is verified against its checksum, the files against the manifest, and headers
    against both, before memory is allocated for a tensor. Every block is verified against its CRC
    before it is returned.
    """

    def __init__(self, root: Path, tag: str) -> None:
        """Verify everything except the bytes of tensors.

        Raises `ConfigError` for an invalid tag, `CheckpointError` that names the file at fault,
        `MachineError` if one cannot be read.
        """
        check_tag(tag)
        super().__init__(Path(root).expanduser().absolute() / tag)
        self._engine: _aio.Engine | None = None
        self._block_readers: dict[str, BlockReader] = {}  # at most one file of each stream
        self._headers_checked: set[str] = set()
        remove_stale(self.directory.parent)
        if self.directory.is_symlink():
            raise CheckpointError(
                f"{self.directory} is a symbolic link, which is not followed",
                remedy="name the directory that it leads to",
            )
        if not self.directory.is_dir():
            raise CheckpointError(
                f"there is no checkpoint {self.directory}",
                remedy=f"list the existing ones: ls {self.directory.parent}",
            )
        self.manifest_crc32c = 0  # distinguishes checkpoints of the same name
        self.manifest = self._read_manifest()
        self._records = {record.name: record for record in self.manifest.files}
        self._tensor_facts: dict[str, dict[str, TensorEntry]] = {}
        for record in self.manifest.files:
            self._check_file(record)
        self._specs = {
            stream: {name: TensorSpec(name, one.shape, one.dtype) for name, one in tensors.items()}
            for stream, tensors in self._tensor_facts.items()
        }
        self._engine = _aio.Engine(block_size=BLOCK_BYTES)
        try:
            self._check_consistency()
        except BaseException:
            self.close()
            raise

    def _read_manifest(self) -> Manifest:
        path = self.directory / MANIFEST_NAME
        try:
            if (size := regular_file_size(path)) > MAX_MANIFEST_BYTES:
                raise ChangedError(f"it has {size} bytes, more than {MAX_MANIFEST_BYTES}")
            data = read_small(path, nbytes=MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.directory} is not a checkpoint: it has no {MANIFEST_NAME}",
                because="the manifest is written last, so without it nothing else can be trusted",
                remedy="use another checkpoint",
            ) from None
        except ChangedError as error:
            raise self._damaged(path, str(error)) from None
        except OSError as error:
            raise refusal("reading", path, error) from error
        manifest = Manifest.from_bytes(data, path)
        self.manifest_crc32c = crc32c(data)
        return manifest

    def _check_file(self, record: FileRecord) -> None:
        path = self.directory / record.name
        try:
            regular_file_size(path, record.nbytes)
            if record.stream == INDEX:
                return
            file = SafetensorsFile(path)
        except FileNotFoundError:
            raise self._damaged(path, "it is missing") from None
        except ChangedError as error:
            raise self._damaged(path, str(error)) from None
        except ConfigError as error:
            raise self._damaged(path, error.what) from None
        except OSError as error:
            raise refusal("reading", path, error) from error
        file.close()
        known = self._tensor_facts.setdefault(record.stream, {})
        facts = sorted(file.facts.items(), key=lambda item: item[1].offset)
        for name, tensor in facts:
            if name in known:
                raise self._damaged(path, f"tensor {name!r} is in {known[name].file.name} too")
            known[name] = tensor

    def _check_consistency(self) -> None:
        streams = {stream: list(specs.values()) for stream, specs in self._specs.items()}
        problems = list(disagreements(self.manifest, streams))
        if problems:
            for record in self.manifest.files:
                self._check_header(record)  # report a damaged header rather than its effects
            raise damaged(
                f"the files of the checkpoint {self.directory} do not match its manifest: "
                + listed(problems, separator="; ")
            )

    def _damaged(self, path: Path, problem: str) -> CheckpointError:
        return damaged(f"{path} is not sound: {problem}")

    def _fill(self, stream: str, name: str, first_byte: int, target: Tensor) -> None:
        facts = self._tensor_facts[stream][name]
        record = self._records[facts.file.name]
        self._check_header(record)
        done = 0
        while done < target.numel():
            block, start = divmod(facts.offset + first_byte + done, record.block_bytes)
            data = self._block(record, block)
            count = min(data.numel() - start, target.numel() - done)
            # With numpy: torch copies with all threads, which wait for one another on a busy CPU.
            target.numpy()[done : done + count] = data[start : start + count].numpy()
            done += count

    def _check_header(self, record: FileRecord) -> None:
        """Check a file's header against its checksum, once."""
        if record.name in self._headers_checked:
            return
        ends = [
            facts.offset
            for facts in self._tensor_facts.get(record.stream, {}).values()
            if facts.file.name == record.name
        ]
        for block in range(-(-min(ends, default=0) // record.block_bytes)):
            self._block(record, block)
        self._headers_checked.add(record.name)

    def _block(self, record: FileRecord, block: int) -> Tensor:
        """Return the checked bytes of a block; raises `CheckpointError` or `TransferError`."""
        try:
            return self._reader(record).block(block)
        except WrongBytesError as error:
            location = self._describe_block(record, block)
            raise damaged(
                f"{self.directory / record.name} is damaged: {location}: {error}"
            ) from None
        except MachineError as error:
            self._close_stream(record.stream)
            raise MachineError(
                f"reading {self.directory / record.name}: {error.what}",
                because=error.because,
                remedy="end other programs that use RAM",
            ) from error
        except (ChangedError, FileNotFoundError) as error:
            self._close_stream(record.stream)
            raise self._damaged(self.directory / record.name, str(error)) from None
        except OSError as error:
            self._close_stream(record.stream)
            location = self._describe_block(record, block)
            raise refusal(f"reading {location} of", self.directory / record.name, error) from error

    def _reader(self, record: FileRecord) -> BlockReader:
        if self._engine is None:
            raise ConfigError(f"the checkpoint {self.directory} was closed")
        reader = self._block_readers.get(record.stream)
        if reader is not None and reader.path.name == record.name:
            return reader
        self._close_stream(record.stream)
        path = self.directory / record.name
        reader = BlockReader(path, record.nbytes, record.block_bytes, record.crc32c, self._engine)
        self._block_readers[record.stream] = reader
        return reader

    def _close_stream(self, stream: str) -> None:
        reader = self._block_readers.pop(stream, None)
        if reader is not None:
            reader.close()

    def _describe_block(self, record: FileRecord, block: int) -> str:
        """Describe a block and the tensors that it holds bytes of."""
        first = block * record.block_bytes
        last = min(first + record.block_bytes, record.nbytes)
        names = []
        header_bytes = record.nbytes
        for name, tensor in self._tensor_facts.get(record.stream, {}).items():
            if tensor.file.name != record.name:
                continue
            header_bytes = min(header_bytes, tensor.offset)
            end = tensor.offset + tensor.numel * tensor.dtype.itemsize
            if tensor.offset < last and end > first:
                names.append(repr(name))
        if record.stream != INDEX and first < header_bytes:
            names.insert(0, "the header")
        content = listed(names, limit=3) or "no tensor"
        return f"block {block} (bytes {first} to {last - 1}), which holds {content}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(record.nbytes for record in self.manifest.files)

    def verify(self, seen: Callable[[int], None] | None = None) -> Iterator[str]:
        """See `StateReader.verify`; checks each block."""
        for record in self.manifest.files:
            self._close_stream(record.stream)  # drop verified blocks in memory: read from the drive
            for block in range(len(record.crc32c)):
                try:
                    self._block(record, block)
                except (CheckpointError, MachineError) as error:
                    yield error.what
                if seen is not None:
                    seen(min(record.block_bytes, record.nbytes - block * record.block_bytes))
            self._close_stream(record.stream)

    def close(self) -> None:
        """Close the files; idempotent."""
        for stream in list(self._block_readers):
            self._close_stream(stream)
        engine, self._engine = self._engine, None
        if engine is not None:
            with suppress(OSError):
                engine.close()


def _allocate(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate memory for a tensor, in one dimension; raises `DoesNotFitError` with its name."""
    try:
        return torch.empty(numel, dtype=dtype)
    except RuntimeError as error:
        size = format_size(numel * dtype.itemsize)
        raise DoesNotFitError(f"tensor {name!r} needs {size} of RAM", because=str(error)) from error


_JOIN_ELEMENTS = 1 << 20  # joined at once
_NAN = 0x7FC00000  # the only NaN in masters
_INFINITY = 0x7F800000
# Parameters of these dtypes are converted on request; others are codes of a quantized model.
_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 weights and int16 residuals, in new memory."""
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(residual).view(torch.float32)  # int32 wraps: modulo 2**32


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 masters into bf16 weights and int16 residuals; lossless except for NaN bits."""
    bits = master.contiguous().view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > _INFINITY, _NAN, bits)
    residual = bits.to(torch.int16)  # the lower half, signed
    weight = ((bits - residual) >> 16).to(torch.int16)
    return weight.view(torch.bfloat16), residual
