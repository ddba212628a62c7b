"""Construction of an engine from a model and a configuration: `initialize`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from infinity.common.accelerators import accelerator_type, is_accelerator, module_of
from infinity.common.crc32c import crc32c_of
from infinity.common.files import sync_directory
from infinity.config.schema import Config, load_config
from infinity.config.settings import Settings
from infinity.distributed.compare import check_equal
from infinity.distributed.context import DistContext
from infinity.distributed.launch import find_ranks
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError, InfinityWarning
from infinity.model.checks import check_model
from infinity.model.meta_init import InitialValues
from infinity.model.partition import Partition, partition_model
from infinity.model.partitioner import UnitSpec
from infinity.optim.adapter_probe import OptimizerMaker
from infinity.optim.from_torch import choose_optimizer
from infinity.optim.lr_schedules import make_schedule
from infinity.optim.offloaded import OffloadedOptimizer, mark_stepped
from infinity.optim.param_groups import check_parameters_match, make_optimizer
from infinity.plan.plan import Plan
from infinity.profiling.step_log import StepLog
from infinity.storage.device import Device
from infinity.storage.devices import resolve_device
from infinity.storage.os_errors import checked_root, refusal
from infinity.storage.run_dir import of_rank, remove_dead_runs_of_ranks
from infinity.training.checkpoints import check_buffer_sizes
from infinity.training.components import EngineComponents
from infinity.training.initial_write import Progress
from infinity.training.resumable_loader import ResumableLoader
from infinity.training.run_plan import plan_for
from infinity.training.stored_weights import take_over_stored_weights


@dataclass(frozen=True, slots=True)
class InitArguments:
    """Arguments of `initialize`, with the configuration loaded."""

    model: nn.Module
    settings: Settings
    optimizer: torch.optim.Optimizer | OptimizerMaker | None
    model_parameters: Iterable[Any] | None
    training_data: Any
    lr_scheduler: Any
    collate_fn: Callable[..., Any] | None
    units: Sequence[UnitSpec] | None
    device: Device | torch.device | str | None
    progress: Progress | None
    engine_class: type[Engine]


def initialize(
    model: nn.Module,
    config: Config | Settings | Mapping[str, Any] | str | Path,
    *,
    optimizer: torch.optim.Optimizer | OptimizerMaker | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    batch_size: int | None = None,
    units: Sequence[UnitSpec] | None = None,
    device: Device | torch.device | str | None = None,
    progress: Progress | None = None,
    engine_class: type[Engine] = Engine,
    ranks: DistContext | None = None,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Make an engine that trains a model with offloaded weights, gradients and optimizer state.

    Args:
        model: Any module. It may be larger than RAM if it is built under `infinity.Init` or under
            ``torch.device("meta")``: values are then made one tensor at a time. If no parameter
            requires grad, the engine is for inference, and `backward` and `step` raise.
        config: A `Config`, a mapping, or the path of a YAML or JSON file.
        optimizer: Replaces the configuration's: a class of `torch.optim`, an instance over the
            model's parameters without state, or a function of parameter groups that returns an
            optimizer. torch's AdamW, Adam, SGD and Adagrad (class or instance) and Muon (instance)
            are replaced by built-in update rules with the same groups and settings. Other
            optimizers run in torch on fp32 masters, which is slower.
        model_parameters: Parameters or groups, as for `torch.optim` optimizers. Default: all that
            require grad.
        training_data: A Dataset, for which a DataLoader is returned that saves its position and
            distributes batches to ranks round-robin; or any iterable, which is returned unchanged.
        lr_scheduler: A scheduler class, a function of the optimizer, or a scheduler over the
            optimizer that is passed. It replaces the configuration's.
        collate_fn: Passed to the DataLoader.
        batch_size: Samples per micro-batch of the DataLoader.
        units: Modules, names of modules, or lists of them, each a unit. Default: the model's
            repeated blocks.
        device: Device of computation. Default: the first GPU, else the CPU. A `Device` object is
            owned by the engine, which closes it.
        progress: Called with ``(done_bytes, total_bytes, text)`` while the initial state is
            written.
        engine_class: A subclass of `Engine` to make.
        ranks: Processes that train together. Default: torch's default process group, or the
            processes that `torchrun` started. All pass equal arguments, except for their data. N
            ranks with M micro-batches compute bitwise the same as one rank with N * M, in the order
            (micro-batch, rank). Budgets of RAM, disk and threads are per machine.

    Returns:
        ``(engine, optimizer, dataloader, scheduler)``. The optimizer is a `torch.optim.Optimizer`
        whose `step` is the engine's. Loader and scheduler are None if not requested.

    Raises:
        ConfigError: Arguments are invalid or contradict each other.
        DoesNotFitError: A budget or a drive is too small; the message has the missing bytes.
        MachineError: A path, a drive or a device cannot be used. After any error all resources are
            released, and the model is unchanged unless writing the initial state had begun.

    Example:
        >>> config = {"nvme_path": "/mnt/nvme", "precision": "bf16", "gradient_clipping": 1.0}
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> engine, optimizer, _, _ = infinity.initialize(model, config, optimizer=optimizer)

    `infinity.initialize` also takes DeepSpeed's arguments (``args, model, optimizer, ...``) and
    configurations: see `infinity.deepspeed`.
    """
    with starting(ranks) as (group, undo):
        settings = config
        if not isinstance(settings, Settings):
            settings = Settings(load_config(settings), 1 if batch_size is None else batch_size)
        check_model(model)
        arguments = InitArguments(
            model, settings, optimizer, model_parameters, training_data, lr_scheduler, collate_fn,
            units, device, progress, engine_class,
        )  # fmt: skip
        rank_specific = ("nvme_path", "step_log", "trace", "io.weights")
        facts: dict[str, Any] = {
            "infinity": version("torch-infinity"),
            "torch": torch.__version__,
            "samples of a micro-batch": settings.batch_size,
            "drop_last": settings.drop_last,
        }
        for name, entry in settings.config.resolved().items():
            if name not in rank_specific:
                facts[name] = entry["value"]
        check_equal(group, "the configuration", facts)
        return _make_engine(arguments, group, undo)


@contextmanager
def starting(ranks: DistContext | None) -> Iterator[tuple[DistContext, ExitStack]]:
    """Yield the ranks, and a stack of callbacks to run if `initialize` fails on any rank."""
    try:
        with ExitStack() as undo:
            group = ranks or find_ranks()
            undo.callback(group.close)
            with group.collective_section("initialize()"):
                yield group, undo
            undo.pop_all()
    except InfinityError as error:
        if isinstance(error.__cause__, OSError):  # its text is part of the message
            raise error from None
        raise


def _make_engine(
    arguments: InitArguments, ranks: DistContext, undo: ExitStack
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Make the engine of this rank; push to `undo` the cleanup for a failure on any rank."""
    config = arguments.settings.config
    model = arguments.model
    client = arguments.optimizer
    device = resolve_device(device_for(arguments.device, ranks))
    undo.callback(device.close)
    make_current(device.torch_device, ranks)
    ranks.check(device.torch_device)
    if config.seed is not None:
        torch.manual_seed(config.seed)
    reads = take_over_stored_weights(model, ranks, undo)
    if config.durable:
        check_buffer_sizes(model)
    initial_values = InitialValues(model, _meta_seed(config, ranks), reads)
    groups = arguments.model_parameters
    if groups is not None:
        groups = list(groups)
    if isinstance(client, torch.optim.Optimizer):
        check_parameters_match(client, groups)
    choice = choose_optimizer(config, client, groups)
    settings = replace(arguments.settings, config=choice.config)
    config = settings.config
    offloaded = make_optimizer(
        model, config, choice.groups, choice.optimizer, trains=settings.trains
    )
    rule, trained_groups = offloaded.rule, offloaded.param_groups
    restore_experts = undo.callback(_declare_experts(model))
    partition = partition_model(
        model, config, trained_groups, arguments.units, ranks.count, needs_full=rule.needs_full
    )
    offloaded.set_stack_rows(partition.pieces)
    if ranks.count > 1:
        check_equal(ranks, "the model", _model_facts(partition, initial_values))
        check_equal(ranks, "the optimizer", _optimizer_facts(offloaded))
    plan = plan_for(model, partition, config, device, rule, ranks, initial_values)
    if ranks.count > 1:
        check_equal(ranks, "the plan", _plan_facts(plan))
    scheduler = None
    if any(partition.trained):
        scheduler = _make_scheduler(config, offloaded, arguments.lr_scheduler, client)
    loader = _make_loader(arguments.training_data, settings, arguments.collate_fn, ranks)
    step_log = StepLog(config.step_log) if config.step_log and not ranks.rank else None
    if step_log is not None:
        undo.callback(step_log.close)
    initial_values.check()
    for path in config.nvme_path if not ranks.local_rank else ():
        remove_dead_runs_of_ranks(path, ranks.local_ranks, ranks.count)
    local = config if ranks.count == 1 else _config_of_rank(config, ranks)
    undo.callback(_close_rank, config, local, ranks)
    components = EngineComponents(
        model, partition, plan, local, device, offloaded, initial_values, arguments.progress, ranks
    )
    undo.callback(components.close)
    components.add_cleanup(partial(_close_rank, config, local, ranks), last=True)
    components.add_cleanup(restore_experts)
    engine = arguments.engine_class(
        model,
        components,
        offloaded,
        settings,
        lr_scheduler=scheduler,
        loader=loader,
        step_log=step_log,
    )
    undo.callback(engine.close)  # without restoring values, which may not fit in RAM
    if isinstance(client, torch.optim.Optimizer):
        components.add_cleanup(_redirect_to_engine(client, offloaded))
    if ranks.rank == 0:
        origin = settings.step_log_header()
        reports = any(partition.trained) and not origin
        unset_defaults = _unset_defaults(config, groups, client) if reports else ""
        _report_start(engine, config, origin, unset_defaults, step_log)
    return engine, offloaded, loader, scheduler


def _declare_experts(model: nn.Module) -> Callable[[], None]:
    """Make modules of transformers compute experts in ranges; return a function to undo it."""
    if "transformers.integrations.moe" not in sys.modules:
        return lambda: None
    experts = import_module("infinity.integrations.huggingface.experts")
    undo: Callable[[], None] = experts.compute_in_ranges(model)
    return undo


def device_for(given: Any, ranks: DistContext) -> Any:
    """Return the device to compute on: one per rank, unless `given` has an index."""
    if ranks.count == 1 or isinstance(given, Device):
        return given
    requested: Any = accelerator_type() if given is None else given
    if requested is None:
        return None
    device = torch.device(requested)
    lacks_index = is_accelerator(device) and device.index is None
    if not lacks_index:
        return device
    # A launcher may make only one device visible to each rank.
    index = 0 if module_of(device.type).device_count() == 1 else ranks.local_rank
    return torch.device(device.type, index)


def make_current(device: torch.device, ranks: DistContext) -> None:
    """Make a rank's device current, for "cuda" without an index and for a model's kernels."""
    if ranks.count > 1 and is_accelerator(device):
        module_of(device.type).set_device(device)


def _meta_seed(config: Config, ranks: DistContext) -> int | None:
    """Return the seed for values of a meta model; None to draw it from torch's generator."""
    if config.seed is not None or ranks.count == 1:
        return config.seed
    ranks.synchronize("draws a seed")
    return int(ranks.all_gather_object(int(torch.randint(2**62, ())))[0])


_COMPARED = 1024  # elements, at both ends of a parameter whose values are in a file


def _model_facts(partition: Partition, initial_values: InitialValues) -> dict[str, Any]:
    """Return the units, parameters and checksums of values that must be equal on all ranks.

    Of values in files, the first and last elements are compared. Of values that are not made yet,
    which takes time, only the smallest matrix is, or without a matrix the smallest tensor: vectors
    are often constants.
    """
    facts: dict[str, Any] = {"units": [unit.name for unit in partition.layouts]}
    for unit in partition.layouts:
        for segment in unit.segments:
            facts[segment.name] = f"{segment.shape}, {segment.dtype}, " + (
                f"trained in group {segment.group}" if segment.trained else "frozen"
            )
    unmade: dict[int, tuple[bool, int]] = {}
    for index, parameter in enumerate(partition.parameters[: partition.num_model_params]):
        size, name = parameter.numel(), partition.names[index]
        count = min(size, _COMPARED)
        first = initial_values.pieces(parameter, 0, count)
        last = initial_values.pieces(parameter, size - count, count)
        if first and last:
            for position, pieces in (("first", first), ("last", last)):
                value = torch.cat([read().flatten() for read in pieces])
                facts[f"{position} values of {name}"] = crc32c_of(value)
        elif parameter.is_meta:
            unmade[index] = (parameter.dim() < 2, size)
        else:
            facts[f"values of {name}"] = crc32c_of(parameter)
    if unmade:
        index = min(unmade, key=unmade.__getitem__)
        value = initial_values.value(partition.parameters[index])
        facts[f"values of {partition.names[index]}"] = crc32c_of(value)
    return facts


def _optimizer_facts(optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """Return the rule, its state, and the groups' values, which must be equal on all ranks."""
    rule, values = optimizer.rule, optimizer.group_values()
    state = {"moments": rule.moments, "full parameters": rule.needs_full}
    groups = {f"group {n}": v for n, v in enumerate(values)}
    return {"name": rule.name, **state, **groups}


def _plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the parts of the plan that determine collectives and commits."""
    names = ("slot_classes", "chunk_elements", "num_staging_buffers", "prefetch_units",
             "micro_batches", "gradient_itemsize", "unified", "durable_every", "saved")  # fmt: skip
    facts: dict[str, Any] = {name: str(getattr(plan, name)) for name in names}
    facts |= {"shared RAM": plan.shared, "unsharded units": sorted(plan.unsharded)}
    for unit, placement in zip(plan.units, plan.placements, strict=True):
        facts[f"placement of {unit.name}"] = f"{placement}, {unit.numel} elements"
    return facts


def _config_of_rank(config: Config, ranks: DistContext) -> Config:
    """Return the configuration with this rank's directories; only rank 0 writes a trace."""
    paths = tuple(of_rank(checked_root(path), ranks.rank) for path in config.nvme_path)
    for path in paths:
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            sync_directory(path.parent)  # else a power failure could lose its commits
        except OSError as error:
            raise refusal(path, error) from error
    changes = {"nvme_path": paths, "trace": None if ranks.rank else config.trace}
    return config.model_copy(update=changes)


def _close_rank(config: Config, local: Config, ranks: DistContext) -> None:
    """Close a rank's connections, and remove its empty directories."""
    for path in local.nvme_path if local is not config else ():
        with suppress(OSError):  # not empty
            path.rmdir()
    ranks.close()


def _make_loader(
    training_data: Any,
    settings: Settings,
    collate_fn: Callable[..., Any] | None,
    ranks: DistContext,
) -> Any:
    """Return a loader for a Dataset; other data unchanged.

    With `shuffles`, anything with `__len__` and `__getitem__` gets a loader.
    """
    has_items = all(hasattr(training_data, name) for name in ("__getitem__", "__len__"))
    if not (isinstance(training_data, Dataset) or (settings.shuffles and has_items)):
        return training_data
    if has_items:
        check_equal(ranks, "training_data", {"number of samples": len(training_data)})
    return ResumableLoader(
        training_data,
        ranks,
        shuffled=settings.shuffles,
        batch_size=settings.batch_size,
        collate_fn=collate_fn,
        drop_last=settings.drop_last,
    )


def _unset_defaults(config: Config, groups: Any, client: Any) -> str:
    """List settings at defaults that a plain PyTorch loop does not have; "" if there are none."""
    values: dict[str, str] = {}
    if "precision" not in config.model_fields_set:
        values["precision"] = config.precision
    if "gradient_clipping" not in config.model_fields_set:
        values["gradient_clipping"] = f"{config.gradient_clipping:g}"
    groups_have_lr = groups and all(isinstance(group, dict) and "lr" in group for group in groups)
    if client is None and not groups_have_lr and "lr" not in config.optimizer.model_fields_set:
        values["optimizer.lr"] = f"{config.optimizer.parameters()['lr']:g}"
    return ", ".join(f"{name} is {value}" for name, value in values.items())


def _report_start(
    engine: Engine, config: Config, origin: Mapping[str, Any], unset_defaults: str,
    step_log: StepLog | None,
) -> None:  # fmt: skip
    """Issue the start's warnings, and write the start record, with `origin`, to the step log."""
    messages = list(engine.warnings)
    if unset_defaults:
        messages.append(
            f"defaults that may differ from a plain loop: {unset_defaults}; name them in the "
            "configuration"
        )
    for warning in messages:
        warnings.warn(warning, InfinityWarning, stacklevel=5)
    if step_log is not None:
        record = {"config": config.resolved(), "plan": engine.plan.describe(), **origin}
        step_log.write({"event": "start", **record, "warnings": messages})


def _make_scheduler(config: Config, optimizer: OffloadedOptimizer, given: Any, client: Any) -> Any:
    """Return the scheduler that the engine steps, or None; `client` is the passed optimizer."""
    if given is None:
        section = config.scheduler
        return None if section is None else make_schedule(section.type, section.params, optimizer)
    if callable(given) and not isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return given(optimizer)
    for name in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(given, name, None)):
            raise ConfigError(
                f"lr_scheduler is a {type(given).__name__}, which has no {name}()",
                because="the engine steps it, and saves its state with checkpoints",
                remedy="pass a scheduler, or a function: lr_scheduler=lambda optimizer: ...",
            )
    if getattr(given, "optimizer", client) is not client:
        raise ConfigError(
            "lr_scheduler is an object made over another optimizer than was passed",
            remedy="pass that optimizer as well: initialize(optimizer=..., lr_scheduler=...); "
            "or a function: lr_scheduler=lambda optimizer: ...",
        )
    if isinstance(client, torch.optim.Optimizer):
        # The scheduler changes the groups, which the engine shares; without the mark torch would
        # warn that its optimizer has not stepped.
        mark_stepped(client)
    return given


def _redirect_to_engine(
    client: torch.optim.Optimizer, offloaded: OffloadedOptimizer
) -> Callable[[], None]:
    """Redirect methods of the passed optimizer to the engine's; return an undo function.

    Without this they would silently do nothing, because the parameters have no gradients.
    """
    attributes = vars(client)
    names = ("step", "zero_grad", "load_state_dict", "add_param_group")
    saved = {name: attributes.get(name) for name in names}

    def redirected(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(offloaded, name)(*args, **kwargs)
            if name == "step":
                mark_stepped(client)
            return result

        vars(call)["_wrapped_by_lr_sched"] = True  # schedulers check for this mark of their wrapper
        return call

    def restore() -> None:
        for name, method in saved.items():
            attributes.pop(name, None)
            if method is not None:
                attributes[name] = method

    attributes.update({name: redirected(name) for name in saved})
    mark_stepped(client)  # the engine steps it, without its wrapper
    return restore
