"""Discovery of the ranks of a launch, and creation of their process group."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from infinity.common.accelerators import backend
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.distributed.environment import (
    gloo_over_loopback,
    int_from_env,
    local_rank_and_count,
    num_launched,
)
from infinity.distributed.torch_context import DEFAULT_TIMEOUT, OWNED_CONTEXTS, TorchDistContext
from infinity.errors import ConfigError, InfinityWarning, MachineError, first_lines

_WARN_AFTER_S = 10.0  # wait after which a rank warns
_POLL_INTERVAL_S = 0.1
_STALE_ENTRY_S = 30.0  # wait for a restarted process to replace its entry in the store


def find_ranks(timeout: timedelta | None = None) -> DistContext:
    """Return the context of the default process group, or of the ranks a launcher started.

    If a launcher such as `torchrun` set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT, a default
    group is created, NCCL where there are GPUs, else gloo. Returns `SINGLE_PROCESS` without a group
    or launcher.

    Args:
        timeout: Delay after which a rank counts as lost; 30 minutes by default.

    Raises:
        ConfigError: One of the variables is missing, or WORLD_SIZE differs between ranks.
        MachineError: The group cannot be created.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        owned = any(user._world is dist.group.WORLD for user in OWNED_CONTEXTS)
        return TorchDistContext(owned=owned) if dist.get_world_size() > 1 else SINGLE_PROCESS
    count = num_launched()
    if count <= 1:
        return SINGLE_PROCESS
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set",
            remedy=f"torchrun --nproc-per-node {count} train.py, which sets them; or unset "
            "WORLD_SIZE for one process",
        )
    import torch.distributed as dist

    timeout = timeout or DEFAULT_TIMEOUT
    try:
        if int_from_env("RANK"):
            _wait_until(_accepts_connections, "rank 0", timeout)
        store, rank = _rendezvous(dist, timeout)
        _check_count(store, rank, count, timeout)
        one_machine = local_rank_and_count(store, rank, count)[1] == count
        with gloo_over_loopback(one_machine):
            if one_machine:  # torchrun's store outlives restarts, with addresses of dead ranks
                restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(f"restart-{restart}", store)
            # Likewise for an earlier group of this process, such as that of a closed engine.
            number = store.add(f"groups of rank {rank}", 1)
            store = dist.PrefixStore(f"group-{number}", store)
            dist.init_process_group(
                backend(), store=store, rank=rank, world_size=count, timeout=timeout
            )
            return TorchDistContext(owned=True)
    except (RuntimeError, ValueError) as error:
        raise MachineError(
            f"the {count} ranks do not find each other: {first_lines(error)}",
            because="a rank did not start, or MASTER_ADDR and MASTER_PORT cannot be reached",
            remedy="on one machine: torchrun --standalone --nproc-per-node N train.py",
        ) from error


def _rendezvous(dist: Any, timeout: timedelta) -> tuple[Any, int]:
    """Return the store of all ranks, and this rank.

    Connects on a thread, since torch blocks signals, and another program that listens at the
    address may never answer.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            # world_size=1: otherwise rank 0 would wait here for ranks that never start.
            results.extend(next(dist.rendezvous("env://", world_size=1, timeout=timeout)))
        except BaseException as error:
            errors.append(error)

    def has_ended() -> bool:
        thread.join(_POLL_INTERVAL_S)
        return not thread.is_alive()

    thread = threading.Thread(target=connect, name="infinity-rendezvous", daemon=True)
    thread.start()
    _wait_until(has_ended, "an answer from rank 0", timeout)
    if errors:
        raise errors[0]
    store, rank, _ = results
    return store, rank


def _wait_until(is_ready: Callable[[], bool], awaited: str, timeout: timedelta) -> None:
    """Poll until `is_ready()`; warn of a long wait, raise `RuntimeError` after `timeout`."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    start, timeout_s, warn_after_s = time.monotonic(), timeout.total_seconds(), _WARN_AFTER_S
    while not is_ready():
        if (waited_s := time.monotonic() - start) > timeout_s:
            raise RuntimeError(f"no sign of {awaited} at {address} in {waited_s:.0f} s")
        if waited_s > warn_after_s:
            warn_after_s = timeout_s  # once
            warnings.warn(
                f"rank {int_from_env('RANK')} of {num_launched()} waits for {awaited} at {address}",
                InfinityWarning,
                stacklevel=4,
            )
        time.sleep(_POLL_INTERVAL_S)


def _accepts_connections() -> bool:
    """Return True if rank 0, or its launcher, accepts connections."""
    address = os.environ["MASTER_ADDR"], int_from_env("MASTER_PORT")
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False


def _check_count(store: Any, rank: int, count: int, timeout: timedelta) -> None:
    """Wait for all ranks; raise `ConfigError` if WORLD_SIZE differs between two of them."""
    key = "WORLD_SIZE of rank {}".format
    store.set(key(rank), str(count))
    for other in range(count):
        _wait_until(partial(store.check, [key(other)]), f"rank {other}", timeout)
        end = None
        while (other_count := int(store.get(key(other)))) != count:
            # A store that outlives restarts may have the entry of a dead process.
            end = end or time.monotonic() + _STALE_ENTRY_S
            if time.monotonic() > end:
                raise ConfigError(
                    f"WORLD_SIZE is {count} on rank {rank}, {other_count} on rank {other}",
                    because="they were started for different numbers of processes",
                    remedy="start all with one command; on several nodes with the same --nnodes "
                    "and --nproc-per-node on each",
                )
            time.sleep(_POLL_INTERVAL_S)
