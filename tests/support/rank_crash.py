"""Ranks that train with durable state in forked children (`support.forked`) and may be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from support import crash_child, forked
from support.small import ON_DISK, batch, settings, small_model
from torch.nn import functional

import infinity
from infinity.checkpoint.commits import CommitFiles, SmallFile
from infinity.storage.disk import Disk
from infinity.storage.run_dir import Scratch
from infinity.training.unit_updater import UnitUpdater

TOTAL_STEPS = 5
MICRO_BATCHES = 2
HANG_S = 300
Death = tuple[int, str, int]  # rank, name of a point ("after NAME": after the call), n-th call

# Calls that delimit the phases of a commit, of the update pass before it, and of a start.
POINTS: dict[str, tuple[type, str]] = {
    "unit updated": (UnitUpdater, "_finish"),
    "state synced": (Disk, "sync"),
    "record synced": (SmallFile, "sync"),
    "prepared": (CommitFiles, "prepare"),
    "committed": (CommitFiles, "commit"),
    "repaired": (CommitFiles, "repair"),
    "marked": (Scratch, "keep"),
}


def arm(death: Death) -> None:
    """Kill this process before or after the n-th call of a point."""
    _, name, number = death
    owner, method = POINTS[name.removeprefix("after ")]
    original: Callable[..., Any] = getattr(owner, method)
    left = number

    def wrapper(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not name.startswith("after "):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **options)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, wrapper)


def join(store: Path, rank: int, count: int, patience_s: float = HANG_S / 3) -> None:
    """Make the process group through a file store, with `patience_s` as its timeout."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count,
            timeout=timedelta(seconds=patience_s),
        )  # fmt: skip


def make_engine(folder: Path, placement: dict[str, Any], count: int, **more: Any) -> Any:
    """Return an engine with dropout from the rank's generator and a schedule stepped every step."""
    model = small_model(0)
    model.embedding.register_forward_hook(lambda *args: functional.dropout(args[-1], 0.1))
    more = {"durable": True, "resume": "auto", "gradient_accumulation_steps": MICRO_BATCHES} | more
    return infinity.initialize(
        model,
        settings(folder / "nvme", placement, **more),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )[0]


def train(
    folder: str,
    attempt: int,
    rank: int,
    count: int,
    placement: dict[str, Any],
    every: int,
    death: Death | None,
) -> None:
    """Resume from the last common commit; write `folder`/done-RANK at the end."""
    root = Path(folder)
    log = os.open(root / f"log-{attempt}-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # else the engine makes the process group
        join(root / f"store-{attempt}", rank, count)
    torch.manual_seed(rank)
    if death is not None and death[0] == rank:
        arm(death)
    unsharded = not placement.get("reshard_after_forward", False)
    prefetch_units = (
        2 if unsharded else 0
    )  # with prefetching these few units would have a slot each
    engine = make_engine(root, placement, count, commit_every=every, prefetch_units=prefetch_units)
    assert engine.plan.zero_stage == (2 if unsharded else 3)
    (root / f"from-{attempt}-{rank}").write_text(str(engine.global_steps))
    while engine.global_steps < TOTAL_STEPS:
        for micro in range(MICRO_BATCHES):
            number = engine.global_steps * MICRO_BATCHES + micro
            engine.backward(engine(batch(number * count + rank)))
            engine.step()
    result = crash_child.digest(engine)
    engine.close()
    (root / f"done-{rank}").write_text(result)


def journey(
    folder: Path,
    count: int,
    placement: dict[str, Any],
    every: int,
    deaths: list[Death | int | None],
) -> list[int]:
    """Start all ranks once for each death and once without; return the first step of each start.

    An int instead of a `Death` is the number of the library line at which a rank dies; the rank is
    that number modulo `count`. Every other rank must exit with an error message. At the end all
    ranks have the same digest, in `folder`/done-RANK.
    """
    (folder / "nvme").mkdir(parents=True)
    for attempt, death in enumerate([*deaths, None]):
        point, line = (None, death) if isinstance(death, int) else (death, None)
        dying_rank = point[0] if point is not None else line % count if line is not None else None
        children = [
            forked.start(
                train, str(folder), attempt, rank, count, placement, every, point,
                kill_at_line=line if rank == dying_rank else None,
            )
            for rank in range(count)
        ]  # fmt: skip
        for child in children:
            child.join(HANG_S)
        codes = [child.exitcode for child in children]
        for child in children:
            child.kill()
        logs = [(folder / f"log-{attempt}-{rank}").read_text() for rank in range(count)]
        if dying_rank is None:
            assert codes == [0] * count, "\n".join(logs)
            continue
        if line is not None and codes == [0] * count:  # the run has fewer lines
            continue
        assert codes[dying_rank] == -signal.SIGKILL, (death, codes, logs)
        for rank in set(range(count)) - {dying_rank}:
            assert codes[rank] == 1, (death, rank, codes, logs)
            assert "lost the others" in logs[rank] or "do not find" in logs[rank], logs[rank]
    first_steps = []
    for attempt in range(len(deaths) + 1):
        files = [folder / f"from-{attempt}-{rank}" for rank in range(count)]
        steps = {int(file.read_text()) for file in files if file.exists()}
        assert len(steps) <= 1, "ranks went on from different steps"
        first_steps += steps
    digests = {(folder / f"done-{rank}").read_text() for rank in range(count)}
    assert len(digests) == 1
    (folder / "done").write_text(digests.pop())
    return first_steps


def train_until_rank_hangs(folder: str, rank: int, count: int, patience_s: float | None) -> None:
    """Train two steps and gather large tensors; with `patience_s` rank 1 hangs after one step."""
    root = Path(folder)
    log = os.open(root / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    join(root / f"store-{patience_s}", rank, count, patience_s or HANG_S / 3)
    with make_engine(root, ON_DISK, count, durable=False, resume="never") as engine:
        for number in range(2 * MICRO_BATCHES):
            if number == MICRO_BATCHES and patience_s is not None and rank == 1:
                (root / "hangs").write_text("")
                time.sleep(HANG_S)
            engine.backward(engine(batch(number * count + rank)))
            engine.step()
        gathered = engine.ranks.gather(
            torch.full((1 << 15,), rank)
        )  # large messages take another path
        assert [set(row.tolist()) for row in gathered] == [{other} for other in range(count)]


def launched(folder: str, deaths: list[Death]) -> None:
    """Run ranks as functions under torchrun's launcher; each start but the last has a death."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    host = "127.0.0.1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="restart", rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:0", local_addr=host, max_restarts=len(deaths), monitor_interval=0.1,
        start_method="fork",
    )  # fmt: skip
    elastic_launch(config, started)(folder, [*deaths, None])


def started(folder: str, deaths: list[Death | None]) -> None:
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    train(folder, attempt, rank, int(os.environ["WORLD_SIZE"]), ON_DISK, 1, deaths[attempt])
