"""Tests of merging TrainingArguments and a configuration: filled in, compared, refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from support.hf_runs import FP32, Texts, assert_close_history, history, llama, trainer_for

import infinity
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import monitors
from infinity.integrations.huggingface.trainer import InfinityTrainer

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto", "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}  # fmt: skip


def config_of(trainer: Any) -> Any:
    return trainer._settings.config


def test_auto_values_filled_from_arguments(tmp_path: Path) -> None:
    trainer = trainer_for(
        InfinityTrainer, tmp_path, None, {"infinity_config": AUTO}, learning_rate=3e-4,
        adam_beta1=0.8, adam_epsilon=1e-7, weight_decay=0.2, max_grad_norm=0.7, warmup_steps=2,
        max_steps=6,
    )  # fmt: skip
    config = config_of(trainer)
    assert config.gradient_accumulation_steps == 3
    assert config.gradient_clipping == 0.7
    assert config.precision == "fp32"
    assert config.optimizer.parameters() == {
        "lr": 3e-4, "betas": (0.8, 0.999), "eps": 1e-7, "weight_decay": 0.2, "maximize": False
    }  # fmt: skip
    assert config.scheduler is None
    with trainer:
        trainer.train()
        assert trainer.lr_scheduler.warmup_num_steps == 2
        assert trainer.lr_scheduler.total_num_steps == 6
        (group,) = trainer.optimizer.param_groups  # DeepSpeed's optimizer: one group
        assert group["weight_decay"] == 0.2
        rates = [entry["learning_rate"] for entry in history(trainer)[:-1]]
    # DeepSpeed's first schedule step, after the first update, sets the initial value again.
    assert rates == pytest.approx([0, 0, 1.5e-4, 3e-4, 2.25e-4, 1.5e-4])


def test_deepspeed_argument_equals_infinity_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "ds_config.json", []
    writer = SimpleNamespace(write=events.extend, close=lambda: None)
    monkeypatch.setitem(monitors._WRITERS, "tensorboard", lambda section: writer)
    path.write_text(json.dumps(AUTO | {"tensorboard": {"enabled": True}}))
    runs = []
    for given in ({"deepspeed": str(path), "arguments": infinity.TrainingArguments}, {}):
        options = {"infinity_config": None if given else AUTO}
        with trainer_for(InfinityTrainer, tmp_path, None, options, **given) as trainer:
            trainer.train()
            runs.append(trainer)
    assert runs[0].args.deepspeed == str(path)
    assert runs[0].engine.plan.precision.name == "fp32"
    assert history(runs[0]) == history(runs[1])
    assert "Train/Samples/lr" in [label for label, *_ in events]


def test_migration_guide_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guide = Path(__file__).resolve().parents[3] / "docs" / "migrating-from-deepspeed.md"
    section = guide.read_text(encoding="utf-8").partition("\n## The Hugging Face Trainer\n")[2]
    script = section.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "ds_config.json").write_text(json.dumps(AUTO))
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "infinity")
    names: dict[str, Any] = {"model": llama(), "dataset": Texts(8)}
    exec(compile(script, str(guide), "exec"), names)
    engine = names["trainer"].engine
    assert engine.global_steps == 4
    assert engine.train_batch_size() == 2
    assert engine.zero_optimization_stage() == 3
    messages = [record.getMessage() for record in caplog.records if record.name == "infinity"]
    assert messages == [engine.translation.describe()]
    assert "zero_optimization.stage" in messages[0]
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert saved.num_parameters() == llama().num_parameters()


def test_deepspeed_config_without_optimizer_uses_trainers(
    tmp_path: Path,
) -> None:
    options = {"infinity_config": {"zero_optimization": {"stage": 2}}}
    stock = trainer_for(hf.Trainer, tmp_path / "theirs", max_steps=3)
    stock.train()
    with trainer_for(InfinityTrainer, tmp_path / "ours", None, options, max_steps=3) as offloaded:
        offloaded.train()
        assert_close_history(offloaded, stock, 2e-6)
        assert [g["weight_decay"] for g in offloaded.optimizer.param_groups] == [0.1, 0.0]


def test_conflicting_settings_reported_together(tmp_path: Path) -> None:
    config = {
        "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "precision": "fp32",
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.9], "eps": 1e-5, "weight_decay": 0.3},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": config}, bf16=True)
    text = str(caught.value)
    for name in (
        "gradient_accumulation_steps: 4", "gradient_clipping: 0.5", "optimizer.lr: 0.001",
        "optimizer.betas", "optimizer.weight_decay: 0.3", "precision: 'fp32'",
    ):  # fmt: skip
        assert name in text
    assert "optimizer.eps" not in text
    assert "leave it out" in text


def test_conflicting_deepspeed_settings_reported(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": "1e-3", "weight_decay": 0.1}},
    }
    with pytest.raises(ConfigError) as caught:
        trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": config})
    text = str(caught.value)
    assert "train_micro_batch_size_per_gpu: 4 in the configuration, 2 by" in text
    assert "optimizer.params.lr" in text
    assert "weight_decay" not in text
    assert 'write "auto"' in text


def test_native_config_accepts_auto(tmp_path: Path) -> None:
    config = {
        "gradient_accumulation_steps": "auto", "optimizer": {"lr": "auto", "moments": "bf16"},
        "prefetch_units": 1,
    }  # fmt: skip
    found = config_of(trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": config}))
    assert found.gradient_accumulation_steps == 3
    assert (found.optimizer.lr, found.optimizer.moments) == (1e-2, "bf16")
    assert found.prefetch_units == 1


def test_config_from_file_and_object(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("precision: fp32\nprefetch_units: 3\n")
    for given in (path, str(path), infinity.load_config(str(path))):
        trainer = trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": given})
        assert config_of(trainer).prefetch_units == 3


def test_two_configurations_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two configurations"):
        trainer_for(InfinityTrainer, tmp_path, deepspeed=AUTO, arguments=infinity.TrainingArguments)


def test_engine_resume_auto_raises(tmp_path: Path) -> None:
    """The engine would be at its last commit, and the Trainer at step 0."""
    given = {"nvme_path": str(tmp_path), "durable": True, "resume": "auto"}
    with pytest.raises(ConfigError, match=r"resume: auto is not for InfinityTrainer(.|\n)*True"):
        trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": given})


def test_deepspeed_argument_with_native_config_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no DeepSpeed configuration"):
        trainer_for(
            InfinityTrainer, tmp_path, None, {"infinity_config": None},
            deepspeed={"precision": "fp32"}, arguments=infinity.TrainingArguments,
        )  # fmt: skip


def test_invalid_config_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="look_ahaed"):
        trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": {"look_ahaed": 3}})
    with pytest.raises(ConfigError, match="not a configuration"):
        trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": 3})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "sync_each_batch",
        ),
        ({"bf16_full_eval": True}, "computes in fp32"),
        ({"optim": "adamw_bnb_8bit"}, '"moments": "8bit"'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_arguments_raise(tmp_path: Path, changed: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_for(InfinityTrainer, tmp_path, **changed)
    assert said in str(caught.value)


def test_bf16_full_eval_in_bf16_run(tmp_path: Path) -> None:
    options = {"infinity_config": None}
    with trainer_for(
        InfinityTrainer, tmp_path, None, options, bf16=True, bf16_full_eval=True, max_steps=1
    ) as trainer:
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0


def test_config_chooses_optimizer_and_schedule(tmp_path: Path) -> None:
    config = {
        **FP32,
        "optimizer": {"type": "Lion"},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    }
    with trainer_for(
        InfinityTrainer, tmp_path, llama(), {"infinity_config": config}, max_steps=3
    ) as trainer:
        trainer.train()
        assert trainer.engine.optimizer.rule.name == "Lion"
        rates = [entry["learning_rate"] for entry in history(trainer)[:-1]]
    assert rates == pytest.approx([1e-2, 5e-3, 2.5e-3])
