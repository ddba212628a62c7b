"""Objects that a Trainer gets for an engine: a module to call, and an accelerator.

[Note: micro-batches]
A Trainer says by `accelerator.sync_gradients` whether the micro-batch that begins is the last of
its window, which may be shorter at the end of an epoch. The engine is told at the forward; a
micro-batch that is not the last ends when the next forward comes.

[Note: reference models]
A reference model (DPO, KTO, GRPO) or a reward model that is a network gets an engine for inference:
weights only. It is made before the trained model's, within the same budgets: of what is free it
gets at most the share that its weights are of all that will rest, and where that is too little, as
little as it can do with.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from infinity._initialize import initialize
from infinity.config.schema import Config, load_config
from infinity.distributed.launch import find_ranks
from infinity.engine import Engine
from infinity.errors import ConfigError, DoesNotFitError
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.storage.devices import find_device
from infinity.storage.reservations import PROCESS
from infinity.training.run_plan import limits_for
from infinity.types import Tier

_Accelerator: Any = importlib.import_module("accelerate").Accelerator


class OffloadAccelerator(_Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` for a model whose memory is an engine's.

    A Trainer's accelerator becomes one by its class. What it does for other modules, loaders
    and trackers is as before.
    """

    engine: Engine | None = None
    offload: Callable[[nn.Module], Engine] | None = None  # a model that is not trained
    beside: tuple[Engine, ...] = ()  # of those models
    grad_norm: Tensor | None = None  # of the step that comes, NaN until it has happened
    _open = False  # a window with gradients
    _due = False  # the end of a micro-batch that has them, and is not the last
    _ends_window = True  # the current micro-batch
    max_norm: float | None = None  # of the TrainingArguments as the engine was made
    _clipping = 0.0  # that of the engine then
    more_follow = False  # micro-batches, whatever the Trainer says: it has handed over all

    def attach(self, engine: Engine) -> None:
        """From now on `backward` is the engine's."""
        self.engine = engine
        self._start_over()
        self.grad_norm = None
        self._clipping = engine.gradient_clipping
        engine.optimizer.register_step_pre_hook(self._steps)
        engine.optimizer.register_step_post_hook(self._stepped)

    def begin_micro_batch(self) -> None:
        """A forward that gradients will be asked of; see the note."""
        engine = self._engine()
        if self._due:
            engine.step()
            self._due = False
        self._ends_window = self.sync_gradients and not self.more_follow
        engine.set_gradient_accumulation_boundary(self._ends_window)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """The engine's backward; the Trainer has divided the loss."""
        try:
            self._engine().backward(loss, scale_wrt_gas=False)
        except BaseException:
            self._start_over()  # as the engine has
            raise
        self._open, self._due = True, not self._ends_window

    def forget_window(self) -> None:
        """Drop the gradients of a window that has begun."""
        if self._open:
            Engine.zero_grad(self._engine())
        self._start_over()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The norm of the step that comes: NaN, and the number once `optimizer.step()` is done.

        The engine clips as it steps: by its configuration, until another norm is told than was
        when it was made.
        """
        if norm_type != 2:
            raise ConfigError(f"the engine clips by the 2-norm, not by norm {norm_type}")
        if math.isfinite(max_norm):  # Trainer says inf where it wants the norm only
            is_default = max_norm == self.max_norm or self.max_norm is None
            self._engine().gradient_clipping = self._clipping if is_default else float(max_norm)
        if self.grad_norm is None:
            self.grad_norm = torch.full((), float("nan"))
        return self.grad_norm

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model; one that others are measured by, as a reference, rests with an engine."""
        if self.offload is None or not evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        self.beside = (*self.beside, self.offload(model))
        return model

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The user's module."""
        model = model.module if isinstance(model, OffloadedModel) else model
        return super().unwrap_model(model, *args, **kwargs)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step found gradients that were not finite."""
        if self.engine is None:
            return bool(super().optimizer_step_was_skipped)
        report = self.engine.last_report
        return report is not None and report.skipped

    def _engine(self) -> Engine:
        if self.engine is None:
            raise ConfigError(
                "the Trainer has no engine yet", remedy="call trainer.train() or evaluate() first"
            )
        return self.engine

    def _start_over(self) -> None:
        self._open, self._due, self._ends_window, self.more_follow = False, False, True, False

    def _steps(self, *_: Any) -> None:
        """Whatever was called of the model in this window, a Trainer steps at its end."""
        self._engine().set_gradient_accumulation_boundary(True)

    def _stepped(self, *_: Any) -> None:
        self._start_over()
        norm = self._engine().grad_norm
        if self.grad_norm is not None and norm is not None:
            self.grad_norm.fill_(norm)  # the Trainer holds it, and logs it from now on
        self.grad_norm = None


class OffloadedModel(nn.Module):
    """The `model_wrapped` of a Trainer: calls the engine; `module` is the user's module."""

    def __init__(self, engine: Engine, accelerator: OffloadAccelerator) -> None:
        super().__init__()
        self.module = engine.module
        # Past nn.Module: neither is a part of this module.
        vars(self).update(engine=engine, _accelerator=accelerator)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward."""
        if torch.is_grad_enabled():
            self._accelerator.begin_micro_batch()
        return self.engine(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a window that has begun; after a step there are none."""
        self._accelerator.forget_window()

    def to(self, *args: Any, **kwargs: Any) -> OffloadedModel:
        """Stay; raises `ConfigError` for another dtype than the engine computes in."""
        dtype = COMPUTE_DTYPES[self.engine.plan.precision.name]
        asked = [*args, *kwargs.values()]
        other = [a for a in asked if isinstance(a, torch.dtype) and a is not dtype]
        if other:
            raise ConfigError(
                f"the model was to become {other[0]}, the engine computes in {dtype}",
                remedy="choose bf16 or fp16 in TrainingArguments",
            )
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


# Keys that say how to train, or where one run keeps what is its own.
_OF_TRAINING = {"optimizer", "scheduler", "loss_scale", "durable", "commit_every", "resume",
                "step_log", "trace", "trace_steps"}  # fmt: skip
_TRAINED_BYTES = 14  # a parameter with AdamW and one micro-batch


def offload_beside(
    model: nn.Module, trained: nn.Module | None, config: Config, device: torch.device
) -> Engine:
    """An engine for a model without gradients; see [Note: reference models].

    `trained` is a model that has no engine yet. Raises `DoesNotFitError` where not even the
    slots for its units fit.
    """
    model.requires_grad_(False).eval()
    raw, ranks = config.model_dump(exclude_unset=True, exclude=_OF_TRAINING), find_ranks()
    config, itemsize = load_config(raw), COMPUTE_DTYPES[config.precision].itemsize
    model_bytes = sum(p.numel() * itemsize for p in model.parameters())
    others = 0 if trained is None else sum(
        p.numel() * (_TRAINED_BYTES if p.requires_grad else itemsize) for p in trained.parameters()
    )  # fmt: skip
    with closing(find_device(device)) as opened:
        limits = limits_for(config, opened, model, ranks)
    free = {Tier.DEVICE: limits.device or 0, Tier.HOST: (limits.host or 0) - limits.base}
    left = {tier: int(n * others / (model_bytes + others)) for tier, n in free.items()}
    left[Tier.HOST] += limits.base  # the process, which is then not counted as this engine's
    PROCESS.take(model, left, opened, promised=True)
    try:
        return initialize(model, config, device=device, ranks=ranks)[0]
    except DoesNotFitError:
        least = {"weights": "disk" if config.nvme_path else "host", **raw.get("placement", {})}
    finally:
        PROCESS.release(model)
    return initialize(model, load_config({**raw, "placement": least}), device=device)[0]
