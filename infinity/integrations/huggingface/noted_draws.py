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
        self._last_batch: dict[str, Any] | None = None
        self._resumed_batch: dict[str, Any] | None = None
        self._resumed_rng: dict[str, Any] | None = None
        self._pass_rng: dict[str, Any] = {}  # generators before this epoch; samplers draw from them

    def state_dict(self) -> dict[str, Any]:
        """Return the current state as plain data."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scheduler": scheduler, "rng": capture_rng(), "data": self._last_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedule now, and the generators once the data loader is at its batch."""
        self._resumed_batch = state["data"]
        self._resumed_rng = state["rng"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])

    def before_epoch(self) -> None:
        """Record the generators before a pass over the data, or restore them on a resume."""
        # Checkpoints of older releases have no "pass".
        if self._resumed_batch is not None and self._resumed_batch.get("pass"):
            restore_rng(self._resumed_batch["pass"])
        self._pass_rng = capture_rng()

    def before_batch(self, number: int) -> None:
        """Record the generators before batch `number` is read, or restore them on a resume."""
        if self._resumed_batch is not None and self._resumed_rng is not None:
            if number == self._resumed_batch["batch"]:
                restore_rng(self._resumed_batch["generators"])
            elif number == self._resumed_batch["batch"] + 1:
                self.finish()
        self._last_batch = {"batch": number, "generators": capture_rng(), "pass": self._pass_rng}

    def finish(self) -> None:
        """Restore the generators of the loaded checkpoint, if not done yet."""
        if self._resumed_rng is not None:
            restore_rng(self._resumed_rng)
        self._resumed_batch = self._resumed_rng = None


class RecordingSampler(Sampler[Any]):
    """Sampler that calls `LoopState.before_batch` before the first index of each batch."""

    def __init__(self, sampler: Any, batch_size: int, state: LoopState) -> None:
        self.sampler = sampler
        self._batch_size = batch_size
        self._state = state
        # accelerate calls set_epoch on the data set if the sampler has no such attribute.
        if hasattr(sampler, "set_epoch"):
            self.set_epoch = sampler.set_epoch

    def __iter__(self) -> Iterator[Any]:
        self._state.before_epoch()
        for number, index in enumerate(self.sampler):
            if number % self._batch_size == 0:
                self._state.before_batch(number // self._batch_size)
            yield index

    def __len__(self) -> int:
        return len(self.sampler)


def record_rng_per_batch(loader: Any, state: LoopState) -> Any:
    """Wrap the sampler of a loader without workers to report each batch to `state`."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    # With several ranks it is inside accelerate's BatchSamplerShard.
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
    batch_size: Any = getattr(batch_sampler, "batch_size", None)
    is_supported = hasattr(batch_sampler, "sampler") and isinstance(batch_size, int)
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and is_supported:
        batch_sampler.sampler = RecordingSampler(batch_sampler.sampler, batch_size, state)
    return loader
