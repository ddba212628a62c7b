"""Whether the tensors of a checkpoint's files are those that its manifest speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from infinity.checkpoint.layout import (
    BUFFERS,
    FROZEN,
    GRADIENT,
    MASTER,
    MODEL,
    RESIDUAL,
    TensorSpec,
)
from infinity.checkpoint.manifest import BufferRecord, Manifest, ParameterRecord
from infinity.checkpoint.plain import DTYPES
from infinity.formats import MomentFormat

_MOMENT = re.compile(r"moment([1-9][0-9]?)(_scales)?")
_BESIDE = {RESIDUAL: torch.int16, MASTER: torch.float32}  # what stands beside weights
_MOMENT_DTYPES = {MomentFormat.FP32: torch.float32, MomentFormat.INT8: torch.uint8}

Records = Mapping[str, ParameterRecord | BufferRecord]


def problems(manifest: Manifest, streams: Mapping[str, Sequence[TensorSpec]]) -> Iterator[str]:
    """What does not agree, each naming stream and tensor; streams of other names are not judged."""
    trained: Records = {p.name: p for p in manifest.parameters if p.trained}
    frozen: Records = {p.name: p for p in manifest.parameters if not p.trained}
    buffers: Records = {b.name: b for b in manifest.buffers}
    for stream, records in ((MODEL, trained), (FROZEN, frozen), (BUFFERS, buffers)):
        specs = streams.get(stream, ())
        found = {spec.name for spec in specs}
        for name in records:
            if name not in found:
                yield f"{name!r} is missing in the stream {stream!r}"
        for spec, record in _known(stream, specs, records):
            yield from (
                _differences(stream, spec, record, DTYPES[record.dtype])
                if record
                else (_unknown(stream, spec),)
            )
    for stream, specs in streams.items():
        if stream in (*_BESIDE, GRADIENT) or _MOMENT.fullmatch(stream):
            yield from _state_problems(manifest, stream, specs, trained)


def _state_problems(
    manifest: Manifest, stream: str, specs: Sequence[TensorSpec], trained: Records
) -> Iterator[str]:
    """A stream with something for each of the trained parameters, or for some of them."""
    dtype = _BESIDE.get(stream)
    scaled = None
    if match := _MOMENT.fullmatch(stream):
        index = int(match[1])
        if index > len(manifest.moments):
            yield f"the stream {stream!r} is there, and {len(manifest.moments)} moments are known"
            return
        format = MomentFormat(manifest.moments[index - 1])
        dtype = _MOMENT_DTYPES.get(format, torch.bfloat16)
        if match[2]:
            scaled, dtype = format, torch.float32
    for spec, record in _known(stream, specs, trained):
        if record is None:
            yield _unknown(stream, spec)
        elif scaled is None:
            yield from _differences(stream, spec, record, dtype)
        elif prod(spec.shape) != scaled.num_scales(prod(record.shape)) or spec.dtype is not dtype:
            yield (
                f"{spec.name!r} in the stream {stream!r} is {spec.dtype} of shape {spec.shape}, "
                f"not {dtype} with {scaled.num_scales(prod(record.shape))} elements"
            )


def _known(
    stream: str, specs: Sequence[TensorSpec], records: Records
) -> Iterator[tuple[TensorSpec, ParameterRecord | BufferRecord | None]]:
    for spec in specs:
        yield spec, records.get(spec.name)


def _unknown(stream: str, spec: TensorSpec) -> str:
    return f"{spec.name!r} in the stream {stream!r} is not in the manifest, or not of that kind"


def _differences(
    stream: str,
    spec: TensorSpec,
    record: ParameterRecord | BufferRecord,
    dtype: torch.dtype | None,
) -> Iterator[str]:
    if spec.shape != record.shape:
        yield (
            f"{spec.name!r} in the stream {stream!r} has the shape {spec.shape}, not {record.shape}"
        )
    if dtype is not None and spec.dtype is not dtype:
        yield f"{spec.name!r} in the stream {stream!r} is {spec.dtype}, not {dtype}"
