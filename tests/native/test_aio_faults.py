"""Tests of injected I/O faults: each kind has its effect, and successful requests are correct."""

from __future__ import annotations

import contextlib
import errno
import random
from pathlib import Path

import pytest
from support.native_io import BLOCK, Buffer, make_file, noise
from support.stalled import LONG_S, wait_all

from infinity._aio import READ, WRITE, AioError, Engine, File, Ticket

NUM_BLOCKS = 64
DATA = noise(NUM_BLOCKS * BLOCK, seed=7)


def faulty(backend: str, faults: str, queue_depth: int = 4, stuck_after_s: float = 600.0) -> Engine:
    return Engine(
        backend=backend,
        block_size=BLOCK,
        queue_depth=queue_depth,
        stuck_after_s=stuck_after_s,
        faults=faults,
    )


def outcome(ticket: Ticket) -> int:
    """Return the error number, 0 on success."""
    try:
        ticket.wait()
    except AioError as error:
        return error.errno or -1
    return 0


def outcomes(engine: Engine, op: int, file: File, buffer: Buffer) -> list[int]:
    """Transfer every block as a separate request; return their error numbers, 0 on success."""
    tickets = [
        engine.submit(op, [(file, i * BLOCK, BLOCK, buffer.address + i * BLOCK)], keep=buffer)
        for i in range(NUM_BLOCKS)
    ]
    assert wait_all(tickets, LONG_S)
    return [outcome(ticket) for ticket in tickets]


def wrong_blocks(got: bytes, want: bytes = DATA) -> list[int]:
    starts = range(0, len(want), BLOCK)
    return [i // BLOCK for i in starts if got[i : i + BLOCK] != want[i : i + BLOCK]]


@pytest.mark.parametrize(("kind", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_injected_errors_affect_only_failed_blocks(
    backend: str, tmp_path: Path, kind: str, number: int
) -> None:
    file = make_file(tmp_path / "f", bytes(len(DATA)))
    engine = faulty(backend, f"seed=1,kinds={kind},rate=0.3")
    written = outcomes(engine, WRITE, file, Buffer(len(DATA), DATA))
    assert set(written) == {0, number}
    assert 8 <= written.count(number) <= 32
    # Failed writes changed nothing; successful ones are complete.
    on_disk = (tmp_path / "f").read_bytes()
    assert wrong_blocks(on_disk) == [i for i, error in enumerate(written) if error]
    target = Buffer(len(DATA), b"\xaa" * len(DATA))
    read = outcomes(engine, READ, file, target)
    assert (read.count(errno.EIO) > 5) == (kind == "eio")
    failed = {i for i, error in enumerate(read) if error}
    assert set(wrong_blocks(target.bytes(), on_disk)) == failed
    engine.close()


@pytest.mark.parametrize(
    ("direct", "kind", "rate"),
    [
        ("off", "short", 1.0),
        ("auto", "short", 0.3),
        ("auto", "delay", 1.0),
        ("off", "delay", 0.3),
        ("off", "reorder", 0.3),
        ("auto", "reorder", 1.0),
        ("auto", "short+delay+reorder", 0.3),
        ("off", "short+delay+reorder", 1.0),
    ],
)
def test_harmless_faults_do_not_change_data(
    backend: str, tmp_path: Path, kind: str, direct: str, rate: float
) -> None:
    file = make_file(tmp_path / "f", bytes(len(DATA)), direct=direct)
    engine = faulty(backend, f"seed=2,kinds={kind},rate={rate}")
    assert set(outcomes(engine, WRITE, file, Buffer(len(DATA), DATA))) == {0}
    target = Buffer(len(DATA))
    assert set(outcomes(engine, READ, file, target)) == {0}
    assert target.bytes() == DATA == (tmp_path / "f").read_bytes()
    counters = engine.counters()
    assert counters["read_bytes"] == counters["write_bytes"] == len(DATA)
    engine.close()


def test_reorder_fault_changes_completion_order(backend: str, tmp_path: Path) -> None:
    """The later of two requests sometimes completes first."""
    file = make_file(tmp_path / "f", DATA)
    target = Buffer(len(DATA))
    engine = faulty(backend, "seed=3,kinds=reorder,rate=0.4", queue_depth=2)
    overtaken = 0
    for pair_index in range(30):
        pair = [
            engine.submit(READ, [(file, block * BLOCK, BLOCK, target.address + block * BLOCK)])
            for block in (2 * pair_index, 2 * pair_index + 1)
        ]
        assert wait_all(pair)
        earlier, later = (ticket.times_ns[2] for ticket in pair)  # polling done() could miss it
        overtaken += later < earlier
    assert overtaken > 3
    engine.close()


def test_flip_fault_flips_one_bit_per_block(backend: str, tmp_path: Path) -> None:
    file = make_file(tmp_path / "f", DATA)
    target = Buffer(len(DATA))
    engine = faulty(backend, "seed=4,kinds=flip,rate=0.25")
    assert set(outcomes(engine, READ, file, target)) == {0}
    wrong = wrong_blocks(target.bytes())
    assert 6 <= len(wrong) <= 28
    bits = int.from_bytes(target.bytes()) ^ int.from_bytes(DATA)
    assert bits.bit_count() == len(wrong)  # one bit in each block
    assert (tmp_path / "f").read_bytes() == DATA
    engine.close()


def test_faults_are_determined_by_seed(backend: str, tmp_path: Path) -> None:
    def pattern(seed: int) -> list[int]:
        file = make_file(tmp_path / "f", DATA)
        engine = faulty(backend, f"seed={seed},kinds=eio,rate=0.3")
        errors = outcomes(engine, READ, file, Buffer(len(DATA)))
        engine.close()
        return errors

    assert pattern(5) == pattern(5)
    assert pattern(5) != pattern(6)


SEEDS = [
    pytest.param(seed, marks=[] if seed in (0, 7) else [pytest.mark.big]) for seed in range(24)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_all_kinds_give_data_or_error(backend: str, tmp_path: Path, seed: int) -> None:
    """Each request has correct data or an expected error, and the engine closes; without flips."""
    rng = random.Random(seed)
    file = make_file(tmp_path / "f", DATA)
    kinds = "eio+enospc+short+delay+reorder+stuck"
    engine = faulty(backend, f"seed={seed},kinds={kinds},rate=0.05", stuck_after_s=0.2)
    targets, tickets, ranges = [], [], []
    for _ in range(12):
        first = rng.randrange(NUM_BLOCKS - 4)
        length = rng.randrange(1, 4 * BLOCK)
        target = Buffer(length)
        segment = (file, first * BLOCK, length, target.address)
        tickets.append(engine.submit(READ, [segment], priority=rng.randrange(3), keep=target))
        targets.append(target)
        ranges.append((first * BLOCK, length))
    with contextlib.suppress(AioError):
        wait_all(tickets, LONG_S)
    with contextlib.suppress(AioError):
        engine.close()
    for ticket, target, (offset, length) in zip(tickets, targets, ranges, strict=True):
        assert ticket.done()
        number = outcome(ticket)
        assert number in (0, errno.EIO, errno.ETIMEDOUT, errno.ECANCELED)
        if number == 0:
            assert target.bytes(0, length) == DATA[offset : offset + length]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rate=0.1", "seed is missing"),
        ("seed=one", "not a number"),
        ("seed=1,kinds=fire", "unknown kind 'fire'"),
        ("seed=1,rate=1.5", "between 0 and 1"),
        ("seed=1,often=yes", "unknown setting 'often'"),
    ],
)
def test_invalid_fault_settings_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Engine(faults=text, stuck_after_s=1.0)


def test_backend_reason_names_fault_seed(backend: str) -> None:
    engine = faulty(backend, "seed=99,kinds=delay")
    assert "faults of seed 99" in engine.backend_reason
    engine.close()
