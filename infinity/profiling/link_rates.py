"""Measured rates of the links between ranks.

Links are measured by all ranks together (`cached_links`) and cached by the numbers of ranks per
node and of nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from infinity.distributed.context import DistContext, Work
from infinity.plan import rates as names
from infinity.plan.machine import cpu_model
from infinity.plan.plan import BETWEEN_HOSTS, LINKS
from infinity.profiling.rate_cache import FORMAT, CachedRates, device_name, read_cache, write_cache
from infinity.storage.device import CpuDevice, Device
from infinity.storage.disk_rates import MIN_CALLS, timed

LINK_SECONDS = 1.0  # for both collectives
_LINK_BYTES = 32 << 20  # gathered bytes: the size of a small unit


def read_cached_links(device: Device, gpus: int, nodes: int) -> CachedRates | None:
    """Return cached rates between ranks, and their day; None if there are none.

    If this number of nodes was not measured, combines the rates between nodes with those between
    the ranks of one node, as far as they are cached.
    """
    if gpus * nodes == 1:
        return None
    entry = read_cache(_link_key(device, gpus, nodes), LINKS)
    if entry is None and nodes > 1:
        entry = read_cache(_link_key(device), {names.BETWEEN_NODES})
        within_node = read_cached_links(device, gpus, 1)
        if entry is not None and within_node is not None:
            entry = entry[0] | within_node[0], min(entry[1], within_node[1])
    return entry


def cached_links(
    ranks: DistContext, device: Device, *, refresh: bool = False, seconds: float = LINK_SECONDS
) -> CachedRates:
    """Return rates between these ranks and their day; measure unless cached on every node.

    Collective over all ranks. Cache entries are keyed by processor, device, ranks per node and
    nodes. With several nodes it also measures and caches, for plans with other numbers of nodes,
    the rate a node receives while only ranks of different nodes communicate (and that of a rank
    between RAM), and the rate of ranks while only ranks of one node communicate. Raises the error
    of a lost rank.
    """
    gpus, nodes = ranks.local_count, ranks.num_nodes
    cached = None if refresh else read_cache(_link_key(device, gpus, nodes), LINKS)
    entries = ranks.all_gather_object(cached)
    if all(entries):
        oldest: CachedRates = min(entries, key=lambda entry: entry[1])  # the same on all ranks
        return oldest
    numbers, day = measure_links(ranks, device, seconds), datetime.now(UTC).date().isoformat()
    new_entries = [(_link_key(device, gpus, nodes), numbers)]
    if {*ranks.all_gather_object(gpus)} == {gpus} and nodes > 1:  # equal number of ranks per node
        node_sets = [[*range(first, first + gpus)] for first in range(0, ranks.count, gpus)]
        peer_sets = [*zip(*node_sets, strict=True)]
        between_peers = _slowest_of_sets(ranks, peer_sets, device, seconds)
        host_rates = between_peers
        if not device.unified:
            host_rates = _slowest_of_sets(ranks, peer_sets, CpuDevice(), seconds)
        node_rates = {names.BETWEEN_NODES: gpus * between_peers["all_to_all"]}
        node_rates[BETWEEN_HOSTS] = host_rates["all_gather"]
        numbers |= node_rates
        new_entries.append((_link_key(device), node_rates))
        if gpus > 1:
            within_node = _slowest_of_sets(ranks, node_sets, device, seconds)
            new_entries.append((_link_key(device, gpus, 1), within_node))
    if ranks.local_rank == 0:
        for key, rates in new_entries:
            write_cache(key, rates, day)
    ranks.synchronize("caches rates")  # the files exist when any rank returns
    return numbers, day


def _link_key(device: Device, *ranks: int) -> dict[str, Any]:
    """Return the cache key of links for (ranks per node, nodes), or between nodes if empty."""
    computer = {"format": FORMAT, "processor": cpu_model(), "device": device_name(device)}
    return computer | {"ranks": [*ranks]}


def _slowest_of_sets(
    ranks: DistContext, sets: Sequence[Sequence[int]], device: Device, seconds: float
) -> dict[str, float]:
    """Measure links within all `sets` concurrently; return the rates of the slowest rank."""
    with contextlib.closing(ranks.new_subgroup(sets)) as subgroup:
        rates = measure_links(subgroup, device, seconds)
    slowest = ranks.gather(torch.tensor([*rates.values()], dtype=torch.float64)).amin(0)
    return dict(zip(rates, slowest.tolist(), strict=True))


def measure_links(
    ranks: DistContext, device: Device, seconds: float = LINK_SECONDS
) -> dict[str, float]:
    """Return bytes per second that the slowest rank receives, by collective.

    Messages have the size of a unit, and are in the memory that a run sends from.
    """
    nbytes = _LINK_BYTES // ranks.count * ranks.count
    arena = device.reserve(2 * nbytes)
    source, target = arena.view(0, nbytes), arena.view(nbytes, nbytes)
    collectives: dict[str, Callable[[], Work]] = {
        "all_gather": lambda: ranks.all_gather(source, overlap=True),
        "all_to_all": lambda: ranks.all_to_all(target, source),
    }
    numbers, received = {}, nbytes - nbytes // ranks.count
    for name, collective in collectives.items():

        def call(collective: Callable[[], Work] = collective) -> None:
            collective().wait()
            device.compute_event().wait()

        call()
        # All ranks must make the same number of calls: the smallest of all.
        counts = [int(seconds / len(collectives) / timed(call)), MIN_CALLS]
        count = min(int(n) for n in ranks.gather(torch.tensor([max(counts)])))
        times = torch.tensor([timed(call) for _ in range(count)], dtype=torch.float64)
        numbers[name] = received / float(ranks.gather(times).amax(0).median())
    return numbers
