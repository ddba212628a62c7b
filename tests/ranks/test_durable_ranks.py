"""Tests of durable steps on several ranks: whichever is killed, all resume from a common step."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked
from support.models import CASES
from support.optimizers import ELEMENTWISE, WHOLE, Maker
from support.rank_crash import HANG_S, POINTS, Death, journey, launched
from support.ranks import ThreadRanks, make_engine, on_ranks
from support.small import MIXED, ON_DEVICE, ON_DISK
from support.trainer import make_config
from torch import Tensor
from unit.checkpoint.test_checkpoint_cli import run

from infinity.checkpoint.commits import COMMIT_NAMES, CommitFiles, CommitRecord
from infinity.checkpoint.durable_reader import DurableReader
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError, InfinityError, TransferError
from infinity.storage.run_dir import Scratch

PLACEMENTS: dict[str, dict[str, Any]] = {
    "disk": ON_DISK,
    "mixed": MIXED,
    "device": ON_DEVICE | {"shared": False},
    "shared": MIXED | {"weights": "host", "shared": True},
}
COUNTS = (2, 3, 4)
# Whether weights stay unsharded, steps between commits, and the placement.
VARIANTS = list(itertools.product((False, True), (1, 2), PLACEMENTS))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return, by number of ranks, the digest at the end of a run that is not killed."""

    @cache
    def digest(count: int) -> str:
        folder = tmp_path_factory.mktemp("undisturbed")
        journey(folder, count, ON_DEVICE, 1, [])
        return (folder / "done").read_text()

    return digest


def test_ranks_killed_in_commit_phases_resume(
    tmp_path: Path, expected: Callable[[int], str]
) -> None:
    """A commit prepared on one rank only is rolled back; one prepared on all is completed."""
    deaths: list[Death | int | None] = [
        (1, "marked", 1),  # rank 0 is marked already: the start dies
        (1, "prepared", 2),  # the first prepared record is that of the initial state
        (0, "committed", 3),
        (1, "after committed", 1),
    ]
    folder = tmp_path / "here"
    start_steps = journey(folder, 2, ON_DISK | {"reshard_after_forward": True}, 1, deaths)
    assert (folder / "done").read_text() == expected(2)
    # The step at each start that a rank reaches: 0 without a commit; after three updates; after 4.
    assert start_steps == [0, 0, 3, 4]
    for rank in range(2):  # the same run directory at every start
        left = list((folder / "nvme" / f"rank-{rank}").glob("infinity-run-*"))
        assert len(left) == 1


# Deaths, and the steps at which the starts begin.
DEATHS: list[tuple[list[Death], list[int]]] = [
    ([(1, "committed", 3)], [0, 2]),
    ([(0, "prepared", 3), (1, "unit updated", 1), (0, "after committed", 2)], [0, 1, 1, 3]),
]


@pytest.mark.parametrize(
    ("deaths", "steps"), [DEATHS[0], pytest.param(*DEATHS[1], marks=pytest.mark.big)]
)
def test_launcher_restarts_killed_ranks(
    tmp_path: Path, expected: Callable[[int], str], deaths: list[Death], steps: list[int]
) -> None:
    (tmp_path / "nvme").mkdir()
    log = tmp_path / "log"
    launcher = forked.start(launched, str(tmp_path), deaths, out=log)
    launcher.join(HANG_S)
    assert launcher.exitcode == 0, log.read_text()
    assert {(tmp_path / f"done-{rank}").read_text() for rank in range(2)} == {expected(2)}
    start_steps = [{int((tmp_path / f"from-{n}-{r}").read_text()) for r in range(2)}
              for n in range(len(steps))]  # fmt: skip
    assert start_steps == [{step} for step in steps]


# Every rank of every count at each point. The other settings rotate: each of their values occurs
# with each point, and with each rank.
KILLED = [
    (point, count, rank)
    for point in [*POINTS, *(f"after {point}" for point in POINTS)]
    for count in COUNTS
    for rank in range(count)
]


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("point", "count", "rank", "unsharded", "commit_every", "name"),
    [
        (*killed, *variant)
        for killed, variant in zip(KILLED, itertools.cycle(VARIANTS), strict=False)
    ],
)
def test_ranks_killed_at_every_commit_point_resume(
    tmp_path: Path,
    expected: Callable[[int], str],
    point: str,
    count: int,
    rank: int,
    unsharded: bool,
    commit_every: int,
    name: str,
) -> None:
    """The first process is killed; the second resumes and is killed as well."""
    nth = 1 if "repaired" in point or "marked" in point else 2
    deaths: list[Death | int | None] = [(rank, point, nth), (rank, "prepared", 1)]
    if "repaired" in point:
        deaths.insert(0, (rank, "prepared", 2))
    journey(
        tmp_path,
        count,
        PLACEMENTS[name] | {"reshard_after_forward": not unsharded},
        commit_every,
        deaths,
    )
    assert (tmp_path / "done").read_text() == expected(count)


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_killed_at_random_lines_resume(
    tmp_path: Path, expected: Callable[[int], str], count: int
) -> None:
    rng = random.Random(count)
    for unsharded, commit_every, name in VARIANTS:
        lines = [rng.randrange(5_000, 80_000) for _ in range(4)]
        folder, placement = (
            tmp_path / f"{unsharded}-{commit_every}-{name}",
            PLACEMENTS[name] | {"reshard_after_forward": not unsharded},
        )
        journey(folder, count, placement, commit_every, [*lines])
        assert (folder / "done").read_text() == expected(count), (
            unsharded,
            commit_every,
            name,
            lines,
        )


# --- what a start finds --------------------------------------------------------------------------

CASE = CASES["frozen"]


def train_durably(
    count: int,
    folder: Path,
    steps: int,
    load: Path | None = None,
    optimizer: Maker | None = None,
    before_step: Callable[[Engine], None] = lambda _: None,
    batches_per_step: int = 2,
    **overrides: Any,
) -> dict[str, Tensor]:
    """Train ranks in threads, from where they resume, up to a step; return the masters.

    A step has `together` micro-batches over all ranks.
    """
    config = make_config(("disk", "host", "disk"), precision="bf16", seed=5)
    config |= {"durable": True, "commit_every": 1} | overrides
    config["gradient_accumulation_steps"] = max(1, batches_per_step // count)
    if optimizer is not None:
        config.pop("optimizer")
    options = {} if optimizer is None else {"optimizer": optimizer}
    models = [CASE.build() for _ in range(count)]
    batches = CASE.batches(steps * batches_per_step)

    def work(ranks: DistContext) -> dict[str, Tensor]:
        model = models[ranks.rank]
        with make_engine(ranks, model, config, folder, groups=CASE.groups, **options) as engine:
            if load is not None:
                engine.load_checkpoint(load)
            for batch in batches[engine.global_steps * batches_per_step :][ranks.rank :: count]:
                engine.backward(batch.call(engine))
                before_step(engine)
                engine.step()
            return {n: v.clone() for n, v in engine.state_dict(master=True).items()}

    return on_ranks(count, work)[0]


train_six = partial(train_durably, batches_per_step=6)  # divisible among one, two or three ranks


def run_dirs(folder: Path, rank: int) -> list[Path]:
    return list((folder / f"rank-{rank}").glob("infinity-run-*"))


def test_last_commit_loads_on_other_rank_count(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    expected = train_six(1, third, 6)
    train_six(3, first, 2)
    (run_dir,) = run_dirs(first, 0)
    with pytest.raises(
        ConfigError, match="it is of 3 ranks, this run has 2: start that number"
    ) as caught:
        train_six(2, first, 4, resume="auto")
    assert "engine.load_checkpoint of that directory" in str(caught.value)
    with pytest.raises(ConfigError, match="it is of 3 ranks, this run has 1"):
        train_six(1, first, 4, resume="auto")
    train_six(2, second, 4, load=run_dir)
    (other_dir,) = run_dirs(second, 1)
    (single_dir,) = third.glob("infinity-run-*")
    with DurableReader(other_dir) as two, DurableReader(single_dir) as one:
        assert two.streams == one.streams
        assert list(two.verify()) == []
        assert {path.parent.name for path in two.directories} == {"rank-0", "rank-1"}
    code, out, _ = run("verify", second)
    assert code == 0
    assert f"{run_dirs(second, 0)[0]}: sound" in out
    found = train_six(2, second, 6, resume="auto")
    assert found.keys() == expected.keys()
    assert [n for n, value in found.items() if not torch.equal(value, expected[n])] == []


def test_commit_waits_until_all_ranks_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next pass would overwrite the only complete step of a rank killed before that."""
    prepare, commit, synchronize = CommitFiles.prepare, CommitFiles.commit, ThreadRanks.synchronize
    arrived: dict[str, threading.Event] = defaultdict(threading.Event)  # reached by rank 0, by step
    prepared = set()

    def rank_of(files: CommitFiles) -> str:
        return files._directory.parent.name

    def wait_and_prepare(files: CommitFiles, record: CommitRecord) -> None:
        if rank_of(files) == "rank-1":
            assert arrived[f"commits update {record.step}"].wait(HANG_S)
        prepare(files, record)
        prepared.add((rank_of(files), record.step))

    def check_and_commit(files: CommitFiles, record: CommitRecord) -> None:
        arrived[f"commits update {record.step}"].set()
        assert {(f"rank-{rank}", record.step) for rank in range(2)} <= prepared
        commit(files, record)

    def record_synchronize(ranks: ThreadRanks, doing: str, *notes: int, **error: Any) -> Any:
        if ranks.rank == 0:
            arrived[doing].set()
        return synchronize(ranks, doing, *notes, **error)

    monkeypatch.setattr(CommitFiles, "prepare", wait_and_prepare)
    monkeypatch.setattr(CommitFiles, "commit", check_and_commit)
    monkeypatch.setattr(ThreadRanks, "synchronize", record_synchronize)
    train_durably(2, tmp_path, 2)
    assert ("rank-1", 2) in prepared


@pytest.mark.parametrize("name", ["NAdam", "Adafactor"])
def test_torch_optimizer_state_is_committed(tmp_path: Path, name: str) -> None:
    """Step counts are those after the pass; each rank commits those of its parameters."""
    optimizer = {**ELEMENTWISE, **WHOLE}[name]
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    expected = train_six(1, folders[0], 3, optimizer=optimizer)
    for count in (1, 2):
        train_six(count, folders[count], 1, optimizer=optimizer)
        train_six(count, folders[count], 2, optimizer=optimizer, resume="auto")
    (run_dir,) = run_dirs(folders[2], 0)
    for values in (
        train_six(1, folders[1], 3, optimizer=optimizer, resume="auto"),
        train_six(3, folders[3], 3, load=run_dir, optimizer=optimizer),
    ):
        assert [n for n, v in values.items() if not torch.equal(v, expected[n])] == []


def test_rank_with_missing_shards_is_named(tmp_path: Path) -> None:
    train_durably(2, tmp_path, 2)
    (run_dir,) = run_dirs(tmp_path, 1)
    run_dir.rename(tmp_path / "away")
    message = r"cannot be resumed: rank 1 found no directory of it below .* that fits"
    for resume in ("auto", str(run_dirs(tmp_path, 0)[0])):
        with pytest.raises(ConfigError, match=message):
            train_durably(2, tmp_path, 2, resume=resume)
    with pytest.raises(CheckpointError, match="the directories of rank 1 are missing"):
        DurableReader(run_dirs(tmp_path, 0)[0])
    (tmp_path / "away").rename(run_dir)
    with pytest.raises(ConfigError, match="it is of 2 ranks, this run has 4"):
        train_durably(4, tmp_path, 2, resume="auto")
    train_durably(2, tmp_path, 2)  # a second run next to it
    with pytest.raises(ConfigError, match="2 durable runs fit the model"):
        train_durably(2, tmp_path, 3, resume="auto")
    expected = train_durably(2, tmp_path, 3, resume=str(run_dir))
    found = train_durably(2, tmp_path, 3, resume=str(run_dir))
    assert [n for n, value in found.items() if not torch.equal(value, expected[n])] == []


def test_swapped_rank_shards_are_rejected_by_name(tmp_path: Path) -> None:
    """As on machines with one rank and one drive each that are restarted in another order."""
    models = [CASE.build() for _ in range(4)]

    def start(ranks: DistContext, order: Sequence[int]) -> int:
        ranks.local_rank, ranks.local_count = 0, 1
        node = tmp_path / f"node-{order[ranks.rank]}"
        node.mkdir(exist_ok=True)
        config = make_config(("disk", "host", "disk"), precision="bf16", seed=5)
        config |= {"durable": True, "resume": "auto", "commit_every": 1}
        with make_engine(ranks, models.pop(), config, node, groups=CASE.groups) as engine:
            engine.backward(CASE.batches(2)[ranks.rank].call(engine))
            engine.step()
            return engine.global_steps

    assert on_ranks(2, lambda ranks: start(ranks, (0, 1))) == [1, 1]
    with pytest.raises(ConfigError, match=r"a durable run in directories of other ranks: .*rank-1"):
        on_ranks(2, lambda ranks: start(ranks, (1, 0)))
    models += [CASE.build() for _ in range(2)]
    assert on_ranks(2, lambda ranks: start(ranks, (0, 1))) == [2, 2]


def test_leftovers_of_dead_ranks_are_removed(tmp_path: Path) -> None:
    leftovers = [tmp_path, *(tmp_path / f"rank-{rank}" for rank in range(4))]
    dead = []
    for path in leftovers:
        path.mkdir(exist_ok=True)
        scratch = Scratch.create(path)
        scratch._lock.close()  # as when a process is killed
        dead.append(scratch.directory)
    train_durably(2, tmp_path, 1)
    assert [path for path in dead if path.exists()] == []
    assert all(run_dirs(tmp_path, rank) for rank in range(2))


def test_ranks_without_common_commit_are_rejected(tmp_path: Path) -> None:
    """The files of one rank are set back, as if restored from a copy of its drive."""
    train_durably(2, tmp_path, 2)
    (run_dir,) = run_dirs(tmp_path, 1)
    shutil.copytree(run_dir, tmp_path / "copy")
    train_durably(2, tmp_path, 5, resume="auto")
    for name in COMMIT_NAMES:
        shutil.copy(tmp_path / "copy" / name, run_dir / name)
    with pytest.raises(
        CheckpointError, match=r"no commit in common: rank 0 has 5 .* rank 1 has 2 "
    ):
        train_durably(2, tmp_path, 6, resume="auto")


@pytest.mark.parametrize("how", ["exchanged", "copied over"])
def test_directory_of_other_rank_is_rejected(tmp_path: Path, how: str) -> None:
    train_durably(2, tmp_path, 2)
    first, second = tmp_path / "rank-0", tmp_path / "rank-1"
    second.rename(tmp_path / "away")
    if how == "exchanged":
        first.rename(second)
        (tmp_path / "away").rename(first)
    else:
        shutil.copytree(first, second)
    run_dir = run_dirs(tmp_path, 0)[0]
    for resume in ("auto", str(run_dir)):
        with pytest.raises(ConfigError, match="holds the shards of rank 0, not of rank 1"):
            train_durably(2, tmp_path, 3, resume=resume)


def test_ranks_of_different_histories_are_rejected(tmp_path: Path) -> None:
    """Both resumed from the same commit, with equal numbers of commits and steps since."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    train_durably(2, one, 1)
    shutil.copytree(one, other)
    for folder in (one, other):
        train_durably(2, folder, 4, resume="auto")
    shutil.rmtree(one / "rank-1")
    shutil.copytree(other / "rank-1", one / "rank-1")
    message = r"no commit in common: rank 0 has 4 \(update 4, start "
    with pytest.raises(CheckpointError, match=message):
        train_durably(2, one, 5, resume="auto")
    with pytest.raises(CheckpointError, match=message):
        DurableReader(run_dirs(one, 0)[0])


def test_ranks_ending_at_different_steps_resume_at_common_step(tmp_path: Path) -> None:
    """One fails in a step after the barrier: when it closes, it prepares the step before."""
    (sound := tmp_path / "whole").mkdir()
    expected = train_durably(2, sound, 4)

    def raise_lost(*_: Any) -> None:
        raise TransferError("a gradient was lost", path="/", offset=0, length=1, errno=5)

    def fail_on_one(engine: Engine) -> None:
        if engine.ranks.rank == 1 and engine.global_steps == 3:
            engine._step_runner._make_job = raise_lost  # type: ignore[method-assign]

    with pytest.raises(InfinityError, match="a gradient was lost"):
        train_durably(2, tmp_path, 4, commit_every=2, before_step=fail_on_one)
    found = train_durably(2, tmp_path, 4, resume="auto")
    assert [n for n, value in found.items() if not torch.equal(value, expected[n])] == []
