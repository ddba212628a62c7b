"""`InfinityTrainer`: `transformers.Trainer` over an engine."""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity._initialize import starting
from infinity.config.schema import Config
from infinity.distributed.context import DistContext
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineClosedError, InfinityWarning
from infinity.integrations.deepspeed.accelerate_state import check_num_processes
from infinity.integrations.deepspeed.arguments import initialize
from infinity.integrations.deepspeed.settings import DeepSpeedSettings
from infinity.integrations.huggingface.accelerator import (
    OffloadAccelerator,
    OffloadedModel,
    offload_auxiliary,
)
from infinity.integrations.huggingface.batches import (
    Decided,
    StepBatches,
    find_pad_token,
    is_sum_over_samples,
    schedule_of_checkpoint,
    with_schedule,
)
from infinity.integrations.huggingface.build import load_model
from infinity.integrations.huggingface.models import choose_logits
from infinity.integrations.huggingface.noted_draws import LoopState, record_rng_per_batch
from infinity.integrations.huggingface.packages import package, transformers
from infinity.integrations.huggingface.save import save_pretrained
from infinity.integrations.huggingface.settings import (
    ParameterGroupsOptimizer,
    TrainerSettings,
    check_name,
    find_settings,
    refuse_arguments,
)
from infinity.integrations.huggingface.step_log import StepLog
from infinity.integrations.huggingface.trainer_checkpoints import (
    TAG,
    check_resumable,
    has_engine,
    newest_complete_checkpoint,
)
from infinity.model.lazy_tensor import LazyTensor
from infinity.optim.from_torch import (
    OptimizerChoice,
    adopt_scheduler,
    choose_class,
    choose_instance,
    without_optimizer,
)
from infinity.optim.lr_schedules import make_schedule
from infinity.training.load_weights import load_weights
from infinity.training.rng_state import capture_rng, restore_rng

# This module overrides private methods of Trainer and sets `_created_lr_scheduler` (so that a
# second train() creates a new schedule) and `TrainingArguments._n_gpu`, as Trainer does. A test
# checks each name, its parameters and its callers, so that a release that changes one fails in the
# test and not in a training run.


OLDEST = (5, 17)  # oldest supported transformers; tests of the trainer fail with older releases


def stock_trainer(package: Any) -> Any:
    """Return transformers' ``Trainer``; raise `ConfigError` for a release that is too old."""
    if tuple(map(int, package.__version__.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"InfinityTrainer needs transformers {needed}, this is {package.__version__}",
            remedy=f"pip install 'transformers>={needed}'",
        )
    return package.Trainer


_Trainer: Any = stock_trainer(transformers())


class InfinityTrainer(_Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that offloads model, gradients and optimizer state to an engine.

    The engine is `trainer.engine`, created by the first `train()`, `evaluate()` or `predict()`. It
    stays open after `train()` for evaluation and saving. Under `torchrun`, N ranks compute the
    numbers of one rank with N times `gradient_accumulation_steps`.

    A `checkpoint-N` contains the model in the format of `from_pretrained`, and the checkpoint of
    the engine instead of optimizer.pt. A resumed run is bitwise equal to an uninterrupted one. With
    bf16 and fp16 the model is saved in that dtype; the fp32 masters are in the checkpoint of the
    engine (``trainer.engine.save_weights(path, dtype="fp32")``).

    Args:
        model: Any module: in RAM, built under `infinity.Init`, on the meta device, or with lazily
            loaded weights. It is never moved, cast or wrapped.
        args: `TrainingArguments`; ``deepspeed=...`` is used like `infinity_config`.
        infinity_config: A configuration, of this library or DeepSpeed's: a mapping, a path, or a
            `Config`. Keys that are missing or "auto" are taken from `args`; values set in both must
            be equal. With `activations.tokens`, the maximum number of tokens of a batch, the plan
            chooses the micro-batches of a step; losses equal Trainer's except for rounding.
        given: Positional arguments of `transformers.Trainer`: `model`, `args`, ...
        named: Keyword arguments of `transformers.Trainer`.

    Raises:
        ConfigError: The configuration and `args` contradict each other.

    Example:
        >>> with InfinityTrainer(model, args, infinity_config={"nvme_path": "/mnt/nvme"},
        ...                      train_dataset=data) as trainer:
        ...     trainer.train()
    """

    # Attributes of Trainer, declared for the type checker.
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *given: Any, infinity_config: Any = None, **named: Any) -> None:
        if any(isinstance(argument, Engine) for argument in (*given, *named.values())):
            raise ConfigError(
                "InfinityTrainer(model=...) got an engine; it makes its own",
                remedy="give the module: from_pretrained of transformers, one built under "
                "infinity.Init, or infinity.huggingface.models.load_model, which reads no weights",
            )
        self.engine: Engine | None = None
        self._infinity_config = infinity_config
        self._settings: TrainerSettings | None = None
        self._loop_state = LoopState()
        self._step_batches: StepBatches | None = None
        self._step_log = StepLog()
        self._resume_folder: str | None = None
        self._closed = False
        super().__init__(*given, **named)
        if self.model_init is None:
            self._settings = find_settings(self.args, infinity_config, self.model)

    # --- the engine ------------------------------------------------------------------------------

    def _ensure_engine(self) -> Engine:
        """Return the engine of the model; create it if needed."""
        engine = self.engine
        if engine is not None and engine.module is self.model:
            if self._closed:
                raise EngineClosedError(
                    "the trainer is closed", remedy="create a new trainer with a new model"
                )
            return engine
        if engine is not None:  # model_init returned another model
            engine.close()
            self.engine = None
        user_optimizer = self.optimizer
        choice = self._choose_optimizer(user_optimizer)
        settings = self._current_settings()
        with starting(None) as (ranks, _):
            check_num_processes(self.args.world_size, ranks)
        config = self._choose_schedule(choose_logits(self.model, choice.config), ranks)
        config = config.model_copy(update={"cast_inputs": True})  # images and audio are fp32
        deepspeed_settings = DeepSpeedSettings(
            config,
            -(-self._samples_per_step // config.gradient_accumulation_steps),
            drop_last=self.args.dataloader_drop_last,
            translation=settings.translation,
            given=self._infinity_config or self.args.deepspeed,
        )
        rng_state = capture_rng()
        engine, optimizer, *_ = initialize(
            self.model,
            deepspeed_settings,
            model_parameters=choice.groups,
            optimizer=choice.optimizer,
            device=self.args.device,
            ranks=ranks,
        )
        restore_rng(rng_state)  # random draws of the Trainer do not depend on the engine
        self.engine, self._closed = engine, False
        self._loop_state.scheduler = None
        engine.register_state("trainer", self._loop_state)
        self.accelerator.max_norm = self.args.max_grad_norm
        self.accelerator.attach(engine)
        if user_optimizer is not None and self.lr_scheduler is not None:
            adopt_scheduler(self.lr_scheduler, user_optimizer)
        self.optimizer = optimizer
        self.model_wrapped = OffloadedModel(engine, self.accelerator)
        return engine

    def _offload_auxiliary(self, model: nn.Module) -> Engine:
        trained = None if self.engine is not None else self.model
        return offload_auxiliary(model, trained, self._current_settings().config, self.args.device)

    @property
    def _samples_per_step(self) -> int:
        """Number of samples of an optimizer step on each rank."""
        args = self.args
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)

    def _choose_schedule(self, config: Config, ranks: DistContext) -> Config:
        """Return `config` with a batch schedule and set `_step_batches` if the plan may choose."""
        self._step_batches = None
        methods = [
            ("training_step", InfinityTrainer),
            ("get_batch_samples", InfinityTrainer),
            ("compute_loss", _Trainer),
            ("_prepare_inputs", _Trainer),
        ]
        if config.activations.tokens is None or not is_sum_over_samples(self, methods):
            return config
        decided: Decided = (None, None)
        if self._resume_folder is not None:
            decided = schedule_of_checkpoint(self._resume_folder, TAG)
        if self._current_settings().sets_micro_batches:
            decided = (config.gradient_accumulation_steps, decided[1])
        config = with_schedule(
            self.model, config, self.args.device, self._samples_per_step, decided, ranks
        )
        self._step_batches = StepBatches(
            config, self._samples_per_step, find_pad_token(self), ranks
        )
        return config

    def _choose_optimizer(self, user_optimizer: torch.optim.Optimizer | None) -> OptimizerChoice:
        settings = self._current_settings()
        config = settings.config
        if not any(p.requires_grad for p in self.model.parameters()):
            return OptimizerChoice(without_optimizer(config), None)  # evaluation or prediction only
        if user_optimizer is not None:
            return choose_instance(config, user_optimizer, named=settings.sets_optimizer)
        if settings.sets_optimizer and settings.translation is not None:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            # One group in which all weights decay, as transformers passes to DeepSpeed optimizers.
            decay = config.optimizer.parameters()["weight_decay"]
            return OptimizerChoice(config, [{"params": parameters, "weight_decay": decay}])
        if self.optimizer_cls_and_kwargs is not None:
            optimizer_class, options = self.optimizer_cls_and_kwargs
        else:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        before = self.optimizer_cls_and_kwargs
        self.optimizer_cls_and_kwargs = (ParameterGroupsOptimizer, {})
        try:  # the groups of Trainer, with and without weight decay
            groups: list[dict[str, Any]] = super().create_optimizer().param_groups
        finally:
            self.optimizer, self.optimizer_cls_and_kwargs = None, before
        if settings.sets_optimizer:
            return OptimizerChoice(config, groups)
        return choose_class(config, optimizer_class, options, groups)

    def _current_settings(self, num_training_steps: int = 1) -> TrainerSettings:
        if self._settings is None or num_training_steps > 1:
            self._settings = find_settings(
                self.args, self._infinity_config, self.model, num_training_steps
            )
        return self._settings

    def close(self, *, restore: bool = False) -> None:
        """Release threads, files and memory. Idempotent.

        Args:
            restore: Materialize the model's parameters in RAM; otherwise they stay offloaded.
        """
        self._closed = True
        for engine in self.accelerator.auxiliary_engines:
            engine.close()
        if self.engine is not None:
            self.engine.close(restore=restore)

    def __enter__(self) -> InfinityTrainer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- overrides for model and optimizer -------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create Trainer's accelerator and make it leave model and optimizer to the engine."""
        refuse_arguments(self.args)
        check_name(self.args.optim)
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OffloadAccelerator
        self.accelerator.offload = self._offload_auxiliary

    # Disable mixed precision, DeepSpeed and compilation of accelerate.
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        arguments.pop("dynamo_plugin", None)
        return {**arguments, "mixed_precision": "no", "deepspeed_plugin": None}

    # The engine places the model.
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    # The original reads p.grad of all parameters, which warns: gradients are not DTensors here.
    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False

    # The Trainer calls the wrapper of the engine.
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if self.engine is None:
            self.create_optimizer()
        self._ensure_engine()
        return self.model_wrapped

    def get_train_dataloader(self) -> Any:
        """Return Trainer's loader, with random draws that are reproduced after a resume."""
        return record_rng_per_batch(super().get_train_dataloader(), self._loop_state)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the engine if needed.

        Args:
            model: Not used.

        Returns:
            The optimizer of the engine.
        """
        self._ensure_engine()
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Create the schedule of the configuration, else that of the `TrainingArguments`.

        Args:
            num_training_steps: Optimizer steps of the run.
            optimizer: Optimizer to schedule; default: the engine's.

        Returns:
            The schedule.
        """
        section = self._current_settings(num_training_steps).scheduler
        if self.lr_scheduler is None and section is not None:
            chosen = optimizer or self.optimizer
            self.lr_scheduler = make_schedule(section.type, section.params, chosen)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # --- batches of a step -----------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step, and store them for the batch schedule.

        Args:
            args: Arguments of `Trainer.get_batch_samples`.
            kwargs: Arguments of `Trainer.get_batch_samples`.

        Returns:
            The batches, and the number of items in them or None.
        """
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if self._step_batches is not None:
            self._step_batches.hold(batches, num_items)
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward of a batch.

        With a batch schedule, the call for the last batch of a step runs all its micro-batches.

        Args:
            model: The wrapped model.
            inputs: The batch.
            num_items_in_batch: Number of items of the step, over which the loss is averaged.

        Returns:
            The loss. With a batch schedule, the last call of a step returns the loss of the step,
            the others return 0.
        """
        self._record_step()
        self._step_log.batch(inputs, getattr(self.model, "main_input_name", "input_ids"))
        step_batches = self._step_batches
        if step_batches is None or not step_batches.take(inputs):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        total = torch.zeros((), device=self.args.device)
        for batch, is_last in step_batches.micro_batches_of_plan() if step_batches.complete else ():
            self.accelerator.more_micro_batches = not is_last
            total += super().training_step(model, batch, num_items_in_batch)
        return total

    def _record_step(self) -> None:
        if self.engine is not None:
            self._step_log.see(self.engine.last_report)

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Log values; add the metrics of the engine to a log with a loss.

        Args:
            logs: Values by name.
            more: Other arguments of `Trainer.log`.
            named: Other arguments of `Trainer.log`.
        """
        if "loss" in logs:
            self._record_step()
            logs = logs | self._step_log.take(self.args.world_size)
        super().log(logs, *more, **named)

    def compute_ref_log_probs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the log probabilities of the reference model, as in TRL's trainers.

        The model may be its own reference before training; the engine is created in this case.

        Args:
            model: The reference model.
            args: Arguments of the method of TRL's trainer.
            kwargs: Arguments of the method of TRL's trainer.

        Returns:
            The return value of the method of TRL's trainer.
        """
        if model is self.model:
            self._ensure_engine()
        return super().compute_ref_log_probs(model, *args, **kwargs)

    # Set up engine, optimizer, schedule and checkpoint without accelerator.prepare.
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._current_settings(max_steps)
        resumes = resume_from_checkpoint is not None and has_engine(resume_from_checkpoint)
        self._resume_folder = resume_from_checkpoint if resumes else None
        self.create_optimizer()  # a subclass may set self.optimizer only, or return it
        engine = self._ensure_engine()
        self.optimizer = engine.optimizer
        self.create_scheduler(num_training_steps=max_steps)
        self._loop_state.scheduler = self.lr_scheduler
        if self._resume_folder is not None:
            engine.load_checkpoint(self._resume_folder, TAG)
            if self._step_batches is not None:
                self._step_batches.compare(schedule_of_checkpoint(self._resume_folder, TAG))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    # --- checkpoints -----------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, as `Trainer.train`.

        Args:
            resume_from_checkpoint: Path of a `checkpoint-N`; True for the newest complete one in
                `output_dir`.
            args: Other arguments of `Trainer.train`.
            kwargs: Other arguments of `Trainer.train`.

        Returns:
            A `TrainOutput` of transformers.

        Raises:
            ConfigError: No checkpoint in `output_dir` is complete, or the path is no checkpoint.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
            check_resumable(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if has_engine(resume_from_checkpoint):
            return  # _prepare_for_training loads the checkpoint of the engine
        warnings.warn(
            f"{resume_from_checkpoint} contains no checkpoint of an engine: only its weights are "
            "loaded, the optimizer state starts anew (saved with save_only_model, or by another "
            "Trainer)",
            InfinityWarning,
            stacklevel=3,
        )
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if has_engine(best):  # has fp32 masters, also if the saved weights have 16 bits
            self._ensure_engine().load_checkpoint(best, TAG, load_module_only=True)
        else:
            self._load_weights(best)

    def _load_weights(self, folder: str) -> None:
        """Load weights written by `save_pretrained` into the engine, or the model without one."""
        engine = self.engine
        if hasattr(self.model, "peft_config"):
            peft = package("peft")
            adapters = peft.load_peft_weights(folder, device="cpu")
            trained = [p for p in self.model.parameters() if p.requires_grad]
            with nullcontext() if engine is None else engine.materialized(trained):
                peft.set_peft_model_state_dict(self.model, adapters, self.model.active_adapter)
        elif engine is not None and isinstance(self.model, transformers().PreTrainedModel):
            # With the conversion of names by transformers.
            loaded = load_model(folder, model_class=type(self.model))
            engine.load_state_dict(loaded.state_dict())
        else:
            load_weights(self.model if engine is None else engine, folder)

    # Write weights tensor by tensor from their tiers; all ranks take part.
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        is_offloaded = any(p.is_meta or isinstance(p, LazyTensor) for p in self.model.parameters())
        if state_dict is not None or (self.engine is None and not is_offloaded):
            super()._save(output_dir, state_dict)
            return
        target = output_dir if output_dir is not None else self.args.output_dir
        engine = self._ensure_engine()
        if isinstance(self.model, transformers().PreTrainedModel) or hasattr(
            self.model, "peft_config"
        ):
            save_pretrained(engine, target)
        else:
            engine.save_weights(target)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        torch.save(self.args, Path(target) / "training_args.bin")  # as Trainer does; never loaded

    # The checkpoint of the engine replaces optimizer.pt, scheduler.pt and rng_state.pth.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._ensure_engine()
        with engine.ranks.collective_section("saves a checkpoint"):
            if not engine.ranks.rank:  # left by a run that was resumed from an earlier step
                shutil.rmtree(Path(output_dir) / TAG, ignore_errors=True)
        engine.save_checkpoint(output_dir, TAG, save_latest=False, wait=True)

    def _save_rng_state(self, output_dir: str) -> None:
        pass

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and has_engine(checkpoint):
            self._loop_state.finish()
        else:
            super()._load_rng_state(checkpoint)
