"""Tests of the private API of transformers and accelerate that InfinityTrainer relies on.

A release that changes one of these fails here, by name.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from accelerate import Accelerator
from support.hf_runs import llama

from infinity.errors import ConfigError
from infinity.integrations.huggingface.trainer import (
    OLDEST,
    InfinityTrainer,
    OffloadAccelerator,
    stock_trainer,
)

# Replaced methods of `transformers.Trainer`, and their callers.
REPLACED = {
    "_build_accelerator_args": ["create_accelerator_and_postprocess"],
    "_move_model_to_device": ["__init__", "train"],
    "_wrap_model": ["_prepare_for_training", "evaluation_loop"],
    "_prepare_for_training": ["_inner_training_loop"],
    "_save": ["save_model"],
    "_save_optimizer_and_scheduler": ["_save_checkpoint"],
    "_save_rng_state": ["_save_checkpoint"],
    "_load_rng_state": ["_run_epoch"],
    "_load_from_checkpoint": ["train"],
    "_load_best_model": ["_finalize_training"],
}
if hasattr(hf.Trainer, "_has_mixed_mesh_grads"):  # since 5.23
    REPLACED["_has_mixed_mesh_grads"] = ["_clip_grad_norm", "_get_grad_norm"]
# Extended public methods through which the batches of a step pass, and their callers.
EXTENDED = {"get_batch_samples": ["_run_epoch"], "training_step": ["_run_epoch"]}


def parameters(function: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


@pytest.mark.parametrize("name", REPLACED | EXTENDED)
def test_replaced_method_signature_and_callers(name: str) -> None:
    original = getattr(hf.Trainer, name, None)
    assert original is not None, f"transformers.Trainer has no {name} any more"
    replacement = parameters(getattr(InfinityTrainer, name))
    assert replacement in (parameters(original), ("args", "kwargs"))
    for caller in (REPLACED | EXTENDED)[name]:
        assert f"self.{name}(" in inspect.getsource(getattr(hf.Trainer, caller)), caller


def test_batches_of_a_step_passed_to_training_step() -> None:
    epoch = inspect.getsource(hf.Trainer._run_epoch)
    assert "for i, inputs in enumerate(batch_samples):" in epoch
    assert "self.training_step(model, inputs, num_items_in_batch)" in epoch
    assert "if not loss_is_scaled_for_ga:" in inspect.getsource(hf.Trainer.training_step)
    loss = inspect.signature(llama().loss_function).parameters
    assert "num_items_in_batch" in loss
    for name in ("model_accepts_loss_kwargs", "compute_loss_func", "label_smoother"):
        assert f"self.{name} = " in inspect.getsource(hf.Trainer.__init__)
    assert hf.Trainer.loss_is_scaled_for_ga is None


def test_set_attributes_are_read_by_trainer() -> None:
    assert "self._created_lr_scheduler" in inspect.getsource(hf.Trainer._prepare_for_training)
    assert "self.args._n_gpu = 1" in inspect.getsource(hf.Trainer.__init__)
    assert "return self._n_gpu" in inspect.getsource(hf.TrainingArguments.n_gpu.fget)


def test_no_other_private_method_replaced() -> None:
    private = {n for n, v in vars(InfinityTrainer).items() if n.startswith("_") and callable(v)}
    shared = {n for n in private if hasattr(hf.Trainer, n) and not n.startswith("__")}
    assert shared == set(REPLACED)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backward", ("loss", "kwargs")),
        ("clip_grad_norm_", ("parameters", "max_norm", "norm_type")),
        ("unwrap_model", ("model", "keep_fp32_wrapper", "keep_torch_compile")),
    ],
)
def test_accelerator_method_signatures(name: str, expected: tuple[str, ...]) -> None:
    assert parameters(getattr(Accelerator, name)) == expected
    assert name in vars(OffloadAccelerator)


def test_accelerator_properties_without_slots() -> None:
    assert isinstance(Accelerator.sync_gradients, property)
    assert isinstance(Accelerator.optimizer_step_was_skipped, property)
    # The instance's `__class__` is assigned: both layouts must be equal.
    assert not hasattr(Accelerator, "__slots__")


def test_trainer_calls_of_accelerator() -> None:
    """The calls that `OffloadAccelerator` implements."""
    epoch = inspect.getsource(hf.Trainer._run_epoch)
    assert "gradient_state._set_sync_gradients(do_sync_step)" in epoch
    assert "self.accelerator.optimizer_step_was_skipped" in epoch
    assert "grad_norm = self._clip_grad_norm(model)" in epoch
    assert "self.accelerator.backward(loss" in inspect.getsource(hf.Trainer.training_step)
    for name in ("_clip_grad_norm", "_get_grad_norm"):
        assert "self.accelerator.clip_grad_norm_(" in inspect.getsource(getattr(hf.Trainer, name))
    log = inspect.getsource(hf.Trainer._maybe_log_save_evaluate)
    assert "grad_norm.item() if isinstance(grad_norm, torch.Tensor)" in log


def test_prepare_for_training_source_unchanged() -> None:
    """`_prepare_for_training` is replaced completely: the original must do nothing else."""
    source = inspect.getsource(hf.Trainer._prepare_for_training)
    for line in (
        "self.create_optimizer()",
        "self._wrap_model(self.model_wrapped)",
        "self.create_scheduler(num_training_steps=max_steps)",
        "self._load_optimizer_and_scheduler(resume_from_checkpoint)",
        'for attr in ("model", "optimizer", "lr_scheduler"):',
        "return model, train_dataloader",
    ):
        assert line in source
    assert len(source.splitlines()) < 115  # 5.24 has more of FSDP
    assert "self.deepspeed" in inspect.getsource(hf.TrainingArguments.__post_init__)


def test_old_transformers_raises() -> None:
    with pytest.raises(ConfigError, match=r"needs transformers 5\.17, this is 5\.16\.1"):
        stock_trainer(SimpleNamespace(__version__="5.16.1"))
    assert stock_trainer(SimpleNamespace(__version__="5.17.0.dev0", Trainer=hf)) is hf
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"transformers>={".".join(map(str, OLDEST))}"' in project
