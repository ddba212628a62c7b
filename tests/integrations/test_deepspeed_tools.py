"""Tests of DeepSpeed's monitors, accelerator, and engine and parameter accessors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small import ON_DISK, batch, small_engine, small_model, train

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityWarning, ResidencyError, TrainingError
from infinity.integrations import deepspeed
from infinity.integrations.deepspeed.monitors import MonitorMaster, get_monitor_config
from infinity.integrations.deepspeed.utils import clone_tensors_for_torch_save, see_memory_usage
from infinity.integrations.deepspeed.zero import ZeroParamStatus


@pytest.mark.parametrize("every", [2, None, float("inf")])
def test_steps_per_print_sets_print_interval(
    every: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "steps_per_print": every}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    engine, *_ = deepspeed.initialize(model=small_model(), config=config)
    with engine:
        losses = []
        for number in range(10):
            loss = engine(batch(number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    lines = capsys.readouterr().out.splitlines()
    if every != 2:
        assert lines == []
        return
    found = [re.fullmatch(r"step=(\d), skipped=0, loss=([\d.]+), lr=\[0.01\], .* samples/s", line)
             for line in lines]  # fmt: skip
    assert [int(one[1]) for one in found if one] == [2, 4]
    assert float(found[1][2]) == pytest.approx((losses[6] + losses[7]) / 2, abs=1e-3)


@pytest.mark.parametrize("stands_in", [True, False])
def test_as_deepspeed_prints_summary_of_config(
    stands_in: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "overlap_comm": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    if stands_in:
        monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    engine, *_ = deepspeed.initialize(model=small_model(), config=config)
    with engine:
        lines = capsys.readouterr().err.splitlines()
        summary = (
            "infinity: 5 keys of the DeepSpeed configuration are in effect; without effect here: "
            "zero_optimization.overlap_comm"
        )
        assert lines == ([summary, f"infinity: {engine!r}"] if stands_in else [])


def monitored(monkeypatch: pytest.MonkeyPatch, calls: list[Any], **more: Any) -> Any:
    """Return an engine with two micro-batches per step whose W&B logs to `calls`."""

    def log(data: dict[str, float], **step: Any) -> None:
        calls.append((data, step))

    wandb = SimpleNamespace(
        init=lambda **given: calls.append(given), log=log, finish=lambda: calls.append("finish")
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **more,
    }  # fmt: skip
    return deepspeed.initialize(model=small_model(), config=config)[0]


def test_monitors_receive_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    section = {"enabled": True, "project": "p", "team": "t"}
    with monitored(monkeypatch, calls, wandb=section) as engine:
        losses = []
        for index in range(6):
            loss = engine(batch(index))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    means = [pytest.approx((losses[i] + losses[i + 1]) / 2) for i in (0, 2, 4)]
    steps: list[Any] = []
    for window, mean in enumerate(means):
        samples = 4 * (window + 1)
        values = {"Train/Samples/train_loss": mean, "Train/Samples/lr": 0.01}
        steps += [({k: v}, {"step": samples}) for k, v in values.items()]
    assert calls == [{"project": "p", "group": None, "entity": "t"}, *steps, "finish"]
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        monitor_config = get_monitor_config({name: {"enabled": True, "output_path": str(tmp_path)}})
        with pytest.raises(ConfigError, match=f"pip install {name}"):
            MonitorMaster(monitor_config)


def test_monitored_loss_is_mean_of_own_window(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fp16 = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    with monitored(monkeypatch, calls, wandb={"enabled": True}, fp16=fp16) as engine:
        expected = pytest.approx(float(engine(batch(0)).detach()), rel=1e-2)

        def window(*kinds: str) -> list[float]:
            calls.clear()
            for kind in kinds:
                loss = engine(batch(0))
                if kind == "plain":
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss * float("inf") if kind == "overflow" else loss)
                if kind == "dropped":
                    Engine.zero_grad(engine)
                else:
                    engine.step()
            name = "Train/Samples/train_loss"
            return [data[name] for data, _ in calls if name in data]

        engine.set_lr(0.0)
        assert window("dropped", "whole", "whole") == [expected]
        with pytest.raises(TrainingError, match="smallest loss scale"):
            window("overflow", "overflow")
        assert window("whole", "whole") == [expected]
        assert window("whole", "plain") == window("plain", "plain") == []
        assert window("whole", "whole") == [expected]


def test_parameter_ds_attributes_follow_residency(tmp_path: Path) -> None:
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


def test_module_to_does_not_move_offloaded_module(tmp_path: Path) -> None:
    model = small_model()
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    for dims in range(9):  # integer and bool buffers, which a cast to half leaves alone
        for dtype in kinds:
            name = f"{dtype}{dims}".removeprefix("torch.")
            model.register_buffer(name, torch.zeros((1,) * dims, dtype=dtype))
    with small_engine(tmp_path, ON_DISK, model, engine_class=deepspeed.DeepSpeedEngine) as engine:
        with pytest.raises(ResidencyError, match="cannot be moved or cast"):
            engine.module.to("meta", torch.half)
        with pytest.warns(InfinityWarning, match="not moved to meta"):
            assert engine.module.to("meta") is engine.module
        with pytest.raises(ResidencyError, match="cannot be moved or cast"):
            engine.module.half()
        train(engine, 1)
    with (
        small_engine(tmp_path, ON_DISK) as plain,
        pytest.raises(ResidencyError, match="cannot be moved or cast"),
    ):
        plain.module.to("meta")


def test_engine_accessors_follow_configuration(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps_per_print": 7, "zero_optimization": {"stage": 2, "reduce_bucket_size": 3e6},
        "gradient_clipping": 0.5,
    }  # fmt: skip
    engine, optimizer, *_ = infinity.initialize(model=small_model(), config=config)
    with engine:
        answers: Any = engine
        assert (answers.steps_per_print(), answers.zero_optimization_stage()) == (7, 2)
        assert answers.wall_clock_breakdown() is False
        assert not hasattr(answers, "dump_state")
        assert (answers.gradient_clipping(), answers.gradient_clipping) == (0.5, 0.5)
        assert (answers.loss_scale(), optimizer.loss_scale, optimizer.overflow) == (1, 1, False)
        answers.set_lr(0.25)
        assert answers.get_lr() == [0.25]
        dataset = torch.utils.data.TensorDataset(torch.arange(6))
        loader = answers.deepspeed_io(dataset, route="eval")
        assert [one[0].tolist() for one in loader] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(AttributeError, match="has 'sparse_allreduce'"):
            answers.sparse_allreduce(None, None)
        train(engine, 1)
        for _ in range(2):  # an existing checkpoint is replaced
            engine.save_checkpoint(save_dir=tmp_path / "new" / "out", tag=3, client_state={"a": 1})
            assert [e.name for e in (tmp_path / "new" / "out").glob("3*")] == ["3"]
        path, state = engine.load_checkpoint(load_dir=tmp_path / "new" / "out", tag=3)
        assert (Path(path or "").name, state) == ("3", {"a": 1})
        weights = clone_tensors_for_torch_save(answers.module_state_dict())
        engine.load_module_state_dict({"module": weights})
        with pytest.raises(ConfigError, match=r"norm\.weight"):
            engine.load_module_state_dict({n: v for n, v in weights.items() if n != "norm.weight"})
        without_norm = {name: value for name, value in weights.items() if name != "norm.weight"}
        engine.load_module_state_dict(without_norm, allowed_missing_keys=["norm.weight"])


def test_accelerator_wraps_torch_device(caplog: pytest.LogCaptureFixture) -> None:
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
    found.reset_peak_memory_stats()
    assert found.memory_allocated() <= found.max_memory_allocated()
    assert found.is_bf16_supported()
    found.synchronize()
    with found.stream(found.current_stream()):
        assert found.on_accelerator(torch.ones(1, device=found.current_device_name()))
    assert found.device_count() >= 1
    assert not hasattr(found, "range_push")
    assert not hasattr(found, "lru_cache")
    with pytest.raises(ConfigError, match="create_op_builder is not supported"):
        found.create_op_builder("CPUAdam")
    with caplog.at_level("INFO", logger="infinity"):
        see_memory_usage("before", force=True)
    assert "before: RAM" in caplog.text
