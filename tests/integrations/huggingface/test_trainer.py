"""Tests of InfinityTrainer against `transformers.Trainer`: same data, same seed, fp32.

Tolerance: 2e-6 of each logged number (or absolutely below 1). AdamW in fp32 differs from torch's
in the last bits only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from support.hf_runs import (
    FP32,
    LENGTH,
    Texts,
    arguments,
    assert_close_history,
    assert_same_bits,
    gpt2,
    history,
    llama,
    masters,
    trainer_for,
)
from support.small import ON_DISK
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

import infinity
from infinity.config.schema import load_config
from infinity.errors import ConfigError, EngineClosedError
from infinity.integrations.huggingface.accelerator import offload_auxiliary
from infinity.integrations.huggingface.step_log import StepLog
from infinity.integrations.huggingface.trainer import InfinityTrainer
from infinity.profiling.step_report import StepReport
from infinity.storage.reservations import PROCESS
from infinity.training import run_plan
from infinity.types import Tier

TOLERANCE = 2e-6


def both(
    tmp_path: Path,
    make: Any = llama,
    options: Any = None,
    use: Callable[[Any], object] = lambda trainer: trainer.train(),
    **changed: Any,
) -> tuple[Any, Any]:
    """Return an InfinityTrainer and a Trainer after calling `use` on each; it trains by default."""
    stock = trainer_for(hf.Trainer, tmp_path / "theirs", make(), options, **changed)
    use(stock)
    offloaded = trainer_for(InfinityTrainer, tmp_path / "ours", make(), options, **changed)
    use(offloaded)
    return offloaded, stock


def assert_same_model(offloaded: Any, stock: Any, tolerance: float = 1e-5) -> None:
    for name, value in stock.model.state_dict().items():
        torch.testing.assert_close(
            offloaded.engine.state_dict()[name],
            value,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("make", [llama, gpt2])
def test_train_and_evaluate_match_trainer(tmp_path: Path, make: Any) -> None:
    offloaded, stock = both(tmp_path, make, eval_strategy="steps", eval_steps=3)
    assert len(history(stock)) == 11  # 7 steps, 3 evaluations, the end
    assert_close_history(offloaded, stock, TOLERANCE)
    assert_same_model(offloaded, stock)
    offloaded.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_accumulation_steps": 1, "max_grad_norm": 0.05},
        {"max_grad_norm": 0.0},
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"optim": "adamw_torch", "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {"optim": "sgd", "learning_rate": 0.5},
        {"optim": "adagrad"},
        {"neftune_noise_alpha": 5.0},
        {"per_device_train_batch_size": 3, "max_steps": -1, "num_train_epochs": 1},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_training_arguments_match_trainer(tmp_path: Path, changed: dict[str, Any]) -> None:
    offloaded, stock = both(tmp_path, **{"max_steps": 4, **changed})
    assert_close_history(offloaded, stock, TOLERANCE)
    offloaded.close()


def test_max_grad_norm_clips(tmp_path: Path) -> None:
    clipped = trainer_for(InfinityTrainer, tmp_path, max_steps=2, max_grad_norm=0.05)
    free = trainer_for(InfinityTrainer, tmp_path, max_steps=2, max_grad_norm=0.0)
    clipped.train()
    free.train()
    assert clipped.engine.last_report.clip_factor < 0.2
    assert free.engine.last_report.clip_factor == 1.0
    clipped.close()
    free.close()


def test_reading_p_grad_warns_for_callback_but_not_for_trainer(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Reading(hf.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **named: Any) -> None:
            read.append([p.grad for p in model.parameters()])

    found, read = [], []
    for callbacks in ([], [Reading()]):
        with trainer_for(
            InfinityTrainer, tmp_path, None, {"callbacks": callbacks}, max_steps=2
        ) as trainer:
            trainer.train()
        found.append([w.filename for w in recwarn if "p.grad was read" in str(w.message)])
    assert found == [[], [__file__]]
    assert len(read) == 2


def test_predictions_and_metrics_match_trainer(tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
        return {"accuracy": float((guessed == labels)[labels != -100].mean())}

    options = {"compute_metrics": accuracy}
    offloaded, stock = both(tmp_path, options=options, max_steps=3)
    found, expected = offloaded.predict(Texts(5, seed=4)), stock.predict(Texts(5, seed=4))
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=0, atol=2e-5)
    assert found.metrics["test_accuracy"] == expected.metrics["test_accuracy"]
    assert abs(found.metrics["test_loss"] - expected.metrics["test_loss"]) < 1e-5
    offloaded.close()


def test_evaluate_before_and_after_train_matches_trainer(tmp_path: Path) -> None:
    def use(trainer: hf.Trainer) -> None:
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()

    offloaded, stock = both(tmp_path, use=use, max_steps=2)
    assert_close_history(offloaded, stock, TOLERANCE)
    offloaded.close()


def assert_overrides_match_trainer(
    overrides: dict[str, Any],
    folder: Path,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> None:
    """Train subclasses of both trainers with these members, and compare their losses."""
    stock = trainer_for(
        type("Stock", (hf.Trainer,), overrides), folder / "a", None, options, **arguments
    )
    stock.train()
    offloaded = trainer_for(
        type("Offloaded", (InfinityTrainer,), overrides), folder / "b", None, options, **arguments
    )
    offloaded.train()
    assert_close_history(offloaded, stock, TOLERANCE)
    offloaded.close()


def test_overridden_compute_loss_matches_trainer(tmp_path: Path) -> None:
    def weighted(self: Any, model: Any, inputs: Any, return_outputs: bool = False,
                 num_items_in_batch: Any = None) -> Any:  # fmt: skip
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    overrides = {"compute_loss": weighted, "loss_is_scaled_for_ga": False}
    assert_overrides_match_trainer(overrides, tmp_path, max_steps=4)


def test_several_forwards_and_backwards_per_micro_batch(tmp_path: Path) -> None:
    def twice(self: Any, model: Any, inputs: Any, return_outputs: bool = False,
              num_items_in_batch: Any = None) -> Any:  # fmt: skip
        first = model(**inputs).loss
        return first + model(input_ids=inputs["input_ids"].flip(1), labels=inputs["labels"]).loss

    def step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss / 3)
        self.accelerator.backward(model(**inputs).loss / 3)
        return loss.detach()

    overrides = {"compute_loss": twice, "training_step": step}
    assert_overrides_match_trainer(overrides, tmp_path, max_steps=4)


def test_train_continues_after_exception_within_window(tmp_path: Path) -> None:
    class Once(hf.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and not failed:
                failed.append(1)
                raise KeyboardInterrupt

    failed: list[int] = []
    options = {"callbacks": [Once()]}
    with trainer_for(InfinityTrainer, tmp_path, None, options, max_steps=3) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        trainer.train()
        assert trainer.engine.global_steps == 4
        assert trainer.engine.micro_step == 0


def test_fp16_scales_loss_and_skips_overflows(tmp_path: Path) -> None:
    options = {"infinity_config": None}
    arguments = {"fp16": True, "max_steps": 4, "gradient_accumulation_steps": 1}
    with trainer_for(
        InfinityTrainer, tmp_path, llama(dropout=0.0), options, **arguments
    ) as trainer:
        assert trainer._settings.config.precision == "fp16"
        trainer.train()
        assert trainer.engine.global_steps == 4
        assert trainer.engine.loss_scale > 1
        losses = [entry["loss"] for entry in history(trainer)[:-1]]
        assert all(3.5 < loss < 4.2 for loss in losses)


def test_compute_loss_func_and_training_step_match_trainer(tmp_path: Path) -> None:
    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(
            logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        return total / num_items_in_batch

    def step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs),
                                 num_items_in_batch=num_items_in_batch)  # fmt: skip
        self.accelerator.backward(loss)
        return loss.detach()

    options = {"compute_loss_func": loss_of}
    assert_overrides_match_trainer({"training_step": step}, tmp_path, options, max_steps=6)


class Listener(hf.TrainerCallback):
    """Record every event and the names of its keyword arguments."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args: Any, state: Any, control: Any, **keywords: Any) -> None:
            present = sorted(k for k, v in keywords.items() if v is not None)
            self.heard.append((name, state.global_step, present))

        return record


def test_callback_events_match_trainer(tmp_path: Path) -> None:
    events = []
    for kind in (hf.Trainer, InfinityTrainer):
        listener = Listener()
        options = {"callbacks": [listener]}
        trainer = trainer_for(
            kind, tmp_path / kind.__name__, None, options, max_steps=6, eval_strategy="steps",
            eval_steps=2, save_strategy="steps", save_steps=3,
        )  # fmt: skip
        trainer.train()
        events.append(listener.heard)
    assert len(events[0]) > 40
    assert events[0] == events[1]
    trainer.close()


def test_early_stopping_and_best_model_match_trainer(tmp_path: Path) -> None:
    found = []
    for kind in (hf.Trainer, InfinityTrainer):
        trainer = trainer_for(
            kind, tmp_path / kind.__name__, None,
            {"callbacks": [hf.EarlyStoppingCallback(early_stopping_patience=2)]},
            max_steps=12, learning_rate=0.1, eval_strategy="steps", eval_steps=1,
            save_strategy="steps", save_steps=1, load_best_model_at_end=True, save_total_limit=1,
            metric_for_best_model="eval_loss",
        )  # fmt: skip
        trainer.train()
        left = sorted(p.name for p in (tmp_path / kind.__name__).glob("checkpoint-*"))
        found.append((trainer.state.best_global_step, trainer.state.global_step, left))
        found[-1] += (
            round(trainer.evaluate()["eval_loss"], 5),
            round(trainer.state.best_metric, 5),
        )
    assert found[0] == found[1]
    assert found[0][0] < found[0][1] < 12
    assert found[0][3] == found[0][4]
    trainer.close()


def test_activation_checkpointing_recomputes(tmp_path: Path) -> None:
    counts = []
    for on in (False, True):
        model = llama()
        calls = []
        # Not a forward hook: recomputation stops at the last tensor that is needed.
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        trainer = trainer_for(
            InfinityTrainer, tmp_path, model, max_steps=2, activation_checkpointing=on
        )
        trainer.train()
        counts.append((len(calls), history(trainer)[0]["loss"]))
        trainer.close()
    assert counts[0][0] == 6  # 2 windows of 3 micro-batches
    assert counts[1][0] == 12
    assert counts[0][1] == counts[1][1]


def test_step_log_sums_reports_without_keeping_them() -> None:
    """A Trainer that never logs would otherwise keep one report per step."""
    log = StepLog()
    seen: list[Any] = []
    for number in (1, 3):
        moved = {"disk_read": number * 2**30}
        stalls = {"update": 0.5, "disk_read": 1.0}
        report = StepReport(
            number, 2.0 * number, 1.0, 1.0, False, stalls, moved, memory={"peak": number * 2**30}
        )
        log.batch({"ids": torch.ones(2, 8, dtype=torch.long)}, "ids")
        for _ in range(2):
            log.see(report)
        seen.append(weakref.ref(report))
        del report
    assert seen[0]() is None
    assert log.take(ranks=3) == {
        "step_s": 4.0, "stall_s": 1.5, "tokens_per_s": 3 * 32 / 8.0, "disk_read_gib": 2.0,
        "memory_peak_gib": 3.0,
    }  # fmt: skip
    assert log.take(ranks=3) == {}


def test_state_on_disk_bitwise_equal_to_ram(tmp_path: Path) -> None:
    disk = {
        **FP32,
        "nvme_path": str(tmp_path / "disk"),
        "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "disk"},
    }
    ram = {**FP32, "placement": {"weights": "host", "optimizer_state": "host", "gradients": "host"}}
    (tmp_path / "disk").mkdir()
    runs = []
    for config in (disk, ram):
        trainer = trainer_for(
            InfinityTrainer, tmp_path / "out", None, {"infinity_config": config}, max_steps=3
        )
        trainer.train()
        runs.append((history(trainer), masters(trainer)))
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == 3
        for entry in logged:
            tokens = entry["tokens_per_s"] * entry["step_s"]  # 3 batches of 2 texts
            assert tokens == pytest.approx(6 * LENGTH)
            assert 0 <= entry["stall_s"] <= entry["step_s"]
            assert entry["memory_peak_gib"] > 0
        written = trainer.engine.plan.predicted_bytes["disk_write"] / 2**30
        assert logged[-1].get("disk_write_gib", 0) == pytest.approx(written)
        assert ("disk_write_gib" in logged[-1]) == (config is disk)
        trainer.close()
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def test_precision_follows_bf16_flag_and_model_dtype(tmp_path: Path) -> None:
    flagged = trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": None}, bf16=True)
    half = trainer_for(
        InfinityTrainer, tmp_path, llama().bfloat16(), {"infinity_config": None}, max_steps=1
    )
    plain = trainer_for(InfinityTrainer, tmp_path, None, {"infinity_config": None})
    assert [t._settings.config.precision for t in (flagged, half, plain)] == [
        "bf16",
        "bf16",
        "fp32",
    ]
    half.train()
    half.save_model(str(tmp_path / "saved"))
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.dtype is torch.bfloat16
    half.close()


def test_meta_model_and_model_init_match_trainer(tmp_path: Path) -> None:
    def without_values() -> Any:
        with infinity.Init(threshold_bytes=256):
            model = llama(dropout=0.0)
        assert next(model.parameters()).is_meta
        return model

    def with_values() -> Any:
        return llama(dropout=0.0)

    trainers = []
    for kind, model, init in (
        (hf.Trainer, with_values(), None), (InfinityTrainer, without_values(), None),
        (hf.Trainer, None, with_values), (InfinityTrainer, None, without_values),
    ):  # fmt: skip
        options = {"model_init": init} if init else {}
        trainers.append(trainer_for(kind, tmp_path, model, options, max_steps=3))
        trainers[-1].train()
    stock, offloaded, stock_init, offloaded_init = trainers
    assert_close_history(offloaded, stock, TOLERANCE)
    assert_close_history(offloaded_init, stock_init, TOLERANCE)
    assert_same_model(offloaded, stock)
    first = offloaded_init.engine
    offloaded_init.train()  # a new model, a new engine
    assert offloaded_init.engine is not first
    assert_close_history(offloaded_init, stock_init, TOLERANCE)
    offloaded.close()
    offloaded_init.close()


def test_second_train_restarts_schedule(tmp_path: Path) -> None:
    def use(trainer: hf.Trainer) -> None:
        trainer.train()
        trainer.train()

    offloaded, stock = both(tmp_path, use=use, max_steps=3)
    assert_close_history(offloaded, stock, TOLERANCE)
    offloaded.close()


def test_close_restores_weights_and_rejects_later_calls(tmp_path: Path) -> None:
    with trainer_for(InfinityTrainer, tmp_path, max_steps=1) as trainer:
        trainer.train()
        expected = dict(trainer.engine.state_dict())
        trainer.close(restore=True)
        trainer.close()
    assert_same_bits({k: v.detach() for k, v in trainer.model.state_dict().items()}, expected)
    with pytest.raises(EngineClosedError):
        trainer.evaluate()


def test_engine_as_model_raises(tmp_path: Path) -> None:
    with trainer_for(InfinityTrainer, tmp_path, max_steps=1) as trainer:
        trainer.train()
        with pytest.raises(ConfigError, match="got an engine"):
            trainer_for(InfinityTrainer, tmp_path, trainer.engine)


def test_skipped_step_does_not_advance_schedule(tmp_path: Path) -> None:
    """The second step has an infinite loss."""
    calls = 0

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = InfinityTrainer.compute_loss(self, *args, **kwargs)
        return loss * float("inf") if calls == 2 else loss

    kind = type("Broken", (InfinityTrainer,), {"compute_loss": broken})
    with trainer_for(kind, tmp_path, max_steps=3, gradient_accumulation_steps=1) as trainer:
        trainer.train()
        assert trainer.engine.skipped_steps == 1
        rates = [entry["learning_rate"] for entry in history(trainer)[:3]]
        assert rates[1] == rates[2] < rates[0]


# --- reference models, and losses and data of users ----------------------------------------------


class Distilling(hf.Trainer):  # type: ignore[misc]
    """A trainer with a reference model, passed before the arguments as in TRL."""

    def __init__(self, model: Any = None, reference: Any = None, args: Any = None, **more: Any):
        super().__init__(model=model, args=args, **more)
        self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            targets = self.reference(input_ids=inputs["input_ids"]).logits.softmax(-1)
        return -(targets * model(input_ids=inputs["input_ids"]).logits.log_softmax(-1)).mean()


def test_reference_model_offloaded_by_second_engine(tmp_path: Path) -> None:
    class Ours(InfinityTrainer, Distilling):  # type: ignore[misc]
        pass

    more = {"train_dataset": Texts(26)}
    stock = Distilling(llama(), llama(tied=True).eval(), arguments(tmp_path), **more)
    stock.train()
    disk = {"nvme_path": str(tmp_path), "placement": ON_DISK, **FP32}
    offloaded = Ours(
        llama(), llama(tied=True).eval(), arguments(tmp_path), infinity_config=disk, **more
    )
    offloaded.train()
    assert_close_history(offloaded, stock, TOLERANCE)
    (reference_engine,) = offloaded.accelerator.auxiliary_engines
    assert reference_engine.module is offloaded.reference
    assert reference_engine.counters()["disk_read"] > 0
    assert not any(parameter.requires_grad for parameter in offloaded.reference.parameters())
    offloaded.close()
    with pytest.raises(EngineClosedError):
        reference_engine.settle()


@pytest.mark.parametrize(("rest", "tier"), [(0, Tier.DEVICE), (10**6, Tier.DISK)])
def test_reference_model_budget_share_sets_tier(
    tmp_path: Path, rest: int, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A measured budget would depend on the memory of other processes.
    monkeypatch.setattr(run_plan, "default_host_budget_bytes", lambda machine: 16 << 30)
    trained = nn.Linear(rest, rest, device="meta")
    config = load_config({"nvme_path": str(tmp_path), **FP32})
    with offload_auxiliary(llama(), trained, config, torch.device("cpu")) as engine:
        assert {placement.weight for placement in engine.plan.placements} == {tier}
    assert not any(PROCESS.total(each) for each in Tier)


@pytest.mark.parametrize("part", ["whole", "body and head"])
def test_loss_that_calls_unwrapped_model_matches_trainer(part: str, tmp_path: Path) -> None:
    """It uses `self.model`, not the wrapped model that Trainer passes; steps still end."""

    def compute_loss(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        model = self.model
        if part == "whole":
            logits = model(input_ids=inputs["input_ids"]).logits
        else:
            logits = model.lm_head(model.model(input_ids=inputs["input_ids"]).last_hidden_state)
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )

    trainers = []
    for base in (hf.Trainer, InfinityTrainer):
        kind = type("Own", (base,), {"compute_loss": compute_loss})
        trainers.append(trainer_for(kind, tmp_path / base.__name__, max_steps=6))
        trainers[-1].train()
    assert_close_history(trainers[1], trainers[0], 5e-6)
    assert trainers[1].engine.global_steps == 6
    trainers[1].close()


class Streamed(IterableDataset[dict[str, Tensor]]):
    """An iterable dataset that depends on the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.epochs.append(self.epoch)
        yield from (Texts(20, seed=self.epoch)[index] for index in range(20))


def test_iterable_dataset_receives_epoch(tmp_path: Path) -> None:
    trainers = []
    for kind in (hf.Trainer, InfinityTrainer):
        data = Streamed()
        trainers.append(trainer_for(kind, tmp_path, None, {"train_dataset": data}, max_steps=6))
        trainers[-1].train()
        assert data.epochs == [0, 1]
    assert_close_history(trainers[1], trainers[0], 5e-6)
    trainers[1].close()


@pytest.mark.parametrize(("first", "last"), [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_max_grad_norm_changed_by_callback(tmp_path: Path, first: float, last: float) -> None:
    class Tighter(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.max_grad_norm = 0.05 if state.global_step < 4 else last

    trainers = []
    changed = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": first}
    for kind in (hf.Trainer, InfinityTrainer):
        trainers.append(trainer_for(kind, tmp_path, None, {"callbacks": [Tighter()]}, **changed))
        trainers[-1].train()
    assert_close_history(trainers[1], trainers[0], 5e-6)
    trainers[1].close()


def test_evaluate_frozen_model_matches_trainer(tmp_path: Path) -> None:
    found = []
    for kind in (hf.Trainer, InfinityTrainer):
        model = llama().requires_grad_(False)
        trainer = trainer_for(kind, tmp_path, model)
        found.append(trainer.evaluate()["eval_loss"])
    trainer.close()
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_precision_is_dtype_of_most_parameters(tmp_path: Path) -> None:
    """For example a bf16 base with adapters, which peft creates in fp32."""
    model = llama().to(torch.bfloat16).requires_grad_(False)
    model.model.norm.float().requires_grad_(True)
    trainer = trainer_for(InfinityTrainer, tmp_path, model, {"infinity_config": {}}, max_steps=1)
    trainer.train()
    assert trainer.engine.plan.precision.name == "bf16"
    trainer.close()
