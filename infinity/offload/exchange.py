"""Reduce-scatter of gradients: each rank receives its shard of a unit's gradient from all ranks.

A unit's gradients wait until all have arrived, and are then exchanged by all-to-all: every rank
sends to each other rank the shard that is stored there. The receiver adds the shards *in the order
of ranks*, in fp32. So N ranks with M micro-batches add the same terms as one rank with N * M, in
the order (micro-batch, rank).

[Note: when gradients are exchanged]
Ranks must exchange the same unit at the same time, but need not have the same gradients: a
parameter may be unused on some. So at each synchronization of a backward (the next use of a unit)
ranks report a unit that is complete, and start to exchange it if all report the same one. The other
units are exchanged at the end of the backward, where every rank reports its gradients. A gradient
that a rank lacks is not added, as on one rank. A parameter whose gradient arrives twice in one
backward (reentrant checkpoints around tied weights) is exchanged twice, in the order (micro-batch,
arrival, rank).

Exchanges overlap with compute, each in its own buffers. They are added in the order in which they
started: before a later synchronization if they have completed or their buffers are needed, else at
the end. An error in adding is stored until the next synchronization, so that other ranks do not
wait for this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infinity.distributed.context import DistContext
from infinity.errors import MachineError
from infinity.offload.transfers import Transfers
from infinity.offload.window import AccumulationWindow
from infinity.optim.cpu import CpuKernels
from infinity.plan.budget import exchange_bytes, num_exchanges
from infinity.plan.layout import Segment
from infinity.plan.plan import Plan
from infinity.storage.device import HAPPENED, Event, after_all

CountBytes = Callable[[str, int], None]  # (direction, bytes)


class Accumulate(Protocol):
    """Callback that adds a gradient to its shard; see `GradientStore.take`."""

    def __call__(self, unit: int, segment: Segment, flat: Tensor, *, last: bool) -> Event:
        """Add `flat` (1-D, on the device), and return the event after which it may be overwritten.

        `last` marks the last addition to this parameter in the backward.
        """


class _Exchange(NamedTuple):
    """Exchange in flight; `present` holds for each rank the parameters with a gradient."""

    unit: int
    present: Sequence[Collection[int]]
    pair: int  # index of its buffers
    received: Tensor  # (ranks, elements of a shard)
    event: Event


class GradientExchange:
    """Gradients of a backward that wait for their exchange, and exchanges in flight.

    `with_gradient` receives the parameters for which any rank has a gradient.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        ranks: DistContext,
        accumulate: Accumulate,
        with_gradient: set[int],
        window: AccumulationWindow,
    ) -> None:
        self._plan = plan
        self._window = window
        self._transfers = transfers
        self._device = transfers.device
        self._ranks = ranks
        self._accumulate = accumulate
        self._with_gradient = with_gradient
        # Gradients by unit, then by parameter; one more dict if a gradient arrived twice.
        self._arrived: dict[int, list[dict[int, Tensor]]] = {}
        self._expected = [{s.parameter for s in u.trained_segments if s.numel} for u in plan.units]
        self._parameters = [p for expected in self._expected for p in sorted(expected)]
        self._dtype: torch.dtype = getattr(torch, plan.precision.dtype)
        nbytes, count = exchange_bytes(plan), num_exchanges(plan)
        arena = self._device.reserve(2 * count * nbytes)
        views = [arena.view(i * nbytes, nbytes) for i in range(2 * count)]
        self._buffer_pairs = list(zip(views[::2], views[1::2], strict=True))  # (sent, received)
        self._reusable: list[Event] = [HAPPENED] * count  # after which pairs may be overwritten
        self._in_flight: deque[_Exchange] = deque()
        self._error: Exception | None = None

    def free(self) -> None:
        """Free the buffers."""
        self.reset()
        self._buffer_pairs.clear()

    def reset(self) -> None:
        """Discard gradients that have arrived, and those in flight once they have completed."""
        self._arrived.clear()
        while self._in_flight:
            with suppress(MachineError):  # lost ranks are reported at the next synchronization
                self._in_flight.popleft().event.wait()
        self._error = None

    def put(self, unit: int, parameter: int, gradient: Tensor) -> None:
        """Store a gradient (flat, on the device) until it is exchanged."""
        arrivals = self._arrived.setdefault(unit, [])
        gradients = next((g for g in arrivals if parameter not in g), None)
        if gradients is None:
            gradients = {}
            arrivals.append(gradients)
        gradients[parameter] = gradient

    def ready(self) -> int:
        """Return the report of a complete unit, `2 * (unit + 1) + wide`; 0 for none.

        Adds exchanges that have completed; never blocks. Raises the error of an earlier addition.
        """
        self._add_completed(all_but=len(self._buffer_pairs))
        self._check()
        for unit, arrivals in self._arrived.items():
            if arrivals[0].keys() == self._expected[unit]:
                return 2 * (unit + 1) + self._is_wide(unit)
        return 0

    def start_ready(self, ready: Collection[int]) -> None:
        """Start to exchange the unit that all ranks reported as complete; see `ready`."""
        units = {value // 2 - 1 for value in ready}
        if len(units) == 1 and (unit := units.pop()) >= 0:
            present = [self._expected[unit]] * self._ranks.count
            self._start(unit, present, wide=any(value % 2 for value in ready))

    def finish(self) -> None:
        """Exchange the remaining gradients at the end of a backward, and add all exchanges."""
        while True:
            self._add_completed()
            self._check()
            reported = self._ranks.assert_equal_across_ranks(
                "ends a backward", bool(self._arrived), values=self._window.position
            )
            if not any(has_gradients for has_gradients, *_ in reported):
                return
            local_parameters = {p for arrivals in self._arrived.values() for p in arrivals[0]}
            flags = [parameter in local_parameters for parameter in self._parameters]
            flags += [self._is_wide(unit) for unit in range(len(self._expected))]
            table = self._ranks.gather(
                torch.tensor(flags, dtype=torch.uint8, device="cpu")
            ).tolist()
            num_parameters = len(self._parameters)
            by_rank = [{p for p, flag in zip(self._parameters, row, strict=False) if flag}
                    for row in table]  # fmt: skip
            for unit, expected in enumerate(self._expected):
                present = [parameters & expected for parameters in by_rank]
                if any(present):
                    wide = any(row[num_parameters + unit] for row in table)
                    self._start(unit, present, wide=wide)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _is_wide(self, unit: int) -> bool:
        """Return True if a gradient of the unit is a sum of slices, in fp32."""
        arrived = self._arrived.get(unit, [{}])[0].values()
        return any(gradient.dtype is not self._dtype for gradient in arrived)

    def _start(self, unit: int, present: Sequence[Collection[int]], *, wide: bool) -> None:
        """Start to exchange a unit. All ranks do so now, so it must not fail on one rank only.

        `present` holds for each rank the parameters with a gradient.
        """
        self._add_completed(all_but=len(self._buffer_pairs) - 1)
        layout, count = self._plan.units[unit], self._ranks.count
        used_pairs = {exchange.pair for exchange in self._in_flight}
        pair = next(pair for pair in range(len(self._buffer_pairs)) if pair not in used_pairs)
        dtype = torch.float32 if wide else self._dtype
        arrivals = self._arrived.get(unit, [])
        gradients = arrivals.pop(0) if arrivals else {}
        if not arrivals:
            self._arrived.pop(unit, None)
        nbytes = layout.numel * dtype.itemsize
        sent, received = (buffer[:nbytes] for buffer in self._buffer_pairs[pair])
        elements = sent.view(dtype)
        for segment in layout.trained_segments:
            if segment.parameter in gradients:
                target = elements[segment.offset : segment.offset + segment.numel]
                target.copy_(gradients[segment.parameter])
        start = partial(self._ranks.all_to_all, received, sent)
        after = after_all(self._reusable[pair], self._device.compute_event())
        sent_nbytes = nbytes // count * (count - 1)
        event = self._transfers.run_on_comm_stream("all_to_all", start, sent_nbytes, after)
        shards = received.view(dtype).view(count, -1)
        self._in_flight.append(_Exchange(unit, present, pair, shards, event))

    def _add_completed(self, all_but: int = 0) -> None:
        """Add completed exchanges, oldest first; wait for all but the newest `all_but`.

        An error is stored for `_check`.
        """
        while self._in_flight and (
            len(self._in_flight) > all_but or self._in_flight[0].event.done()
        ):
            exchange = self._in_flight.popleft()
            try:
                self._device.compute_wait(exchange.event)
                if self._error is None:
                    self._add(exchange)
            except Exception as error:
                self._error = self._error or error

    def _add(self, exchange: _Exchange) -> None:
        unit, present = exchange.unit, exchange.present
        shard = self._plan.local_units[unit]
        last_rank = {p: rank for rank, parameters in enumerate(present) for p in parameters}
        events = []
        for rank, parameters in enumerate(present):
            for segment in shard.segments:
                if segment.parameter in parameters:
                    first, end = segment.within(0, shard.numel)
                    gradient = exchange.received[rank, first:end]
                    last = last_rank[segment.parameter] == rank
                    events.append(self._accumulate(unit, segment, gradient, last=last))
        self._reusable[exchange.pair] = after_all(*events)
        self._with_gradient.update(last_rank)  # on all ranks, not only where the shard is stored


class NormTree:
    """Reduction tree over the square sums of all ranks' blocks, in the order of a single rank."""

    def __init__(
        self, plan: Plan, ranks: DistContext, kernels: CpuKernels, count_bytes: CountBytes
    ) -> None:
        self._ranks = ranks
        self._count_bytes = count_bytes
        self._kernels = kernels
        self._counts = {p: n for unit in plan.units for p, n in unit.reported_squares.items()}
        self._sums = {s.parameter: s.num_sums for u in plan.units for s in u.trained_segments}

    def fold(
        self, local: Mapping[int, Tensor], parameters: Sequence[int], equal: Mapping[str, int]
    ) -> dict[int, list[float]]:
        """Return sums of squares by parameter, for a stack one per expert.

        `local` maps parameters to the square sums (fp64) of the blocks in this rank's shard.
        `parameters` are equal on all ranks. For a parameter inside one shard, only its folded sums
        are sent.

        Raises `TrainingError` unless the values of `equal` are equal on all ranks.
        """
        sizes = {p: self._counts[p] for p in parameters}
        length = max(sum(counts[r] for counts in sizes.values()) for r in range(self._ranks.count))
        self._count_bytes("all_gather", 8 * length * (self._ranks.count - 1))
        sums = torch.zeros(length, dtype=torch.float64, device="cpu")
        position = 0
        for parameter in parameters:
            count = sizes[parameter][self._ranks.rank]
            if count:
                blocks = local[parameter]
                sends_sums = count < blocks.numel()
                if sends_sums:
                    blocks = torch.tensor(
                        self._fold(parameter, blocks), dtype=torch.float64, device="cpu"
                    )
                sums[position : position + count] = blocks
                position += count
        self._ranks.assert_equal_across_ranks("ends a step", values=equal)
        table = self._ranks.gather(sums)
        folded = {}
        offsets = [0] * self._ranks.count
        for parameter in parameters:
            rank_blocks = []
            for rank, count in enumerate(sizes[parameter]):
                rank_blocks.append(table[rank, offsets[rank] : offsets[rank] + count])
                offsets[rank] += count
            folded[parameter] = self._fold(parameter, torch.cat(rank_blocks))
        return folded

    def _fold(self, parameter: int, blocks: Tensor) -> list[float]:
        """Return the sums over a parameter's blocks: one, or one per expert of a stack."""
        count = self._sums[parameter]
        groups = (blocks,) if count == 1 else blocks.view(count, -1).unbind()
        return [self._kernels.fold_squares(group) for group in groups]
