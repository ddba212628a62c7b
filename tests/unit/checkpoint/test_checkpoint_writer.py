"""Tests of `CheckpointWriter`: atomic publication, errors, stale files and pruning."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoint_crash, forked
from support.checkpoint_files import content, feed, same_content, sample, save
from support.fault_injection import faulty_io
from support.process_memory import SMALL_BYTES, Peak, count_held, needs_peak

from infinity import _aio
from infinity.checkpoint import blocks, directory
from infinity.checkpoint import directory as root_module
from infinity.checkpoint.directory import checkpoints, find_tag, prune
from infinity.checkpoint.manifest import BLOCK_BYTES, Manifest, TensorSpec
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import CheckpointWriter
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    InfinityError,
    MachineError,
)


def test_latest_is_complete_after_kill_at_random_lines(in_memory: Path) -> None:
    rng = random.Random(1)
    lines = [rng.randrange(1, 12_000) for _ in range(12)]
    seen = forked.call(checkpoint_crash.kill_often, in_memory / "root", lines)
    assert seen["lock+tmp"] > 3  # many were killed in the middle


def test_latest_is_complete_after_exit_before_each_call(in_memory: Path) -> None:
    seen = forked.call(checkpoint_crash.die_at_every_call, in_memory)
    # Each of these states occurred and was cleaned up.
    assert set(seen) == {"nothing", "lock", "lock+tmp", "lock+tmp+new", "lock+new"}


@pytest.mark.big
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(5))
def test_latest_is_complete_after_many_kills(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kill_times = [rng.uniform(0, 0.12) for _ in range(400)]
    seen = forked.call(checkpoint_crash.kill_often, tmp_path / "root", kill_times)
    assert seen.total() == 400


def listed(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_write_any_chunk_size_gives_identical_files(tmp_path: Path) -> None:
    """Blocks of 1 MiB and shards of 2 MiB: tensors end inside blocks and cross their borders."""
    large = {"a": (700, 1000), "b": (3,), "c": (1024, 1024), "d": (0, 2)}
    for root, source, shard, chunk_sizes in (
        (tmp_path / "x", sample(1, large, ("8bit",)), 1 << 21, (4096, 99_991, 1 << 20, 1_048_577)),
        (tmp_path / "y", sample(1), 2000, (1,)),
    ):
        first = save(root, "one", source, shard)
        for chunk_size in chunk_sizes:
            writer = CheckpointWriter(root, f"p{chunk_size}", source.streams, max_shard_bytes=shard)
            feed(writer, source, chunk_size)
            assert same_files(first, writer.finish(source.manifest))
        assert same_content(content(root, "one"), source.content)


def same_files(one: Path, other: Path) -> bool:
    names = listed(one)
    return names == listed(other) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def test_write_interleaved_streams_copies_the_data(tmp_path: Path) -> None:
    shapes = {"a": (1500, 1000), "b": (1200, 1000)}
    source = sample(2, shapes=shapes)
    writer = CheckpointWriter(tmp_path, "t", source.streams)
    scratch = torch.empty(300_007, dtype=torch.uint8)
    streams = {
        stream: torch.cat([source.content[stream, s.name] for s in specs])
        for stream, specs in source.streams.items()
    }
    positions = dict.fromkeys(streams, 0)
    while positions:
        for stream in list(positions):
            chunk = streams[stream][positions[stream] : positions[stream] + scratch.numel()]
            scratch[: chunk.numel()] = chunk
            writer.write(stream, scratch[: chunk.numel()])
            scratch.fill_(0xEE)
            positions[stream] += chunk.numel()
            if positions[stream] == streams[stream].numel():
                del positions[stream]
    writer.finish(source.manifest)
    assert same_content(content(tmp_path, "t"), source.content)


def test_write_non_contiguous_data(tmp_path: Path) -> None:
    source = sample(2)
    writer = CheckpointWriter(tmp_path, "t", source.streams)
    for (stream, _), data in source.content.items():
        writer.write(stream, torch.stack([data, data]).t().reshape(-1)[::2])
    writer.finish(source.manifest)
    assert same_content(content(tmp_path, "t"), source.content)


@needs_peak
def test_write_memory_is_independent_of_tensor_size(tmp_path: Path) -> None:
    """The bound is the writes in flight and one block of each of two streams of 48 MiB."""
    pool = (blocks.WRITES_IN_FLIGHT + 2) * BLOCK_BYTES
    assert forked.call(peak_of_writing, tmp_path) < pool + SMALL_BYTES


def peak_of_writing(root: Path) -> int:
    count_held()
    source = sample(3, shapes={"a": (24 << 20,)}, moments=())
    writer = CheckpointWriter(root, "t", source.streams)
    writer.write("frozen", source.content["frozen", "frozen.w"])
    for data in ("running", "mask"):
        writer.write("buffers", source.content["buffers", data])
    peak = Peak()
    for stream in ("model", "residual"):
        for data in source.content[stream, "a"].split(5 << 20):
            writer.write(stream, data)
    grown = peak.grown
    writer.abort()
    return grown


def test_written_files_do_not_stay_in_page_cache(tmp_path: Path) -> None:
    source = sample(3, shapes={"a": (8 << 20,)}, moments=())
    path = save(tmp_path, "t", source) / "residual.safetensors"
    if _aio.File(str(path), read_only=True).file_system == "tmpfs":
        pytest.skip("the pages of tmpfs are its file")
    mincore = pages_in_cache(path)
    if mincore is None:
        pytest.skip("no mincore")
    assert mincore * os.sysconf("SC_PAGESIZE") < 2 << 20


def pages_in_cache(path: Path) -> int | None:
    import ctypes
    import mmap

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
        array = np.frombuffer(area, dtype=np.uint8)
        pages = -(-len(area) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(area)), vector
        )
        del array
        return None if failed else sum(v & 1 for v in vector)


# --- invalid arguments -------------------------------------------------------------------------


def test_existing_tag_is_refused(tmp_path: Path) -> None:
    source = sample(1)
    path = save(tmp_path, "t", source)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists already") as caught:
        CheckpointWriter(tmp_path, "t", source.streams)
    assert "another tag" in str(caught.value)
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for tag in ("taken", "dangling"):
        with pytest.raises(CheckpointError, match=f"{tag} is not a directory"):
            CheckpointWriter(tmp_path, tag, source.streams)
    assert (path / "manifest.json").read_bytes() == before
    assert listed(tmp_path) == ["dangling", "latest", "t", "taken"]


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/a", "x.tmp", "latest", ".hidden", "a\0", "a\n", " a", "ä" * 101]
)
def test_invalid_tag_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="the tag"):
        CheckpointWriter(tmp_path / "root", tag, sample(1).streams)
    assert listed(tmp_path) == []


def test_unusual_valid_tags_are_accepted(tmp_path: Path) -> None:
    for tag in ("ä" * 100, "step 1", "100 %", "-rf", "a.tmp.b", "*", "Ω"):
        save(tmp_path, tag, sample(1))
        assert find_tag(tmp_path, None) == tag
        assert same_content(content(tmp_path, tag), sample(1).content)


def test_second_writer_of_a_tag_is_refused(tmp_path: Path) -> None:
    source = sample(1)
    one = CheckpointWriter(tmp_path, "t", source.streams)
    with pytest.raises(CheckpointError, match="being written"):
        CheckpointWriter(tmp_path, "t", source.streams)
    other = CheckpointWriter(tmp_path, "u", source.streams)  # removes no file of the first
    for writer in (one, other):
        feed(writer, source)
        writer.finish(source.manifest)
    assert listed(tmp_path) == ["latest", "t", "u"]


def test_invalid_write_is_refused_and_removes_files(tmp_path: Path) -> None:
    source = sample(1)
    data = torch.zeros(4, dtype=torch.uint8)
    cases: list[tuple[str, Any, str]] = [
        ("other", data, "is not a stream of this"),
        ("model", data.float(), "takes 1-D uint8"),
        ("model", data.view(2, 2), "takes 1-D uint8"),
        ("model", torch.empty(4, dtype=torch.uint8, device="meta"), "takes 1-D uint8"),
        ("frozen", torch.zeros(61, dtype=torch.uint8), "which lacks 60"),
    ]
    for stream, value, text in cases:
        writer = CheckpointWriter(tmp_path / "root", "t", source.streams)
        with pytest.raises(ConfigError, match=text):
            writer.write(stream, value)
        assert listed(tmp_path) == []
        with pytest.raises(ConfigError, match="was aborted"):
            writer.write("model", data)
        with pytest.raises(ConfigError, match="was aborted"):
            writer.finish(source.manifest)
        writer.abort()


def changed(manifest: Manifest, **fields: Any) -> Manifest:
    from dataclasses import replace

    return replace(manifest, **fields)


def test_finish_with_inconsistent_manifest_is_refused(tmp_path: Path) -> None:
    source = sample(1)
    first = source.manifest.parameters[0]
    cases = [
        (changed(source.manifest, precision="int8"), "precision is 'int8'"),
        (changed(source.manifest, moments=("fp32",)), "the manifest has 1 moments"),
        (changed(source.manifest, parameters=source.manifest.parameters[1:]), "'wte'"),
        (changed(source.manifest, buffers=()), "'running'"),
        (changed(source.manifest, parameters=(first, *source.manifest.parameters)), "twice"),
        (changed(source.manifest, run=float("nan")), "run cannot be saved as JSON"),
        (changed(source.manifest, client_state=object()), "client_state cannot be saved as JSON"),
    ]
    for manifest, text in cases:
        writer = CheckpointWriter(tmp_path, "t", source.streams)
        feed(writer, source)
        with pytest.raises(ConfigError, match=text):
            writer.finish(manifest)
        assert listed(tmp_path) == []


def test_finish_with_missing_bytes_is_refused(tmp_path: Path) -> None:
    source = sample(1)
    writer = CheckpointWriter(tmp_path, "t", source.streams)
    feed(writer, source)
    writer.finish(source.manifest)
    writer = CheckpointWriter(tmp_path, "u", source.streams)
    source.content["residual", "scalar"] = source.content["residual", "scalar"][:1]
    feed(writer, source)
    with pytest.raises(ConfigError, match="the stream 'residual' lacks 1 of"):
        writer.finish(source.manifest)
    assert listed(tmp_path) == ["latest", "t"]


def test_invalid_streams_are_refused(tmp_path: Path) -> None:
    spec = TensorSpec("a", (2,), torch.float32)
    for streams, text in (
        ({"model": [spec, spec]}, "'a' is in the stream 'model' twice"),
        ({"../x": [spec]}, "not a valid name of a stream"),
        ({"index": [spec]}, "not a valid name of a stream"),
        ({"model": [TensorSpec("a", (2,), torch.complex128)]}, "does not support torch.complex128"),
    ):
        with pytest.raises(ConfigError, match=text):
            CheckpointWriter(tmp_path, "t", streams)
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        CheckpointWriter(tmp_path, "t", {"model": [spec]}, max_shard_bytes=0)
    assert listed(tmp_path) == []


def test_invalid_root_is_refused(tmp_path: Path) -> None:
    source = sample(1)
    with pytest.raises(MachineError, match="does not exist") as caught:
        CheckpointWriter(tmp_path / "a/b", "t", source.streams)
    assert f"mkdir -p {tmp_path / 'a/b'}" in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="is not a directory"):
        CheckpointWriter(tmp_path / "file", "t", source.streams)
    with pytest.raises(InfinityError):
        CheckpointWriter(Path("/proc"), "t", source.streams)


def test_checkpoint_larger_than_free_space_is_refused(tmp_path: Path) -> None:
    huge = {"model": [TensorSpec("a", (1 << 50,), torch.float32)]}
    with pytest.raises(DoesNotFitError, match=r"needs 4.00 PiB.*are free: .*missing"):
        CheckpointWriter(tmp_path / "root", "t", huge)
    assert listed(tmp_path) == []


# --- errors of the system ----------------------------------------------------------------------


def is_complete(root: Path, tag: str = "former") -> bool:
    with CheckpointReader(root, tag) as reader:
        assert list(reader.verify()) == []
    return find_tag(root, None) == tag


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount_point)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount")
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def test_disk_full_during_write_leaves_previous_checkpoint(small_disk: Path) -> None:
    source = sample(1, shapes={"a": (900, 1000)}, moments=())
    save(small_disk, "former", sample(2))
    for when in ("at once", "between", "at the end"):
        writer = CheckpointWriter(small_disk, "t", source.streams)
        filler = small_disk / "filler"
        if when == "between":
            feed_streams(writer, source, ("model",))
        if when == "at the end":
            feed_streams(writer, source, ("model", "residual", "frozen", "buffers"))
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with open(filler, "ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1))
        remaining = {"at once": ("model", "residual"), "between": ("residual",), "at the end": ()}
        with pytest.raises(DoesNotFitError, match="No space left on device") as caught:
            finish(writer, source, remaining[when])
        assert "free space there" in str(caught.value)
        filler.unlink()
        assert listed(small_disk) == ["former", "latest"], when
        assert is_complete(small_disk)
    with pytest.raises(DoesNotFitError, match="missing"):
        CheckpointWriter(small_disk, "t", {"model": [TensorSpec("a", (9 << 20,), torch.uint8)]})


def feed_streams(writer: CheckpointWriter, source: Any, streams: tuple[str, ...]) -> None:
    for (stream, _), data in source.content.items():
        if stream in streams:
            writer.write(stream, data)


def finish(writer: CheckpointWriter, source: Any, streams: tuple[str, ...]) -> None:
    feed_streams(writer, source, streams)
    writer.finish(source.manifest)


def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    """RLIMIT_FSIZE needs no privileges; it is per process, so a child sets it."""
    save(tmp_path, "former", sample(2))
    child = multiprocessing.get_context("fork").Process(
        target=write_with_size_limit, args=(tmp_path,)
    )
    child.start()
    child.join(forked.HANG_S)
    assert child.exitcode == 0
    assert listed(tmp_path) == ["former", "latest"]
    assert is_complete(tmp_path)


def write_with_size_limit(root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    source = sample(1, shapes={"a": (900, 1000)}, moments=())
    writer = CheckpointWriter(root, "t", source.streams)
    try:
        feed(writer, source)
    except MachineError as error:
        os._exit(0 if "ulimit -f" in str(error) else 3)
    os._exit(4)


def test_read_only_root_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "root", "former", sample(2))
    if os.geteuid() == 0:
        root = mount_read_only(tmp_path / "root")
    else:
        root = tmp_path / "root"
        root.chmod(0o500)
    try:
        with pytest.raises(MachineError, match=r"read-only|permissions"):
            CheckpointWriter(root, "t", sample(1).streams)
        assert is_complete(root)  # reading needs no write permission
        assert listed(root) == ["former", "latest"]
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", str(root)], check=True)
        else:
            root.chmod(0o700)


def mount_read_only(root: Path) -> Path:
    """Mount the directory read-only on itself, because root ignores permissions."""
    for step in (["--bind", str(root), str(root)], ["-o", "remount,bind,ro", str(root)]):
        done = subprocess.run(["mount", *step], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"may not mount: {done.stderr.strip()}")
    return root


@pytest.mark.parametrize("what", ["temporary", "root"])
def test_directory_removed_during_write_is_reported(tmp_path: Path, what: str) -> None:
    source = sample(1, shapes={"a": (900, 1000)})
    root = tmp_path / "root"
    save(root, "former", sample(2))
    for written in (("model",), tuple(source.streams)):
        writer = CheckpointWriter(root, "t", source.streams)
        feed_streams(writer, source, written)
        removed = root / "t.tmp" if what == "temporary" else root
        removed.rename(tmp_path / "moved")
        with pytest.raises(MachineError, match=r"not there|removed") as caught:
            finish(writer, source, tuple(set(source.streams) - set(written)))
        assert str(root / "t") in str(caught.value)
        if what == "root":
            assert not root.exists()
            (tmp_path / "moved").rename(root)
            directory.remove_stale(root)
        else:
            shutil.rmtree(tmp_path / "moved")
        assert listed(root) == ["former", "latest"]
        assert is_complete(root)


def test_replaced_directory_is_not_published(tmp_path: Path) -> None:
    source = sample(1)
    writer = CheckpointWriter(tmp_path, "t", source.streams)
    feed(writer, source)
    (tmp_path / "t.tmp").rename(tmp_path / "moved")
    (tmp_path / "t.tmp").mkdir()
    (tmp_path / "t.tmp/theirs").touch()
    with pytest.raises(InfinityError):
        writer.finish(source.manifest)
    assert (tmp_path / "t.tmp/theirs").exists()
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("seed", range(12))
def test_write_with_io_faults_is_correct_or_removes_files(tmp_path: Path, seed: int) -> None:
    """A write gives a correct checkpoint, or an error that leaves no files."""
    save(tmp_path, "former", sample(2))
    source = sample(1, shapes={"a": (1500, 1000), "b": (7,)})
    kinds = ("eio", "enospc", "short+delay+reorder")[seed % 3]
    with faulty_io(faults=f"seed={seed},kinds={kinds},rate=0.2"):
        writer = CheckpointWriter(tmp_path, "t", source.streams)
    failure = None
    try:
        feed(writer, source, 100_000)
        writer.finish(source.manifest)
    except (MachineError, DoesNotFitError) as error:
        failure = str(error)
    if failure is not None:
        assert kinds != "short+delay+reorder"
        assert str(tmp_path / "t") in failure
        assert listed(tmp_path) == ["former", "latest"]
        assert is_complete(tmp_path)
    else:
        assert same_content(content(tmp_path, "t"), source.content)
        assert is_complete(tmp_path, "t")


def test_publish_error_leaves_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sample(1)
    save(tmp_path, "former", sample(2))
    for name in ("fsync", "rename"):
        count = 0
        with monkeypatch.context() as patch:

            def failing(*args: Any, name: str = name) -> None:
                nonlocal count
                count += 1
                raise OSError(errno.EIO, "it hurts")

            writer = CheckpointWriter(tmp_path, "t", source.streams)
            feed(writer, source)
            patch.setattr(os, name, failing)
            with pytest.raises(MachineError, match="it hurts"):
                writer.finish(source.manifest)
        assert count == 1
        assert listed(tmp_path) == ["former", "latest"]
        assert is_complete(tmp_path)


def test_keyboard_interrupt_removes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sample(1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    writer = CheckpointWriter(tmp_path, "t", source.streams)
    with monkeypatch.context() as patch:
        patch.setattr(blocks.BlockWriter, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            feed(writer, source)
    assert listed(tmp_path) == []


# --- stale files -------------------------------------------------------------------------------


def test_next_writer_removes_only_stale_files(tmp_path: Path) -> None:
    source = sample(1)
    live = CheckpointWriter(tmp_path, "live", source.streams)
    leave_stale_files(tmp_path, "dead")
    assert (tmp_path / "dead.tmp/model-00001-of-00001.safetensors").exists()
    (tmp_path / "theirs.tmp").mkdir()
    (tmp_path / "theirs.tmp/model.safetensors").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/model.safetensors").touch()
    (tmp_path / "link.tmp").symlink_to(tmp_path / "linked")
    (tmp_path / ".link.infinity-lock").touch()
    leave_stale_files(tmp_path, "mixed")
    (tmp_path / "mixed.tmp/notes.txt").write_text("mine")
    save(tmp_path, "next", source)
    assert not (tmp_path / "dead.tmp").exists()
    assert not (tmp_path / ".dead.infinity-lock").exists()
    assert (tmp_path / "theirs.tmp/model.safetensors").exists()
    assert (tmp_path / "linked/model.safetensors").exists()
    assert listed(tmp_path / "mixed.tmp") == ["notes.txt"]
    assert (tmp_path / "live.tmp").exists()
    with pytest.raises(MachineError, match="not empty"):  # has a foreign file
        CheckpointWriter(tmp_path, "mixed", source.streams)
    feed(live, source)
    live.finish(source.manifest)
    assert is_complete(tmp_path, "live")


def leave_stale_files(root: Path, tag: str) -> None:
    """Create what a writer leaves if it is killed in the middle."""

    def write() -> None:
        source = sample(5)
        feed_streams(CheckpointWriter(root, tag, source.streams), source, ("model", "residual"))
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join(forked.HANG_S)
    assert child.exitcode == 0
    assert (root / f"{tag}.tmp").is_dir()


def test_reader_removes_stale_files(tmp_path: Path) -> None:
    save(tmp_path, "t", sample(1))
    leave_stale_files(tmp_path, "dead")
    assert is_complete(tmp_path, "t")
    assert listed(tmp_path) == ["latest", "t"]


def test_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Otherwise a DataLoader worker would make files of a killed run look in use."""
    source = sample(1)
    writer = CheckpointWriter(tmp_path, "t", source.streams)
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=lambda: started.set() or time.sleep(forked.HANG_S))
    child.start()
    assert started.wait(forked.HANG_S)
    try:
        assert writer._lock is not None
        writer._lock.close()  # as if this process died
        assert directory.remove_stale(tmp_path) == [tmp_path / "t.tmp"]
    finally:
        child.terminate()
        child.join()
        child.close()
        writer.abort()
    assert listed(tmp_path) == []


def test_abort_removes_files_and_is_idempotent(tmp_path: Path) -> None:
    source = sample(1)
    writer = CheckpointWriter(tmp_path / "root", "t", source.streams)
    feed_streams(writer, source, ("model",))
    writer.abort()
    writer.abort()
    assert listed(tmp_path) == []
    save(tmp_path / "root", "t", source)
    writer.abort()
    assert is_complete(tmp_path / "root", "t")


@pytest.mark.parametrize(
    ("umask", "folder", "file"), [(0o027, 0o750, 0o640), (0, 0o755, 0o644)], ids=oct
)
def test_permissions_follow_umask_without_group_write(
    tmp_path: Path, umask: int, folder: int, file: int
) -> None:
    before = os.umask(umask)
    try:
        path = save(tmp_path, "t", sample(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == folder
    for name in listed(path):
        assert stat.S_IMODE((path / name).stat().st_mode) == file, name
    assert stat.S_IMODE((tmp_path / "latest").stat().st_mode) == file


# --- latest, keep_last and prune ---------------------------------------------------------------


def test_latest_is_one_line_written_on_request(tmp_path: Path) -> None:
    assert find_tag(tmp_path, None) is None
    assert find_tag(tmp_path / "nowhere", None) is None
    save(tmp_path, "a", sample(1))
    save(tmp_path, "b", sample(1), save_latest=False)
    assert (tmp_path / "latest").read_bytes() == b"a\n"
    assert find_tag(tmp_path, None) == "a"
    assert find_tag(tmp_path, "b") == "b"
    (tmp_path / "latest").write_text("b")  # as DeepSpeed writes it
    assert find_tag(tmp_path, None) == "b"


def test_keep_last_removes_older_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "zzz").mkdir()
    (tmp_path / "zzz/manifest.json").write_text("{}")
    for step in range(1, 6):
        save(tmp_path, f"s{step}", sample(step), keep_last=3)
        expected = [f"s{n}" for n in range(max(step - 2, 1), step + 1)]
        assert listed(tmp_path) == ["latest", *expected, "zzz"]
    for invalid in (0, 1.5, "2"):
        with pytest.raises(ConfigError, match=f"keep_last is {invalid!r}"):
            save(tmp_path, "s6", sample(6), keep_last=invalid)
    assert listed(tmp_path) == ["latest", "s3", "s4", "s5", "zzz"]


def test_keep_last_keeps_the_latest_tag(tmp_path: Path) -> None:
    save(tmp_path, "best", sample(1))
    for step in range(3):
        save(tmp_path, f"s{step}", sample(step), keep_last=2, save_latest=False)
    assert listed(tmp_path) == ["best", "latest", "s2"]
    assert is_complete(tmp_path, "best")


def test_prune_removes_only_checkpoints(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, f"s{step}", sample(step))
    (tmp_path / "s1/notes.txt").write_text("mine")
    (tmp_path / "s2/extra").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "s0")
    assert [one.tag for one in checkpoints(tmp_path)] == ["s4", "s3", "s2", "s1", "s0"]
    before = listed(tmp_path)
    planned = prune(tmp_path, 1, dry_run=True)
    assert [one.tag for one in planned] == ["s3", "s0"]
    assert all(one.nbytes > 5000 for one in planned)
    assert listed(tmp_path) == before
    assert prune(tmp_path, 1) == planned
    assert listed(tmp_path) == ["alias", "latest", "s1", "s2", "s4"]
    assert is_complete(tmp_path, "s4")
    with pytest.raises(ConfigError, match="at least 1"):
        prune(tmp_path, 0)
    with pytest.raises(MachineError, match="nowhere"):
        prune(tmp_path / "nowhere", 1)


def test_failed_removal_is_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(2):
        save(tmp_path, f"s{step}", sample(step))

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "it hurts")

    with monkeypatch.context() as patch:
        patch.setattr(root_module.os, "rmdir", failing)
        with pytest.raises(MachineError, match="it hurts"):
            prune(tmp_path, 1)
    assert (tmp_path / "s0.tmp").exists()
    assert not (tmp_path / "s0").exists()
    assert directory.remove_stale(tmp_path) == [tmp_path / "s0.tmp"]
    assert listed(tmp_path) == ["latest", "s1"]
