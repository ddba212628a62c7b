"""pytest plugin that emulates `torch.cuda` on the host, for builds of torch without CUDA.

    PYTHONPATH=tests python -m pytest -p support.host_cuda -m gpu tests/gpu

It must be imported before torch. It builds and loads host_cuda.cpp, which implements the device,
and replaces the functions of `torch.cuda` that the engine and its tests call. Optimizer kernels are
built for the host (`cuda_on_host`). Memory accesses of operations, optimizer kernels, CPU kernels
and the disk are recorded; a test fails if two accesses of one range are not ordered by streams,
events or threads.

Not emulated: timing, graph capture, compiled code, `nvrtc`, NCCL.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TOTAL_BYTES = 4 << 30
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")  # warnings of torch's headers
_HOST = 0  # number of the calling thread's timeline in host_cuda.cpp


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _build(torch_folder: Path) -> Path:
    """Build host_cuda.cpp, or reuse the cached library; return its path."""
    source = Path(__file__).with_suffix(".cpp")
    version = (torch_folder / "version.py").read_text()
    digest = hashlib.sha256(repr((source.read_text(), version, _FLAGS)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"infinity-host-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{digest}.so"
    if not target.exists():
        temporary = folder / f"{digest}.{os.getpid()}.so"
        include = torch_folder / "include"
        command = [os.environ.get("CXX", "c++"), *_FLAGS, str(source), "-o", str(temporary)]
        command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        os.replace(temporary, target)
    return target


def _load() -> ctypes.CDLL:
    assert "torch" not in sys.modules, "torch looks for devices once, when it is imported"
    folder = _torch_folder()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_build(folder)))
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.hc_memory.restype = ctypes.c_int64
    library.hc_limit.argtypes = [ctypes.c_int64]
    library.hc_register.argtypes = [address, size]
    library.hc_unregister.argtypes = [address]
    for name in ("hc_hands_over", "hc_takes_over"):
        getattr(library, name).argtypes = [ctypes.c_uint64]
    library.hc_access.argtypes = [ctypes.c_int, address, size, ctypes.c_int, ctypes.c_char_p]
    return library


LIBRARY = _load()


class _Lock:
    """Replacement of `threading.Lock`: acquiring is ordered after the last release."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self.locked = self._lock.locked
        self._at_fork_reinit = self._lock._at_fork_reinit  # type: ignore[attr-defined]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired = self._lock.acquire(blocking, timeout)
        if acquired:
            LIBRARY.hc_takes_over(id(self))
        return acquired

    def release(self) -> None:
        LIBRARY.hc_hands_over(id(self))
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def _patch_threading() -> None:
    """Make threads timelines, ordered by locks, events, and start and join of threads."""
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def start_ordered(self: threading.Thread) -> None:
        LIBRARY.hc_hands_over(id(self))
        start(self)

    def run_as_timeline(self: threading.Thread) -> None:
        LIBRARY.hc_thread_begins()
        LIBRARY.hc_takes_over(id(self))
        try:
            run(self)
        finally:
            LIBRARY.hc_hands_over(id(self))
            LIBRARY.hc_thread_ends()

    def join_ordered(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            LIBRARY.hc_takes_over(id(self))

    is_set, set_ = threading.Event.is_set, threading.Event.set

    def set_ordered(self: threading.Event) -> None:
        LIBRARY.hc_hands_over(id(self))
        set_(self)

    def is_set_ordered(self: threading.Event) -> bool:
        result = is_set(self)
        if result:
            LIBRARY.hc_takes_over(id(self))
        return result

    patches: dict[Any, dict[str, Any]] = {
        threading.Event: {"set": set_ordered, "is_set": is_set_ordered},
        threading: {"Lock": _Lock, "_allocate_lock": _Lock, "_CRLock": None},
        threading.Thread: {"start": start_ordered, "run": run_as_timeline, "join": join_ordered},
        queue: {"SimpleQueue": queue._PySimpleQueue},  # type: ignore[attr-defined]
    }
    for owner, values in patches.items():
        for name, value in values.items():
            setattr(owner, name, value)


_patch_threading()

import torch  # noqa: E402  (after the device is loaded)
from torch import Tensor  # noqa: E402

DEVICE = torch.device("cuda", 0)


class Stream(torch.Stream):
    """Replacement of `torch.cuda.Stream`: a timeline."""

    def __new__(
        cls, device: Any = None, priority: int = 0, like: torch.Stream | None = None
    ) -> Any:
        if like is None:
            return super().__new__(cls, DEVICE, priority=priority)
        location = {"device_index": like.device_index, "device_type": like.device_type}
        return super().__new__(cls, stream_id=like.stream_id, **location)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


def event(
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """Replacement of `torch.cuda.Event`; a query is answered at random until the event is known."""
    return torch.Event(DEVICE, enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Any = None) -> Stream:
    return Stream(like=torch.accelerator.current_stream())


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Set the current stream, as `with stream:` does; several threads may enter it at a time."""
    before = current_stream()
    torch.accelerator.set_stream(stream or before)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class _DeviceContext:
    """Replacement of `torch.cuda.device`: there is one device."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _MemoryFraction:
    """Share of the device's memory that torch's allocator may use."""

    def __init__(self) -> None:
        self._fraction = 1.0

    def get(self, device: Any = None) -> float:
        return self._fraction

    def set(self, share: float, device: Any = None) -> None:
        self._fraction = share
        LIBRARY.hc_limit(int(share * TOTAL_BYTES))


def violations() -> list[str]:
    """Return and clear the unordered accesses."""
    text = ctypes.create_string_buffer(1 << 16)
    LIBRARY.hc_violations(text, len(text))
    return text.value.decode().splitlines()


def _memory(what: int) -> Callable[..., int]:
    return lambda device=None: LIBRARY.hc_memory(what)


def _memory_stats(device: Any = None) -> dict[str, int]:
    return {"num_alloc_retries": LIBRARY.hc_memory(4), "num_device_alloc": LIBRARY.hc_memory(3)}


def _patch_torch() -> None:
    properties = SimpleNamespace(
        name="CUDA on the host", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=4
    )
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: LIBRARY.hc_register(address, size),
        cudaHostUnregister=LIBRARY.hc_unregister,
    )
    default = torch.Stream(stream_id=1, device_index=0, device_type=1)  # as in host_cuda.cpp
    share, nothing = _MemoryFraction(), lambda *arguments: None
    values: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": nothing, "device": _DeviceContext,
        "device_of": type("device_of", (_DeviceContext,), {}),
        "init": nothing, "_lazy_init": nothing,
        "Stream": Stream, "Event": event, "stream": on_stream, "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(like=default),
        "set_stream": torch.accelerator.set_stream, "synchronize": torch.accelerator.synchronize,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - LIBRARY.hc_memory(2), TOTAL_BYTES),
        "memory_allocated": _memory(0), "max_memory_allocated": _memory(1),
        "memory_reserved": _memory(2), "max_memory_reserved": _memory(5),
        "memory_stats": _memory_stats, "empty_cache": LIBRARY.hc_empty_cache,
        "reset_peak_memory_stats": lambda device=None: LIBRARY.hc_reset_peak(),
        "get_per_process_memory_fraction": share.get,
        "set_per_process_memory_fraction": share.set,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0), "cudart": lambda: runtime,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": lambda mode: LIBRARY.hc_refuse_waits(mode == "error"),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": nothing, "manual_seed_all": nothing,
        "default_generators": (torch.default_generator,),
        "is_bf16_supported": lambda including_emulation=True: True,
    }  # fmt: skip
    for name, value in values.items():  # torch's compiler requires distinct objects
        for module in (torch.cuda, torch.cuda.random):
            if module is torch.cuda or hasattr(module, name):
                attribute = value if isinstance(value, type | tuple) else partial(value)
                setattr(module, name, attribute)

    def clone(storage: Any) -> Any:
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return view.set_(storage, 0, (storage.nbytes(),)).clone().untyped_storage()

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]


def _record(timeline: int, write: bool, what: str, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            nbytes = tensor.numel() * tensor.element_size()
            LIBRARY.hc_access(timeline, tensor.data_ptr(), nbytes, write, what.encode())


def _record_update(timeline: int, pieces: Any) -> None:
    for piece in pieces:
        _record(timeline, False, "an update", piece.gradient)
        _record(timeline, True, "an update", piece.weight, piece.master_state)
        for moment in piece.moments:
            _record(timeline, True, "an update", moment.values, moment.scales)


def _patch_kernels() -> None:
    """Run GPU kernels on the host; record accesses of optimizer kernels, CPU kernels and disk."""
    from support.cuda_on_host import HostLauncher

    from infinity.optim import cpu, cuda
    from infinity.storage import disk

    class Launcher(HostLauncher):
        def __init__(self, device: torch.device, cache: object = None) -> None:
            super().__init__()
            self.device = DEVICE

        def scratch(self, num_elements: int, stream: Any) -> Tensor:
            with on_stream(stream):
                return torch.empty(num_elements, dtype=torch.float64, device=DEVICE)

    cuda.CudaLauncher = Launcher  # type: ignore[misc, assignment]
    cuda.why_not = lambda device: None

    def record_before(owner: Any, name: str, record: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def recorded(self: Any, first: Any, *others: Any, **named: Any) -> Any:
            first = first if isinstance(first, Tensor) else list(first)
            record(first, *others, **named)
            return original(self, first, *others, **named)

        setattr(owner, name, recorded)

    def timeline_of(stream: Any) -> int:
        return (stream or current_stream()).stream_id

    def on_gpu(pieces: Any, stream: Any = None) -> None:
        _record_update(timeline_of(stream), pieces)

    def squares(tensors: Any, sums: Tensor, stream: Any = None) -> None:
        _record(timeline_of(stream), False, "square sums", *tensors)
        _record(timeline_of(stream), True, "square sums", sums)

    def sums(target: Tensor, source: Tensor) -> None:
        _record(_HOST, False, "a sum", source)
        _record(_HOST, True, "a sum", target)

    def record_disk(name: str, write: bool) -> None:
        """Order the wait for a request after the request; the transfer itself counts as instant."""
        original = getattr(disk.Disk, name)

        def recorded(self: Any, pieces: Any, *others: Any, **named: Any) -> Any:
            pieces = list(pieces)
            _record(_HOST, write, "the disk", *(buffer for _, buffer in pieces))
            ticket = original(self, pieces, *others, **named)
            LIBRARY.hc_hands_over(id(ticket))
            return ticket

        setattr(disk.Disk, name, recorded)

    def order_after_request(name: str) -> None:
        original = getattr(disk.DiskTicket, name)

        def recorded(self: Any) -> Any:
            result = original(self)
            if result is not False:
                LIBRARY.hc_takes_over(id(self))
            return result

        setattr(disk.DiskTicket, name, recorded)

    record_before(cuda.CudaKernels, "update_all", on_gpu)
    record_before(cuda.CudaKernels, "square_sums", squares)
    record_before(cpu.CpuKernels, "update_all", lambda pieces: _record_update(_HOST, pieces))
    record_before(cpu.CpuKernels, "convert", sums)
    record_before(cpu.CpuKernels, "accumulate", sums)
    record_before(
        cpu.CpuKernels, "square_sum", lambda tensor: _record(_HOST, False, "a sum", tensor)
    )
    record_disk("read", write=True)  # a read writes the buffer
    record_disk("write", write=False)
    order_after_request("wait")
    order_after_request("done")


_patch_torch()
_patch_kernels()


def pytest_runtest_teardown() -> None:
    """Fail a test after which there are unordered accesses."""
    found = violations()
    assert not found, "\n".join(["nothing orders these:", *found[:10]])
