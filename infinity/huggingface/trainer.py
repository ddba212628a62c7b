"""`InfinityTrainer`: `transformers.Trainer` over an engine.

What of transformers it touches that is not public is listed in `trainer_private.py`.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError, EngineClosedError, InfinityWarning
from infinity.huggingface.library import transformers
from infinity.huggingface.saving import save_pretrained
from infinity.huggingface.trainer_checkpoint import (
    LoopState,
    has_engine,
    load_engine,
    newest_whole,
    refuse_foreign,
    save_engine,
)
from infinity.huggingface.trainer_data import DataNotes, note_draws
from infinity.huggingface.trainer_model import OffloadAccelerator, OffloadedModel
from infinity.huggingface.trainer_optimizer import (
    Choice,
    GroupsOnly,
    adopt_scheduler,
    all_in_one,
    check_name,
    choose_class,
    choose_instance,
)
from infinity.huggingface.trainer_settings import TrainerSettings, find_settings, refuse_arguments
from infinity.model.promised import Promised
from infinity.read_settings import Settings
from infinity.schedules import make_schedule
from infinity.startup import initialize
from infinity.training.rng import capture_rng, restore_rng
from infinity.weights import load_weights

_Trainer: Any = transformers().Trainer


class InfinityTrainer(_Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose model, gradients and optimizer state rest with an engine.

    All arguments are the Trainer's; `infinity_config` is a configuration, ours or DeepSpeed's: a
    dict, a path, a `Config`. `TrainingArguments(deepspeed=...)` is taken as well (that of
    `infinity`, where the package deepspeed is not installed). What it leaves out, or calls
    "auto", comes from the TrainingArguments; what both say must be the same.

    The model may be any module: in RAM, built under `infinity.Init`, on the meta device, or with
    its weights still in their files. It is never moved, cast or wrapped. The engine is made by
    the first `train()`, `evaluate()` or `predict()`; it is `trainer.engine`, and what is called
    is `trainer.model_wrapped`. It goes on after `train()`, so that evaluating and saving work;
    `close()`, or leaving a `with` block, gives everything back.

    A `checkpoint-N` holds the model as `from_pretrained` takes it, and the engine's own
    checkpoint in place of optimizer.pt: a run that resumes computes the same bits as one that was
    not interrupted. In bf16 and fp16 the model is saved in these, as with DeepSpeed; the exact
    masters are in the engine's checkpoint (`trainer.engine.save_weights(path, dtype="fp32")`).
    """

    # The Trainer's own, which a type checker does not see.
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any

    def __init__(
        self, model: Any = None, args: Any = None, *others: Any, infinity_config: Any = None,
        **named: Any,
    ) -> None:  # fmt: skip
        if isinstance(model, Engine):
            raise ConfigError(
                "InfinityTrainer(model=...) got an engine; it makes its own",
                remedy="give the module: from_pretrained of transformers, one built under "
                "infinity.Init, or infinity.huggingface.models.load_model, which reads no weights",
            )
        self.engine: Engine | None = None
        self._infinity_config = infinity_config
        self._settings: TrainerSettings | None = None
        self._notes = DataNotes()
        self._loop = LoopState(self._notes)
        self._closed = False
        if args is not None:
            refuse_arguments(args)
            check_name(args.optim)
            if args.n_gpu > 1:
                args._n_gpu = 1
        super().__init__(model, args, *others, **named)
        if self.model_init is None:
            self._settings = find_settings(self.args, infinity_config, self.model)

    # --- the engine ------------------------------------------------------------------------------

    def _open(self) -> Engine:
        """The engine of the model, made if there is none."""
        engine = self.engine
        if engine is not None and engine.module is self.model:
            if self._closed:
                raise EngineClosedError(
                    "the trainer is closed", remedy="make a new one, over a new model"
                )
            return engine
        if engine is not None:  # another model, of model_init
            engine.close()
            self.engine = None
        given = self.optimizer
        choice, settings = self._choose(given), self._settings_now()
        told = Settings(
            choice.config,
            settings.translation,
            self.args.per_device_train_batch_size,
            drop_last=self.args.dataloader_drop_last,
            given=choice.config,
        )
        generators = capture_rng()
        engine, optimizer, *_ = initialize(
            self.model,
            told,
            model_parameters=choice.groups,
            optimizer=choice.guest,
            device=self.args.device,
        )
        restore_rng(generators)  # a Trainer draws as if there were no engine
        self.engine, self._closed = engine, False
        self._loop = LoopState(self._notes)
        engine.register_state("trainer", self._loop)
        self.accelerator.attach(engine)
        if given is not None and self.lr_scheduler is not None:
            adopt_scheduler(self.lr_scheduler, given, optimizer)
        self.optimizer = optimizer
        self.model_wrapped = OffloadedModel(engine, self.accelerator)
        return engine

    def _choose(self, given: torch.optim.Optimizer | None) -> Choice:
        settings = self._settings_now()
        config = settings.config
        if given is not None:
            return choose_instance(config, given, named=settings.names_optimizer)
        if settings.names_optimizer and settings.translation is not None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            return Choice(config, all_in_one(trained, config.optimizer.weight_decay))
        if self.optimizer_cls_and_kwargs is not None:
            kind, options = self.optimizer_cls_and_kwargs
        else:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        groups = self._groups()
        if settings.names_optimizer:
            return Choice(config, groups)
        return choose_class(config, kind, options, groups)

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups that `Trainer` makes: with weight decay, and without."""
        before = self.optimizer_cls_and_kwargs
        self.optimizer_cls_and_kwargs = (GroupsOnly, {})
        try:
            groups: list[dict[str, Any]] = super().create_optimizer().param_groups
        finally:
            self.optimizer, self.optimizer_cls_and_kwargs = None, before
        return groups

    def _settings_now(self, num_training_steps: int = 1) -> TrainerSettings:
        if self._settings is None or num_training_steps > 1:
            self._settings = find_settings(
                self.args, self._infinity_config, self.model, num_training_steps
            )
        return self._settings

    def close(self, *, restore: bool = False) -> None:
        """Give everything back: threads, files, memory. Idempotent.

        The model's parameters are absent afterwards; with `restore` they get their full values
        back, in RAM.
        """
        self._closed = True
        if self.engine is not None:
            self.engine.close(restore=restore)

    def __enter__(self) -> InfinityTrainer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- what Trainer would do with model and optimizer ------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's; the accelerator then leaves model and optimizer to the engine."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OffloadAccelerator

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        built.pop("dynamo_plugin", None)
        return {**built, "mixed_precision": "no", "deepspeed_plugin": None}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if self.engine is None:
            self.create_optimizer()
        self._open()
        return self.model_wrapped

    def get_train_dataloader(self) -> Any:
        """As Trainer's; random draws of its batches are the same after a resume."""
        return note_draws(super().get_train_dataloader(), self._notes)

    def create_optimizer(self, model: Any = None) -> Any:
        """The engine's optimizer, which is made here."""
        self._open()
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The configuration's schedule if it has one, else that of the TrainingArguments."""
        section = self._settings_now(num_training_steps).scheduler
        if self.lr_scheduler is None and section is not None:
            chosen = optimizer or self.optimizer
            self.lr_scheduler = make_schedule(section.type, section.params, chosen)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._settings_now(max_steps)
        self.create_optimizer()  # a subclass may set self.optimizer only, or return it
        engine = self._open()
        self.optimizer = engine.optimizer
        self.create_scheduler(num_training_steps=max_steps)
        self._loop.scheduler = self.lr_scheduler
        if resume_from_checkpoint is not None and has_engine(resume_from_checkpoint):
            load_engine(engine, resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    # --- checkpoints -----------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's. True resumes from the newest checkpoint of an engine that is complete.

        Raises `ConfigError` where output_dir has checkpoints, and none is.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_whole(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
            refuse_foreign(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if has_engine(resume_from_checkpoint):
            return  # all of it comes with the engine
        warnings.warn(
            f"{resume_from_checkpoint} holds no checkpoint of an engine: its weights are taken, "
            "the optimizer starts anew (saved with save_only_model, or by another Trainer)",
            InfinityWarning,
            stacklevel=3,
        )
        self._take_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if has_engine(best):  # fp32 masters, where weights are saved in 16 bits
            self._open().load_checkpoint(best, "engine", load_module_only=True)
        else:
            self._take_weights(best)

    def _take_weights(self, folder: str) -> None:
        """Weights that `save_pretrained` wrote, to wherever the model's rest."""
        engine = self.engine
        if hasattr(self.model, "peft_config"):
            if engine is not None:
                raise ConfigError(
                    f"{folder} holds adapters only, which cannot be loaded while an engine runs",
                    remedy="leave save_only_model out; or load them before the trainer is made",
                )
            super()._load_from_checkpoint(folder)
            return
        load_weights(self.model if engine is None else engine, folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        absent = any(p.is_meta or isinstance(p, Promised) for p in self.model.parameters())
        if state_dict is not None or (self.engine is None and not absent):
            super()._save(output_dir, state_dict)
            return
        target = output_dir if output_dir is not None else self.args.output_dir
        engine = self._open()
        if isinstance(self.model, transformers().PreTrainedModel) or hasattr(
            self.model, "peft_config"
        ):
            save_pretrained(engine, target)
        else:
            engine.save_weights(target)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        torch.save(self.args, Path(target) / "training_args.bin")  # as Trainer does; never loaded

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_engine(self._open(), output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        pass

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and has_engine(checkpoint):
            self._notes.finish()
        else:
            super()._load_rng_state(checkpoint)
