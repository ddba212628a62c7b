"""Tests of the disk tier with concurrent, killed and forked processes and failing file systems."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import Program
from support.internals import components
from support.loops import loop_mount, loop_name, throttled
from support.small import (
    assert_nothing_left,
    batch,
    masters,
    same,
    settings,
    small_engine,
    small_model,
    train,
)
from support.train_alone import digest, train_alone
from support.waiting import wait_until

import infinity
from infinity.errors import EngineFailedError, InfinityError, MachineError, TransferError

SLOW = {"io": {"slow_bytes_per_s": 20_000_000}}


def start_trainer(path: Path, steps: int, group: Path | None = None, **more: Any) -> Program:
    """Return a process that trains, in a control group if one is given."""
    return Program(train_alone, path, steps, more, group)


def wait_for_output(program: Program) -> list[str]:
    code, out, err = program.end()
    assert code == 0, err
    return out.splitlines()


def test_two_processes_share_one_path(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        train(engine, 6)
        expected = digest(masters(engine))
    with start_trainer(tmp_path, 6) as first, start_trainer(tmp_path, 6) as second:
        assert wait_for_output(first)[-1] == expected
        assert wait_for_output(second)[-1] == expected
    assert not list(tmp_path.iterdir())


def test_killed_run_cleaned_up_by_next(tmp_path: Path) -> None:
    with start_trainer(tmp_path, 0) as program:
        assert wait_until(lambda: program.said('{"step": 1'))
        program.signal(signal.SIGKILL)
        assert program.end()[0] == -signal.SIGKILL
    (dead_directory,) = tmp_path.iterdir()
    with start_trainer(tmp_path, 0) as alive:
        assert wait_until(lambda: alive.said("ready"))
        (live_directory,) = tmp_path.iterdir()
        assert live_directory != dead_directory
        engine, *_ = infinity.initialize(small_model(), settings(tmp_path))
        with engine:  # does not touch the directory of the live process
            train(engine, 1)
            assert live_directory in set(tmp_path.iterdir())
        assert list(tmp_path.iterdir()) == [live_directory]


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """Token batches, generated in the process that reads them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(index)


@pytest.mark.parametrize("verify", [False, True])
def test_data_loader_fork_during_optimizer_pass(tmp_path: Path, verify: bool) -> None:
    with small_engine(tmp_path) as engine:
        expected, state = train(engine, 8), masters(engine)
    io = {"verify": verify, **SLOW["io"]}
    with small_engine(tmp_path, io=io) as engine:
        losses = []
        for epoch in range(2):
            loader = torch.utils.data.DataLoader(
                torch.utils.data.Subset(Batches(8), range(4 * epoch, 4 * epoch + 4)),
                batch_size=None,
                num_workers=2,
                multiprocessing_context="fork",
            )
            if epoch:
                assert (
                    components(engine).optimizer_pass._job is not None
                )  # forked in the middle of an optimizer pass
            for tokens in loader:
                loss = engine(tokens)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
        assert losses == expected
        assert same(masters(engine), state)


def test_fork_during_pass_does_not_affect_parent(tmp_path: Path) -> None:
    """The engine is inert in the child, and the child's exit frees nothing of the parent."""
    with small_engine(tmp_path) as engine:
        expected, state = train(engine, 4), masters(engine)
    with small_engine(tmp_path, **SLOW) as engine:
        losses = train(engine, 2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.close()  # no effect in the child
                try:
                    engine(batch(0))
                except InfinityError:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert losses + train(engine, 2, first=2) == expected
        assert same(masters(engine), state)


# --- failing file systems ------------------------------------------------------------------------


def train_until_failure(engine: infinity.Engine, first: int) -> InfinityError:
    """Train until the failure of the disk is raised."""
    with pytest.raises((TransferError, EngineFailedError)) as caught:
        train(engine, 20, first=first)
    return caught.value


def transfer_error(error: BaseException | None) -> TransferError:
    while error is not None and not isinstance(error, TransferError):
        error = error.__cause__
    assert isinstance(error, TransferError)
    return error


def test_file_system_remounted_read_only(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with loop_mount(tmp_path, "ext4", options="errors=remount-ro") as path:
        trigger = Path(f"/sys/fs/ext4/{loop_name(path)}/trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel cannot trigger an ext4 error")
        engine, *_ = infinity.initialize(small_model(), settings(path))
        train(engine, 2)
        trigger.write_text("a test")
        error = transfer_error(train_until_failure(engine, 2))
        assert error.errno in (errno.EROFS, errno.EIO)
        assert str(path) in str(error)
        assert "unit '" in str(error)
        with pytest.raises(MachineError, match="could not be removed"):
            engine.close()
        engine.close()
        (leftover,) = path.iterdir()
        leftover_threads = [t for t in threading.enumerate() if t not in threads]
        assert not leftover_threads
        assert leftover.name.startswith("infinity-run-")


def test_drive_shut_down_while_training(tmp_path: Path) -> None:
    """ext4 is shut down under the engine: every transfer fails from then on."""
    import fcntl
    import struct

    with loop_mount(tmp_path, "ext4") as path:
        reserved = infinity.storage.reservations.PROCESS.total("host")
        engine, *_ = infinity.initialize(small_model(), settings(path))
        train(engine, 2)
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN, without the log
        except OSError as problem:
            engine.close()
            pytest.skip(f"ext4 cannot be shut down here: {problem}")
        finally:
            os.close(fd)
        error = transfer_error(train_until_failure(engine, 2))
        assert error.errno == errno.EIO
        assert "dmesg" in str(error)
        with pytest.raises(InfinityError):
            engine.close()
        assert infinity.storage.reservations.PROCESS.total("host") == reserved


def test_path_without_space_rejected_at_initialize(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with loop_mount(tmp_path, "ext4", mib=16) as path:
        model = small_model(width=512, num_blocks=2)
        with pytest.raises(InfinityError, match=r"needed, .* free at .*missing") as caught:
            infinity.initialize(model, settings(path))
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 3
        assert_nothing_left(path, threads)


@pytest.mark.clock
def test_two_drives_striped_by_measured_speed(tmp_path: Path) -> None:
    """The probe finds the ratio, and a run over both drives computes the same."""
    with small_engine(tmp_path) as engine:
        train(engine, 4)
        expected = digest(masters(engine))
    with loop_mount(tmp_path, mib=128) as slow, loop_mount(tmp_path, mib=128) as fast:
        with throttled(slow, 4 << 20) as group:  # slow enough to dominate on a busy machine
            (group / "blkio.throttle.read_bps_device").write_text(throttle_rule(fast, 12 << 20))
            (group / "blkio.throttle.write_bps_device").write_text(throttle_rule(fast, 12 << 20))
            paths = [str(slow), str(fast)]
            io = {"block_size": 4096}
            with start_trainer(slow, 4, group, nvme_path=paths, io=io) as process:
                ready, *_, last = wait_for_output(process)
        drives = json.loads(ready.removeprefix("ready"))
        ratio = drives[str(fast)]["speed"] / drives[str(slow)]["speed"]
        assert ratio > 1.5  # nominally 3, less because both start with a burst
        share = drives[str(fast)]["nbytes"] / drives[str(slow)]["nbytes"]
        assert share == pytest.approx(ratio, rel=0.2)  # stripes are not split
        assert last == expected
        assert not [*slow.iterdir(), *fast.iterdir()]


def throttle_rule(path: Path, bytes_per_s: int) -> str:
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
