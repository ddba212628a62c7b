"""Tests of placing host memory on the NUMA node of a GPU."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from infinity.storage.host_arena import HostArena
from infinity.storage.numa import node_of_pci, prefer_node

HAS_NODES = Path("/sys/devices/system/node/node0").is_dir()
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def preferred_node(address: int) -> int | None:
    """Return the preferred node of the page at `address`, or None."""
    policy, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    library, ulong = ctypes.CDLL(None), ctypes.c_ulong
    of_address, bits = ulong(1 << 1), ulong(8 * ctypes.sizeof(mask) + 1)
    number = ulong(GET_MEMPOLICY[platform.machine()])
    preferred = 1
    if library.syscall(number, ctypes.byref(policy), mask, bits, ulong(address), of_address):
        return None
    return int(mask[0]).bit_length() - 1 if policy.value == preferred and mask[0] else None


@pytest.mark.skipif(not HAS_NODES, reason="the kernel knows no NUMA nodes")
def test_prefer_node_sets_policy_and_keeps_bytes() -> None:
    arena = HostArena(1 << 20)
    bytes_of = arena.view(0, arena.nbytes)
    bytes_of.fill_(7)
    assert preferred_node(bytes_of.data_ptr()) is None
    if not prefer_node(bytes_of.data_ptr(), arena.nbytes, 0):
        pytest.skip("mbind is not allowed here (a container without CAP_SYS_NICE)")
    assert preferred_node(bytes_of.data_ptr()) == 0
    assert preferred_node(bytes_of.data_ptr() + arena.nbytes - 1) == 0
    assert bool((bytes_of == 7).all())


@pytest.mark.parametrize("node", [-1, 1023, 5000])
def test_prefer_missing_node_has_no_effect(node: int) -> None:
    arena = HostArena(4096)
    address = arena.view(0, 4096).data_ptr()
    assert not prefer_node(address, 4096, node)
    assert preferred_node(address) is None


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("?", None)])
def test_node_of_pci_reads_sysfs(tmp_path: Path, content: str, node: int | None) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(content)
    assert node_of_pci(0, 0x1B, 0, tmp_path) == node
    assert node_of_pci(0, 0x1C, 0, tmp_path) is None
