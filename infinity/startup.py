"""`initialize`: from a model and a config to an engine, or to an error that says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from infinity.bench.rate_cache import KnownRates, kept_rates
from infinity.config import Config
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityWarning
from infinity.integrations.front_door import Settings, read_settings
from infinity.journal import Journal
from infinity.memory.device import Device, find_device
from infinity.model.cut import UnitSpec
from infinity.model.materialize import Origins
from infinity.optim.guest_probe import GuestMaker
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.parts import Cut, Parts, check_model, cut_model, make_optimizer, plan_for
from infinity.plan.plan import Plan
from infinity.schedules import known_schedules
from infinity.training.birth import Progress
from infinity.training.data import ResumableLoader


def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    config_params: Config | Mapping[str, Any] | str | Path | None = None,
    args: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    batch_size: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    units: Sequence[UnitSpec] | None = None,
    device: Device | torch.device | str | None = None,
    progress: Progress | None = None,
    poison: Callable[[Tensor], None] | None = None,
    optimizer: torch.optim.Optimizer | GuestMaker | None = None,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Take over a model's memory; returns `(engine, optimizer, dataloader, scheduler)`.

    `config` (or `config_params`, or `args.deepspeed_config`) is ours or DeepSpeed's: that one is
    translated, `engine.translation` and the journal say how, and it may give the `batch_size`.

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
    told = read_settings(config, config_params, args, batch_size, optimizer, lr_scheduler)
    settings = told.config
    check_model(model)
    with ExitStack() as undo:
        target = find_device(device)
        undo.callback(target.close)
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        origins = Origins(model, settings.seed)
        offloaded = make_optimizer(model, settings, model_parameters, optimizer)
        cut = cut_model(model, settings, offloaded, units)
        plan = _make_plan(model, cut, settings, target, offloaded)
        scheduler = _make_scheduler(settings, offloaded, lr_scheduler)
        loader = _make_loader(training_data, told, collate_fn)
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
            config={name: entry["value"] for name, entry in settings.resolved().items()},
        )
        engine.translation = told.translation
        if isinstance(loader, ResumableLoader):
            engine.register_state("training_data", loader)
        undo.callback(engine.close)  # no values: they may not fit RAM
        _announce(engine, told, journal)
        undo.pop_all()
    return engine, offloaded, loader, scheduler


def _make_plan(
    model: nn.Module, cut: Cut, config: Config, device: Device, optimizer: OffloadedOptimizer
) -> Plan:
    """The plan of this run, by what is known of this machine's rates."""
    known = _rates_for(config, device)
    plan = plan_for(model, cut, config, device, optimizer.rule, known.rates)
    if "auto" in config.homes.model_dump().values():
        plan = replace(plan, rates_origin=known.origin)
    return plan


def _make_loader(training_data: Any, told: Settings, collate_fn: Callable[..., Any] | None) -> Any:
    """A loader of a Dataset; anything else as it is."""
    if not isinstance(training_data, Dataset):
        return training_data
    return ResumableLoader(
        training_data,
        batch_size=told.batch_size,
        collate_fn=collate_fn,
        drop_last=told.drop_last,
    )


def _announce(engine: Engine, told: Settings, journal: Journal | None) -> None:
    """What there is to say at the start, as warnings and in the journal."""
    for warning in engine.warnings:
        warnings.warn(warning, InfinityWarning, stacklevel=3)
    if journal is not None:
        start = {"config": told.config.resolved(), "plan": engine.plan.describe()}
        start |= told.journal_entry()
        journal.write({"event": "start", **start, "warnings": engine.warnings})


def _rates_for(config: Config, device: Device) -> KnownRates:
    """What is kept of this machine's rates: measuring takes seconds, and is for `infinity plan`."""
    paths = config.nvme_path
    known = all(path.is_dir() for path in paths)  # if not, the disk tier says what is wrong
    io, num_threads = config.io, config.cpu.num_threads
    return kept_rates(paths if known else (), device, io=io, num_threads=num_threads)


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
    kind = known_schedules()[config.scheduler.type]
    try:
        return kind(optimizer, **config.scheduler.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler {config.scheduler.type} refuses its params: {error}",
            remedy="see torch.optim.lr_scheduler, or infinity.schedules, for what it takes",
        ) from error
