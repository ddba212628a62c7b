"""A CUDA GPU behind the `Device` interface.

[Note: one chain of compute]
Compute goes to the stream that the computing thread is on, which may be a side stream of the
user's. Where the engine finds that it is another one than before, the new one waits for the old
one: whatever streams a user has, what the engine knows of compute is one chain, and one event ends
all of it. `torch.cuda.current_stream()` belongs to the calling thread, so threads of the engine
that only move and update (`attach_worker_thread`) use the stream last seen on a computing thread.
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

_PORTABLE = 1  # cudaHostRegisterPortable: for whatever GPU a thread has
_PIN_TRIES = 2


@dataclass(frozen=True)
class _CudaSquareSums:
    """Numbers on their way to pinned memory."""

    numbers: Tensor
    event: CudaEvent

    def result(self) -> list[float]:
        if not self.event.done():
            self.event.wait()
        return [float(total) for total in self.numbers.tolist()]


def _order(stream: torch.cuda.Stream, after: Event) -> None:
    """Order later work on `stream` after `after`; the host does not wait for CUDA's events."""
    parts: Sequence[Event] = getattr(after, "events", (after,))
    for part in parts:
        if isinstance(part, CudaEvent):
            stream.wait_event(part.raw)
        else:
            part.wait()


def _not_pinned(nbytes: int, total: int, code: int) -> str:
    return (
        f"{format_size(nbytes)} of RAM could not be pinned (CUDA error {code}; "
        f"{format_size(total - nbytes)} of this range are): copies to and from the GPU go through "
        "a buffer of the driver's, slower, and make the host wait; the likely cause is a limit of "
        "the container or too little free memory: try --ulimit memlock=-1, or a lower budget.host"
    )


class _CudaArena:
    """One allocation; views get a storage of their own through the array interface."""

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw
        self.nbytes = raw.numel()

    def view(self, offset: int, nbytes: int) -> Tensor:
        if nbytes == 0:  # torch asks the driver whose an address is, and one may be past the end
            return self.raw.new_empty(0)
        part = _ArrayInterface(self.raw, offset, nbytes)
        return torch.as_tensor(part, device=self.raw.device)


class _ArrayInterface:
    """Describes device bytes to torch, and keeps the allocation alive."""

    def __init__(self, raw: Tensor, offset: int, nbytes: int) -> None:
        self.raw = raw
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (raw.data_ptr() + offset, False),
            "version": 3,
            "stream": None,
        }


def _node_of(device: torch.device) -> int | None:
    """Return the NUMA node of a GPU; None if torch does not know it, or there is one only."""
    facts: Any = torch.cuda.get_device_properties(device)  # torch does not declare these
    try:
        return node_of_pci(facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id)
    except AttributeError:  # an older torch
        return None


class CudaDevice(Device):
    """A CUDA GPU: one copy stream a direction, registered host memory."""

    unified = False
    host_clock = False
    _PIN_SLICE = 1 << 30

    def __init__(self, torch_device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "device 'cuda' was asked for, but torch sees no CUDA device",
                remedy="use device='cpu', or install a CUDA build of torch",
            )
        index = torch_device.index
        index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", index)
        # torch hands streams out from a pool of 32 for each priority, over and over: at another
        # priority than the user's streams, none of the user's is one of these.
        self._in = self._stream(priority=-1)
        self._out = self._stream(priority=-1)
        # Of streamed updates: behind the others they would wait for compute, and for free slots.
        self._bring = self._stream(priority=-1)
        self._back = self._stream(priority=-1)
        self._between = self._stream(priority=-1)
        self._update = self._stream(priority=0)  # its kernels take turns with compute
        self._kernels: CudaKernels | None = None
        self._no_kernels: str | None = None  # why, once that is known
        self._compute = torch.cuda.current_stream(self.torch_device)
        self._follower = threading.local()
        self._pinned: list[tuple[int, int]] = []  # first and end address, in order
        self.warnings: list[str] = []
        self._clock: CudaClock | None = None  # while a trace is recorded
        self._node = _node_of(self.torch_device)

    def _stream(self, priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self.torch_device, priority=priority
        )

    def reserve(self, nbytes: int) -> _CudaArena:
        """One plain allocation, that no work queued before touches: not all streams follow it."""
        size = round_up(max(nbytes, PAGE), PAGE)
        try:
            raw = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            free = self.memory_bytes() or 0
            raise DoesNotFitError(
                f"the device refused {format_size(size)}; {format_size(free)} are free",
                remedy="lower budget.device, or close what else uses the GPU",
            ) from error
        torch.cuda.current_stream(self.torch_device).synchronize()
        return _CudaArena(raw)

    def memory_bytes(self) -> int | None:
        """Free device memory now, of which torch's allocator may be held to a part."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        share = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        taken = torch.cuda.memory_reserved(self.torch_device)
        return max(min(free, int(share * total) - taken), 0)

    def copy_h2d(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """On the copy-in stream."""
        return self._copy(self._in, target, source, after)

    def copy_d2h(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """On the copy-out stream, after the compute issued so far."""
        self._out.wait_stream(self._compute_stream())
        return self._copy(self._out, target, source, after)

    def copy_d2h_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """On a stream of its own: no compute that `copy_d2h` waits for holds it up."""
        return self._copy(self._back, target, source, after)

    def copy_h2d_unordered(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """On a stream of its own: no slot that `copy_h2d` waits for holds it up."""
        return self._copy(self._bring, target, source, after)

    def run_on_comm_stream(self, start: Callable[[], Event], after: Event = HAPPENED) -> Event:
        """On a stream of its own, which NCCL's follows and is followed by; the host goes on."""
        _order(self._between, after)
        with torch.cuda.stream(self._between):
            start().wait()
        return CudaEvent(self._between)

    def _copy(
        self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Event
    ) -> Event:
        _order(stream, after)
        begin = self._begin(stream)
        with torch.cuda.stream(stream):
            host = target if target.device.type == "cpu" else source
            for first, end in self._registered_parts(host.data_ptr(), host.numel()):
                target[first:end].copy_(source[first:end], non_blocking=True)
        return self._end(stream, begin)

    def _registered_parts(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cuts a host range where one registration ends and the next begins: no copy may cross."""
        cuts = {0, nbytes}
        pinned = self._pinned  # another thread may put a longer list there
        for edges in pinned[max(bisect_left(pinned, (address,)) - 1, 0) :]:
            if edges[0] >= address + nbytes:
                break
            cuts.update(edge - address for edge in edges if 0 < edge - address < nbytes)
        return pairwise(sorted(cuts))

    def _begin(self, stream: torch.cuda.Stream) -> CudaStamp | None:
        """Where work on a stream begins, if that is asked for."""
        return CudaStamp(self._clock, stream) if self._clock is not None else None

    def _end(self, stream: torch.cuda.Stream, begin: CudaStamp | None) -> CudaEvent:
        clock = self._clock
        if begin is None or clock is None:
            return CudaEvent(stream)
        return CudaSpan(begin, clock, stream)

    def compute_event(self) -> Event:
        """Recorded on the compute stream."""
        return CudaEvent(self._compute_stream())

    def compute_wait(self, event: Event) -> None:
        """The compute stream waits; the host does not."""
        _order(self._compute_stream(), event)

    def sync_compute_stream(self) -> None:
        """See [Note: one chain of compute]."""
        self._compute_stream()

    def why_no_kernels(self) -> str | None:
        """Compiles or loads the first kernels and runs them, when first asked; warns once."""
        if self._kernels is None and self._no_kernels is None:
            try:
                self._kernels = CudaKernels(self.torch_device)
            except MachineError as error:
                self._no_kernels = error.because or error.what
                self.warnings.append(
                    f"the optimizer's kernels do not run on {self.torch_device}, so the CPU "
                    f"updates: {self._no_kernels}"
                )
        return self._no_kernels

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """On the update stream; launches only, so that copies and compute overlap with it."""
        assert self._kernels is not None
        _order(self._update, after)
        begin = self._begin(self._update)
        self._kernels.update_all(pieces, self._update)
        return self._end(self._update, begin)

    def begin_square_sums(self, tensors: Sequence[Tensor]) -> SquareSums:
        """On the compute stream; the numbers follow the kernel to pinned memory."""
        assert self._kernels is not None
        stream = self._compute_stream()
        with torch.cuda.stream(stream):
            sums = torch.empty(len(tensors), dtype=torch.float64, device=self.torch_device)
            self._kernels.square_sums(tensors, sums, stream)
            numbers = torch.empty(len(tensors), dtype=torch.float64, device="cpu", pin_memory=True)
            numbers.copy_(sums, non_blocking=True)
        return _CudaSquareSums(numbers, CudaEvent(stream))

    def attach_worker_thread(self) -> None:
        """Streams belong to threads, and so does the current GPU; this one has none of its own."""
        torch.cuda.set_device(self.torch_device)
        stay_out_of_captures()
        self._follower.yes = True

    def _compute_stream(self) -> torch.cuda.Stream:
        """The stream that the thread that computes is on, after all that went to others before.

        Remembered for threads that follow. See [Note: one chain of compute].
        """
        if getattr(self._follower, "yes", False):
            return self._compute
        current = torch.cuda.current_stream(self.torch_device)
        if torch.cuda.is_current_stream_capturing():
            raise ResidencyError(
                "the engine, or its model, was used while a CUDA graph is being captured",
                because="a replay would read addresses where other weights are by then, and copy "
                "nothing",
                remedy="capture nothing that calls the model; `compile: true` compiles its blocks",
            )
        if current != self._compute:
            current.wait_stream(self._compute)
            self._compute = current
        return current

    def time_events(self, wanted: bool) -> None:
        """Events record times, from one wait for the compute issued so far on."""
        stream = self._compute_stream() if wanted else None
        self._clock = CudaClock(stream) if stream is not None else None

    def stamp(self) -> int | Stamp:
        """An event on the compute stream, while events are timed."""
        if self._clock is None:
            return time.perf_counter_ns()
        return CudaStamp(self._clock, self._compute_stream())

    def synchronize(self) -> None:
        """Everything on the device."""
        torch.cuda.synchronize(self.torch_device)

    def pin(self, arena: HostArena) -> None:
        """Take it from the GPU's NUMA node, and register it in slices of at most 1 GiB.

        A pool that is not registered still works, slower.
        """
        with torch.cuda.device(self.torch_device):  # else the current GPU gets a context too
            self._pin(arena)

    def _pin(self, arena: HostArena) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        base = arena.view(0, arena.nbytes).data_ptr()
        if self._node is not None:
            prefer_node(base, arena.nbytes, self._node)
        slices = [
            (base + start, min(self._PIN_SLICE, arena.nbytes - start))
            for start in range(0, arena.nbytes, self._PIN_SLICE)
        ]
        # The driver registers with one thread: meanwhile others make the pages of the next slice.
        with ThreadPoolExecutor(1, "infinity-pin") as ahead:
            made = ahead.submit(prefault, *slices[0])
            for (address, size), following in zip_longest(slices, slices[1:]):
                made.result()
                if following is not None:
                    made = ahead.submit(prefault, *following)
                if code := self._register(cudart, address, size):
                    left = base + arena.nbytes - address
                    self.warnings.append(_not_pinned(left, arena.nbytes, code))
                    return
                self._pinned = sorted([*self._pinned, (address, address + size)])

    def _register(self, cudart: Any, address: int, size: int) -> int:
        """Register a slice, and return CUDA's error code, 0 for none.

        Memory that was plugged in lately may have to be moved first: it is refused once.
        """
        for _ in range(_PIN_TRIES):
            if not (code := int(cudart.cudaHostRegister(address, size, _PORTABLE))):
                break
            self._clear_error()
        return code

    def close(self) -> None:
        """Unregister host memory."""
        self.unpin()

    def unpin(self) -> None:
        """See `Device`."""
        if not self._pinned:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.torch_device):
            for start, _ in self._pinned:
                if int(cudart.cudaHostUnregister(start)):
                    self._clear_error()
        self._pinned.clear()

    def return_freed_memory(self) -> None:
        """A block that an engine had would stay torch's, and be cut for smaller tensors."""
        torch.cuda.empty_cache()

    def _clear_error(self) -> None:
        """Clear CUDA's last error, which was reported already.

        torch looks there after each kernel, and would raise it for the next one.
        """
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)


def stay_out_of_captures() -> None:
    """Keep this thread's calls of CUDA from breaking a graph that another thread captures.

    Captures forbid all threads to look at events, but those that say that they take no part; once
    the thread has a context. torch's own threads do the same. Where the driver cannot be asked, a
    capture may break, and nothing else does.
    """
    with contextlib.suppress(Exception):
        driver = importlib.import_module("cuda.bindings.driver")
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.cuThreadExchangeStreamCaptureMode(mode)
