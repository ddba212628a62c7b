"""A command in several processes of this machine, one a GPU, started by torch's own launcher."""

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

# What each process is at first: Linux ends it when the launcher is gone, also by kill -9.
_FOLLOW = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_PATIENCE_S = 600  # for a step that ends, and a save, after Ctrl-C; then processes are killed


def launch(count: int, arguments: Sequence[str]) -> None:
    """Run Python with these arguments in `count` processes, as `torchrun --standalone` does.

    They meet on the loopback interface, so the machine need not know its own name; Ctrl-C and
    SIGTERM are passed on, and none of them outlives the launcher. Returns when all end well.
    Raises `ConfigError` for more processes than GPUs, where there are any, or inside a launcher;
    `MachineError` where one was killed; `typer.Exit` where one ended with words of its own.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"--gpus {count} in a process of a launcher (WORLD_SIZE={os.environ['WORLD_SIZE']})",
            remedy="leave --gpus out, or the launcher",
        )
    if 0 < (found := num_accelerators()) < count:
        raise ConfigError(f"--gpus {count}, and {found} are here", remedy=f"--gpus {found}")
    threads = max(read_machine().num_cpus // count, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_PATIENCE_S))
    here = "127.0.0.1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{here}:0",
        local_addr=here,
        max_restarts=0,
    )
    logging.disable(logging.ERROR)  # what it would say of processes that say it themselves
    try:
        elastic_launch(config, sys.executable)("-c", _FOLLOW, str(os.getpid()), *arguments)
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise MachineError(
                f"rank {number} of {count} was ended by {name}",
                because="it ran out of memory, crashed, or was killed",
                remedy="dmesg | tail; --resume auto goes on from the last checkpoint",
            ) from None
        raise typer.Exit(failure.exitcode) from None
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    finally:
        logging.disable(logging.NOTSET)
