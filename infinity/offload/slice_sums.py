"""Gradients of slices, added in fp32 where they are made, so that each parameter's leaves once.

[Note: taps]
A block that runs in slices reads its parameters k times. Autograd would add the k gradients in the
compute dtype before anybody sees them, and lose their low bits. So each slice reads a parameter
through a *tap*, an identity of its own whose backward adds that slice's gradient to an fp32 sum and
passes nothing on. Where samples do not see each other the sum has the bits that micro-batches of a
slice's size have, which are summed in fp32 as well: what a slice reads twice is added in the
compute dtype first, as in a micro-batch, and sums go in the order of slices, whatever the order of
autograd. (Slices run backwards in forward, so that backward finds the first one first, and nothing
has to be kept for its turn.) When autograd comes to the parameter itself, all its taps have had
their backward: the sum leaves. A recomputation makes a graph that nobody follows: no taps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Reader = tuple[int, int]  # a tap: the number of its slice, and how many of its parameter are before


class _Tap(torch.autograd.Function):
    """A parameter as one slice reads it."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, call: SlicedCall, index: int, reader: Reader
    ) -> Tensor:
        ctx.call, ctx.index, ctx.reader = call, index, reader
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.call.add(ctx.index, ctx.reader, gradient)
        return None, None, None, None


class SlicedCall:
    """One call of a block in slices: what reads its parameters, and their gradients' sums.

    A slice has one tap of each of the block's parameters, `unit_parameters`. One of another unit's
    (experts, tied weights) is made each time: kept, it would keep that unit in its slot. Taps that
    are `apart` belong to a backward inside another: they do not lead to the parameter.
    """

    def __init__(
        self, sums: SliceSums, unit_parameters: Collection[int], *, apart: bool = False
    ) -> None:
        self._sums = sums
        self._unit_parameters = unit_parameters
        self._apart = apart
        self._number = 0  # of the slice under way
        self._taps: dict[int, Tensor] = {}  # by parameter, of that slice
        self._readers: dict[int, list[Reader]] = {}  # by parameter
        self._early: dict[int, dict[Reader, Tensor]] = {}  # gradients before their turn
        self._totals: dict[int, tuple[int, Tensor]] = {}  # how many taps are in it, and the sum

    @contextmanager
    def slice(self, number: int) -> Iterator[None]:
        """In the block parameters are read for this slice; the last one comes first."""
        self._number, self._sums.call = number, self
        try:
            yield
        finally:
            self._sums.call = None
            self._taps.clear()  # they are views of slots

    def read(self, index: int, parameter: nn.Parameter) -> Tensor:
        """The parameter, or its tap."""
        hooked = parameter._backward_hooks  # a user's, which wants the gradient as autograd has it
        if not parameter.requires_grad or hooked or not torch.is_grad_enabled():
            return parameter
        tap = self._taps.get(index)
        if tap is None:
            readers = self._readers.setdefault(index, [])
            reader = self._number, len(readers)
            readers.append(reader)
            source = parameter.detach().requires_grad_() if self._apart else parameter
            tap = _Tap.apply(source, self, index, reader)  # type: ignore[no-untyped-call]
            if index in self._unit_parameters:
                self._taps[index] = tap
        found: Tensor = tap
        return found

    @property
    def parameters(self) -> set[int]:
        """Parameters that were read."""
        return set(self._readers)

    def add(self, index: int, reader: Reader, gradient: Tensor) -> None:
        """One tap's gradient; it is added when those before it are."""
        self._sums.open.setdefault(index, {})[self] = None
        early, order = self._early.setdefault(index, {}), sorted(self._readers[index])
        early[reader] = gradient
        while (done := self._totals[index][0] if index in self._totals else 0) < len(order):
            if order[done] not in early:
                return
            self._add(index, early.pop(order[done]))

    def _add(self, index: int, gradient: Tensor) -> None:
        if index not in self._totals:
            self._totals[index] = 1, gradient.to(torch.float32, copy=True)
        else:
            count, total = self._totals[index]
            self._totals[index] = count + 1, total.add_(gradient)

    def take(self, index: int) -> Tensor:
        """The sum, of all that came: some slices may have had no gradient."""
        for _, gradient in sorted(self._early.pop(index).items(), key=lambda item: item[0]):
            self._add(index, gradient)
        return self._totals.pop(index)[1]


class SliceSums:
    """The calls in slices of one engine."""

    def __init__(self) -> None:
        self.call: SlicedCall | None = None  # of which a slice runs
        self.open: dict[int, dict[SlicedCall, None]] = {}  # by parameter: those that have a sum
        self.summed: set[int] = set()  # parameters of which a sum arrived when last something did

    @property
    def is_used(self) -> bool:
        """Whether there are sums, or were when gradients last arrived."""
        return bool(self.open or self.summed)

    def read(self, index: int, parameter: nn.Parameter) -> Tensor:
        """Return the parameter, or the view that captures its gradient for the current slice."""
        return parameter if self.call is None else self.call.read(index, parameter)

    def take(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """What arrives of a parameter: its sums of slices, and what autograd has besides."""
        if not self.is_used:
            return gradient
        found, calls = gradient, self.open.pop(index, ())
        for call in calls:
            total = call.take(index)
            found = total if found is None else total.add_(found)
        (self.summed.add if calls else self.summed.discard)(index)
        return found

    def drop(self) -> None:
        """Forget all sums: the accumulation window starts over, or the engine is closed."""
        self.open.clear()
