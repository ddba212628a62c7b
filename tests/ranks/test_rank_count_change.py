"""Tests of resuming on any number of ranks what any other number saved, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.crash_child import digest
from support.models import CASES
from support.ranks import make_engine, on_ranks
from support.trainer import make_config, train_on

from infinity.distributed.context import DistContext

COUNTS = (1, 2, 3, 4)
MICRO_BATCHES = 12  # micro-batches of a step, over all ranks
CASE = CASES["frozen"]


def train(
    count: int, folder: Path, steps: int, *, load: Path | None = None, **overrides: object
) -> tuple[list[float], str]:
    """Train `steps` steps; return losses in the order of batches, and a digest of all state.

    With `load`, weights and seed start from other values: those of the checkpoint must count.
    """
    (nvme := folder / "nvme").mkdir(parents=True)
    config = make_config(
        ("disk", "disk", "disk"), precision="bf16", seed=5 if load is None else 99,
        gradient_accumulation_steps=MICRO_BATCHES // count, **overrides,
    )  # fmt: skip
    models = [CASE.build(seed=int(load is not None)) for _ in range(count)]
    save = None if config.get("durable") or load is not None else folder / "saved"

    def work(ranks: DistContext) -> tuple[list[float], str]:
        with make_engine(ranks, models[ranks.rank], config, nvme, groups=CASE.groups) as engine:
            if load is not None:
                engine.load_checkpoint(load)
            first = engine.global_steps
            batches = CASE.batches((first + steps) * MICRO_BATCHES)[first * MICRO_BATCHES :]
            losses = train_on(engine, batches[ranks.rank :: count], save=save).losses
            all_losses = ranks.gather(torch.tensor(losses, dtype=torch.float64))
            return all_losses.T.flatten().tolist(), digest(engine)

    found = on_ranks(count, work)
    assert found.count(found[0]) == count
    return found[0]


@pytest.mark.big
@pytest.mark.parametrize(("durable", "moments"), [(False, "8bit"), (True, "bf16_stochastic")])
def test_resume_between_all_rank_counts(durable: bool, moments: str, tmp_path: Path) -> None:
    overrides = {"durable": durable, "optimizer": {"moments": moments}}
    losses, end = train(1, tmp_path / "unresumed", 3, **overrides)
    saved = {}
    for count in COUNTS:
        folder = tmp_path / f"of-{count}"
        train(count, folder, 2, **overrides)
        run_root = folder / "nvme" / ("rank-0" if count > 1 else "")
        saved[count] = next(run_root.glob("infinity-run-*")) if durable else folder / "saved"
    for one, other in itertools.permutations(COUNTS, 2):
        found = train(other, tmp_path / f"{one}-{other}", 1, load=saved[one], **overrides)
        assert found == (losses[-MICRO_BATCHES:], end), f"saved on {one}, resumed on {other}"
