"""Which tape a run is on: one for training cycles, one for calls without gradients.

A call of the module without gradients is a cycle, whoever makes it: `engine(...)`, `module(...)`,
or `generate()`, which calls the module for every token. So units stay and leave by what is used
next there too. A training cycle that such a call interrupts goes on after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.memory.mover import Mover
from infinity.plan.tape import Tape, guess_cycle


class Cycles:
    """Opens and closes the mover's tape; see `plan/tape.py` for what a cycle is."""

    def __init__(self, mover: Mover) -> None:
        num_units = len(mover.plan.units)
        self.training = Tape(guess_cycle(num_units, backward=True))
        self.without_grad = Tape(guess_cycle(num_units, backward=False))
        self._mover = mover
        self._open = False
        self._interrupted: bool | None = None  # a training cycle; whether its next one follows

    def begin(self, *, last_micro_batch: bool) -> None:
        """A forward starts; a second one before the backward belongs to the same cycle."""
        grad = torch.is_grad_enabled()
        tape = self.training if grad else self.without_grad
        if self._open and self._mover.tape is tape:
            return
        if self._open and not grad:
            self._interrupted = self._mover.wraps
        else:
            self.end()
        self._mover.tape = tape
        self._mover.wraps = not (grad and last_micro_batch)
        tape.begin()
        self._open = True

    def end_call(self) -> None:
        """A call without gradients is over, if one is under way."""
        if self._mover.tape is not self.without_grad:
            return
        self.without_grad.end()
        wraps, self._interrupted = self._interrupted, None
        if wraps is None:
            self._mover.tape, self._open = None, False
        else:
            self._mover.tape, self._mover.wraps = self.training, wraps

    def end(self) -> None:
        """The backward is over, or whatever was under way: what was seen is learnt."""
        self.end_call()
        if self._mover.tape is not None:
            self._mover.tape.end()
            self._mover.tape = None
        self._open = False

    def around_calls(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """What goes before and after a call of the model: one without gradients is a cycle."""
        caches: list[bool] = []  # of autocast, before each call under way

        def before() -> None:
            caches.append(torch.is_autocast_cache_enabled())
            if not torch.is_grad_enabled():
                torch.set_autocast_cache_enabled(False)  # it would keep casts of weights that move
                self.begin(last_micro_batch=False)

        def after() -> None:
            if caches:
                torch.set_autocast_cache_enabled(caches.pop())
            self.end_call()

        return before, after

    def surprises(self) -> int:
        """Unexpected uses, and updates that could not be published, since the start."""
        tapes = self.training.surprises + self.without_grad.surprises
        return self._mover.surprises + tapes
