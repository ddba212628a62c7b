"""The accumulation window: the micro-batches of one update, and the gradients that arrived."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError, TrainingError
from infinity.plan.plan import Plan


class AccumulationWindow:
    """Counts micro-batches and gradients of an update.

    It is empty again after a step or a rollback. Used by the training thread, and by autograd's
    threads during a backward.
    """

    def __init__(self, plan: Plan) -> None:
        self.length = plan.micro_batches
        """Micro-batches of an update, on each rank."""
        self.ranks = plan.ranks
        """Ranks whose gradients are summed."""
        self.boundary: bool | None = None
        """Where it is set by hand: whether the current micro-batch is the last."""
        self.no_sync = 0
        """Blocks of `engine.no_sync()` that are open."""
        self.micro_step = 0
        """Micro-batches that are behind us."""
        self.backwards = 0
        """Backwards of the current micro-batch."""
        self.arrived = 0
        """Gradients since the start, whoever called backward."""
        self.divisor = self.share
        """Of gradients that arrive; not 1 only where their loss is not divided."""
        self.scaled = False
        """`engine.scale` made a loss since a backward last ended."""
        self.updated = False
        """By the last `step()`."""
        self.updates = 0
        """Windows that ended in a step, since the start."""
        self._accounted = 0  # of `arrived`
        self._sums = plan.gradient_itemsize == 4
        self._dtype = plan.precision.dtype
        self._configured = plan.micro_batches

    @property
    def share(self) -> int:
        """Number of micro-batches of an update on all ranks, which losses are divided by."""
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
    def has_news(self) -> bool:
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
        if length > 1 and not self._sums:
            raise self._refusal(ConfigError, f"a window of {length} micro-batches")
        self.length = length
        self.divisor = self.share

    # --- what happens in it ----------------------------------------------------------------------

    def account(self) -> None:
        """Mark gradients so far as accounted for; later ones come from unscaled losses."""
        self._accounted, self.scaled, self.divisor = self.arrived, False, self.share

    def end_micro_batch(self) -> None:
        """Begin the next micro-batch."""
        self.micro_step, self.backwards = self.micro_step + 1, 0

    def end(self) -> None:
        """End the window after a step."""
        self.updates += 1
        self.start_over()

    def start_over(self) -> None:
        """Empty the window."""
        self.micro_step = self.backwards = 0

    # --- what has no meaning ---------------------------------------------------------------------

    def check(self) -> None:
        """Raise `TrainingError` for a micro-batch that is not the last where there may be one."""
        if not self._sums and not self.is_last:
            raise self._refusal(TrainingError, "a window of several micro-batches, set by hand")

    def check_step(self) -> None:
        """Raise `TrainingError` for a `step()` that has no meaning."""
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
                remedy="call engine.backward(loss), or loss.backward(), before",
            )

    def check_full(self) -> None:
        """Raise `TrainingError` if a full window cannot begin and end here."""
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

    def _refusal(self, kind: type[Any], what: str) -> Any:
        return kind(
            f"{what}, but gradient_accumulation_steps is {self._configured}: gradients rest in "
            f"{self._dtype}, 2 bytes each",
            because="sums of micro-batches would lose their low bits; sums rest in fp32, 4 bytes "
            "each, which is settled when memory is reserved",
            remedy="set gradient_accumulation_steps to 2 or more in the configuration; windows set "
            "by hand may then be longer or shorter",
        )
