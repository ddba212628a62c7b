"""Tests of the `infinity doctor` command: report, problems and exit codes, machine files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import infinity
from infinity import _aio
from infinity.cli import doctor as doctor_module
from infinity.cli.doctor import text_of
from infinity.cli.main import app
from infinity.plan.plan_machine import read_machine_file
from infinity.profiling import calibration, processor_rates


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def facts_of(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out = doctor(*arguments, "--json")
    facts: dict[str, Any] = json.loads(out)
    return code, facts


def test_doctor_reports_that_a_run_could_start(tmp_path: Path) -> None:
    code, out = doctor("--path", str(tmp_path))
    assert code == 0, out
    assert out.endswith("a run could start here\n")
    for expected in (
        f"infinity   {infinity.__version__}",
        "torch ",
        "device ",
        "memlock ",
        "NUMA ",
    ):
        assert expected in out
    assert f"path       {tmp_path}" in out
    assert "\x1b" not in out, "plain text, to be pasted"
    assert list(tmp_path.iterdir()) == []


def test_doctor_json(tmp_path: Path) -> None:
    code, facts = facts_of("--path", str(tmp_path))
    assert (code, facts["ok"], facts["problems"]) == (0, True, [])
    import torch

    assert facts["torch"]["version"] == torch.__version__
    assert bool(facts["torch"]["accelerators"]) == torch.cuda.is_available()
    assert bool(facts["torch"]["no_accelerator_because"]) != torch.cuda.is_available()
    assert facts["kernels"]["chosen"] in facts["kernels"]["isas"]
    assert facts["io"]["backend"] in ("io_uring", "threads")
    (drive,) = facts["drives"]
    space = os.statvfs(tmp_path)
    assert drive["total_bytes"] == space.f_blocks * space.f_frsize
    assert drive["parameters"] == drive["free_bytes"] // 12
    assert set(drive["backends"]) == {"io_uring", "threads"}
    assert drive["direct"] == (drive["direct_reason"] == "")
    memory = facts["memory"]
    assert 0 < memory["budget_bytes"] < memory["usable_bytes"] <= memory["physical_bytes"]


def test_doctor_without_path_checks_no_drive() -> None:
    code, facts = facts_of()
    assert code == 0
    assert facts["drives"] == []
    assert "a run could start here" in doctor()[1]


def test_missing_path_or_file_is_a_problem(tmp_path: Path) -> None:
    code, out = doctor("--path", str(tmp_path / "none"))
    assert code == 4
    assert f"PROBLEM: nvme_path {tmp_path / 'none'} does not exist" in out
    assert f"try: mkdir -p {tmp_path / 'none'}" in out
    assert "a run could start" not in out
    (tmp_path / "file").write_text("")
    assert doctor("--path", str(tmp_path / "file"))[0] == 4


def test_exit_code_is_that_of_first_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "LEAST_HOST_BYTES", 2**60)
    code, facts = facts_of("--path", str(tmp_path / "none"))
    assert code == 3
    assert [problem["exit_code"] for problem in facts["problems"]] == [3, 4]


@pytest.mark.parametrize(
    ("number", "code", "part"),
    [
        (errno.EROFS, 4, "is read-only"),
        (errno.EACCES, 4, "permissions forbid it"),
        (28, 3, "is full"),
    ],
)
def test_os_error_of_path_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, part: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        found, out = doctor("--path", str(tmp_path))
    assert found == code
    assert part in out
    assert os.strerror(number) in out


@contextmanager
def tmpfs(mount_point: Path, options: str) -> Iterator[None]:
    """Mount a small file system; skip the test if this process may not mount."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount_point)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)


def test_full_file_system(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=1m"):
        (tmp_path / "filler").write_bytes(b"x" * 2**20)
        code, out = doctor("--path", str(tmp_path))
        assert code == 3, out
        assert "is full" in out
        assert os.listdir(tmp_path) == ["filler"]


def test_read_only_file_system(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=1m,ro"):
        code, out = doctor("--path", str(tmp_path))
        assert code == 4, out
        assert "is read-only" in out


def test_tmpfs_is_noted_as_ram(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "size=64m"):
        code, facts = facts_of("--path", str(tmp_path))
        assert code == 0
        assert facts["drives"][0]["file_system"] == "tmpfs"
        assert any("tmpfs, which is RAM" in note for note in facts["notes"])


def test_no_io_backend_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"ok": False, "reason": "seccomp forbids it"}
    both = {"io_uring": answer, "threads": answer}
    monkeypatch.setattr("infinity._aio.probe", lambda directory: both)
    code, out = doctor("--path", str(tmp_path))
    assert code == 4
    assert "no I/O back end works" in out
    assert "seccomp forbids it" in out


def test_failing_io_backend_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _aio.probe

    def probe(directory: str) -> dict[str, Any]:
        return {**real(directory), "io_uring": {"ok": False, "reason": "seccomp forbids it"}}

    monkeypatch.setattr("infinity._aio.probe", probe)
    code, out = doctor("--path", str(tmp_path))
    assert code == 0, "threads do"
    assert "io_uring: does not work: seccomp forbids it" in out


def test_missing_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = doctor_module.collect_facts([])
    assert facts["torch"] is None
    found = {problem["what"]: problem for problem in facts["problems"]}["torch cannot be imported"]
    assert found["exit_code"] == 4
    assert "pip install" in found["remedy"]


MEMINFO = "MemTotal: {total} kB\nMemAvailable: {free} kB\nHugePages_Total: 7\n"


def computer(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_too_little_memory_is_a_problem(tmp_path: Path) -> None:
    root = computer(tmp_path, {"proc/meminfo": MEMINFO.format(total=4 << 20, free=1 << 18)})
    facts = doctor_module.collect_facts([], root)
    (problem,) = facts["problems"]
    assert problem["exit_code"] == 3
    assert "a run could use 204.80 MiB of RAM" in problem["what"]
    assert "PROBLEM" in text_of(facts)
    assert not facts["ok"]


def test_numa_nodes_match_kernels(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    lists = [str(cpus[0]), ",".join(map(str, cpus[1:]))]
    files = {f"sys/devices/system/node/node{i}/cpulist": cpulist for i, cpulist in enumerate(lists)}
    files["proc/meminfo"] = MEMINFO.format(total=64 << 20, free=64 << 20)
    facts = doctor_module.collect_facts([], computer(tmp_path, files))
    several = len(cpus) > 1
    assert facts["kernels"]["cpus_by_node"] == ([cpus[:1], cpus[1:]] if several else [cpus])
    expected = f"1+{len(cpus) - 1} CPUs" if several else "no"
    assert f"NUMA       {expected}\n" in text_of(facts)


def test_memory_bound_of_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO.format(total=64 << 20, free=64 << 20),
        "proc/self/cgroup": "0::/box\n",
        "proc/self/mountinfo": "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/box/memory.max": str(8 << 30),
        "sys/fs/cgroup/box/memory.current": "0",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }
    facts = doctor_module.collect_facts([], computer(tmp_path, files))
    memory = facts["memory"]
    assert (memory["usable_bytes"], memory["physical_bytes"]) == (8 << 30, 64 << 30)
    assert memory["bounded_by"] == "memory cgroup /box"
    assert memory["huge_pages"] == 7
    assert any("huge pages are off" in note for note in facts["notes"])
    out = text_of(facts)
    assert "8.00 GiB usable, bounded by memory cgroup /box; 64.00 GiB in the machine" in out
    (tmp_path / "sys/fs/cgroup/box/memory.max").write_text("max")
    assert doctor_module.collect_facts([], tmp_path)["memory"]["bounded_by"] == "the machine's RAM"


# The machine file


@pytest.fixture
def _brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate cache and shorten measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("infinity.storage.disk_rates.SPAN_BYTES", 16 << 20)
    monkeypatch.setattr(processor_rates, "_LEAST_CHUNKS", 1)
    monkeypatch.setattr(processor_rates, "_MOST_CHUNKS", 1)
    monkeypatch.setattr(processor_rates, "_MATRIX_SIZES", (64,))
    monkeypatch.setattr(processor_rates, "_WIDTH", {True: 64, False: 64})
    monkeypatch.setattr(processor_rates, "_NUM_LOGITS", 512)
    monkeypatch.setattr(calibration.ProcessorTimes, "now", lambda: None)  # other tests run


@pytest.mark.usefixtures("_brief")
def test_machine_file_with_path(tmp_path: Path) -> None:
    drive, out = tmp_path / "drive", tmp_path / "rig.json"
    drive.mkdir()
    arguments = ("--path", str(drive), "--machine-file", str(out))
    code, text = doctor(*arguments)
    assert code == 0, text
    machine = read_machine_file(out)
    assert machine.nominal == ()
    assert f"rates      measured {machine.measured}" in text
    for expected in ("disk: read ", "mixed ", "update: fp32 ", "parameters/s", "compute: bf16 "):
        assert expected in text
    assert text.endswith("a run could start here\n")
    assert os.listdir(drive) == []
    assert sorted(os.listdir(tmp_path)) == ["cache", "drive", "rig.json"]

    rates = machine.rates
    code, facts = facts_of(*arguments)
    assert read_machine_file(out).rates == rates, "measured once"
    assert facts["machine_file"] == json.loads(out.read_text())
    doctor(*arguments, "--refresh")
    assert read_machine_file(out).rates != rates


@pytest.mark.usefixtures("_brief")
def test_machine_file_without_path(tmp_path: Path) -> None:
    out = tmp_path / "rig.json"
    code, text = doctor("--machine-file", str(out))
    assert code == 0, text
    assert read_machine_file(out).nominal == ("disk_read", "disk_write", "disk_mixed")
    assert "nominal, not measured: disk_read, disk_write, disk_mixed" in text
    assert "disk: " not in text


def test_machine_file_is_not_written_on_problem(tmp_path: Path) -> None:
    out = tmp_path / "rig.json"
    assert doctor("--path", str(tmp_path / "none"), "--machine-file", str(out))[0] == 4
    assert not out.exists()
    assert doctor("--refresh")[0] == 2


@pytest.mark.usefixtures("_brief")
def test_unwritable_machine_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--machine-file", str(tmp_path / "no" / "x.json")])
    assert result.exit_code == 4
    assert "x.json: the machine file cannot be written" in result.stderr
    assert "because: No such file or directory" in result.stderr
    (tmp_path / "old.json").mkdir()
    assert doctor("--machine-file", str(tmp_path / "old.json"))[0] == 4
    assert sorted(os.listdir(tmp_path)) == ["cache", "old.json"]
