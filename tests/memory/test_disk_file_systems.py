"""Tests of the detection of file systems and devices of paths, and of the warnings."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.loops import loop_mount
from support.small import masters, same, settings, small_engine, small_model, train

import infinity
from infinity import _aio
from infinity.errors import InfinityWarning
from infinity.storage import drives
from infinity.storage.drives import (
    device_of,
    drive_of,
    file_system_warnings,
    one_per_file_system,
    shared_drives,
)

pytestmark = pytest.mark.filterwarnings("ignore::infinity.errors.InfinityWarning")
SHM = Path("/dev/shm")


@dataclass
class FakeFile:
    file_system: str = "ext4"
    direct: bool = True
    direct_reason: str = ""
    fd: int = -1


def warnings_for(path: Path, **facts: Any) -> str:
    return "\n".join(file_system_warnings(path, FakeFile(**facts), 3 << 30))  # type: ignore[arg-type]


def test_local_ext4_and_xfs_give_no_warning(tmp_path: Path) -> None:
    assert not warnings_for(tmp_path)
    assert not warnings_for(tmp_path, file_system="xfs")


@pytest.mark.parametrize(
    ("facts", "phrases"),
    [
        ({"file_system": "tmpfs", "direct": False}, ["is tmpfs, which is RAM", "3.00 GiB"]),
        (
            {"file_system": "overlayfs", "direct": False, "direct_reason": "EINVAL"},
            ["(overlayfs) takes no direct I/O (EINVAL)", "page cache", "CPU time", "ext4 or xfs"],
        ),
        ({"file_system": "fuse", "direct": False}, ["(fuse) takes no direct I/O"]),
        ({"file_system": "nfs"}, ["is NFS", "network", "3.00 GiB", "lock"]),
        ({"file_system": "btrfs"}, ["is btrfs", "copies on write", "chattr +C"]),
    ],
)
def test_slow_file_system_warnings(
    tmp_path: Path, facts: dict[str, Any], phrases: list[str]
) -> None:
    with open(tmp_path / "f", "wb") as file:
        text = warnings_for(tmp_path, fd=file.fileno(), **facts)
    assert str(tmp_path) in text
    for phrase in phrases:
        assert phrase in text


def test_tmpfs_warns_and_trains() -> None:
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        pytest.skip("no /dev/shm")
    path = SHM / f"infinity-test-{os.getpid()}"
    path.mkdir()
    try:
        with small_engine(path) as engine:
            expected, state = train(engine, 2), masters(engine)
            assert [w for w in engine.warnings if f"{path} is tmpfs, which is RAM" in w]
            (drive,) = engine.drives().values()
            assert drive["file_system"] == "tmpfs"
        with small_engine(
            path, {"weights": "device", "optimizer_state": "host", "gradients": "host"}
        ) as e:
            assert not e.warnings  # nothing is stored on disk
            assert train(e, 2) == expected
            assert same(masters(e), state)
    finally:
        path.rmdir()


def test_initialize_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        drives, "file_system_warnings", lambda path, file, nbytes: [f"{path} is odd"]
    )
    config = settings(tmp_path) | {"gradient_clipping": 1.0, "optimizer": {"lr": 1e-3}}
    with pytest.warns(InfinityWarning, match="is odd") as caught:
        engine, *_ = infinity.initialize(small_model(), config)
    engine.close()
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_training_on_mounted_file_systems(tmp_path: Path, kind: str) -> None:
    with small_engine(tmp_path) as engine:
        expected = train(engine, 3)
    with loop_mount(tmp_path, kind) as path:
        for turn in range(2):
            with small_engine(path) as engine:
                assert train(engine, 3) == expected
                (drive,) = engine.drives().values()
                assert drive["file_system"] == kind
                assert drive["direct"]
                text = "\n".join(engine.warnings)
                assert ("copies on write" in text) == (kind == "btrfs" and turn == 0), text
            if kind == "btrfs":
                subprocess.run(["chattr", "+C", str(path)], check=True)


def make_sys_tree(root: Path, devices: dict[str, str | None]) -> None:
    """Create a fake /sys from a map of device numbers to the drives they are partitions of."""
    (root / "dev/block").mkdir(parents=True)
    for device, parent in devices.items():
        folder = root / "devices" / (parent or device).replace(":", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dev").write_text(f"{parent or device}\n")
        if parent is not None:
            folder = folder / device.replace(":", "_")
            folder.mkdir()
            (folder / "partition").write_text("1\n")
        os.symlink(folder, root / "dev/block" / device)


def test_partitions_of_one_drive_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sys_tree(tmp_path, {"8:0": None, "8:1": "8:0", "8:2": "8:0", "259:0": None})
    assert [drive_of(d, tmp_path) for d in ("8:0", "8:1", "259:0", "0:45")] == [
        "8:0",
        "8:0",
        "259:0",
        "0:45",
    ]
    devices = {Path("/a"): "8:1", Path("/b"): "8:2", Path("/c"): "259:0"}
    monkeypatch.setattr(drives, "device_of", devices.__getitem__)
    (warning,) = shared_drives(list(devices), tmp_path)
    assert "/a and /b share one drive (8:0)" in warning


def test_second_directory_on_one_device_unused(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert device_of(first) == device_of(second) != ""
    used, (warning,) = one_per_file_system([first, second])
    assert used == [first]
    assert f"{second} is on the same device" in warning
    config = {"nvme_path": [str(first), str(second)]}
    with small_engine(tmp_path / "second", **config) as engine:
        assert list(engine.drives()) == [str(first)]
        assert any("is not used" in w for w in engine.warnings)
        assert not list(second.iterdir())


def test_missing_path_has_no_device(tmp_path: Path) -> None:
    paths = [tmp_path / "none", tmp_path / "nothing"]
    assert device_of(paths[0]) == ""
    assert one_per_file_system(paths) == (paths, [])
    with pytest.raises(infinity.InfinityError, match=r"none[\s\S]*mkdir -p"):
        infinity.initialize(small_model(), settings(tmp_path, nvme_path=[str(p) for p in paths]))


def test_file_reports_device_and_direct_io(tmp_path: Path) -> None:
    file = _aio.File(str(tmp_path / "f"), create=True)
    assert file.device == device_of(tmp_path)
    assert bool(file.direct_reason) != file.direct
