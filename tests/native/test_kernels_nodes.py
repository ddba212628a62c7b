"""Tests of NUMA nodes in the kernel pool: topology, threads per node, pinning."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from support.adam_values import ADAMW, Source, assert_same, update_piece
from support.reference import reference_update

from infinity import _adam
from infinity.optim.cpu import CpuKernels
from infinity.types import MomentFormat

ALLOWED = sorted(os.sched_getaffinity(0))
several_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


def make_sysfs(root: Path, *cpu_lists: str) -> str:
    for number, cpus in enumerate(cpu_lists):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    (root / "sys/devices/system/node/has_cpu").write_text("0\n")
    return str(root)


def test_machine_without_topology_is_one_node(tmp_path) -> None:
    for root in (str(tmp_path / "nothing"), make_sysfs(tmp_path, "4094-4095")):
        assert _adam.Pool(root=root).nodes == [ALLOWED]


def test_single_node_pins_no_threads(tmp_path) -> None:
    root = make_sysfs(tmp_path, f"0-{ALLOWED[-1]}")
    pool = _adam.Pool(3, root=root)
    assert pool.nodes == [ALLOWED]
    assert pool.node_of_thread == [0, 0, 0]
    assert pinned_threads(pool) == []


@several_cpus
def test_threads_are_spread_over_nodes(tmp_path) -> None:
    first, others = str(ALLOWED[0]), ",".join(map(str, ALLOWED[1:]))
    root = make_sysfs(tmp_path, first, "4090-4095", others)  # no CPU of the second node is allowed
    pool = _adam.Pool(root=root)
    assert pool.nodes == [[ALLOWED[0]], ALLOWED[1:]]
    assert pool.num_threads == len(ALLOWED)
    assert pool.node_of_thread == [0] + [1] * (len(ALLOWED) - 1)
    assert _adam.Pool(1, root=root).node_of_thread in ([0], [1])


@several_cpus
def test_threads_are_proportional_to_cpus_of_node(tmp_path) -> None:
    root = make_sysfs(tmp_path, str(ALLOWED[0]), str(ALLOWED[1]))
    if len(ALLOWED) > 2:
        pytest.skip("a list that misses CPUs is not used")
    assert _adam.Pool(4, root=root).node_of_thread == [0, 0, 1, 1]
    assert _adam.Pool(2, root=root).node_of_thread == [0, 1]


def pinned_threads(pool: _adam.Pool) -> list[str]:
    """Return the CPU lists of the threads that the pool's first job starts, if restricted."""
    before = set(os.listdir("/proc/self/task"))
    values = torch.ones(200_000)
    assert pool.square_sum(
        n=200_000, source=values.data_ptr(), source_dtype=_adam.FP32
    ) == 200_000.0  # fmt: skip
    found = []
    for task in set(os.listdir("/proc/self/task")) - before:
        status = Path(f"/proc/self/task/{task}/status").read_text()
        match = re.search(r"Cpus_allowed_list:\t(\S+)", status)
        assert match
        found.append(match[1])
    process_status = Path("/proc/self/status").read_text()
    return sorted(cpus for cpus in found if f"Cpus_allowed_list:\t{cpus}\n" not in process_status)


@several_cpus
def test_workers_are_pinned_to_node_and_caller_is_not(tmp_path) -> None:
    root = make_sysfs(tmp_path, str(ALLOWED[0]), ",".join(map(str, ALLOWED[1:])))
    pool = _adam.Pool(len(ALLOWED) + 1, root=root)
    pinned = pinned_threads(pool)
    workers = pool.node_of_thread[1:]
    assert len(pinned) == len(workers)
    assert str(ALLOWED[0]) in pinned or 0 not in workers
    assert sorted(os.sched_getaffinity(0)) == ALLOWED
    pool.close()


@several_cpus
@pytest.mark.parametrize("kind", MomentFormat)
def test_results_do_not_depend_on_nodes(tmp_path, kind) -> None:
    root = Path(make_sysfs(tmp_path, str(ALLOWED[0]), ",".join(map(str, ALLOWED[1:]))))
    source = Source(51)
    for n in (5, 40_000, 200_001):
        state = source.update_state(n, "split", ADAMW, kind, wild=False)
        gradient = source.floats(n, torch.bfloat16, wild=False)
        want = state.copy()
        reference_update(want.weight, want.master_state, want.moments, gradient, ADAMW, 3, 1.0, 8)
        for threads in (1, 2, 3, 7):
            got = state.copy()
            with CpuKernels(threads, root=root) as kernels:
                update_piece(
                    kernels, got.weight, got.master_state, got.moments, gradient, ADAMW, 3, 1.0, 8
                )
                assert kernels.square_sum(gradient) == CpuKernels(1).square_sum(gradient)
            assert_same(got.tensors, want.tensors)
