"""A DataLoader that knows how far it is, and goes on from there after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler


class _From(Sampler[int]):
    """Another sampler's indices; the next time round without the first `skip`."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self._sampler = sampler
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        return islice(iter(self._sampler), skip, None)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class ResumableLoader(DataLoader[Any]):
    """`torch.utils.data.DataLoader` with `state_dict` and `load_state_dict`.

    The position is the number of passes over the data that are over, and of the batches that were
    handed out since. After `load_state_dict` the next iterator starts there. Batches that are
    skipped are not read, except those of an `IterableDataset`. Random numbers that workers draw
    per sample start anew with the iterator that goes on.
    """

    def __init__(self, dataset: Dataset[Any], **options: Any) -> None:
        self._indices: _From | None = None
        if not isinstance(dataset, IterableDataset):
            self._indices = _From(SequentialSampler(dataset))  # type: ignore[arg-type]
            options["sampler"] = self._indices
        self._epoch = 0
        self._batches = 0
        self._start: torch.Tensor | None = None  # torch's generator when this pass began
        self._resume = False
        super().__init__(dataset, **options)

    def __iter__(self) -> Any:
        now = torch.get_rng_state()
        resume = self._resume and self._start is not None
        if resume:
            torch.set_rng_state(self._start)  # type: ignore[arg-type]  # an iterator draws from it
        else:
            self._start, self._batches = now, 0
        self._resume = False
        skip = self._batches
        if self._indices is not None:
            self._indices.skip = skip * (self.batch_size or 1)
            skip = 0
        batches = super().__iter__()
        if resume:
            torch.set_rng_state(now)
        return self._counted(islice(batches, skip, None))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch
        self._epoch, self._batches, self._start = self._epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Where this is: plain data and, within a pass, one tensor."""
        return {"epoch": self._epoch, "batches": self._batches, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, with the next iterator."""
        self._epoch, self._batches = int(state["epoch"]), int(state["batches"])
        self._start = state["start"]
        self._resume = True
