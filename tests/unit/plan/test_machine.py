"""Tests of machine facts read from fake /proc and /sys trees and from the real machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_accelerator import FakeAccelerator
from support.internals import components
from support.small import small_engine

from infinity.errors import ConfigError, MachineError
from infinity.plan import machine as module
from infinity.plan.machine import (
    Mount,
    cpu_model,
    default_host_budget_bytes,
    disk_free_bytes,
    mount_of,
    read_machine,
    threads_for,
)
from infinity.storage.device import CpuDevice

GIB = 2**30
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpuacct,cpu\n"
)
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"


def computer(root: Path, files: dict[str, str]) -> Path:
    base = {
        "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {30 * GIB // 1024} kB\n",
        "proc/self/status": "Name:\tx\nVmRSS:\t1048576 kB\nCpus_allowed_list:\t0-3,8,10-12\n",
        "proc/self/limits": "Max locked memory         8388608              8388608      bytes\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_read_machine_without_cgroup_limits(tmp_path: Path) -> None:
    machine = read_machine(root=computer(tmp_path, {}))
    assert machine.host_ram_bytes == 32 * GIB
    assert machine.host_available_bytes == 30 * GIB
    assert machine.process_rss_bytes == GIB
    assert machine.num_cpus == 8
    assert machine.cpu_quota is None
    assert machine.memlock_bytes == 8388608
    assert machine.thp_mode == "madvise"
    # 80 % of (30 available + 1 resident in this process), which is less than 32.
    assert default_host_budget_bytes(machine) == int(0.8 * 31 * GIB)


def test_host_ram_variable_raises_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = computer(tmp_path, {})
    monkeypatch.setenv(module.HOST_RAM, "64GiB")
    machine = read_machine(root=root)
    assert (machine.host_ram_bytes, machine.host_available_bytes) == (64 * GIB, 62 * GIB)
    assert module.memory_headroom(root) == (64 * GIB, 62 * GIB)
    monkeypatch.setenv(module.HOST_RAM, "16GiB")  # less than the actual RAM: ignored
    assert read_machine(root=root).host_ram_bytes == 32 * GIB
    monkeypatch.setenv(module.HOST_RAM, "plenty")
    with pytest.raises(ConfigError, match="INFINITY_HOST_RAM is 'plenty'"):
        read_machine(root=root)


def test_cgroup_v2_limits_of_ancestors_apply(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    }
    machine = read_machine(root=computer(tmp_path, files))
    assert machine.host_ram_bytes == 8 * GIB
    assert machine.host_available_bytes == 4 * GIB  # 8 - (5 - 1 of page cache)
    assert machine.num_cpus == machine.cpu_quota == 3
    assert default_host_budget_bytes(machine) == int(0.8 * 5 * GIB)


def test_cgroup_v1_with_empty_v2_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V1_MOUNTS + V2_MOUNT.replace("/cgroup rw", "/cgroup/unified rw"),
        "proc/self/cgroup": "4:memory:/job/x\n1:cpu,cpuacct:/job\n0::/\n",
        "sys/fs/cgroup/unified/cgroup.procs": "1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{10 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {2 * GIB}\n",
        "sys/fs/cgroup/memory/job/x/memory.limit_in_bytes": f"{12 * GIB}\n",
        "sys/fs/cgroup/memory/job/x/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    machine = read_machine(root=computer(tmp_path, files))
    assert machine.host_ram_bytes == 12 * GIB
    assert machine.host_available_bytes == 8 * GIB  # job: 16 - (10 - 2); x would leave 11
    assert machine.num_cpus == machine.cpu_quota == 2


def test_cgroup_v2_mounted_at_subtree(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /docker/abc /sys"),
        "proc/self/cgroup": "0::/docker/abc/inner\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/inner/memory.max": f"{2 * GIB}\n",
    }
    assert read_machine(root=computer(tmp_path, files)).host_ram_bytes == 2 * GIB


@pytest.mark.parametrize("own_path", ["/gone/away", "/../outside", "/"])
def test_unknown_cgroup_path_falls_back_to_mount(tmp_path: Path, own_path: str) -> None:
    files = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": f"0::{own_path}\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/outside/memory.max": f"{GIB}\n",
    }
    assert read_machine(root=computer(tmp_path, files)).host_ram_bytes == 4 * GIB


def test_cgroup_over_limit_has_no_available_ram(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        "sys/fs/cgroup/cpu.max": "1000 100000\n",
    }
    machine = read_machine(root=computer(tmp_path, files))
    assert machine.host_available_bytes == 0
    assert machine.num_cpus == 1


def test_missing_limits_use_fallbacks(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": "Max locked memory         unlimited            unlimited    bytes\n",
        "proc/self/status": "Name:\tx\n",
        "proc/self/mountinfo": "garbage\n- -\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "",
    }
    machine = read_machine(root=computer(tmp_path, files))
    assert machine.memlock_bytes is None
    assert machine.thp_mode == "unknown"
    assert machine.process_rss_bytes == 0
    assert machine.num_cpus == len(os.sched_getaffinity(0))


def test_missing_mem_total_raises(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no MemTotal"):
        read_machine(root=tmp_path)


def test_disk_free_bytes_and_missing_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.statvfs(tmp_path)  # other processes may write to the disk
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", {tmp_path: facts}.__getitem__)
        found = read_machine([tmp_path]).disk_free_bytes
    assert list(found) == [(tmp_path, facts.f_bavail * facts.f_frsize)]
    with pytest.raises(MachineError, match="mkdir -p"):
        disk_free_bytes(tmp_path / "none")


def test_shared_cache_counted_once(tmp_path: Path) -> None:
    files = {}
    for cpu in range(4):
        shared = "0-1" if cpu < 2 else "2-3"
        for index, level, size, sharers in (
            (0, 1, "32K", cpu),
            (2, 2, "512K", cpu),
            (3, 3, "1M", 0),
        ):
            cache_dir = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files[f"{cache_dir}/level"] = f"{level}\n"
            files[f"{cache_dir}/size"] = "32768K\n" if size == "1M" else f"{size}\n"
            files[f"{cache_dir}/shared_cpu_list"] = f"{shared if level == 3 else sharers}\n"
    files["sys/devices/system/cpu/cpu0/cache/index4/level"] = "9\n"
    assert read_machine(root=computer(tmp_path, files)).cache_bytes == 2 * 32768 * 1024


def test_missing_cache_and_cpu_model_use_fallbacks(tmp_path: Path) -> None:
    machine = read_machine(root=computer(tmp_path, {}))
    assert machine.cache_bytes == 0
    assert cpu_model(tmp_path) == os.uname().machine
    assert cpu_model(computer(tmp_path, {"proc/cpuinfo": "model name\t: A B\n"})) == "A B"


def test_mount_of_path(tmp_path: Path) -> None:
    mount_point = (tmp_path / "a b").resolve()
    (mount_point / "deep").mkdir(parents=True)
    name = str(mount_point).replace(" ", "\\040")
    files = {
        "proc/self/mountinfo": "22 1 0:5 / / rw - ext4 /dev/root rw\n"
        f"23 22 0:6 / {name} rw - ext4 /dev/hidden rw\n"
        f"24 22 0:6 / {name} rw shared:1 - xfs /dev/disk\\0401 rw\n"
        f"25 22 0:7 / {name}/de rw - tmpfs none rw\n"
    }
    root = computer(tmp_path / "root", files)
    number = os.stat(mount_point).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for path in (mount_point, mount_point / "deep"):
        assert mount_of(path, root) == Mount(device, "/dev/disk 1", "xfs")
    (tmp_path / "link").symlink_to(mount_point)
    assert mount_of(tmp_path / "link", root).file_system == "xfs"
    assert mount_of(tmp_path, root) == Mount(device, "/dev/root", "ext4")
    assert mount_of(tmp_path, tmp_path) == Mount(device, "", "")
    with pytest.raises(MachineError, match="mkdir -p"):
        mount_of(tmp_path / "none")


def test_read_machine_on_real_machine() -> None:
    machine = read_machine()
    assert mount_of(Path("/")).file_system
    assert 0 < machine.host_available_bytes <= machine.host_ram_bytes
    assert 0 < machine.process_rss_bytes < machine.host_ram_bytes
    assert 1 <= machine.num_cpus <= len(os.sched_getaffinity(0))
    assert machine.thp_mode in ("always", "madvise", "never", "unknown")


def test_read_machine_does_not_import_torch() -> None:
    # A bare package avoids the imports of `infinity/__init__.py`.
    root = Path(module.__file__).resolve().parent.parent
    script = f"""
import sys, types
for name, path in (("infinity", {str(root)!r}), ("infinity.plan", {str(root / "plan")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from infinity.plan.machine import read_machine
read_machine()
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=600
    )
    assert "torch" not in done.stdout.split()


@pytest.mark.parametrize(
    ("wanted", "ranks", "unified", "threads"),
    [(0, 1, True, 16), (0, 1, False, 13), (16, 1, False, 16), (0, 4, False, 1), (0, 8, True, 2),
     (4, 8, False, 1)],
)  # fmt: skip
def test_threads_for_leaves_cores_for_launching(
    wanted: int, ranks: int, unified: bool, threads: int
) -> None:
    assert threads_for(wanted, 16, ranks, unified=unified) == threads


@pytest.mark.parametrize(("unified", "threads"), [(True, 8), (False, 5)])
def test_engine_leaves_cores_for_launching(
    unified: bool, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = replace(read_machine(), num_cpus=8, cpu_quota=None)
    monkeypatch.setattr("infinity.training.components.read_machine", lambda: eight)
    device = CpuDevice() if unified else FakeAccelerator()
    config = {"cpu": {"num_threads": 0}}
    with small_engine(tmp_path, arguments={"device": device}, **config) as engine:
        assert components(engine).kernels.num_threads == threads
