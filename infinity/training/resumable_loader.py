"""DataLoader that continues at its position after a resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import ConfigError, InfinityWarning
from infinity.training.rng_state import capture_rng, restore_rng


class _LocalSampler(Sampler[int]):
    """Sampler of a rank's batches; the next iterator starts at batch `first`."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, ranks: DistContext) -> None:
        self._dataset = dataset
        self.shuffled = False
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._ranks = ranks
        self.first = 0

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, on all ranks together."""
        samples = len(self._dataset)
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        count, size, samples = self._ranks.count, self._batch_size, len(self._dataset)
        order: Sequence[int] = range(samples)
        if self.shuffled:  # the order of torch's DistributedSampler in epoch 0
            generator = torch.Generator("cpu").manual_seed(0)
            order = torch.randperm(samples, generator=generator, device="cpu").tolist()
        for start in range(first, self.num_batches - count + 1, count):
            first_sample = (start + self._ranks.rank) * size
            yield from order[first_sample : first_sample + size]

    def __len__(self) -> int:
        rounds, size = self.num_batches // self._ranks.count, self._batch_size
        end = ((rounds - 1) * self._ranks.count + self._ranks.rank + 1) * size
        return rounds * size - max(end - len(self._dataset), 0) if rounds else 0


class ResumableLoader(DataLoader[Any]):
    """`torch.utils.data.DataLoader` with `state_dict` and `load_state_dict`.

    Batches are distributed round-robin: rank r of n gets batches r, r + n, ... of those that a
    single rank would get. Batches at the end of an epoch that are fewer than ranks are dropped.
    Every rank reads an `IterableDataset` completely, so it must be equal on all ranks.

    The position is the number of completed epochs, and of batches returned since on all ranks, so
    a run may resume with another number of ranks. After `load_state_dict` the next iterator starts
    at that position. Skipped batches are not read, except those of an `IterableDataset`, which are
    read with the random generators (of torch, NumPy and Python) as they were when the epoch began.
    Random numbers that workers draw per sample start over with the resumed iterator.

    With `shuffled` samples come in a random order that is equal in every epoch, as in DeepSpeed.

    Raises:
        ConfigError: An epoch has less than one batch for each rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        ranks: DistContext = SINGLE_PROCESS,
        *,
        shuffled: bool = False,
        **options: Any,
    ) -> None:
        self._ranks = ranks
        self._local_sampler: _LocalSampler | None = None
        size, drop_last = options.get("batch_size", 1), options.get("drop_last", False)
        if not isinstance(dataset, IterableDataset) and isinstance(size, int) and size > 0:
            self._local_sampler = _LocalSampler(dataset, size, drop_last, ranks)
            self._local_sampler.shuffled = shuffled
            options["sampler"] = self._local_sampler
            num_batches = self._local_sampler.num_batches
            if num_batches < ranks.count > 1:
                raise ConfigError(
                    f"training_data makes {num_batches} batches of {size} samples, for "
                    f"{ranks.count} ranks",
                    because="every rank needs a batch of its own",
                    remedy="more data, smaller batches, or fewer ranks",
                )
        self._epoch = 0
        self._batches = 0  # returned in this epoch, on all ranks
        self._epoch_rng_state: dict[str, Any] | None = None  # of `capture_rng` when it began
        self._resume = False
        super().__init__(dataset, **options)

    def __len__(self) -> int:
        return super().__len__() // (1 if self._local_sampler is not None else self._ranks.count)

    def __iter__(self) -> Any:
        rng_state = capture_rng()
        start = self._epoch_rng_state if self._resume else None
        if start is not None:
            # Scripts written for DeepSpeed may skip these batches themselves.
            skips_twice = (
                self._local_sampler is not None and self._local_sampler.shuffled and self._batches
            )
            if skips_twice and not self._ranks.rank:
                warnings.warn(
                    f"the loader of training_data goes on after {self._batches} batches of its "
                    "pass: a loop that skips those itself would skip them twice",
                    InfinityWarning,
                    stacklevel=2,
                )
            # A new iterator draws seeds from torch's generator, and an iterable may draw its order.
            restore_rng(start)
        else:
            self._epoch_rng_state, self._batches = rng_state, 0
        self._resume = False
        if self._local_sampler is not None:
            self._local_sampler.first = self._batches
        batches: Iterator[Any] = super().__iter__()
        if self._local_sampler is None:
            for _ in islice(batches, self._batches):  # read now: they may draw random numbers
                pass
            batches = self._round_robin(batches)
        if start is not None:
            restore_rng(rng_state)
        return self._counted(batches)

    def _round_robin(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batch of every complete round of batches."""
        while len(round_batches := list(islice(batches, self._ranks.count))) == self._ranks.count:
            yield round_batches[self._ranks.rank]

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += self._ranks.count
            yield batch
        self._epoch, self._batches, self._epoch_rng_state = self._epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain data and, within an epoch, the states of generators."""
        shuffled = self._local_sampler is not None and self._local_sampler.shuffled
        position = {"epoch": self._epoch, "batches": self._batches, "start": self._epoch_rng_state}
        return position | {"shuffled": shuffled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position, at which the next iterator starts."""
        self._epoch, self._batches = int(state["epoch"]), int(state["batches"])
        start = state["start"]
        if isinstance(start, torch.Tensor):  # of an earlier version, of torch's generator
            start = {**capture_rng(), "torch": start}
        self._epoch_rng_state = start
        self._resume = True
        if self._local_sampler is not None:  # finish the epoch in its order
            self._local_sampler.shuffled = bool(state.get("shuffled", False))
