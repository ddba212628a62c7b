"""Tests of errors when a scratch directory cannot be created."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.leaks import descriptors

from infinity.errors import DoesNotFitError, InfinityError, MachineError
from infinity.storage import run_dir as module
from infinity.storage.run_dir import Scratch


def names_in(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def create_error(path: Path) -> InfinityError:
    with pytest.raises(InfinityError) as caught:
        Scratch.create(path)
    return caught.value


def test_missing_path_or_file_is_refused(tmp_path: Path) -> None:
    error = create_error(tmp_path / "none")
    assert isinstance(error, MachineError)
    assert error.remedy == f"mkdir -p {tmp_path / 'none'}"
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "file/below"):
        assert isinstance(create_error(tmp_path / name), MachineError)
    assert "is not a directory" in create_error(tmp_path / "file").what
    assert names_in(tmp_path) == ["file", "link"]


@pytest.mark.parametrize(
    ("number", "kind", "part"),
    [
        (errno.ENOSPC, DoesNotFitError, "is full; "),
        (errno.EDQUOT, DoesNotFitError, "quota is used up; "),
        (errno.EROFS, MachineError, "is read-only"),
        (errno.EACCES, MachineError, "permissions forbid it"),
        (errno.ENOLCK, MachineError, "cannot lock files"),
        (errno.EIO, MachineError, "cannot be used"),
    ],
)
@pytest.mark.parametrize("place", ["mkdir", "flock", "record"])
def test_os_error_is_explained_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[InfinityError],
    part: str,
    place: str,
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if place == "mkdir":
            patch.setattr(Path, "mkdir", refuse)
        elif place == "flock":
            patch.setattr("fcntl.flock", refuse)
        else:
            patch.setattr(module, "write_record", refuse)
        before = descriptors()
        error = create_error(tmp_path)
        assert descriptors() <= before
    assert type(error) is kind
    assert part in str(error)
    assert os.strerror(number) in error.what
    assert error.remedy
    assert names_in(tmp_path) == []


def test_directory_without_permission_is_refused() -> None:
    script = """
import os, sys
from infinity.storage.run_dir import Scratch
from infinity.errors import MachineError
os.setgid(65534); os.setuid(65534)
try: Scratch.create(sys.argv[1])
except MachineError as error: print(error)
"""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", script, root], capture_output=True, text=True, timeout=600
        )
    if "PermissionError" in done.stderr:
        pytest.skip("this process may not become nobody")
    assert "permissions forbid it" in done.stdout, done.stderr
    assert "user id 65534" in done.stdout


def test_interrupted_create_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Scratch.create(tmp_path)
    assert names_in(tmp_path) == []


def test_check_space_error_has_sizes(tmp_path: Path) -> None:
    with Scratch.create(tmp_path) as scratch:
        scratch.check_space(0)
        scratch.check_space(4096)
        with pytest.raises(DoesNotFitError) as caught:
            scratch.check_space(2**60)
        for text in ("1.00 EiB needed", "free at", str(tmp_path), "missing"):
            assert text in caught.value.what
