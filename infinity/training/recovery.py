"""What an exception in a call takes back: all of it, however often that is interrupted too.

[Note: interrupted twice]
A handler first says what is `left` to do, by a plain assignment: between an exception and that no
signal strikes. Then it does it (`mend`). If that is interrupted, something is still left, and
whoever next uses the engine begins with it. Every part of it may be repeated.
"""

from __future__ import annotations

from typing import Literal, Protocol

from infinity.memory.gradients import GradientStore
from infinity.memory.mover import Mover
from infinity.model.torch_private import end_checkpoints
from infinity.training.cycles import Cycles
from infinity.training.hooks import HookMark, Hooks
from infinity.training.stepper import Progress, Stepper
from infinity.training.sweep import Sweep
from infinity.training.window import Window

Left = Literal["", "forward", "step", "window"]


class Rooms(Protocol):
    """The part of `Parts` that this needs."""

    hooks: Hooks
    gradients: GradientStore
    sweep: Sweep
    mover: Mover

    def recover(self) -> None:
        """Nothing bound, nothing in flight."""


class Recovery:
    """Undoes the calls of one engine that an exception ended; used by the training thread.

    `left` says what is to be done: after a "forward" nothing is bound and every stack is as it was
    at `mark`; the "window" starts over; after a "step" it does, unless the step has happened:
    then another `progress` is in its place.
    """

    def __init__(self, rooms: Rooms, stepper: Stepper, cycles: Cycles, window: Window) -> None:
        self.left: Left = ""
        self.mark: HookMark | None = None  # where stacks were when the call began
        self.progress: Progress | None = None  # when the step began
        self._rooms = rooms
        self._stepper = stepper
        self._cycles = cycles
        self._window = window

    def start_over(self) -> None:
        """The accumulation window is empty again."""
        self.left, self.mark = "window", None
        self.mend()

    def mend(self, error: BaseException | None = None) -> None:
        """Do what is left, if anything is; `error` is the exception that ended the call."""
        if not self.left:
            return
        if error is not None:
            end_checkpoints(error)
        if self.mark is not None:
            self._rooms.hooks.restore(self.mark)  # a recomputation pushes pairs of its own
        if self.left == "step":
            self._rooms.sweep.await_commit()
            if self._stepper.progress is not self.progress:
                self._rooms.mover.unlock()  # the strike may have come between a lock and its block
                self.left = ""
                return
            self.left = "window"
        if self.left == "window":
            self.forget_arrivals()
            self._stepper.start_over()
            self._rooms.recover()
            self._rooms.hooks.drop_gradients()
            self._rooms.gradients.reset()
        else:
            self._rooms.recover()
        self._cycles.end()
        self.left, self.mark = "", None

    def forget_arrivals(self) -> None:
        """What has arrived is accounted for; what will arrive comes from a loss as it is."""
        hooks = self._rooms.hooks
        hooks.divisor = self._window.length
        self._window.forget(hooks.num_arrived)
