"""What a Trainer is shown of an engine: a module to call, and an accelerator that leaves it alone.

[Note: micro-batches]
A Trainer says by `accelerator.sync_gradients` whether the micro-batch that begins is the last of
its window, which may be shorter at the end of an epoch. The engine is told at the forward; a
micro-batch that is not the last ends when the next forward comes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.training.state_dict import COMPUTE_DTYPES

_Accelerator: Any = importlib.import_module("accelerate").Accelerator


class OffloadAccelerator(_Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` for a model whose memory is an engine's.

    A Trainer's accelerator becomes one by its class. What it does for other modules, loaders
    and trackers is as before.
    """

    engine: Engine | None = None
    grad_norm: Tensor | None = None  # of the step that comes, NaN until it has happened
    _open = False  # a window with gradients
    _due = False  # the end of a micro-batch that has them, and is not the last
    _ends_window = True  # the current micro-batch

    def attach(self, engine: Engine) -> None:
        """From now on `backward` is the engine's."""
        self.engine = engine
        self._start_over()
        self.grad_norm = None
        engine.optimizer.register_step_post_hook(self._stepped)

    def begin_micro_batch(self) -> None:
        """A forward that gradients will be asked of; see the note."""
        engine = self._engine()
        if self._due:
            engine.step()
            self._due = False
        self._ends_window = self.sync_gradients
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
            self._engine().zero_grad()
        self._start_over()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The norm of the step that comes: NaN, and the number once `optimizer.step()` is done.

        The engine clips as it steps, by `max_grad_norm` of the TrainingArguments.
        """
        if norm_type != 2:
            raise ConfigError(f"the engine clips by the 2-norm, not by norm {norm_type}")
        if self.grad_norm is None:
            self.grad_norm = torch.full((), float("nan"))
        return self.grad_norm

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
        self._open, self._due, self._ends_window = False, False, True

    def _stepped(self, *_: Any) -> None:
        self._start_over()
        norm = self._engine().grad_norm
        if self.grad_norm is not None and norm is not None:
            self.grad_norm.fill_(norm)  # the Trainer holds it, and logs it from now on
        self.grad_norm = None


class OffloadedModel(nn.Module):
    """Calls the engine; `module` is the user's module. What a Trainer calls `model_wrapped`."""

    def __init__(self, engine: Engine, accelerator: OffloadAccelerator) -> None:
        super().__init__()
        self.module = engine.module
        # Past nn.Module: neither is a part of this module.
        object.__setattr__(self, "engine", engine)
        object.__setattr__(self, "_accelerator", accelerator)
        object.__setattr__(self, "_dtype", COMPUTE_DTYPES[engine.plan.precision.name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward; floats are brought to what it computes in, where that is 16 bits.

        As transformers does for DeepSpeed: images and sound come in fp32.
        """
        if torch.is_grad_enabled():
            self._accelerator.begin_micro_batch()
        if self._dtype is not torch.float32:
            args, kwargs = _cast(args, self._dtype), _cast(kwargs, self._dtype)
        return self.engine(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a window that has begun; after a step there are none."""
        self._accelerator.forget_window()

    def to(self, *args: Any, **kwargs: Any) -> OffloadedModel:
        """Stay; raises `ConfigError` for another dtype than the engine computes in."""
        asked = [*args, *kwargs.values()]
        other = [a for a in asked if isinstance(a, torch.dtype) and a is not self._dtype]
        if other:
            raise ConfigError(
                f"the model was to become {other[0]}, the engine computes in {self._dtype}",
                remedy="choose bf16 or fp16 in TrainingArguments",
            )
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({key: _cast(item, dtype) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
