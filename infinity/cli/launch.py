"""Launcher of a command in several local processes, one per GPU, on top of torch elastic."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

import typer
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from infinity.common.accelerators import num_accelerators
from infinity.errors import ConfigError, MachineError
from infinity.plan.machine import read_machine

# Bootstrap of each process: Linux ends it when the launcher ends, even by kill -9.
_BOOTSTRAP = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_SHUTDOWN_TIMEOUT_S = 600  # after Ctrl-C, to finish the step and save; then processes are killed


def launch(count: int, arguments: Sequence[str], *, remedy: str = "dmesg | tail") -> None:
    """Run Python with these arguments in `count` processes, as `torchrun --standalone` does.

    The rendezvous is on the loopback interface, so the host name need not resolve. Ctrl-C and
    SIGTERM are forwarded, and no process outlives the launcher. Returns when all have exited with
    0. Raises `ConfigError` for more processes than GPUs, if there are any, or inside a launcher;
    `MachineError` with `remedy` if a process was killed; `typer.Exit` if one failed with a message
    of its own.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"--gpus {count} in a process of a launcher (WORLD_SIZE={os.environ['WORLD_SIZE']})",
            remedy="leave --gpus out, or the launcher",
        )
    available = num_accelerators()
    if 0 < available < count:
        raise ConfigError(
            f"--gpus {count}, but {available} available", remedy=f"--gpus {available}"
        )
    threads = max(read_machine().num_cpus // count, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    loopback = "127.0.0.1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{loopback}:0",
        local_addr=loopback,
        max_restarts=0,
    )
    logging.disable(logging.ERROR)  # each process reports its own error
    try:
        elastic_launch(config, sys.executable)("-c", _BOOTSTRAP, str(os.getpid()), *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            signal_name = signal.Signals(-failure.exitcode).name
            raise MachineError(
                f"rank {rank} of {count} was ended by {signal_name}",
                because="it ran out of memory, crashed, or was killed",
                remedy=remedy,
            ) from None
        raise typer.Exit(failure.exitcode) from None
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    finally:
        logging.disable(logging.NOTSET)
