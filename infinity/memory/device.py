"""The one interface through which the engine touches a compute device.

Ordering is by events, never by synchronising: a copy names the event it must come after, and
returns the event that marks its end. Compute is ordered by `compute_event` (all compute issued
so far) and `compute_wait` (compute issued from now on comes after an event). On a CPU the device
is the host: copies are immediate and every event has already happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinity.errors import ConfigError, DoesNotFitError, MachineError
from infinity.memory.host import HostArena
from infinity.optim.cpu import Piece
from infinity.optim.cuda import CudaKernels
from infinity.plan.layout import PAGE, round_up
from infinity.sizes import format_size


class Event(Protocol):
    """A point in the order of copies or compute."""

    def done(self) -> bool:
        """Whether it has happened; never blocks."""

    def wait(self) -> None:
        """Block the host until it has happened."""


class Happened:
    """An event that lies in the past."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


HAPPENED = Happened()


class DeviceArena(Protocol):
    """Reserved device memory."""

    nbytes: int

    def view(self, offset: int, nbytes: int) -> Tensor:
        """A uint8 device tensor over a range, with a storage object of its own."""


class Device(ABC):
    """Memory, copies and ordering of one compute device."""

    torch_device: torch.device
    unified: bool  # device memory is host memory: nothing needs copying

    @abstractmethod
    def reserve(self, nbytes: int) -> DeviceArena:
        """Reserve memory once; raises `DoesNotFitError` when it is not there."""

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Bytes of device memory free now; None where that is the host's."""

    @abstractmethod
    def copy_in(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Host to device, after `after`; both uint8 and of one size. May return early."""

    @abstractmethod
    def copy_out(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Device to host, after `after` and all compute issued so far. May return early."""

    @abstractmethod
    def compute_event(self) -> Event:
        """The end of all compute issued so far."""

    @abstractmethod
    def compute_wait(self, event: Event) -> None:
        """Order compute issued from now on after `event`; blocks the host only if it must."""

    def why_no_kernels(self) -> str | None:
        """Why optimizer state that rests here is updated by the host; None if `update` works."""
        return "there are no kernels for this device"

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """One optimizer step, in place, of pieces in device memory, after `after`.

        Only where `why_no_kernels` gives no reason. May return early.
        """
        raise MachineError("an update was asked of the device", because=self.why_no_kernels())

    def square_sums(self, tensors: Sequence[Tensor]) -> list[float]:
        """Sums of squares of device tensors, after all compute issued so far; as `update`."""
        raise MachineError("square sums were asked of the device", because=self.why_no_kernels())

    def synchronize(self) -> None:  # noqa: B027
        """Wait for every copy and all compute; only after an interruption."""

    def pin(self, arena: HostArena) -> None:  # noqa: B027  (a CPU has nothing to pin)
        """Make host memory reachable by asynchronous copies."""

    def close(self) -> None:  # noqa: B027
        """Give back pins, streams and threads."""


class CpuDevice(Device):
    """The host itself."""

    torch_device = torch.device("cpu")
    unified = True

    def __init__(self) -> None:
        self.copier: Callable[[Tensor, Tensor], object] = Tensor.copy_

    def reserve(self, nbytes: int) -> HostArena:
        """RAM, like any other."""
        return HostArena(nbytes)

    def memory_bytes(self) -> int | None:
        """None: the device's memory is the host's."""
        return None

    def copy_in(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copies at once."""
        self.copier(target, source)
        return HAPPENED

    def copy_out(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """Copies at once."""
        self.copier(target, source)
        return HAPPENED

    def compute_event(self) -> Event:
        """Compute on a CPU is over when the call returns."""
        return HAPPENED

    def compute_wait(self, event: Event) -> None:
        """Nothing to order."""


class _CudaEvent:
    """A CUDA event, seen through the `Event` protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.raw.synchronize()


class _CudaArena:
    """One allocation; views get a storage of their own through the array interface."""

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw
        self.nbytes = raw.numel()

    def view(self, offset: int, nbytes: int) -> Tensor:
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


class CudaDevice(Device):
    """A CUDA GPU: one copy stream a direction, registered host memory. Not yet run on a GPU."""

    unified = False
    _PIN_SLICE = 1 << 30

    def __init__(self, torch_device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "device 'cuda' was asked for, but torch sees no CUDA device",
                remedy="use device='cpu', or install a CUDA build of torch",
            )
        self.torch_device = torch.device("cuda", torch_device.index or 0)
        self._in = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._update = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._kernels: CudaKernels | None = None
        self._pinned: list[tuple[int, int]] = []

    def reserve(self, nbytes: int) -> _CudaArena:
        """One plain allocation."""
        size = round_up(max(nbytes, PAGE), PAGE)
        try:
            raw = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            free = self.memory_bytes() or 0
            raise DoesNotFitError(
                f"the device refused {format_size(size)}; {format_size(free)} are free",
                remedy="lower budget.device, or close what else uses the GPU",
            ) from error
        return _CudaArena(raw)

    def memory_bytes(self) -> int | None:
        """Free device memory now."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def copy_in(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """On the copy-in stream."""
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: Tensor, source: Tensor, after: Event = HAPPENED) -> Event:
        """On the copy-out stream, after the compute issued so far."""
        self._out.wait_stream(torch.cuda.current_stream(self.torch_device))
        return self._copy(self._out, target, source, after)

    def _copy(
        self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Event
    ) -> Event:
        if isinstance(after, _CudaEvent):
            stream.wait_event(after.raw)
        else:
            after.wait()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _CudaEvent(stream)

    def compute_event(self) -> Event:
        """Recorded on the current stream."""
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))

    def compute_wait(self, event: Event) -> None:
        """The current stream waits; the host does not."""
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.raw)
        else:
            event.wait()

    def why_no_kernels(self) -> str | None:
        """Compiles or loads the first kernels, when first asked."""
        if self._kernels is None:
            try:
                self._kernels = CudaKernels(self.torch_device)
            except MachineError as error:
                return error.because or error.what
        return None

    def update(self, pieces: Sequence[Piece], after: Event = HAPPENED) -> Event:
        """On the update stream; launches only, so that copies and compute go on beside it."""
        assert self._kernels is not None
        if isinstance(after, _CudaEvent):
            self._update.wait_event(after.raw)
        else:
            after.wait()
        self._kernels.update_all(pieces, self._update)
        return _CudaEvent(self._update)

    def square_sums(self, tensors: Sequence[Tensor]) -> list[float]:
        """On the current stream; waits for the numbers."""
        assert self._kernels is not None
        sums = torch.empty(len(tensors), dtype=torch.float64, device=self.torch_device)
        self._kernels.square_sums(tensors, sums)
        return [float(total) for total in sums.tolist()]

    def synchronize(self) -> None:
        """Everything on the device."""
        torch.cuda.synchronize(self.torch_device)

    def pin(self, arena: HostArena) -> None:
        """Register in slices of at most 1 GiB; an unregistered pool still works, slower."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        base = arena.view(0, arena.nbytes).data_ptr()
        for start in range(0, arena.nbytes, self._PIN_SLICE):
            size = min(self._PIN_SLICE, arena.nbytes - start)
            if int(cudart.cudaHostRegister(base + start, size, 0)) == 0:
                self._pinned.append((base + start, size))

    def close(self) -> None:
        """Unregister host memory."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for address, _ in self._pinned:
            cudart.cudaHostUnregister(address)
        self._pinned.clear()


def find_device(device: Device | torch.device | str | None) -> Device:
    """The `Device` for what a user may pass; the default is CUDA where there is one, else CPU."""
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return CpuDevice()
    if wanted.type == "cuda":
        return CudaDevice(wanted)
    raise ConfigError(f"device {str(wanted)!r} is not supported yet", remedy="use 'cpu' or 'cuda'")
