"""Sums of the gradients of slices in fp32, so that each parameter's gradient arrives once.

[Note: taps]
A block that runs in k slices reads its parameters k times. Autograd would add the k gradients in
the compute dtype before any hook runs, and lose their low bits. So each slice reads a parameter
through a *tap*, an identity function whose backward adds the slice's gradient to an fp32 sum and
propagates nothing. If samples are independent, the sum has the bits of micro-batches of the slice's
size, which are summed in fp32 too: gradients of several reads within a slice are added in the
compute dtype first, as in a micro-batch, and slices are added in their order, in any order of
autograd. (In forward the slices run last to first, so backward reaches the first slice first, and
no gradient has to be stored until its turn.) When autograd reaches the parameter itself, the
backward of all its taps has run, and the sum is handed over. No backward runs through the graph of
a recomputation, so it has no taps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Reader = tuple[int, int]  # a tap: (index of its slice, number of earlier taps of its parameter)


class _Tap(torch.autograd.Function):
    """Identity function through which a slice reads a parameter."""

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
    """Taps and gradient sums of one block call in slices.

    A slice has one tap of each of the block's parameters, `unit_parameters`. Parameters of other
    units (experts, tied weights) get a new tap at each read: a cached one would pin their slot.
    Taps that are `detached` belong to a backward nested in another one, and are not connected to
    the parameter.
    """

    def __init__(
        self, sums: SliceSums, unit_parameters: Collection[int], *, detached: bool = False
    ) -> None:
        self._sums = sums
        self._unit_parameters = unit_parameters
        self._detached = detached
        self._number = 0  # index of the slice that runs
        self._taps: dict[int, Tensor] = {}  # of the slice that runs, by parameter
        self._readers: dict[int, list[Reader]] = {}  # by parameter
        self._waiting: dict[int, dict[Reader, Tensor]] = {}  # gradients before their turn
        self._totals: dict[int, tuple[int, Tensor]] = {}  # number of taps added, the sum

    @contextmanager
    def slice(self, number: int) -> Iterator[None]:
        """Read parameters for this slice in the context; slices run last to first."""
        self._number, self._sums.call = number, self
        try:
            yield
        finally:
            self._sums.call = None
            self._taps.clear()  # they are views of slots

    def read(self, index: int, parameter: nn.Parameter) -> Tensor:
        """Return the parameter, or its tap for the current slice."""
        hooked = parameter._backward_hooks  # of the user, which need autograd's gradient
        if not parameter.requires_grad or hooked or not torch.is_grad_enabled():
            return parameter
        tap = self._taps.get(index)
        if tap is None:
            readers = self._readers.setdefault(index, [])
            reader = self._number, len(readers)
            readers.append(reader)
            source = parameter.detach().requires_grad_() if self._detached else parameter
            tap = _Tap.apply(source, self, index, reader)  # type: ignore[no-untyped-call]
            if index in self._unit_parameters:
                self._taps[index] = tap
        result: Tensor = tap
        return result

    @property
    def parameters(self) -> set[int]:
        """Indices of the parameters that were read through taps."""
        return set(self._readers)

    def add(self, index: int, reader: Reader, gradient: Tensor) -> None:
        """Add the gradient of one tap, once those of all earlier taps are added."""
        self._sums.open.setdefault(index, {})[self] = None
        waiting = self._waiting.setdefault(index, {})
        waiting[reader] = gradient
        order = sorted(self._readers[index])
        num_added = self._totals[index][0] if index in self._totals else 0
        while num_added < len(order) and order[num_added] in waiting:
            self._add(index, waiting.pop(order[num_added]))
            num_added += 1

    def _add(self, index: int, gradient: Tensor) -> None:
        if index not in self._totals:
            self._totals[index] = 1, gradient.to(torch.float32, copy=True)
        else:
            count, total = self._totals[index]
            self._totals[index] = count + 1, total.add_(gradient)

    def take(self, index: int) -> Tensor:
        """Remove and return the sum; some slices may have had no gradient."""
        for _, gradient in sorted(self._waiting.pop(index).items(), key=lambda item: item[0]):
            self._add(index, gradient)
        return self._totals.pop(index)[1]


class SliceSums:
    """Block calls in slices of one engine, and their open gradient sums."""

    def __init__(self) -> None:
        self.call: SlicedCall | None = None  # the one whose slice runs
        self.open: dict[int, dict[SlicedCall, None]] = {}  # calls that have a sum, by parameter
        self.summed: set[int] = set()  # parameters whose last gradient was a sum of slices

    @property
    def is_used(self) -> bool:
        """True if sums are open, or gradients that arrived last were sums."""
        return bool(self.open or self.summed)

    def read(self, index: int, parameter: nn.Parameter) -> Tensor:
        """Return the parameter, or the view that captures its gradient for the current slice."""
        return parameter if self.call is None else self.call.read(index, parameter)

    def take(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """Return a parameter's gradient: its sums of slices plus autograd's `gradient`."""
        if not self.is_used:
            return gradient
        calls = self.open.pop(index, ())
        for call in calls:
            total = call.take(index)
            gradient = total if gradient is None else total.add_(gradient)
        if calls:
            self.summed.add(index)
        else:
            self.summed.discard(index)
        return gradient

    def drop(self) -> None:
        """Discard all sums: the accumulation window starts over, or the engine is closed."""
        self.open.clear()
