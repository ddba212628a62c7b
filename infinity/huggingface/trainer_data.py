"""Random draws of collators and datasets, the same after a resume.

[Note: look-ahead]
accelerate's loader reads one batch ahead: when a checkpoint is saved, the first batch of the next
window has been drawn, with the random generators as they were before the window that was trained.
A Trainer that resumes reads that batch again, and puts the generators back afterwards, so that
batches with random masks differ. Here the generators are noted before each batch is read, and put
back as they were before that one and the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from infinity.training.rng import capture_rng, restore_rng


class DataNotes:
    """The batch that was read last, and the generators before it; puts both back on a resume."""

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self._ahead: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None

    def resume(self, last: dict[str, Any] | None, saved: dict[str, Any]) -> None:
        """Go on after a checkpoint: `last` as it was then, `saved` the generators then."""
        self._ahead, self._saved = last, saved

    def before_batch(self, number: int) -> None:
        """A batch of this pass is about to be read."""
        if self._ahead is not None and self._saved is not None:
            if number == self._ahead["batch"]:
                restore_rng(self._ahead["generators"])
            elif number == self._ahead["batch"] + 1:
                self.finish()
        self.last = {"batch": number, "generators": capture_rng()}

    def finish(self) -> None:
        """Generators as they were when the checkpoint was saved, unless that is behind us."""
        if self._saved is not None:
            restore_rng(self._saved)
        self._ahead = self._saved = None


class NotedSampler(Sampler[Any]):
    """Another sampler's indices; tells the notes when the first of a batch is asked for."""

    def __init__(self, sampler: Any, batch_size: int, notes: DataNotes) -> None:
        self.sampler = sampler
        self._batch_size = batch_size
        self._notes = notes

    def __iter__(self) -> Iterator[Any]:
        for number, index in enumerate(self.sampler):
            if number % self._batch_size == 0:
                self._notes.before_batch(number // self._batch_size)
            yield index

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to a sampler that takes it."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def note_draws(loader: Any, notes: DataNotes) -> Any:
    """The loader, which tells `notes` of each batch; worker processes draw for themselves."""
    batches: Any = getattr(loader, "batch_sampler", None)
    known = hasattr(batches, "sampler") and isinstance(getattr(batches, "batch_size", None), int)
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and known:
        batches.sampler = NotedSampler(batches.sampler, batches.batch_size, notes)
    return loader
