"""The committed state of a durable run as weights and buffers by name, without an engine.

The state files hold parameters, which `memory/durable_reader.py` finds; buffers and counters are
in the commit's document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.checkpoint.manifest import BufferRecord, ParameterRecord
from infinity.checkpoint.masters import join
from infinity.checkpoint.plain import DTYPES, dtype_name
from infinity.checkpoint.reader import empty
from infinity.memory.durable_reader import DurableReader
from infinity.plan.layout import REST_DTYPES, Kind
from infinity.training.committed import read_document

_PIECE = 1 << 20  # elements, a multiple of what pages hold


class DurableWeights:
    """A `WeightSource` over the directory of a durable run; raises as its reader does.

    `document` is what the commit holds beside; where no step was committed it is empty, and
    nothing is known of buffers.
    """

    def __init__(self, reader: DurableReader) -> None:
        """Raises `CheckpointError` for a document that cannot be understood."""
        self._reader = reader
        self.document = read_document(reader.document)
        steps = self.document.run.get("steps", {})
        self.parameters = [
            ParameterRecord(
                name, (), segment.shape, segment.dtype, segment.trained, steps.get(name, 0)
            )
            for name, segment in ((name, reader.segment(name)) for name in reader.names)
        ]
        self.buffers = [
            BufferRecord(
                name,
                (),
                tuple(value.shape),
                dtype_name(value.dtype),
                name in self.document.persistent,
            )
            for name, value in self.document.buffers.items()
        ]

    def weight(self, name: str) -> Tensor:
        """What a parameter computes with."""
        return self._whole(name, Kind.WEIGHT, DTYPES[self._reader.segment(name).dtype])

    def has_master(self, name: str) -> bool:
        """Whether there is a residual or a master beside the weight."""
        trained = self._reader.segment(name).trained
        return trained and self._reader.plan.precision.rest_kind is not None

    def master(self, name: str) -> Tensor:
        """The fp32 master."""
        kind = self._reader.plan.precision.rest_kind
        assert kind is not None
        if kind is Kind.MASTER:
            return self._whole(name, kind, torch.float32)
        segment = self._reader.segment(name)
        master = empty(name, segment.numel, torch.float32)
        for first in range(0, segment.numel, _PIECE):
            count = min(_PIECE, segment.numel - first)
            weight = self._reader.read(name, Kind.WEIGHT, first, count).view(torch.bfloat16)
            rest = self._reader.read(name, kind, first, count)
            master[first : first + count] = join(
                weight, rest.view(getattr(torch, REST_DTYPES[kind]))
            )
        return master.view(segment.shape)

    def buffer(self, name: str) -> Tensor:
        """A buffer's value."""
        return self.document.buffers[name]

    def _whole(self, name: str, kind: Kind, dtype: torch.dtype) -> Tensor:
        """In pieces: what is read lies in memory twice."""
        segment = self._reader.segment(name)
        flat = empty(name, segment.numel, dtype)
        for first in range(0, segment.numel, _PIECE):
            count = min(_PIECE, segment.numel - first)
            part = self._reader.read(name, kind, first, count)
            flat.view(torch.uint8)[first * dtype.itemsize :][: part.numel()] = part
        return flat.view(segment.shape)
