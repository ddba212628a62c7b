"""What an exception in a call takes back."""

from __future__ import annotations

from typing import Protocol

from infinity.memory.gradients import GradientStore
from infinity.model.torch_private import end_checkpoints
from infinity.training.cycles import Cycles
from infinity.training.hooks import Hooks
from infinity.training.stepper import Stepper
from infinity.training.window import Window


class Rooms(Protocol):
    """The part of `Parts` that this needs."""

    hooks: Hooks
    gradients: GradientStore

    def recover(self) -> None:
        """Nothing bound, nothing in flight."""


class Recovery:
    """Undoes the calls of one engine that an exception ended; used by the training thread."""

    def __init__(self, rooms: Rooms, stepper: Stepper, cycles: Cycles, window: Window) -> None:
        self._rooms = rooms
        self._stepper = stepper
        self._cycles = cycles
        self._window = window

    def end_forward(self, error: Exception) -> None:
        """An exception ended a forward: nothing is lost but that."""
        end_checkpoints(error)
        self._rooms.recover()
        self._cycles.end()

    def start_over(self, error: Exception | None = None) -> None:
        """The accumulation window is empty again; `error` ended a backward."""
        if error is not None:
            end_checkpoints(error)
        self.forget_arrivals()
        self._stepper.start_over()
        self._rooms.recover()
        self._rooms.hooks.drop_gradients()
        self._rooms.gradients.reset()
        self._cycles.end()

    def forget_arrivals(self) -> None:
        """What has arrived is accounted for; what will arrive comes from a loss as it is."""
        hooks = self._rooms.hooks
        hooks.divisor = self._window.length
        self._window.forget(hooks.num_arrived)
