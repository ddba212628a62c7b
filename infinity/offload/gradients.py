"""Accumulates gradients into each unit's flat range, in the tier where the plan stores them.

Each gradient (one call of a parameter's post-accumulate hook) is added separately: the first of an
accumulation window overwrites, later ones add, in fp32 when micro-batches are summed and in the
compute dtype otherwise. Square sums, one per parameter over a fixed tree, are computed as the last
micro-batch's gradients arrive, while they are in cache.

From a device with its own memory, a first gradient that needs no conversion is copied directly to
its range in RAM (`GradientCopies`). Others are copied to a staging buffer, from which a worker
thread adds them; see `gradient_worker.py`, and [Note: sums] in `gradient_sums.py`.

[Note: one copy per gradient]
Each gradient is copied separately, also within a unit. Packing them would cost a launch on the
device for each, as much as the copy it would save, twice the largest unit in device memory (2 of 24
GB for Llama 8B), and the overlap inside a unit. Of a Llama block's nine copies two are small.

With several ranks each stores a shard of every unit: gradients pass through `exchange.py` first,
and everything in this file is about local shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.errors import TrainingError
from infinity.offload.exchange import GradientExchange, NormTree
from infinity.offload.gradient_copies import Copy, GradientCopies, SquaresOnDevice
from infinity.offload.gradient_sums import (
    GradientSums,
    GradientWindows,
    norm_slices,
    segment_slice,
)
from infinity.offload.gradient_worker import GradientWorker
from infinity.offload.transfers import Transfers
from infinity.offload.window import AccumulationWindow
from infinity.optim.cpu import CpuKernels
from infinity.plan.budget import NUM_GRADIENT_BUFFERS
from infinity.plan.layout import Segment
from infinity.plan.plan import Plan
from infinity.storage.device import HAPPENED, Event
from infinity.storage.staging import BufferPool, host_buffer
from infinity.storage.store import Range
from infinity.types import PAGE, round_up


class GradientStore:
    """Gradient ranges and square sums of all units; used by the training thread.

    `ranges` maps units to ranges, which the optimizer thread reads after `settle`. Ranges that the
    CPU or the device can compute with are in `ram` and `on_device`, as flat tensors of `dtype`.
    """

    def __init__(
        self,
        plan: Plan,
        transfers: Transfers,
        kernels: CpuKernels,
        window: AccumulationWindow,
        ranks: DistContext = SINGLE_PROCESS,
    ) -> None:
        self.plan = plan
        self.ranks = ranks
        self.transfers = transfers
        self._device = transfers.device
        self.kernels = kernels
        summed = plan.gradient_itemsize == 4
        self.dtype = torch.float32 if summed else getattr(torch, plan.precision.dtype)
        self._window = window  # square sums are computed in its last micro-batch
        self.ranges = self._reserve()
        self.ram: dict[int, Tensor] = {}
        self.on_device: dict[int, Tensor] = {}
        on_disk: dict[int, Range] = {}
        for unit, location in self.ranges.items():
            cpu_view = location.addressable_view(by_device=False)
            device_view = location.addressable_view(by_device=True)
            if cpu_view is not None:
                self.ram[unit] = cpu_view.view(self.dtype)
            elif device_view is not None:
                self.on_device[unit] = device_view.view(self.dtype)
            else:
                on_disk[unit] = location
        self._segments = {s.parameter: (u.index, s) for u in plan.units for s in u.trained_segments}
        segments = [segment for _, segment in self._segments.values()]
        segments.sort(key=lambda segment: (segment.origin, segment.first_element))
        # Of each parameter among those that `model.parameters()` yields, rows of stacks in order.
        self._position = {segment.parameter: i for i, segment in enumerate(segments)}
        self._stacks: dict[int, list[int]] = {}  # cut stack -> its rows, in order
        for segment in segments:
            if segment.is_rows:
                self._stacks.setdefault(segment.origin, []).append(segment.parameter)
        # Segments of the local shard, by parameter.
        self._locations = {
            s.parameter: (u.index, s) for u in plan.local_units for s in u.trained_segments
        }
        self._copy_targets = {  # of copies to RAM (uint8), by parameter
            parameter: segment_slice(self.ram[unit], segment).view(torch.uint8)
            for parameter, (unit, segment) in self._locations.items()
            if unit in self.ram and segment.numel
        }
        self._with_gradient: set[int] = set()  # parameters that have arrived
        # By parameter, one per slice of `norm_slices`; completed by `square_sum`.
        self._squares: dict[int, list[float]] = {}
        self.exchange: GradientExchange | None = None
        self._tree: NormTree | None = None
        if ranks.count > 1:
            self.exchange = GradientExchange(
                plan, transfers, ranks, self.take, self._with_gradient, window
            )
            self._tree = NormTree(plan, ranks, kernels, transfers.count)
        nbytes = NUM_GRADIENT_BUFFERS * plan.facts.largest_trained  # in flight
        self._copies = GradientCopies(transfers, nbytes)
        self._device_squares = SquaresOnDevice(transfers.device)
        self._worker: GradientWorker | None = None
        if not plan.unified:
            staging = BufferPool(1, nbytes, self._device).take()
            self._worker = GradientWorker(transfers, staging)
        self._windows = GradientWindows(plan, transfers, self.dtype, on_disk)
        sums_transfers = None if self._worker is None else transfers
        self._sums = GradientSums(
            kernels, self.ram, self._windows, sums_transfers, by_blocks=ranks.count > 1
        )

    def _reserve(self) -> dict[int, Range]:
        plan = self.plan
        ranges: dict[int, Range] = {}
        for tier, store in self.transfers.stores.items():
            units = [
                u for u in plan.local_units if u.numel and plan.placements[u.index].gradient is tier
            ]
            sizes = [plan.gradient_bytes(u) for u in units]
            owners = [f"unit {u.name!r}, gradients" for u in units]
            reserved = store.reserve(sizes, owners)
            ranges |= {u.index: location for u, location in zip(units, reserved, strict=True)}
        return ranges

    def open(self) -> None:
        """Start the thread, and write every extent once, before training."""
        if self._worker is not None and (self.ram or self._windows.ranges):
            self._worker.open()
        self._windows.prewrite()

    def close(self) -> None:
        """End the thread; queued tasks are dropped."""
        if self._worker is not None:
            self._worker.close()

    def free(self) -> None:
        """Free the reserved ranges, once copies into them have ended."""
        if self.exchange is not None:
            self.exchange.free()
        self._copies.reset()
        self._device_squares.reset()
        self.ranges.clear()
        self._copy_targets.clear()
        self.ram.clear()
        self.on_device.clear()
        self._windows.free()
        if self._worker is not None:
            self._worker.free()

    # --- arrivals --------------------------------------------------------------------------

    def receive(self, parameter: int, gradient: Tensor) -> None:
        """Accumulate one gradient, now or once its copy has ended.

        With several ranks it is accumulated after its exchange.
        """
        unit, segment = self._segments[parameter]
        if gradient.layout is not torch.strided:
            raise TrainingError(
                f"the gradient of {segment.name!r} is sparse; flat gradient ranges are dense",
                remedy="use sparse=False in nn.Embedding",
            )
        if segment.numel == 0:
            return
        self._check()
        flat = gradient.detach().contiguous().view(-1)
        if self.exchange is None:
            self.take(unit, segment, flat)
        else:
            self.exchange.put(unit, parameter, flat)

    def take(self, unit: int, segment: Segment, flat: Tensor, *, last: bool = True) -> Event:
        """Accumulate a gradient, or its slice in the local shard.

        Returns the event after which `flat` may be overwritten. `last` marks the last gradient of
        the parameter in this micro-batch.
        """
        event: Event = HAPPENED
        parameter, complete = segment.parameter, last and self._window.is_last
        first = parameter not in self._with_gradient
        self._squares.pop(parameter, None)
        self._device_squares.drop(parameter)
        if unit in self.on_device:
            self._device.sync_compute_stream()
            target = segment_slice(self.on_device[unit], segment)
            if first:
                target.copy_(flat)
            else:
                target.add_(flat)
        elif self._worker is None:
            self._sums.add(unit, segment, flat, first=first, complete=complete)
        elif unit in self.ram and flat.dtype is self.dtype and first:
            event = self._send_to_ram(self._worker, unit, segment, flat, complete=complete)
        else:
            event = self._send_to_staging(
                self._worker, unit, segment, flat, first=first, complete=complete
            )
        self._with_gradient.add(parameter)
        return event

    def _send_to_ram(
        self,
        worker: GradientWorker,
        unit: int,
        segment: Segment,
        gradient: Tensor,
        *,
        complete: bool,
    ) -> Event:
        """Start the copy to the gradient's range in RAM; sum squares on a device with kernels."""
        parameter = segment.parameter
        target, source = self._copy_targets[parameter], gradient.view(torch.uint8)
        event = self._copies.send(unit, parameter, target, source)
        if complete and self.plan.device_kernels and self._tree is None:
            count = len(self.plan.units[unit].trained_segments)
            self._device_squares.add(
                unit, parameter, norm_slices(gradient, segment), complete=count
            )
        elif complete:
            worker.put(partial(self._sums.square, unit, segment), [event])
        return event

    def _send_to_staging(
        self,
        worker: GradientWorker,
        unit: int,
        segment: Segment,
        gradient: Tensor,
        *,
        first: bool,
        complete: bool,
    ) -> Event:
        """Start the copy to the staging buffer, from which the thread adds it."""
        self._copies.release_done()
        source = gradient.view(torch.uint8)
        offset, buffer = worker.allocate(source.numel())
        event = self.transfers.copy_d2h(buffer, source, label=(unit, "gradient"))
        landed = buffer.view(gradient.dtype)
        add = partial(self._sums.add, unit, segment, landed, first=first, complete=complete)
        after = [self._copies.sent(segment.parameter), event]
        worker.put(add, after, gradient, (offset, buffer))
        return event

    def expect(self, unit: int) -> None:
        """Start to read the unit's saved gradients, which are needed soon."""
        if unit not in self._windows.ranges:
            return
        if self._worker is None:
            self._windows.expect(unit)
        else:
            self._worker.put(partial(self._windows.expect, unit))

    def replace(self, parameter: int, value: Tensor) -> None:
        """Replace an accumulated gradient by a value of the parameter's size.

        Raises `TrainingError` if the values of ranks differ.
        """
        what = f"the gradient of {self._segments[parameter][1].name!r}"
        self.ranks.synchronize_write(what, value)
        self.finish()
        self.drain()
        self._copies.wait(parameter)
        self._with_gradient.discard(parameter)  # so that the value overwrites the gradient
        self._sums.drop(parameter)
        self.put(parameter, value)
        self.finish()
        self.drain()

    def put(self, parameter: int, value: Tensor) -> None:
        """Store a gradient (full, equal on all ranks) for a parameter that has none."""
        if parameter in self._locations and value.numel():
            unit, segment = self._locations[parameter]
            first, end = (
                n - segment.offset for n in segment.within(0, self.plan.local_units[unit].numel)
            )
            flat = value.reshape(-1)[first:end].contiguous()
            self.take(unit, segment, flat.to(self._device.torch_device))
        self._with_gradient.add(parameter)

    def complete(self) -> None:
        """Store zeros for expert ranges without tokens, if other rows of the stack have gradients.

        Called on all ranks at the end of a window, after `finish`.
        """
        for rows in self._stacks.values():
            missing = [p for p in rows if p not in self._with_gradient]
            if not missing or len(missing) == len(rows):
                continue
            for parameter in missing:
                numel = self._segments[parameter][1].numel
                self.put(parameter, torch.zeros(numel, dtype=self.dtype, device="cpu"))
            self._save_windows()

    # --- the end of a backward, and of a window ----------------------------------------------

    def finish(self) -> None:
        """End a backward: exchange all gradients, and start to write the windows back.

        Work of the worker thread is only queued; `drain` waits for it.
        """
        self._check()
        if self.exchange is not None:
            self.exchange.finish()
        self._copies.release_done()
        self._device_squares.flush()
        self._save_windows()

    def _save_windows(self) -> None:
        if self._worker is None:
            self._windows.save()
        elif self._windows.ranges:
            self._worker.put(self._windows.save)

    def drain(self) -> None:
        """Wait for all queued work; raise its error."""
        if self._worker is not None:
            self._worker.drain()

    def _check(self) -> None:
        if self._worker is not None:
            self._worker.check()

    def settle(self, unit: int | None = None) -> None:
        """Wait until all gradients are stored, or those of one unit; then extents may be read."""
        self.drain()
        if self._windows.writing:
            with self.transfers.stall("gradient"):
                self._windows.settle(unit)

    def arrived(self) -> frozenset[int]:
        """Return the parameters with a gradient in this accumulation window."""
        return frozenset(self._with_gradient)

    def square_sum(self, equal: Mapping[str, int]) -> float:
        """Return the sum of squares of all gradients, in parameter order, fp64; after `finish`.

        The last synchronization of ranks in a step; see `NormTree.fold`.
        """
        self.drain()
        if self._tree is not None:
            blocks: dict[int, Tensor] = {}  # square sums (fp64) of the blocks of this rank's shards
            for parameter in sorted(self._with_gradient & self._locations.keys()):
                sums = self._sums.squares.get(parameter)
                if sums is None:
                    segment = self._segments[parameter][1]
                    sums = self._sums.square_sums(self._read(parameter), segment)
                blocks[parameter] = sums
            self._squares = self._tree.fold(blocks, sorted(self._with_gradient), equal)
        else:
            if self.plan.device_kernels:
                stored_on_device = {
                    parameter: norm_slices(segment_slice(self.on_device[unit], segment), segment)
                    for parameter, (unit, segment) in self._locations.items()
                    if parameter in self._with_gradient
                    and parameter not in self._squares
                    and unit in self.on_device
                }
                self._device_squares.begin(stored_on_device)
            self._squares |= {**self._device_squares.results(), **self._sums.squares}
        total = 0.0
        for parameter in self._in_order():
            if parameter not in self._squares:
                segment = self._segments[parameter][1]
                self._squares[parameter] = self._sums.square_sums(self._read(parameter), segment)
            for square in self._squares[parameter]:
                total += square
        return total

    def _in_order(self) -> list[int]:
        """Return the parameters that have gradients, in the order of `model.parameters()`."""
        return sorted(self._with_gradient, key=self._position.__getitem__)

    def non_finite(self) -> list[str]:
        """Return names of parameters with non-finite gradients, in order; after `square_sum`."""
        names = (
            self._segments[parameter][1].name
            for parameter in self._in_order()
            if not math.isfinite(sum(self._squares[parameter]))
        )
        return list(dict.fromkeys(names))

    def read(self, parameter: int) -> Tensor:
        """Return a flat copy of an accumulated gradient; raise `TrainingError` if there is none."""
        if rows := self._stacks.get(parameter):
            self.finish()
            if self._with_gradient.isdisjoint(rows):
                parameter = rows[0]
            else:
                self.complete()
                return torch.cat([self.read(row) for row in rows])
        segment = self._segments[parameter][1]
        self.finish()
        self.drain()
        if parameter not in self._with_gradient:
            raise TrainingError(f"parameter {segment.name!r} has no gradient in this window")
        if self.exchange is None:
            return self._read(parameter)
        local = torch.empty(0, dtype=self.dtype, device="cpu")
        if parameter in self._locations:
            local = self._read(parameter)
        self.ranks.synchronize(f"reads the gradient of {segment.name!r}")
        shards = self.ranks.gather_ragged(local.view(torch.uint8))
        return torch.cat(shards).view(self.dtype)

    def _read(self, parameter: int) -> Tensor:
        """Return a flat copy of this rank's shard of an accumulated gradient."""
        unit, segment = self._locations[parameter]
        if unit in self.ram:
            self._copies.wait(parameter)
            return segment_slice(self.ram[unit], segment).clone()
        self.settle(unit)
        first, end = segment.within(0, self.plan.local_units[unit].numel)
        start, nbytes = (n * self.dtype.itemsize for n in (first, end - first))
        alignment = 1 if unit in self.on_device else PAGE  # disks are read in full pages
        aligned_start = start // alignment * alignment
        location = self.ranges[unit].part(
            aligned_start, round_up(start + nbytes, alignment) - aligned_start
        )
        buffer = host_buffer(location.nbytes)
        self.transfers.read([(location, buffer)], label=(unit, "gradient")).wait()
        return buffer[start - aligned_start : start - aligned_start + nbytes].view(self.dtype)

    def take_copies(self) -> dict[int, list[Copy]]:
        """Return copies in flight by unit, for the reader of a unit's range to wait for.

        Until then nothing may be copied to the range. Keep each copy alive until it has ended.
        """
        copies = self._copies.take_copies()
        self.reset()
        return copies

    def reset(self) -> None:
        """Start a new accumulation window."""
        if self.exchange is not None:
            self.exchange.reset()
        if self._worker is not None:
            self._worker.reset()
        self._copies.reset()
        self._device_squares.reset()
        self._windows.reset()
        self._sums.reset()
        self._squares.clear()
        self._with_gradient.clear()
