"""Which tape a run is on: one for training cycles, one for calls without gradients."""

from __future__ import annotations

import torch

from infinity.memory.mover import Mover
from infinity.plan.tape import Tape, guess_cycle


class Cycles:
    """Opens and closes the mover's tape; see `plan/tape.py` for what a cycle is."""

    def __init__(self, mover: Mover) -> None:
        num_units = len(mover.plan.units)
        self.training = Tape(guess_cycle(num_units, backward=True))
        self._without_grad = Tape(guess_cycle(num_units, backward=False))
        self._mover = mover
        self._open = False

    def begin(self, *, last_micro_batch: bool) -> None:
        """A forward starts; a second one before the backward belongs to the same cycle."""
        grad = torch.is_grad_enabled()
        tape = self.training if grad else self._without_grad
        if self._open and self._mover.tape is tape:
            return
        self.end()
        self._mover.tape = tape
        self._mover.wraps = not (grad and last_micro_batch)
        tape.begin()
        self._open = True

    def end(self) -> None:
        """The backward, or a call without gradients, is over: what was seen is learnt."""
        if self._mover.tape is not None:
            self._mover.tape.end()
            self._mover.tape = None
        self._open = False

    def surprises(self) -> int:
        """Unexpected uses, and updates that could not be published, since the start."""
        tapes = self.training.surprises + self._without_grad.surprises
        return self._mover.surprises + tapes
