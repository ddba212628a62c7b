"""Tests of probing the back ends, and of the fallback when io_uring is forbidden."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from support.native_io import in_subprocess

from infinity import _aio
from infinity._aio import AioError

DENY = """
    import ctypes, errno, struct, sys

    def deny(number):  # seccomp: this system call answers EPERM
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM),
                (0x06, 0, 0, 0x7FFF0000)]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *c) for c in code))
        header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
        libc = ctypes.CDLL(None, use_errno=True)
        null = ctypes.c_void_p(0)
        assert libc.prctl(38, ctypes.c_ulong(1), null, null, null) == 0
        assert libc.prctl(22, ctypes.c_ulong(2), header, null, null) == 0, ctypes.get_errno()

    deny(int(sys.argv[1]))
    engine = _aio.Engine()
    print(engine.backend, "|", engine.backend_reason)
    engine.close()
    try:
        _aio.Engine(backend="io_uring")
    except _aio.AioError as error:
        print(error.errno, error)
    found = _aio.probe(sys.argv[2])
    print(found["io_uring"]["ok"], found["threads"]["ok"])
"""


@pytest.mark.parametrize(("number", "name"), [(425, "io_uring_setup"), (426, "io_uring_enter")])
def test_fallback_to_threads_states_reason(tmp_path: Path, number: int, name: str) -> None:
    if not _aio.probe(str(tmp_path))["io_uring"]["ok"]:
        pytest.skip("no io_uring to take away")
    first, second, third = in_subprocess(DENY, str(number), str(tmp_path)).splitlines()
    assert first.startswith("threads | threads:")
    assert f"{name} failed with EPERM (seccomp" in first
    assert second.startswith(str(errno.EPERM))
    assert name in second
    assert third == "False True"


def test_probe_reports_backends(tmp_path: Path) -> None:
    found = _aio.probe(str(tmp_path))
    assert set(found) == {"io_uring", "threads"}
    assert found["threads"]["ok"], found
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AioError) as caught:
        _aio.probe(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT
