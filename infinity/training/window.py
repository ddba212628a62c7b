"""The accumulation window: which micro-batch is its last, and by what gradients are divided."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError, TrainingError
from infinity.plan.plan import Plan


class Window:
    """How many micro-batches make an update: the configuration's number, or as the user says.

    `length` is that number, and what gradients are divided by; `boundary`, where it is set by
    hand, says whether the current micro-batch is the last, whatever their number.
    """

    def __init__(self, plan: Plan) -> None:
        self.length = plan.micro_batches
        self.boundary: bool | None = None
        self.no_sync = 0  # blocks of `engine.no_sync()` that are open
        self.updated = False  # by the last `step()`
        self.seen = 0  # gradients that had arrived when a backward last ended
        self.scaled = False  # `engine.scale` made a loss since
        self._sums = plan.gradient_itemsize == 4
        self._dtype = plan.precision.dtype
        self._configured = plan.micro_batches

    def is_boundary(self, micro_step: int) -> bool:
        """Whether `step()` would update; `micro_step` is the number of micro-batches before."""
        if self.no_sync:
            return False
        return self.boundary if self.boundary is not None else micro_step + 1 >= self.length

    def set_length(self, length: int) -> None:
        """Another number of micro-batches; the caller sees to it that no window is open."""
        if type(length) is not int or length < 1:
            raise ConfigError(f"a window of {length!r} micro-batches", remedy="1 or more")
        if length > 1 and not self._sums:
            raise self._refusal(ConfigError, f"a window of {length} micro-batches")
        self.length = length

    def check(self, micro_step: int) -> None:
        """Raise `TrainingError` for a micro-batch that is not the last where there may be one."""
        if not self._sums and not self.is_boundary(micro_step):
            raise self._refusal(TrainingError, "a window of several micro-batches, set by hand")

    def forget(self, num_arrived: int) -> None:
        """A backward is over: the gradients that came are accounted for."""
        self.seen, self.scaled = num_arrived, False

    def check_step(self, backwards: int) -> None:
        """Raise `TrainingError` for a `step()` that has no meaning."""
        if self.no_sync:
            raise TrainingError(
                "step() inside engine.no_sync()",
                because="the block says that the window goes on",
                remedy="leave the block before the last micro-batch",
            )
        if backwards == 0:
            raise TrainingError(
                "step() without a backward since the last one",
                because="no gradient has reached the engine",
                remedy="call engine.backward(loss), or loss.backward(), before",
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
