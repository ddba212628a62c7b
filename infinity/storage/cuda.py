"""CUDA implementation of the `Device` interface.

[Note: one chain of compute]
Compute runs on the current stream of the computing thread, which may be a side stream created by
the user. When the engine finds that the current stream has changed, the new stream waits for the
old one. All compute known to the engine is thus one chain, and one event marks the end of it.
`torch.cuda.current_stream()` is per thread, so engine threads that only copy and update
(`attach_worker_thread`) use the stream last seen on a computing thread.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from infinity.common.sizes import format_size
from infinity.errors import ConfigError, DoesNotFitError, MachineError, ResidencyError
from infinity.optim.cpu import Piece
from infinity.optim.cuda import CudaKernels
from infinity.profiling.trace_recorder import Stamp
from infinity.storage.cuda_events import CudaClock, CudaEvent, CudaSpan, CudaStamp
from infinity.storage.device import HAPPENED, Device, Event, SquareSums
from infinity.storage.host_arena import HostArena
from infinity.storage.numa import node_of_pci, prefer_node
from infinity.storage.prefault import prefault
from infinity.types import PAGE, round_up

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context
_PIN_TRIES = 2


@dataclass(frozen=True)
class _CudaSquareSums:
    """Sums of squares being copied to pinned memory."""

    sums: Tensor
    event: CudaEvent

    def result(self) -> list[float]:
        if not self.event.done():
            self.event.wait()
        return [float(value) for value in self.sums.tolist()]


def _order(stream: torch.cuda.Stream, after: Event) -> None:
    """Order later work on `stream` after `after`; the host blocks only for non-CUDA events."""
    events: Sequence[Event] = getattr(after, "events", (after,))
    for event in events:
        if isinstance(event, CudaEvent):
            stream.wait_event(event.raw)
        else:
            event.wait()


class _CudaArena:
    """One device allocation; each view has a separate torch storage over the same memory."""

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw
        self.nbytes = raw.numel()

    def view(self, offset: int, nbytes: int) -> Tensor:
        if nbytes == 0:  # torch queries the driver for the address, which may be past the end
            return self.raw.new_empty(0)
        interface = _ArrayInterface(self.raw, offset, nbytes)
        return torch.as_tensor(interface, device=self.raw.device)


class _ArrayInterface:
    """`__cuda_array_interface__` of a byte range; keeps the allocation alive."""

    def __init__(self, raw: Tensor, offset: int, nbytes: int) -> None:
        self.raw = raw
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (raw.data_ptr() + offset, False),
            "version": 3,
            "stream": None,
        }


class CudaDevice(Device):
    """A CUDA GPU with one copy stream per direction and registered (pinned) host memory."""

    unified = False
    host_clock = False
    _PIN_SLICE = 1 << 30

    def __init__(self, torch_device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "device 'cuda' was requested, but torch finds no CUDA device",
                remedy="use device='cpu', or install a CUDA build of torch",
            )
        index = torch_device.index
        index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", index)
        # torch reuses streams from a pool of 32 per priority. A priority other than the default
        # keeps these streams distinct from the user's.
        self._h2d_stream = self._stream(priority=-1)
        self._d2h_stream = self._stream(priority=-1)
        # Separate streams for streamed updates: on the copy streams above they would wait for
        # compute and for free slots.
        self._unordered_h2d_stream = self._stream(priority=-1)
        self._unordered_d2h_stream = self._stream(priority=-1)
        self._comm_stream = self._stream(priority=-1)
        # Default priority: shares the GPU with compute.
        self._update_stream = self._stream(priority=0)
        self._kernels: CudaKernels | None = None
        self._kernel_error: str | None = None  # reason, once the kernels were tried
        self._last_compute_stream = torch.cuda.current_stream(self.torch_device)
        self._thread_role = threading.local()
        self._pinned_ranges: list[tuple[int, int]] = []  # sorted (start, end) addresses
        self.warnings: list[str] = []
        self._clock: CudaClock | None = None  # while a trace is recorded
        self._node: int | None = None  # NUMA node of the GPU, if there are several nodes
        # Any, because the type stub lacks the PCI attributes, as do older versions of torch.
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        with contextlib.suppress(AttributeError):
            self._node = node_of_pci(
                properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
            )

    def _stream(self, priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self.torch_device, priority=priority
        )

    def reserve(self, nbytes: int) -> _CudaArena:
        """Allocate memory, and wait for queued work that may still use it.

        torch may reuse a freed block, and not all streams are ordered after its last use.
        """
        size = round_up(max(nbytes, PAGE), PAGE)
        try:
            raw = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            free = self.memory_bytes() or 0
            raise DoesNotFitError(
                f"the device could not allocate {format_size(size)}; {format_size(free)} are free",
                remedy="lower budget.device, or close what else uses the GPU",
            ) from error
        torch.cuda.current_stream(self.torch_device).synchronize()
        return _CudaArena(raw)

    def memory_bytes(self) -> int | None:
        """Return the free device memory, within the allocator's memory fraction."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return max(min(free, int(fraction * total) - reserved), 0)

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        return self._copy(self._h2d_stream, target, source, after)

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy on the copy-out stream, after the compute issued so far."""
        self._d2h_stream.wait_stream(self._compute_stream())
        return self._copy(self._d2h_stream, target, source, after)

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy on a separate stream, not delayed by compute that `copy_d2h` waits for."""
        return self._copy(self._unordered_d2h_stream, target, source, after)

    def copy_h2d_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copy on a separate stream, not delayed by slots that `copy_h2d` waits for."""
        return self._copy(self._unordered_h2d_stream, target, source, after)

    def run_on_comm_stream(self, start: Callable[[], Event], after: Event = HAPPENED) -> Event:
        """Run `start` on a separate stream that NCCL synchronizes with; the host does not block."""
        _order(self._comm_stream, after)
        with torch.cuda.stream(self._comm_stream):
            start().wait()
        return CudaEvent(self._comm_stream)

    def _copy(
        self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Event
    ) -> Event:
        _order(stream, after)
        begin = self._begin_span(stream)
        with torch.cuda.stream(stream):
            host = target if target.device.type == "cpu" else source
            for start, end in self._registered_ranges(host.data_ptr(), host.numel()):
                target[start:end].copy_(source[start:end], non_blocking=True)
        return self._end_span(stream, begin)

    def _registered_ranges(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Split a host range at the edges of registrations, which no copy may cross."""
        cuts = {0, nbytes}
        ranges = self._pinned_ranges  # snapshot: another thread may replace the list
        for edges in ranges[max(bisect_left(ranges, (address,)) - 1, 0) :]:
            if edges[0] >= address + nbytes:
                break
            cuts.update(edge - address for edge in edges if 0 < edge - address < nbytes)
        return pairwise(sorted(cuts))

    def _begin_span(self, stream: torch.cuda.Stream) -> CudaStamp | None:
        return CudaStamp(self._clock, stream) if self._clock is not None else None

    def _end_span(self, stream: torch.cuda.Stream, begin: CudaStamp | None) -> CudaEvent:
        clock = self._clock
        if begin is None or clock is None:
            return CudaEvent(stream)
        return CudaSpan(begin, clock, stream)

    def compute_event(self) -> Event:
        return CudaEvent(self._compute_stream())

    def compute_wait(self, event: Event) -> None:
        """Make the compute stream wait for `event`; the host does not block."""
        _order(self._compute_stream(), event)

    def sync_compute_stream(self) -> None:
        """Order the current stream after earlier compute; see [Note: one chain of compute]."""
        self._compute_stream()

    def why_no_kernels(self) -> str | None:
        """Return why there are no kernels; the first call loads and runs them, and may warn."""
        if self._kernels is None and self._kernel_error is None:
            try:
                self._kernels = CudaKernels(self.torch_device)
            except MachineError as error:
                self._kernel_error = error.because or error.what
                self.warnings.append(
                    f"the optimizer's kernels do not run on {self.torch_device}, so the CPU "
                    f"updates: {self._kernel_error}"
                )
        return self._kernel_error

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """Launch the update on the update stream, concurrently with copies and compute."""
        assert self._kernels is not None
        _order(self._update_stream, after)
        begin = self._begin_span(self._update_stream)
        self._kernels.update_all(pieces, self._update_stream)
        return self._end_span(self._update_stream, begin)

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        """Launch the kernel on the compute stream, then copy the sums to pinned memory."""
        assert self._kernels is not None
        stream = self._compute_stream()
        with torch.cuda.stream(stream):
            device_sums = torch.empty(len(tensors), dtype=torch.float64, device=self.torch_device)
            self._kernels.square_sums(tensors, device_sums, stream)
            sums = torch.empty(len(tensors), dtype=torch.float64, device="cpu", pin_memory=True)
            sums.copy_(device_sums, non_blocking=True)
        return _CudaSquareSums(sums, CudaEvent(stream))

    def attach_worker_thread(self) -> None:
        """Set the current GPU of the thread, and use the compute stream of the computing thread."""
        torch.cuda.set_device(self.torch_device)
        stay_out_of_captures()
        self._thread_role.is_worker = True

    def _compute_stream(self) -> torch.cuda.Stream:
        """Return the current stream of the computing thread, ordered after earlier compute.

        Worker threads get the stream last seen. See [Note: one chain of compute].
        """
        if getattr(self._thread_role, "is_worker", False):
            return self._last_compute_stream
        current = torch.cuda.current_stream(self.torch_device)
        if torch.cuda.is_current_stream_capturing():
            raise ResidencyError(
                "the engine, or its model, was used while a CUDA graph is being captured",
                because="a replay would read slots that hold other weights by then, and start no "
                "copies",
                remedy="do not capture calls of the model; `compile: true` compiles its blocks",
            )
        if current != self._last_compute_stream:
            current.wait_stream(self._last_compute_stream)
            self._last_compute_stream = current
        return current

    def time_events(self, wanted: bool) -> None:
        """Record times of events if `wanted`; waits once for the compute issued so far."""
        stream = self._compute_stream() if wanted else None
        self._clock = CudaClock(stream) if stream is not None else None

    def stamp(self) -> int | Stamp:
        """Return an event on the compute stream while events are timed, else the host's time."""
        if self._clock is None:
            return time.perf_counter_ns()
        return CudaStamp(self._clock, self._compute_stream())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def pin(self, arena: HostArena) -> None:
        """Bind memory to the GPU's NUMA node and register it in slices of at most 1 GiB.

        Memory that cannot be registered is used unpinned, with a warning.
        """
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        base = arena.view(0, arena.nbytes).data_ptr()
        if self._node is not None:
            prefer_node(base, arena.nbytes, self._node)
        slices = [
            (base + start, min(self._PIN_SLICE, arena.nbytes - start))
            for start in range(0, arena.nbytes, self._PIN_SLICE)
        ]
        # The driver registers with one thread; the pages of the next slice are faulted in
        # concurrently. The context is that of the GPU: none is created on the current one.
        with (
            torch.cuda.device(self.torch_device),
            ThreadPoolExecutor(1, "infinity-pin") as executor,
        ):
            prefaulted = executor.submit(prefault, *slices[0])
            for (address, size), following in zip_longest(slices, slices[1:]):
                prefaulted.result()
                if following is not None:
                    prefaulted = executor.submit(prefault, *following)
                if code := self._register(cudart, address, size):
                    unpinned = base + arena.nbytes - address
                    self.warnings.append(
                        f"{format_size(unpinned)} of RAM could not be pinned (CUDA error {code}; "
                        f"{format_size(arena.nbytes - unpinned)} of this range are): copies to "
                        "and from the GPU go through a staging buffer of the driver, are slower "
                        "and block the host; the likely cause is a limit of the container or too "
                        "little free memory: try --ulimit memlock=-1, or a lower budget.host"
                    )
                    return
                self._pinned_ranges = sorted([*self._pinned_ranges, (address, address + size)])

    def _register(self, cudart: Any, address: int, size: int) -> int:
        """Register a slice, with one retry, and return the CUDA error code, 0 on success.

        Recently hot-plugged memory may have to be migrated first, and is refused once.
        """
        for _ in range(_PIN_TRIES):
            if not (code := int(cudart.cudaHostRegister(address, size, _PORTABLE))):
                break
            self._clear_error()
        return code

    def close(self) -> None:
        self.unpin()

    def unpin(self) -> None:
        if not self._pinned_ranges:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.torch_device):
            for start, _ in self._pinned_ranges:
                if int(cudart.cudaHostUnregister(start)):
                    self._clear_error()
        self._pinned_ranges.clear()

    def return_freed_memory(self) -> None:
        """Empty torch's cache: it would split a freed block of an engine for smaller tensors."""
        torch.cuda.empty_cache()

    def _clear_error(self) -> None:
        """Clear CUDA's last error, which was reported already.

        torch checks it after each kernel launch, and would raise it for the next one.
        """
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)


def stay_out_of_captures() -> None:
    """Prevent CUDA calls of this thread from invalidating a graph capture in another thread.

    A global-mode capture forbids event queries in all threads except those in thread-local mode.
    The thread must have a CUDA context. torch's threads do the same. Where the driver binding is
    missing, a capture may fail; nothing else is affected.
    """
    with contextlib.suppress(Exception):
        driver = importlib.import_module("cuda.bindings.driver")
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.cuThreadExchangeStreamCaptureMode(mode)
