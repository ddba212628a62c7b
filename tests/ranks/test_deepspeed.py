"""Tests of the DeepSpeed interface on several ranks: stages, calls and results."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.test_processes import pytestmark, run_ranks  # noqa: F401
from support import deepspeed_rank
from support.models import CASES
from support.ranks import make_engine, on_ranks
from support.trainer import make_config, masters_of, train_reference

import infinity
from infinity.distributed.context import DistContext
from infinity.errors import ConfigError, TrainingError
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed.engine import DeepSpeedEngine

GPT = CASES["gpt"]
ON_DISK = ("disk", "disk", "disk")
BATCH = 8  # samples of an update; a micro-batch has 2
STEPS = 2


def make_deepspeed_config(stage: int, folder: Path, **overrides: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage > 1:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "gradient_clipping": 0.5,
        "infinity": {"chunk_size": 2048, "cpu": {"num_threads": 1}},
        **overrides,
    }


def train(ranks: DistContext, models: Any, config: dict[str, Any]) -> dict[str, Any]:
    engine, *_ = infinity.initialize(model=models[ranks.rank], config=config, ranks=ranks)
    assert isinstance(engine, infinity.DeepSpeedEngine)
    with engine:
        steps = engine.gradient_accumulation_steps()
        assert engine.get_batch_info() == (BATCH, 2, steps)
        assert steps * ranks.count * 2 == BATCH
        assert (engine.global_rank, engine.world_size) == (ranks.rank, ranks.count)
        assert engine.get_data_parallel_world_size() == engine.dp_world_size == ranks.count
        assert engine.zero_optimization_stage() == config["zero_optimization"]["stage"]
        losses = []
        for batch in GPT.batches(STEPS * BATCH // 2)[ranks.rank :: ranks.count]:
            loss = batch.call(engine)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.global_samples == STEPS * BATCH
        all_losses = ranks.gather(torch.tensor(losses, dtype=torch.float64)).T.flatten().tolist()
        found = {"losses": all_losses, "norm": engine.get_global_grad_norm()}
        return found | {f"master {n}": v for n, v in masters_of(engine).items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(
        torch.equal(v, other[n]) if isinstance(v, torch.Tensor) else v == other[n]
        for n, v in one.items()
    )


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, False), (1, False), (2, True), (2, False), (3, True), (3, False)]
)
def test_zero_stages_match_single_rank_bitwise(stage: int, offload: bool, tmp_path: Path) -> None:
    config = make_deepspeed_config(stage, tmp_path)
    if not offload:
        config["zero_optimization"] = {"stage": stage}
    runs = []
    for count in (1, 2):
        models = [GPT.build() for _ in range(count)]
        runs += on_ranks(count, partial(train, models=models, config=config))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_no_sync_extends_accumulation_window(tmp_path: Path) -> None:
    """As in scripts for DDP: more micro-batches than configured, with a step after the last."""
    models, batches, config = [GPT.build() for _ in range(2)], GPT.batches(12), make_config(ON_DISK)
    one = config | {"gradient_accumulation_steps": 6}
    expected = train_reference(GPT.build(), batches, one, groups=GPT.groups)

    def work(ranks: DistContext) -> list[float | None]:
        norms, options = [], {"groups": GPT.groups, "engine_class": DeepSpeedEngine}
        with make_engine(ranks, models[ranks.rank], config, tmp_path, **options) as engine:
            assert isinstance(engine, DeepSpeedEngine)
            for number, batch in enumerate(batches[ranks.rank :: 2], 1):
                last = number % 3 == 0
                with nullcontext() if last else engine.no_sync():
                    engine.backward(batch.call(engine) / 3)
                    assert engine.is_gradient_accumulation_boundary() is last
                if last:
                    engine.step()
                    norms.append(engine.grad_norm)
            with engine.no_sync(), pytest.raises(TrainingError, match="no_sync"):
                engine.step()
            assert same(masters_of(engine), expected.masters)
        return norms

    assert on_ranks(2, work) == [expected.norms] * 2


def test_batch_sizes_count_all_ranks(tmp_path: Path) -> None:
    config = make_deepspeed_config(1, tmp_path)
    message = r"train_batch_size 8 is not .* 2 x gradient_accumulation_steps 1 .* x 3 processes"
    models = [GPT.build() for _ in range(3)]

    def refused(ranks: DistContext) -> None:
        with pytest.raises(ConfigError, match=message):
            infinity.initialize(model=models[ranks.rank], config=config, ranks=ranks)

    on_ranks(3, refused)

    def changed(ranks: DistContext) -> None:
        new_config = make_deepspeed_config(1, tmp_path, train_batch_size=12)
        engine, *_ = infinity.initialize(model=models[ranks.rank], config=new_config, ranks=ranks)
        assert isinstance(engine, infinity.DeepSpeedEngine)
        with engine:
            engine.set_train_batch_size(24)
            assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (24, 4)
            with pytest.raises(ConfigError, match=r"2 samples on each of 3 ranks(.|\n)*24, or"):
                engine.set_train_batch_size(28)

    on_ranks(3, changed)


def test_deepspeed_script_on_ranks_matches_single_rank(tmp_path: Path) -> None:
    (nvme := tmp_path / "nvme").mkdir()
    (file := tmp_path / "ds.json").write_text(json.dumps(make_deepspeed_config(3, nvme)))
    job = {"config": str(file), "samples": 24}
    (single,) = run_ranks(1, tmp_path / "alone", deepspeed_rank.main, **job)
    found = run_ranks(2, tmp_path / "two", deepspeed_rank.main, **job)
    in_turn = list(itertools.chain(*zip(*(one["losses"] for one in found), strict=True)))
    assert in_turn == single["losses"]
    for one in found:
        assert same(one["masters"], single["masters"])
        assert one["sizes"] == (BATCH, 2, 2)
        assert one["samples"] == 24
        assert one["mean"] == pytest.approx(single["mean"], rel=1e-12)
    ranked_model, single_model = (
        torch.load(tmp_path / n / "out" / "model.bin") for n in ("two", "alone")
    )
    assert same(ranked_model, single_model)
    assert list(nvme.iterdir()) == []


def test_gathered_parameters_broadcast_and_async_save_replaces_tag(
    tmp_path: Path,
) -> None:
    models = [GPT.build() for _ in range(2)]

    def work(ranks: DistContext) -> Any:
        model, config = models[ranks.rank], make_config(("host", "host", "host"))
        with make_engine(ranks, model, config, tmp_path, engine_class=DeepSpeedEngine) as engine:
            parameters = list(engine.module.parameters())
            with deepspeed.zero.GatheredParameters(parameters, modifier_rank=1), torch.no_grad():
                for parameter in parameters if ranks.rank == 1 else ():
                    parameter.fill_(0.25)
            is_filled = {n: bool((v == 0.25).all()) for n, v in engine.state_dict().items()}
            for wait in (True, False):
                batch = GPT.batches(2)[ranks.rank]
                engine.backward(batch.call(engine))
                engine.step()
                engine.save_checkpoint(tmp_path / "saves", "same", wait=wait)
            engine.backward(GPT.batches(2)[ranks.rank].call(engine))
            engine.step()
            engine.finish_saving()
            return is_filled

    for found in on_ranks(2, work):
        assert all(found.values()), found
