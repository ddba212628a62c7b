"""Comparison of the tensors in a checkpoint's files with its manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from infinity.checkpoint.manifest import (
    BUFFERS,
    FROZEN,
    GRADIENT,
    MASTER,
    MODEL,
    RESIDUAL,
    Manifest,
    TensorSpec,
    moment_stream,
)
from infinity.optim.moments import VALUE_DTYPES
from infinity.types import MomentFormat


def problems(manifest: Manifest, streams: Mapping[str, Sequence[TensorSpec]]) -> Iterator[str]:
    """Yield the mismatches, each with stream and tensor; unknown streams are ignored.

    A stream of a moment that the manifest does not have is a mismatch.
    """
    expected = _expected(manifest)
    for stream in (MODEL, FROZEN, BUFFERS):
        names = {spec.name for spec in streams.get(stream, ())}
        for name in expected[stream].keys() - names:
            yield f"{name!r} is missing in the stream {stream!r}"
    for stream, specs in streams.items():
        known = expected.get(stream)
        if known is None:
            if _MOMENT_STREAM.fullmatch(stream):
                count = len(manifest.moments)
                yield f"the stream {stream!r} exists, but the manifest has {count} moments"
            continue
        for spec in specs:
            if spec.name in known:
                yield from differences(stream, spec, *known[spec.name])
            else:
                yield (
                    f"{spec.name!r} in the stream {stream!r} is not in the manifest, or not of "
                    "that kind"
                )


def differences(
    stream: str, spec: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Iterator[str]:
    """Describe how a tensor differs from the expected shape and dtype; None matches any dtype."""
    where = f"{spec.name!r} in the stream {stream!r}"
    if spec.shape != shape:
        yield f"{where} has the shape {spec.shape}, not {shape}"
    if dtype is not None and spec.dtype is not dtype:
        yield f"{where} is {spec.dtype}, not {dtype}"


_MOMENT_STREAM = re.compile(r"moment[1-9][0-9]?(_scales)?")
_Expected = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


def _expected(manifest: Manifest) -> dict[str, _Expected]:
    """Return the shape and dtype of every expected tensor, by stream and name."""
    trained = {p.name: p for p in manifest.parameters if p.trained}
    frozen = {p.name: p for p in manifest.parameters if not p.trained}
    buffers = {b.name: b for b in manifest.buffers}
    expected: dict[str, _Expected] = {
        stream: {name: record.spec[1:] for name, record in records.items()}
        for stream, records in ((MODEL, trained), (FROZEN, frozen), (BUFFERS, buffers))
    }
    state_dtypes: dict[str, torch.dtype | None] = {
        RESIDUAL: torch.int16,
        MASTER: torch.float32,
        GRADIENT: None,
    }
    for index, form in enumerate(map(MomentFormat, manifest.moments), start=1):
        stream = moment_stream(index)
        state_dtypes[stream] = VALUE_DTYPES[form]
        if form.num_scales(1):
            expected[f"{stream}_scales"] = {
                name: ((form.num_scales(prod(record.shape)),), torch.float32)
                for name, record in trained.items()
            }
    for stream, dtype in state_dtypes.items():
        expected[stream] = {name: (record.shape, dtype) for name, record in trained.items()}
    return expected
