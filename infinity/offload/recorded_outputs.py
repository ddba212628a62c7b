"""Outputs that transformers records inside sliced blocks: router logits, attentions.

With `output_router_logits=True` and similar options, hooks on modules in a block append a tensor to
a list of the model's call. Each slice would append one, but the model, for example its auxiliary
loss with an attention mask, expects one per layer. So the tensors of slices are concatenated along
the batch dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CAPTURING = "transformers.utils.output_capturing"  # the module of transformers with these hooks
Records = MutableMapping[str, Any]  # lists or tuples of tensors, by the name of the output


def active_records() -> Records:
    """Return the records of the transformers call in progress, or an empty dict."""
    capturing = sys.modules.get(CAPTURING)
    records: Records | None = None if capturing is None else capturing._active_collector.get()
    return {} if records is None else records


class SlicedRecords:
    """Records of one block call, taken from transformers after each slice and joined."""

    def __init__(self, sizes: Sequence[int], refusal: Callable[[str, str], Exception]) -> None:
        """`sizes` are the samples per slice; `refusal(what, because)` returns an error to raise."""
        self._records = active_records()
        self._num_before = {
            k: len(v) for k, v in self._records.items() if isinstance(v, list | tuple)
        }
        self._sizes = sizes
        self._refusal = refusal
        self._by_slice: dict[str, list[Sequence[Any]]] = {
            k: [()] * len(sizes) for k in self._num_before
        }

    @contextmanager
    def slice(self, number: int) -> Iterator[None]:
        """Take the records that a slice adds while it runs in this context."""
        yield
        for key, count in self._num_before.items():
            values = self._records[key]
            self._by_slice[key][number] = values[count:]
            self._records[key] = values[:count]

    def join(self) -> None:
        """Append the joined tensors to the records, as a call with the full batch would have."""
        for key, by_slice in self._by_slice.items():
            if not any(by_slice):
                continue
            counts = [len(records) for records in by_slice]
            if len(set(counts)) > 1:
                raise self._refusal(
                    f"its slices record {key!r} {', '.join(map(str, counts))} times",
                    "records of slices are joined sample by sample",
                )
            joined = [self._concatenate(key, tensors) for tensors in zip(*by_slice, strict=True)]
            self._records[key] += type(self._records[key])(joined)

    def _concatenate(self, key: str, tensors: Sequence[Any]) -> Tensor:
        first = tensors[0]
        for tensor, size in zip(tensors, self._sizes, strict=True):
            rows = tensor.shape[0] if isinstance(tensor, Tensor) and tensor.dim() else 0
            if not rows or rows * self._sizes[0] != first.shape[0] * size:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise self._refusal(
                    f"it records {key!r} of shape {shape} for {size} samples",
                    "records of slices are joined sample by sample",
                )
        return torch.cat(list(tensors))
