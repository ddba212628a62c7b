"""Tests of the engine's use of the disk: priorities, initial writes, checksums and reports."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_injection import faulty_io
from support.internals import components
from support.small import MIXED, ON_DISK, batch, masters, same, small_engine, train
from support.waiting import wait_until
from torch import Tensor

from infinity import _aio
from infinity.config.schema import IoConfig, load_config
from infinity.errors import ConfigError, EngineClosedError, EngineFailedError, TransferError
from infinity.storage.disk import Disk, Extent
from infinity.storage.host_arena import HostArena
from infinity.storage.store import Priority
from infinity.types import PAGE

Pieces = list[tuple[Extent, Tensor]]


# --- priorities ----------------------------------------------------------------------------------


def completed_ns(request: _aio.Ticket | None) -> int:
    """Return the completion time of a request, in nanoseconds."""
    assert request is not None
    assert request.times_ns is not None
    return request.times_ns[2]


def test_urgent_read_finishes_first(tmp_path: Path) -> None:
    """An urgent read overtakes a long write-back and a read-ahead."""
    with faulty_io(slow_bytes_per_s=20 << 20):
        disk = Disk([tmp_path], IoConfig(block_size=64 << 10, queue_depth=1))
    try:
        extents = [disk.extent(1 << 20) for _ in range(3)]
        disk.allocate()
        buffers = [HostArena(1 << 20).view(0, 1 << 20) for _ in extents]
        writing = disk.write([(extents[0], buffers[0])])
        ahead = disk.read([(extents[1], buffers[1])])
        urgent = disk.read([(extents[2], buffers[2])], Priority.URGENT)
        assert wait_until(writing.done)  # waiting would promote it
        assert (
            completed_ns(urgent.request)
            < completed_ns(ahead.request)
            < completed_ns(writing.request)
        )
    finally:
        disk.close()


def test_waiting_promotes_request(tmp_path: Path) -> None:
    with faulty_io(slow_bytes_per_s=4 << 20):
        disk = Disk([tmp_path], IoConfig(block_size=64 << 10, queue_depth=1))
    try:
        extents = [disk.extent(1 << 20) for _ in range(3)]
        disk.allocate()
        buffers = [HostArena(1 << 20).view(0, 1 << 20) for _ in extents]
        reads = [disk.read([request]) for request in zip(extents, buffers, strict=True)]
        _, second, third = (read.request for read in reads)
        reads[2].wait()
        reads[1].wait()
        assert completed_ns(third) < completed_ns(second)
    finally:
        disk.close()


def test_engine_request_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Demands are urgent, prefetch and update reads normal, all write-back in the background."""
    seen: Counter[tuple[str, str, Priority]] = Counter()

    def watch(name: str) -> None:
        original = getattr(Disk, name)

        def watched(self: Disk, pieces: Pieces, priority: Priority) -> Any:
            kind = "gradients" if "gradients" in pieces[0][0].owner else "state"
            is_main = threading.current_thread() is threading.main_thread()
            thread = "main" if is_main else "optimizer"
            seen[f"{thread} {name}", kind, priority] += 1
            return original(self, pieces, priority)

        monkeypatch.setattr(Disk, name, watched)

    for prefetch_units in (1, 0):  # without prefetch every fetch is a demand
        more = {"prefetch_units": prefetch_units, "gradient_accumulation_steps": 2}
        with small_engine(tmp_path, **more) as engine:
            train(engine, 2)
            watch("read")
            watch("write")
            train(engine, 3, first=4)
            engine.settle()
            monkeypatch.undo()
    assert {key for key in seen if key[2] is Priority.URGENT} == {
        ("main read", "state", Priority.URGENT)
    }
    assert seen["main read", "state", Priority.NORMAL]
    assert seen["main read", "gradients", Priority.NORMAL]
    assert seen["optimizer read", "state", Priority.NORMAL]
    assert seen["optimizer read", "gradients", Priority.NORMAL]
    writes = {key for key in seen if key[0].endswith("write")}
    assert writes == {
        ("optimizer write", "state", Priority.BACKGROUND),
        ("main write", "gradients", Priority.BACKGROUND),
    }


# --- reports -------------------------------------------------------------------------------------


def test_report_contains_disk_times(tmp_path: Path) -> None:
    with small_engine(tmp_path, io={"slow_bytes_per_s": 20_000_000}) as engine:
        train(engine, 3)
        report = engine.last_report
        assert report is not None
        assert set(report.disk_s) == {"disk_read", "disk_write"}
        for direction, times in report.disk_s.items():
            # At 20 MB/s each byte takes at least 50 ns of device time.
            assert times["device"] > report.moved[direction] / 20e6 * 0.9
            assert times["queue"] >= 0
        (drive,) = engine.drives().values()
        moved = engine.counters()
        engine.settle()
        assert drive["read_bytes"] <= moved["disk_read"]
        (drive,) = engine.drives().values()
        moved = engine.counters()
        assert (drive["read_bytes"], drive["write_bytes"]) == (
            moved["disk_read"],
            moved["disk_write"],
        )
        assert drive["nbytes"] == engine.plan.tier_bytes["disk"]
        assert drive["speed"] is None
    with pytest.raises(EngineClosedError):
        engine.drives()
    with small_engine(
        tmp_path, {"weights": "device", "optimizer_state": "host", "gradients": "host"}
    ) as e:
        train(e, 1)
        assert e.drives() == {}
        assert e.last_report is not None
        assert e.last_report.disk_s["disk_read"] == {"queue": 0.0, "device": 0.0}


# --- initial writes ------------------------------------------------------------------------------


def unwritten_bytes(path: Path) -> int:
    """Return the bytes of a file that are reserved but unwritten, by FIEMAP."""
    max_extents = 512
    request = struct.pack("=QQIIII", 0, 2**63, 0, 0, max_extents, 0) + bytes(56 * max_extents)
    with open(path, "rb") as file:
        buffer = bytearray(request)
        try:
            fcntl.ioctl(file.fileno(), 0xC020660B, buffer)  # FS_IOC_FIEMAP
        except OSError as error:
            pytest.skip(f"no FIEMAP here: {error}")
    (count,) = struct.unpack_from("=I", buffer, 20)
    total = 0
    for index in range(count):
        _, _, length = struct.unpack_from("=QQQ", buffer, 32 + 56 * index)
        (flags,) = struct.unpack_from("=I", buffer, 32 + 56 * index + 40)
        total += length if flags & 0x800 else 0
    return total


def test_all_extents_written_before_training(tmp_path: Path) -> None:
    """Includes gradients: the first write to reserved space takes file system locks."""
    with small_engine(tmp_path) as engine:
        (file,) = tmp_path.glob("*/state.bin")
        assert file.stat().st_size == engine.plan.tier_bytes["disk"]
        assert unwritten_bytes(file) == 0
    reserved = tmp_path / "reserved"
    with open(reserved, "wb") as raw:
        os.posix_fallocate(raw.fileno(), 0, 8 * PAGE)
    assert unwritten_bytes(reserved) == 8 * PAGE  # shows that the assertion above can fail
    reserved.unlink()


# --- checksums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [ON_DISK, MIXED])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_verify_does_not_change_results(
    tmp_path: Path, placement: dict[str, str], micro_batches: int
) -> None:
    results = []
    for verify in (False, True):
        with small_engine(
            tmp_path, placement, io={"verify": verify}, gradient_accumulation_steps=micro_batches
        ) as engine:
            results.append((train(engine, 4), masters(engine)))
            disk = engine.plan.tier_bytes["disk"]
            assert engine.plan.memory["host"]["checksums"] == (disk // PAGE * 4 if verify else 0)
            sums = components(engine).disk.checksums
            assert (sums is not None) == verify
            assert sums is None or sums._sums.numel() * 4 == disk // PAGE * 4
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def flip_bit(path: Path, offset: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)
        os.fsync(file.fileno())


@pytest.mark.parametrize("owner", ["unit 'blocks.1', chunk 0", "unit 'blocks.2', gradients"])
def test_bit_flip_on_disk_stops_training(tmp_path: Path, owner: str) -> None:
    with small_engine(tmp_path, io={"verify": True}, gradient_accumulation_steps=2) as engine:
        train(engine, 1)
        engine.backward(engine(batch(2)))
        engine.step()  # half a window: its gradients are on disk
        engine.settle()
        state, gradients = components(engine).store.units, components(engine).gradients.ranges
        extents = [e for unit in state for e in unit.copies[0]] + list(gradients.values())
        (extent,) = [e for e in extents if e.owner == owner]
        (piece,) = components(engine).disk._stripes.pieces(extent.offset, PAGE)
        (file,) = tmp_path.glob("*/state.bin")
        flip_bit(file, piece.offset + 100)
        with pytest.raises((TransferError, EngineFailedError)) as caught:  # noqa: PT012
            for index in range(3, 9):
                engine.backward(engine(batch(index)))
                engine.step()
            engine.settle()
        error = caught.value.__cause__ if caught.type is EngineFailedError else caught.value
        assert isinstance(error, TransferError)
        assert error.errno == errno.EBADMSG
        assert (error.path, error.offset, error.length) == (str(file), piece.offset, PAGE)
        assert str(error).startswith(f"{owner}: ")
        assert "saved state" in str(error)


def test_lost_edit_stops_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_error = TransferError("write failed", path="p", offset=0, length=1, errno=errno.EIO)

    def fail_write(*_: object) -> None:
        raise write_error

    with small_engine(tmp_path) as engine:
        with pytest.raises(TransferError), engine.materialized(engine.module.norm):  # noqa: PT012
            with torch.no_grad():
                engine.module.norm.weight.fill_(3.0)
            monkeypatch.setattr(components(engine).store, "write", fail_write)
        with pytest.raises(EngineFailedError, match="write failed"):
            engine(batch(0))


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("io", "message"),
    [
        ({"weights": [1]}, "weights needs one number per nvme_path: 1 for 2"),
        ({"weights": [1, 0]}, "io.weights.1: should be greater than 0"),
        ({"weights": [1, "fast"]}, "io.weights.1: should be a number"),
        ({"timeout_s": -1}, "io.timeout_s: should be greater than or equal to 0"),
        ({"verify": "perhaps"}, "io.verify"),
    ],
)
def test_invalid_io_settings_rejected(io: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"nvme_path": ["/a", "/b"], "io": io})
    assert message in str(caught.value)


def test_io_defaults() -> None:
    io = load_config({}).io
    assert (io.verify, io.weights, io.timeout_s) == ("auto", None, 120.0)


def test_untraced_error_has_no_traceback() -> None:
    def fail() -> TransferError:
        big = torch.zeros(4)  # a local that the traceback would keep alive
        try:
            raise TransferError("w", path="p", offset=1, length=2, errno=5, because="b", remedy="r")
        except TransferError as error:
            assert big is not None
            return error

    error = fail()
    copy = error.untraced()
    assert error.__traceback__ is not None
    assert copy.__traceback__ is None
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
