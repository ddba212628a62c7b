"""DeepSpeed's profiler, monitors, accelerator, and what its engine and parameters answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infinity.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from support.small import ON_DISK, batch, small_engine, small_model, train
from torch import nn

import infinity
from infinity import deepspeed
from infinity.deepspeed.monitors import MonitorMaster, get_monitor_config
from infinity.deepspeed.utils import clone_tensors_for_torch_save, see_memory_usage
from infinity.deepspeed.zero import ZeroParamStatus
from infinity.errors import ConfigError


def test_operations_of_a_forward_and_a_backward_are_counted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    products = 3 * (8 * 16 + 16 * 4)  # multiply-accumulates of three samples
    out = tmp_path / "profile.txt"
    flops, macs, params = get_model_profile(
        model, input_shape=(3, 8), as_string=False, output_file=str(out)
    )
    assert (flops, macs, params) == (2 * products, products, 8 * 16 + 16 + 16 * 4 + 4)
    assert "Sequential.2: 384 FLOPS" in out.read_text()
    out.unlink()
    assert get_model_profile(model, (3, 8), print_profile=False)[1] == "576 MACs"
    with pytest.raises(ConfigError, match="no input"):
        get_model_profile(model)
    with small_engine(tmp_path, ON_DISK, engine_class=deepspeed.DeepSpeedEngine) as engine:
        profiler = FlopsProfiler(engine.module, engine)
        profiler.start_profile()
        loss = engine(batch(0))
        profiler.stop_profile()
        forward = profiler.get_total_flops()
        profiler.start_profile()
        engine.backward(loss)
        profiler.stop_profile()
        assert forward > 0
        assert profiler.get_total_flops() >= forward
        assert profiler.get_total_params() == sum(p.numel() for p in engine.module.parameters())


def test_monitors_get_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    wandb = SimpleNamespace(
        init=lambda **given: told.append(given), log=lambda data, **step: told.append((data, step))
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "wandb": {"enabled": True, "project": "p", "team": "t"},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=small_model(), config=config)
    with engine:
        losses = []
        for index in range(2):
            loss = engine(batch(index))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    assert told[0] == {"project": "p", "group": None, "entity": "t"}
    mean = pytest.approx(sum(losses) / 2)
    assert told[1:] == [
        ({"Train/Samples/train_loss": mean}, {"step": 4, "commit": None}),
        ({"Train/Samples/lr": 0.01}, {"step": 4, "commit": None}),
    ]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = get_monitor_config({"tensorboard": {"enabled": True, "output_path": str(tmp_path)}})
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        MonitorMaster(board)


def test_parameters_say_where_their_values_are(tmp_path: Path) -> None:
    with small_engine(tmp_path, ON_DISK, engine_class=deepspeed.DeepSpeedEngine) as engine:
        weight = engine.module.norm.weight
        assert deepspeed.runtime.zero.utils.is_zero_param(weight)
        assert (weight.ds_numel, weight.ds_shape) == (weight.numel(), weight.shape)
        assert len({p.ds_id for p in engine.module.parameters()}) == len(
            list(engine.module.parameters())
        )
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([weight]):
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
            assert bool((weight == 1).all())
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert not hasattr(weight, "ds_id")
    with small_engine(tmp_path, ON_DISK) as plain:
        assert not hasattr(plain.module.norm.weight, "ds_id")


def test_the_engine_answers_by_the_configuration(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps_per_print": 7, "zero_optimization": {"stage": 2, "reduce_bucket_size": 3e6},
        "gradient_clipping": 0.5,
    }  # fmt: skip
    engine, optimizer, *_ = infinity.initialize(model=small_model(), config=config)
    with engine:
        answers: Any = engine
        assert (answers.steps_per_print(), answers.zero_reduce_bucket_size()) == (7, 3e6)
        assert answers.zero_allgather_bucket_size() == 5e8
        assert (answers.gradient_clipping(), answers.gradient_clipping) == (0.5, 0.5)
        assert (answers.loss_scale(), optimizer.loss_scale, optimizer.overflow) == (1, 1, False)
        answers.set_lr(0.25)
        assert answers.get_lr() == [0.25]
        dataset = torch.utils.data.TensorDataset(torch.arange(6))
        assert [one[0].tolist() for one in answers.deepspeed_io(dataset)] == [
            [0, 1],
            [2, 3],
            [4, 5],
        ]
        with pytest.raises(ConfigError, match="sparse_allreduce is not here"):
            answers.sparse_allreduce(None, None)
        train(engine, 1)
        for _ in range(2):  # a checkpoint that is there is replaced
            engine.save_checkpoint(save_dir=tmp_path / "new" / "out", tag=3, client_state={"a": 1})
            assert [e.name for e in (tmp_path / "new" / "out").glob("3*")] == ["3"]
        path, state = engine.load_checkpoint(load_dir=tmp_path / "new" / "out", tag=3)
        assert (Path(path or "").name, state) == ("3", {"a": 1})
        kept = clone_tensors_for_torch_save(answers.module_state_dict())
        engine.load_module_state_dict({"module": kept})
        with pytest.raises(ConfigError, match=r"norm\.weight"):
            engine.load_module_state_dict({n: v for n, v in kept.items() if n != "norm.weight"})
        some = {name: value for name, value in kept.items() if name != "norm.weight"}
        engine.load_module_state_dict(some, allowed_missing_keys=["norm.weight"])


def test_the_accelerator_is_torchs(caplog: pytest.LogCaptureFixture) -> None:
    found = deepspeed.accelerator.get_accelerator()
    assert found is deepspeed.get_accelerator()
    gpu = torch.cuda.is_available()
    assert found.device_name(0) == ("cuda:0" if gpu else "cpu")
    assert found.communication_backend_name() == ("nccl" if gpu else "gloo")
    assert found.available_memory() <= found.total_memory()
    found.manual_seed_all(3)
    state = found.get_rng_state()
    first = torch.rand(2, device=found.current_device_name())
    found.set_rng_state(state)
    assert torch.equal(first, torch.rand(2, device=found.current_device_name()))
    assert found.LongTensor([1]).dtype is torch.int64
    with pytest.raises(ConfigError, match="create_op_builder is not here"):
        found.create_op_builder("CPUAdam")
    with caplog.at_level("INFO", logger="infinity"):
        see_memory_usage("before", force=True)
    assert "before: RAM" in caplog.text
