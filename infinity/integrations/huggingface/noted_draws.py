"""Random draws of collators and datasets that are the same after a resume.

[Note: random state of a resumed loader]
accelerate's loader reads one batch ahead: when a checkpoint is saved, the first batch of the
next window has been drawn, with the random generators as they were before the window that was
trained. A Trainer that resumes reads that batch again, and puts the generators back afterwards,
so that batches with random masks differ. Here the generators are noted before each batch is
read, and put back as they were before that one and the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from infinity.training.rng_state import capture_rng, restore_rng


class LoopState:
    """State that the Trainer keeps, not the engine: schedule, and random generators of its data.

    Registered with the engine, so that it is in every checkpoint; `scheduler` is set when it is
    made. Notes the batch that was read last, and puts generators back on a resume.
    """

    def __init__(self) -> None:
        self.scheduler: Any = None
        self._last: dict[str, Any] | None = None
        self._ahead: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None
        self._pass: dict[str, Any] = {}  # generators before this pass: a sampler may draw its order

    def state_dict(self) -> dict[str, Any]:
        """The states now, as plain data."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "rng": capture_rng(), "data": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back: the schedule now, the generators when the data is where it was."""
        self._ahead, self._saved = state["data"], state["rng"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def before_pass(self) -> None:
        """A pass over the data is about to begin."""
        if self._ahead is not None and self._ahead.get("pass"):  # older checkpoints have none
            restore_rng(self._ahead["pass"])
        self._pass = capture_rng()

    def before_batch(self, number: int) -> None:
        """A batch of this pass is about to be read."""
        if self._ahead is not None and self._saved is not None:
            if number == self._ahead["batch"]:
                restore_rng(self._ahead["generators"])
            elif number == self._ahead["batch"] + 1:
                self.finish()
        self._last = {"batch": number, "generators": capture_rng(), "pass": self._pass}

    def finish(self) -> None:
        """Generators as they were when the checkpoint was saved, unless that is behind us."""
        if self._saved is not None:
            restore_rng(self._saved)
        self._ahead = self._saved = None


class NotedSampler(Sampler[Any]):
    """A sampler that reports the first index of each batch to the state of the loop."""

    def __init__(self, sampler: Any, batch_size: int, state: LoopState) -> None:
        self.sampler = sampler
        self._batch_size = batch_size
        self._state = state
        # accelerate asks who has it: of a sampler that has none the data set is told.
        if hasattr(sampler, "set_epoch"):
            self.set_epoch = sampler.set_epoch

    def __iter__(self) -> Iterator[Any]:
        self._state.before_pass()
        for number, index in enumerate(self.sampler):
            if number % self._batch_size == 0:
                self._state.before_batch(number // self._batch_size)
            yield index

    def __len__(self) -> int:
        return len(self.sampler)


def note_draws(loader: Any, state: LoopState) -> Any:
    """Wrap the loader to report each batch of all ranks to `state`; workers draw on their own."""
    batches: Any = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of accelerate's, for several ranks
    known = hasattr(batches, "sampler") and isinstance(getattr(batches, "batch_size", None), int)
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and known:
        batches.sampler = NotedSampler(batches.sampler, batches.batch_size, state)
    return loader
