"""`initialize`: from a model and a config to an engine, or to an error that says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from infinity.config import Config, load_config
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityWarning
from infinity.journal import Journal
from infinity.memory.device import Device, find_device
from infinity.model.cut import UnitSpec
from infinity.model.materialize import Origins
from infinity.optim.guest_probe import GuestMaker
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.parts import Parts, check_model, cut_model, make_optimizer, plan_for
from infinity.training.birth import Progress


def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | Path,
    *,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    batch_size: int = 1,
    collate_fn: Callable[..., Any] | None = None,
    units: Sequence[UnitSpec] | None = None,
    device: Device | torch.device | str | None = None,
    progress: Progress | None = None,
    poison: Callable[[Tensor], None] | None = None,
    optimizer: torch.optim.Optimizer | GuestMaker | None = None,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Take over a model's memory; returns `(engine, optimizer, dataloader, scheduler)`.

    `model_parameters` are parameters or groups as for any torch optimizer (default: all that
    require grad); only they get optimizer state. `training_data` is a Dataset (wrapped in a
    DataLoader of `batch_size`) or any iterable (returned as it is). `lr_scheduler` is a scheduler
    class or function of the optimizer, and wins over the config's. `units` overrides how the
    model is cut. `progress(done_bytes, total_bytes, what)` is called while the initial state is
    written. `poison` overwrites freed slots (tests).

    `optimizer` replaces the config's: any `torch.optim.Optimizer` class, a function of groups that
    makes one (`lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True)`), or an
    instance over the model's parameters that has no state yet. torch runs it tile by tile on fp32
    masters: slower than the built-in rules. It is tried out on small parameters first.

    The model may be larger than RAM: built under `infinity.Init`, under `torch.device("meta")`
    (then the modules' own initialisers make the values, see `model/initialisers.py`), or with
    `remember_values`. Its values are made one tensor at a time.

    A `Device` object that is passed belongs to the engine from then on: `engine.close()` closes
    it, or `initialize` itself where it raises.

    Raises `ConfigError`, `DoesNotFitError` or `MachineError`; nothing is left open or behind
    then, and the model is as it was unless writing the initial state had begun.
    """
    settings = load_config(config)
    check_model(model)
    with ExitStack() as undo:
        target = find_device(device)
        undo.callback(target.close)
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        origins = Origins(model, settings.seed)
        offloaded = make_optimizer(model, settings, model_parameters, optimizer)
        cut = cut_model(model, settings, offloaded, units)
        plan = plan_for(model, cut, settings, target, offloaded.rule)
        scheduler = _make_scheduler(settings, offloaded, lr_scheduler)
        loader = training_data
        if isinstance(training_data, Dataset):
            loader = DataLoader(training_data, batch_size=batch_size, collate_fn=collate_fn)
        journal = Journal(settings.journal) if settings.journal else None
        if journal is not None:
            undo.callback(journal.close)
        origins.check()
        parts = Parts(model, cut, plan, settings, target, offloaded, origins, progress, poison)
        undo.callback(parts.close)
        engine = Engine(
            model,
            parts,
            offloaded,
            gradient_clipping=float(settings.gradient_clipping),
            lr_scheduler=scheduler,
            journal=journal,
        )
        undo.callback(engine.close)  # no values: they may not fit RAM
        for warning in engine.warnings:
            warnings.warn(warning, InfinityWarning, stacklevel=2)
        if journal is not None:
            start = {"config": settings.resolved(), "plan": plan.describe()}
            journal.write({"event": "start", **start, "warnings": engine.warnings})
        undo.pop_all()
    return engine, offloaded, loader, scheduler


def _make_scheduler(config: Config, optimizer: OffloadedOptimizer, given: Any) -> Any:
    """The scheduler the engine steps, or None."""
    if given is not None:
        if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigError(
                "lr_scheduler is an object made over another optimizer",
                remedy="pass a function: lr_scheduler=lambda optimizer: ..., or make the "
                "scheduler over engine.optimizer and step it yourself",
            )
        return given(optimizer)
    if config.scheduler is None:
        return None
    kind = getattr(torch.optim.lr_scheduler, config.scheduler.type)
    try:
        return kind(optimizer, **config.scheduler.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler {config.scheduler.type} refuses its params: {error}",
            remedy="see torch.optim.lr_scheduler for what it takes",
        ) from error
