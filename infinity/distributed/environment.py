"""Environment variables of launchers, and detection of ranks on one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from infinity.distributed.context import format_ranks
from infinity.errors import ConfigError


def num_launched() -> int:
    """Return WORLD_SIZE, or 1 without a launcher."""
    return int_from_env("WORLD_SIZE", 1)


def local_rank_and_count(store: Any, rank: int, count: int) -> tuple[int, int]:
    """Return the local rank, and the number of ranks on this machine.

    Read from the variables of torchrun or DeepSpeed's launcher. With another launcher, such as
    srun, ranks compare machine ids through `store`, a store of torch.
    """
    local_count = int_from_env("LOCAL_WORLD_SIZE", int_from_env("LOCAL_SIZE"))
    if local_count or store is None:
        return int_from_env("LOCAL_RANK", rank), local_count or count
    machine = _machine_id()
    store.set(f"machine of rank {rank}", machine)
    local = [r for r in range(count) if store.get(f"machine of rank {r}") == machine]
    if local[-1] - local[0] >= len(local):
        raise ConfigError(
            f"{format_ranks(local)} are on one machine, and others between them are not",
            remedy="number the ranks of a machine one after the other: srun --distribution=block",
        )
    return local.index(rank), len(local)


def _machine_id() -> bytes:
    """Return host name and boot id: containers of one machine may differ in their names."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return f"{socket.gethostname()} ".encode() + file.read()
    return socket.gethostname().encode()


def int_from_env(name: str, default: int = 0) -> int:
    """Return the number in an environment variable, or `default` if it is unset."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, not a number", remedy=f"unset {name}")
    return int(text)


@contextmanager
def gloo_over_loopback(one_machine: bool) -> Iterator[None]:
    """Make gloo groups created in the block use the loopback interface if on `one_machine`.

    By default gloo resolves the host's name, which fails in some containers.
    """
    name, interface = "GLOO_SOCKET_IFNAME", "/sys/class/net/lo"
    sets_name = one_machine and name not in os.environ and os.path.exists(interface)
    if sets_name:
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if sets_name:
            os.environ.pop(name, None)
