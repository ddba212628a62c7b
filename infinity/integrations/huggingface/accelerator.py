"""Adapters between `transformers.Trainer` and an engine: a model wrapper and an accelerator.

[Note: micro-batches]
A Trainer sets `accelerator.sync_gradients` before a micro-batch that is the last of its
accumulation window; windows may be shorter at the end of an epoch. The boundary is passed to the
engine at the forward. `engine.step()` for a micro-batch that is not the last is called at the next
forward.

[Note: reference models]
A reference model (DPO, KTO, GRPO) or a reward model that is a network gets an engine for inference,
which holds weights only. It may be created before the engine of the trained model, within the same
budgets. It gets at most the fraction of the free bytes that its weights are of the bytes of both
models; the remainder is reserved for the trained model. If it does not fit there, its weights are
placed on disk, or in RAM without `nvme_path`.
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
from infinity.storage.devices import resolve_device
from infinity.storage.reservations import PROCESS
from infinity.training.run_plan import limits_for
from infinity.types import Tier

_Accelerator: Any = importlib.import_module("accelerate").Accelerator


class OffloadAccelerator(_Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` for a model that is managed by an engine.

    `InfinityTrainer` assigns this class to the `__class__` of its accelerator. Other modules,
    data loaders and trackers are handled by the base class.
    """

    engine: Engine | None = None
    offload: Callable[[nn.Module], Engine] | None = None  # creates engines for reference models
    auxiliary_engines: tuple[Engine, ...] = ()  # engines of reference models
    grad_norm: Tensor | None = None  # of the next step, shape (); NaN until the step is done
    _has_gradients = False  # the accumulation window has gradients
    _step_due = False  # engine.step() is due for a micro-batch that is not the last of its window
    _is_boundary = True  # the current micro-batch is the last of its window
    max_norm: float | None = None  # TrainingArguments.max_grad_norm when the engine was created
    _default_clipping = 0.0  # engine.gradient_clipping when the engine was created
    # Further micro-batches of the window follow; overrides sync_gradients.
    more_micro_batches = False

    def attach(self, engine: Engine) -> None:
        """Use the engine for backward passes, clipping and steps."""
        self.engine = engine
        self._reset_window()
        self.grad_norm = None
        self._default_clipping = engine.gradient_clipping
        engine.optimizer.register_step_pre_hook(self._before_step)
        engine.optimizer.register_step_post_hook(self._after_step)

    def begin_micro_batch(self) -> None:
        """Begin a forward pass with gradients; see [Note: micro-batches]."""
        engine = self._engine()
        if self._step_due:
            engine.step()
            self._step_due = False
        self._is_boundary = self.sync_gradients and not self.more_micro_batches
        engine.set_gradient_accumulation_boundary(self._is_boundary)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the engine's backward pass; the Trainer has already divided the loss."""
        try:
            self._engine().backward(loss, scale_wrt_gas=False)
        except BaseException:
            self._reset_window()  # the engine has discarded the window as well
            raise
        self._has_gradients, self._step_due = True, not self._is_boundary

    def discard_window(self) -> None:
        """Discard the gradients of an open accumulation window."""
        if self._has_gradients:
            Engine.zero_grad(self._engine())
        self._reset_window()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Set the norm that the next step clips to, and return its gradient norm.

        The engine clips in `optimizer.step()`, not at all for inf. A `max_norm` equal to
        `self.max_norm` selects the clipping of the engine's configuration. The returned tensor has
        shape ``()`` and is NaN until the step is done, which fills it in place.
        """
        if norm_type != 2:
            raise ConfigError(f"the engine clips by the 2-norm, not by norm {norm_type}")
        if max_norm == math.inf:  # Trainer passes inf for a max_grad_norm of 0
            max_norm = 0.0
        is_default = max_norm == self.max_norm or self.max_norm is None
        self._engine().gradient_clipping = self._default_clipping if is_default else float(max_norm)
        if self.grad_norm is None:
            self.grad_norm = torch.full((), float("nan"))
        return self.grad_norm

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model; one in evaluation mode (a reference model) is offloaded to an engine."""
        if self.offload is None or not evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        self.auxiliary_engines = (*self.auxiliary_engines, self.offload(model))
        return model

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the user's module."""
        model = model.module if isinstance(model, OffloadedModel) else model
        return super().unwrap_model(model, *args, **kwargs)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step was skipped because its gradients were not finite."""
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

    def _reset_window(self) -> None:
        self._has_gradients = self._step_due = self.more_micro_batches = False
        self._is_boundary = True

    def _before_step(self, *_: Any) -> None:
        # A Trainer steps only at the end of a window, even if a forward cleared the boundary.
        self._engine().set_gradient_accumulation_boundary(True)

    def _after_step(self, *_: Any) -> None:
        self._reset_window()
        norm = self._engine().grad_norm
        if self.grad_norm is not None and norm is not None:
            self.grad_norm.fill_(norm)  # the Trainer holds this tensor and logs it after the step
        self.grad_norm = None


class OffloadedModel(nn.Module):
    """`model_wrapped` of a Trainer: calls the engine. `module` is the user's module."""

    def __init__(self, engine: Engine, accelerator: OffloadAccelerator) -> None:
        super().__init__()
        self.module = engine.module
        # Bypass nn.Module.__setattr__: the engine is not a submodule.
        vars(self).update(engine=engine, _accelerator=accelerator)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's forward pass."""
        if torch.is_grad_enabled():
            self._accelerator.begin_micro_batch()
        return self.engine(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of an open accumulation window; a no-op after a step."""
        self._accelerator.discard_window()

    def to(self, *args: Any, **kwargs: Any) -> OffloadedModel:
        """Return self; raise `ConfigError` if a dtype other than the engine's is requested."""
        dtype = COMPUTE_DTYPES[self.engine.plan.precision.name]
        arguments = [*args, *kwargs.values()]
        other_dtypes = [a for a in arguments if isinstance(a, torch.dtype) and a is not dtype]
        if other_dtypes:
            raise ConfigError(
                f"the model cannot be cast to {other_dtypes[0]}, the engine computes in {dtype}",
                remedy="choose bf16 or fp16 in TrainingArguments",
            )
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


# Config keys of training, and of files that belong to a single run.
_TRAINING_KEYS = {"optimizer", "scheduler", "loss_scale", "durable", "commit_every", "resume",
                  "step_log", "trace", "trace_steps"}  # fmt: skip
_TRAINED_PARAMETER_BYTES = 14  # bytes per trained parameter, with AdamW and one micro-batch


def offload_auxiliary(
    model: nn.Module, trained: nn.Module | None, config: Config, device: torch.device
) -> Engine:
    """Create an inference engine for a reference model; see [Note: reference models].

    `trained` is the model to train if it has no engine yet, else None. Raises `DoesNotFitError` if
    not even the slots for the units of `model` fit.
    """
    model.requires_grad_(False).eval()
    ranks = find_ranks()
    itemsize = COMPUTE_DTYPES[config.precision].itemsize
    raw = config.model_dump(exclude_unset=True, exclude=_TRAINING_KEYS)
    config = load_config(raw)
    model_bytes = sum(p.numel() * itemsize for p in model.parameters())
    trained_bytes = 0 if trained is None else sum(
        p.numel() * (_TRAINED_PARAMETER_BYTES if p.requires_grad else itemsize)
        for p in trained.parameters()
    )  # fmt: skip
    with closing(resolve_device(device)) as storage_device:
        limits = limits_for(config, storage_device, model, ranks)
    free_bytes = {Tier.DEVICE: limits.device or 0, Tier.HOST: (limits.host or 0) - limits.base}
    reserved = {
        tier: int(n * trained_bytes / (model_bytes + trained_bytes))
        for tier, n in free_bytes.items()
    }
    reserved[Tier.HOST] += limits.base  # the process base: initialize() does not count it again
    PROCESS.take(model, reserved, storage_device, pending=True)
    try:
        return initialize(model, config, device=device, ranks=ranks)[0]
    except DoesNotFitError:
        lowest_placement = {
            "weights": "disk" if config.nvme_path else "host",
            **raw.get("placement", {}),
        }
    finally:
        PROCESS.release(model)
    return initialize(model, load_config({**raw, "placement": lowest_placement}), device=device)[0]
