"""Reproduction of the random draws of collators and datasets after a resume.

[Note: random state of a resumed loader]
accelerate's loader reads one batch ahead: when a checkpoint is saved, the first batch of the next
window has already been drawn, with the state that the random generators had before the window was
trained. A Trainer that resumes reads that batch again and restores the generators only afterwards,
so that batches with random masks differ. `LoopState` therefore records the generators before each
batch, and on a resume restores the recorded state before that batch, and the state of the
checkpoint before the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from infinity.training.rng_state import capture_rng, restore_rng


class LoopState:
    """State of the training loop in a checkpoint: LR schedule and random generators of the data.

    Registered with the engine, so that every checkpoint contains it. `scheduler` is set when the
    Trainer creates it. See [Note: random state of a resumed loader].
    """

    def __init__(self) -> None:
        self.scheduler: Any = None
        self._last: dict[str, Any] | None = None
        self._ahead: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None
        self._pass: dict[str, Any] = {}  # generators before this epoch; samplers draw from them

    def state_dict(self) -> dict[str, Any]:
        """Return the current state as plain data."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "rng": capture_rng(), "data": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedule now, and the generators once the data loader is at its batch."""
        self._ahead, self._saved = state["data"], state["rng"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def before_pass(self) -> None:
        """Record the generators before a pass over the data, or restore them on a resume."""
        if self._ahead is not None and self._ahead.get("pass"):  # older checkpoints have none
            restore_rng(self._ahead["pass"])
        self._pass = capture_rng()

    def before_batch(self, number: int) -> None:
        """Record the generators before batch `number` is read, or restore them on a resume."""
        if self._ahead is not None and self._saved is not None:
            if number == self._ahead["batch"]:
                restore_rng(self._ahead["generators"])
            elif number == self._ahead["batch"] + 1:
                self.finish()
        self._last = {"batch": number, "generators": capture_rng(), "pass": self._pass}

    def finish(self) -> None:
        """Restore the generators of the loaded checkpoint, if not done yet."""
        if self._saved is not None:
            restore_rng(self._saved)
        self._ahead = self._saved = None


class NotedSampler(Sampler[Any]):
    """Sampler that calls `LoopState.before_batch` before the first index of each batch."""

    def __init__(self, sampler: Any, batch_size: int, state: LoopState) -> None:
        self.sampler = sampler
        self._batch_size = batch_size
        self._state = state
        # accelerate calls set_epoch on the data set if the sampler has no such attribute.
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
    """Wrap the sampler of a loader without workers to report each batch to `state`."""
    batches: Any = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # inside accelerate's BatchSamplerShard
    known = hasattr(batches, "sampler") and isinstance(getattr(batches, "batch_size", None), int)
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and known:
        batches.sampler = NotedSampler(batches.sampler, batches.batch_size, state)
    return loader
