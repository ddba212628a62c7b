"""File systems in small image files, mounted through loop devices, for tests that run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_MAKERS = {"ext4": ("mkfs.ext4", "-q"), "xfs": ("mkfs.xfs", "-q"), "btrfs": ("mkfs.btrfs", "-q")}
# The minimum that mkfs accepts, and some space.
SMALLEST_MIB = {"ext4": 16, "xfs": 320, "btrfs": 128}
_BLKIO = Path("/sys/fs/cgroup/blkio")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def loop_mount(
    directory: Path, kind: str = "ext4", mib: int | None = None, options: str = ""
) -> Iterator[Path]:
    """Mount a fresh file system below `directory`, or skip the test if that is impossible."""
    maker = shutil.which(_MAKERS[kind][0], path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() != 0:
        pytest.skip("mounting a loop device needs root")
    if maker is None:
        pytest.skip(f"{_MAKERS[kind][0]} is not installed")
    name = uuid.uuid4().hex[:8]
    image, mount = directory / f"{name}.img", directory / f"{name}.mnt"
    with open(image, "wb") as file:
        file.truncate((mib or SMALLEST_MIB[kind]) << 20)
    mount.mkdir()
    _run(maker, *_MAKERS[kind][1:], str(image))
    try:
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device: {error}")
    try:
        try:
            _run("mount", "-t", kind, "-o", options or "defaults", device, str(mount))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{kind} cannot be mounted here: {error.stderr}")
        try:
            inside = mount / "nvme"
            inside.mkdir()
            yield inside
        finally:
            with suppress(subprocess.CalledProcessError):
                _run("umount", "--lazy", str(mount))
    finally:
        with suppress(subprocess.CalledProcessError):
            _run("losetup", "--detach", device)


def loop_name(path: Path) -> str:
    """Return the name of the loop device behind a path, such as "loop3"."""
    device = os.stat(path).st_dev
    return os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))


@contextmanager
def throttled(path: Path, bytes_per_s: int) -> Iterator[Path]:
    """Yield a control group that limits reads and writes of the device behind `path`.

    Processes join it through its `cgroup.procs`. Skips the test if it cannot be made.
    """
    device = os.stat(path).st_dev
    group = _BLKIO / f"infinity-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no blkio control group: {error}")
    try:
        rule = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        for direction in ("read", "write"):
            (group / f"blkio.throttle.{direction}_bps_device").write_text(rule)
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()
