"""Accumulation window: the micro-batches of one update, and the gradients that arrived."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError, TrainingError
from infinity.plan.plan import Plan


class AccumulationWindow:
    """Counters of the micro-batches and gradients of one update.

    The window is empty after a step or a rollback. Used by the training thread, and by autograd's
    threads during a backward.
    """

    def __init__(self, plan: Plan) -> None:
        self.length = plan.micro_batches
        """Micro-batches per update on each rank."""
        self.ranks = plan.ranks
        """Ranks whose gradients are summed."""
        self.boundary: bool | None = None
        """Whether the current micro-batch is the last, if the user set it; else None."""
        self.no_sync = 0
        """Number of open `engine.no_sync()` blocks."""
        self.micro_step = 0
        """Completed micro-batches of the window."""
        self.backwards = 0
        """Backwards of the current micro-batch."""
        self.arrived = 0
        """Gradients that arrived since the start, from any backward."""
        self.divisor = self.share
        """Divisor of gradients that arrive: `share`, or 1 if their loss was divided already."""
        self.scaled = False
        """Whether `engine.scale` was called since the last backward ended."""
        self.updated = False
        """Whether the last `step()` updated the weights."""
        self.updates = 0
        """Number of windows that ended in a step since the start."""
        self._accounted = 0  # value of `arrived` at the last `account`
        self._sums_gradients = plan.gradient_itemsize == 4
        self._dtype = plan.precision.dtype
        self._configured = plan.micro_batches

    @property
    def share(self) -> int:
        """Micro-batches per update on all ranks, the divisor of losses."""
        return self.length * self.ranks

    @property
    def is_open(self) -> bool:
        """Return True if there was a backward since the last update."""
        return bool(self.micro_step or self.backwards)

    @property
    def is_last(self) -> bool:
        """Return True if the current micro-batch is the last: `step()` would update."""
        if self.no_sync:
            return False
        return self.boundary if self.boundary is not None else self.micro_step + 1 >= self.length

    @property
    def has_external_gradients(self) -> bool:
        """Return True if gradients arrived in a backward that was not started by the engine."""
        return self.arrived != self._accounted

    @property
    def position(self) -> dict[str, int]:
        """Return the position in the window, which must be equal on all ranks."""
        position = {"updates": self.updates, "micro_step": self.micro_step}
        return position | {"backwards": self.backwards, "micro-batches of an update": self.length}

    def set_length(self, length: int) -> None:
        """Set the number of micro-batches; no window may be open."""
        if type(length) is not int or length < 1:
            raise ConfigError(f"a window of {length!r} micro-batches", remedy="1 or more")
        if length > 1 and not self._sums_gradients:
            raise self._unsummed_error(ConfigError, f"a window of {length} micro-batches")
        self.length = length
        self.divisor = self.share

    # --- transitions -----------------------------------------------------------------------------

    def account(self) -> None:
        """Mark gradients so far as accounted for; later ones come from unscaled losses."""
        self._accounted, self.scaled, self.divisor = self.arrived, False, self.share

    def count_set_gradient(self) -> None:
        """Count a gradient set by the caller as a backward, if the micro-batch had none."""
        if not self.has_external_gradients:
            self.backwards = max(self.backwards, 1)

    def end_micro_batch(self) -> None:
        """Begin the next micro-batch."""
        self.micro_step, self.backwards = self.micro_step + 1, 0

    def end(self) -> None:
        """End the window after a step."""
        self.updates += 1
        self.clear()

    def clear(self) -> None:
        """Empty the window."""
        self.micro_step = self.backwards = 0

    # --- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `TrainingError` if the micro-batch is not the last and gradients are not summed."""
        if not self._sums_gradients and not self.is_last:
            raise self._unsummed_error(
                TrainingError, "a window of several micro-batches, set by hand"
            )

    def check_step(self) -> None:
        """Raise `TrainingError` for a `step()` in `no_sync()` or without a backward."""
        if self.no_sync:
            raise TrainingError(
                "step() inside engine.no_sync()",
                because="in the block the window stays open",
                remedy="leave the block before the last micro-batch",
            )
        if self.backwards == 0:
            raise TrainingError(
                "step() without a backward since the last one",
                because="no gradient has reached the engine",
                remedy="call engine.backward(loss), or loss.backward(), before; or "
                "engine.set_gradient(p, value) for gradients that are computed in another way",
            )

    def check_full(self) -> None:
        """Raise `TrainingError` if `train_batch()` cannot run a full window now."""
        if self.no_sync or self.boundary is not None:
            raise TrainingError(
                "train_batch() where the end of the window is set by hand",
                because=f"it is a window of {self.length} micro-batches",
                remedy="leave engine.no_sync(), and set_gradient_accumulation_boundary(None)",
            )
        if self.is_open:
            raise TrainingError(
                "train_batch() in the middle of an accumulation window: micro_step is "
                f"{self.micro_step} of {self.length}"
                + (", and a backward has been" if self.backwards else ""),
                remedy="finish the window with backward() and step(), or drop it: "
                "Engine.zero_grad(engine)",
            )

    def _unsummed_error(self, kind: type[Any], what: str) -> Any:
        return kind(
            f"{what}, but gradient_accumulation_steps is {self._configured}: gradients are "
            f"stored in {self._dtype}, 2 bytes each",
            because="sums of micro-batches would lose their low bits; they are stored in fp32, 4 "
            "bytes each, and memory for them is reserved at initialize()",
            remedy="set gradient_accumulation_steps to 2 or more in the configuration; windows set "
            "by hand may then be longer or shorter",
        )
