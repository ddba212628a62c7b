"""Tests of host arenas: exact sizes, huge pages, prefaulting, and pinning in slices."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bare_cuda import bare_cuda_device
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.small import small_model

import infinity
from infinity.common.sizes import format_size
from infinity.offload.transfers import Transfers
from infinity.storage import cuda as cuda_module
from infinity.storage import host_arena as host_module
from infinity.storage import prefault as prefault_module
from infinity.storage.cuda import CudaDevice
from infinity.storage.host_arena import HostArena, make_arena
from infinity.storage.prefault import prefault
from infinity.types import PAGE, Kind

MIB, GIB = 1 << 20, 1 << 30
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def address_of(arena: HostArena) -> int:
    return int(arena.view(0, arena.nbytes).data_ptr())


def mapping_at(address: int) -> tuple[int, int, list[str]]:
    """Return start, end and VmFlags of the mapping that contains `address`."""
    first = end = 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = int(found[1], 16), int(found[2], 16)
        elif line.startswith("VmFlags:") and first <= address < end:
            return first, end, line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def resident_bytes(arena: HostArena) -> int:
    pages = (ctypes.c_ubyte * -(-arena.nbytes // mmap.PAGESIZE))()
    address, length = ctypes.c_void_p(address_of(arena)), ctypes.c_size_t(arena.nbytes)
    assert ctypes.CDLL(None).mincore(address, length, pages) == 0
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * MIB + 1, 5 * MIB, 65 * MIB + PAGE])
def test_arena_rounds_up_to_pages_only(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would round pinned memory up to a power of two."""
    lengths: list[int] = []
    make = mmap.mmap

    def record_length(descriptor: int, length: int, **more: int) -> mmap.mmap:
        lengths.append(length)
        return make(descriptor, length, **more)

    monkeypatch.setattr(host_module.mmap, "mmap", record_length)
    arena = HostArena(nbytes)
    assert lengths == [-(-nbytes // PAGE) * PAGE] == [arena.nbytes]
    assert address_of(arena) % PAGE == 0
    first, end, _ = mapping_at(address_of(arena))
    assert first <= address_of(arena) <= end - arena.nbytes


def test_arena_for_ranges_has_exact_size() -> None:
    arena = make_arena([1, PAGE, PAGE + 1])
    assert arena.nbytes == 4 * PAGE
    views = [arena.carve(size) for size in (1, PAGE, PAGE + 1)]
    assert [view.data_ptr() - address_of(arena) for view in views] == [0, PAGE, 2 * PAGE]


def test_arena_not_resident_until_used() -> None:
    arena = HostArena(4 * GIB)
    assert (arena.nbytes, resident_bytes(arena)) == (4 * GIB, 0)


def test_arena_advises_huge_pages() -> None:
    if not THP.exists():
        pytest.skip("the kernel has no transparent huge pages")
    arena = HostArena(8 * MIB)
    _, _, flags = mapping_at(address_of(arena))
    assert "hg" in flags


def test_arena_not_inherited_by_fork() -> None:
    arena = HostArena(8 * MIB)
    address = address_of(arena)
    first, end, flags = mapping_at(address)
    assert "dc" in flags
    assert end - first >= arena.nbytes
    child = os.fork()
    if child == 0:  # only checks whether the page is mapped
        libc = ctypes.CDLL(None, use_errno=True)
        missing = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(PAGE), (ctypes.c_ubyte * 1)()
        )
        os._exit(0 if missing == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("nbytes", "sizes"),
    [
        (PAGE, [PAGE]),
        (GIB, [GIB]),
        (GIB + PAGE, [GIB, PAGE]),
        (2 * GIB + GIB // 2, [GIB, GIB, GIB // 2]),
    ],
)
def test_arena_pinned_in_slices_of_one_gib(
    nbytes: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, int]] = []
    device = bare_cuda_device(monkeypatch, lambda *arguments: calls.append(arguments) or 0)
    prefaulted: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda_module, "prefault", lambda *arguments: prefaulted.append(arguments))
    arena = HostArena(nbytes)
    device.pin(arena)
    base = address_of(arena)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    assert calls == [(base + start, size, 1) for start, size in zip(starts, sizes, strict=True)]
    assert device.warnings == []
    assert prefaulted == [(address, size) for address, size, _ in calls]
    assert resident_bytes(arena) == 0  # pinning itself touches no page
    # A copy of the entire arena is split at slice boundaries only.
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert list(device._registered_ranges(base, nbytes)) == list(zip(starts, ends, strict=True))


def test_pages_prefaulted_before_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads prefault the pages, preserving content; the driver would use one thread."""
    monkeypatch.setattr(prefault_module, "_PREFAULT_SLICE", 16 * MIB)
    arena = HostArena(80 * MIB + PAGE)
    arena.view(PAGE, 3).fill_(7)
    bare_cuda_device(monkeypatch).pin(arena)
    resident = resident_bytes(arena)
    if not prefault(address_of(arena), arena.nbytes):
        pytest.skip("the kernel is older than Linux 5.14")
    assert resident == arena.nbytes
    assert arena.view(0, PAGE + 4).sum() == 21


def test_pin_works_without_prefault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefault_module, "_POPULATE_WRITE", 0x7FFF)  # EINVAL
    calls: list[tuple[int, int, int]] = []
    device, arena = bare_cuda_device(monkeypatch, lambda *a: calls.append(a) or 0), HostArena(PAGE)
    assert not prefault(address_of(arena), PAGE)
    device.pin(arena)
    assert calls == [(address_of(arena), PAGE, 1)]


@pytest.mark.parametrize("allowed", [0, 1])
def test_failed_pin_warns_and_memory_is_used(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver rejects a slice twice, after accepting `allowed` slices."""
    calls: list[int] = []
    freed: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(address)
        return 0 if len(calls) <= allowed else 2

    monkeypatch.setattr(CudaDevice, "_PIN_SLICE", PAGE)
    device = bare_cuda_device(monkeypatch, register, lambda address: freed.append(address) or 0)
    device.pin(HostArena(3 * PAGE))
    assert len(calls) == allowed + 2
    (warning,) = device.warnings
    assert f"{4 * (3 - allowed)} KiB" in warning.replace(".00", "")
    assert f"CUDA error 2; {format_size(4096 * allowed)} of this range are" in warning
    device.close()
    assert freed == calls[:allowed]


def test_pin_retried_after_one_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with memory that the kernel must migrate first."""
    calls: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(address)
        return 2 if calls.count(address) == 1 else 0

    monkeypatch.setattr(CudaDevice, "_PIN_SLICE", PAGE)
    device = bare_cuda_device(monkeypatch, register)
    arena = HostArena(3 * PAGE)
    device.pin(arena)
    assert len(calls) == 6
    assert device.warnings == []
    assert device._pinned_ranges == [(n, n + PAGE) for n in sorted(set(calls))]


def test_host_memory_registered_on_engine_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every rank creates a context on the first GPU."""
    seen: list[Any] = []
    current_devices: list[torch.device | None] = [None]

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        current_devices.append(device)
        yield
        current_devices.pop()

    def record_device(*_: int) -> int:
        seen.append(current_devices[-1])
        return 0

    device = bare_cuda_device(monkeypatch, record_device, record_device, current)
    device.torch_device = torch.device("cuda", 1)
    device.pin(HostArena(PAGE))
    device.close()
    assert seen == 2 * [device.torch_device]


def test_copies_split_at_registration_boundaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = bare_cuda_device(monkeypatch)
    device._pinned_ranges = [(1000, 2000), (2000, 3000), (5000, 6000)]
    assert list(device._registered_ranges(1200, 300)) == [(0, 300)]
    assert list(device._registered_ranges(1200, 800)) == [(0, 800)]
    assert list(device._registered_ranges(1200, 801)) == [(0, 800), (800, 801)]
    assert list(device._registered_ranges(1500, 1500)) == [(0, 500), (500, 1500)]
    assert list(device._registered_ranges(7000, 10)) == [(0, 10)]
    assert list(device._registered_ranges(4990, 20)) == [(0, 10), (10, 20)]


def test_zero_moments_not_written_to_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fresh mapping is zero, and moments would be two thirds of the initial write."""
    placement = dict.fromkeys(("weights", "optimizer_state", "gradients"), "host")
    config = {"placement": placement, "precision": "bf16", "chunk_size": 16384}
    written: list[int] = []
    write = Transfers.write

    def record_write(self: Transfers, pieces: Any, *more: Any, **named: Any) -> Any:
        written.extend(extent.nbytes for extent, _ in pieces)
        return write(self, pieces, *more, **named)

    monkeypatch.setattr(Transfers, "write", record_write)
    with closing(FakeAccelerator(seed=1)) as device:
        engine, *_ = infinity.initialize(small_model(width=128), config, device=device)
        with engine:
            elements = sum(unit.numel for unit in engine.plan.units)
            assert sum(written) == 4 * elements  # weights and their residuals
            assert not any(
                unit.memory[kind].data.any()
                for unit in components(engine).store.units
                for kind in (Kind.MOMENT1, Kind.MOMENT2)
            )
