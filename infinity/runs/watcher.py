"""Who follows a run: told of steps, evaluations and files, and asked whether to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class StepFacts:
    """One step. `loss` is in nats a token; times in seconds; `left_s` is until the last step."""

    step: int
    num_steps: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    tokens_per_s: float
    step_s: float
    left_s: float
    stall_s: dict[str, float]


@dataclass(frozen=True)
class Result:
    """What a run came to. Losses are in nats a token, None where none was computed.

    `stopped` says that it was asked to stop before its last step. `checkpoint` is the one to go on
    from, None where that is a durable state on disk; `model` the directory for transformers.
    `failed_saves` counts checkpoints that could not be saved on the way.
    """

    steps: int
    num_steps: int
    stopped: bool
    loss: float | None
    evaluation_before: float | None
    evaluation: float | None
    tokens: int
    checkpoint: Path | None
    model: Path | None
    failed_saves: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = dict(vars(self))
        for name in ("checkpoint", "model"):
            found[name] = None if found[name] is None else str(found[name])
        return found


class Watcher(Protocol):
    """Implemented by whoever shows a run."""

    def begin(self, done: int, num_steps: int) -> None:
        """Training begins, behind `done` steps."""

    def step(self, facts: StepFacts) -> None:
        """A step is over."""

    def evaluated(self, step: int, loss: float) -> None:
        """The held-out loss after `step` steps."""

    def saved(self, path: Path, what: str) -> None:
        """Something was written, or is being written: a checkpoint, the model."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    @property
    def stopping(self) -> bool:
        """Whether to finish this step, save, and stop."""
