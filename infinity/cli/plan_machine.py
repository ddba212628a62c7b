"""Machine that `infinity plan` plans for: this one, one from a file, or one of given sizes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.config.schema import Config, Offload, Recompute
    from infinity.plan.plan_machine import PlanMachine
    from infinity.train.settings import RunConfig

_COMMON_MACHINE = "a common machine"


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search; sizes in bytes, None if machine or configuration decide."""

    target: str
    model: str | None = None
    model_class: str | None = None  # of transformers; None: the class in the model's config
    machine_file: Path | None = None
    device: int | None = None
    host: int | None = None
    disk: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    link: int | None = None
    between: int | None = None
    paths: tuple[Path, ...] = ()
    tokens: int | None = None  # of all ranks
    micro_batches: int | None = None
    sequence: int | None = None
    slices: int | None = None
    offload: Offload | None = None
    recompute: Recompute | None = None
    precision: str | None = None
    moments: str | None = None
    lora: int | None = None
    frozen_format: str | None = None
    refresh: bool = False
    drives: int | None = None
    finer_units: bool = False
    keys: tuple[str, ...] = ()  # KEY=VALUE, of the engine's configuration
    run: RunConfig | None = None  # if TARGET is a configuration for `infinity train`


def machine_of(options: SearchOptions, config: Config) -> PlanMachine:
    """Return the machine to plan for, with the sizes of the options."""
    from infinity.plan.machine import may_have_gpu
    from infinity.plan.plan_machine import PlanMachine, read_machine_file
    from infinity.plan.rates import DISK, Rates

    if options.machine_file is not None:
        if options.paths or options.refresh:
            raise ConfigError(
                "--machine is a machine that was measured; --path and --refresh measure this one",
                remedy="leave out one or the other; --disk changes its space",
            )
        return _with_sizes(read_machine_file(options.machine_file), options)
    paths = options.paths or config.nvme_path
    if options.disk is not None and not options.paths:
        paths = tuple(path for path in paths if path.exists())
    assumed = assumed_disk(options)
    unmeasured = options.device is not None and not paths
    if unmeasured and not may_have_gpu():
        return _with_sizes(PlanMachine.this_machine(assumed, None, name=_COMMON_MACHINE), options)
    from infinity.storage.devices import resolve_device

    with closing(resolve_device(None)) as device:
        if unmeasured and device.unified:
            machine = PlanMachine.this_machine(assumed, None, name=_COMMON_MACHINE)
        else:
            from infinity.profiling.calibration import cached_or_nominal_rates, cached_rates
            from infinity.profiling.link_rates import read_cached_links

            known = cached_rates(paths, device, io=config.io, refresh=options.refresh)
            gpus, nodes = options.gpus or 1, options.nodes or 1
            links, _ = read_cached_links(device, gpus, nodes) or ({}, "")
            rates = Rates.of(known.rates.numbers() | links)
            memory = device.memory_bytes()
            machine = PlanMachine.this_machine(
                paths or assumed, memory, rates, measured=known.measured
            )
            if assumed:  # not measured: the user did not name a directory to write to
                cached = cached_or_nominal_rates(assumed, device, io=config.io)
                rates = replace(machine.rates, **{n: getattr(cached.rates, n) for n in DISK})
                nominal = (*machine.nominal, *(name for name in cached.nominal if name in DISK))
                machine = replace(machine, rates=rates, nominal=nominal)
            if links:
                machine = replace(machine, gpus=gpus, nodes=nodes)
    return _with_sizes(machine, options)


def assumed_disk(options: SearchOptions) -> tuple[Path, ...]:
    """Return the working directory as the assumed disk of a model, if no disk is given.

    Empty for a configuration, which determines the disk itself.
    """
    is_bare_model = options.model is None and options.run is None and options.machine_file is None
    return (Path.cwd(),) if is_bare_model and options.disk is None and not options.paths else ()


def _with_sizes(machine: PlanMachine, options: SearchOptions) -> PlanMachine:
    """Return the machine with other sizes; a GPU that is not installed gets nominal rates."""
    from infinity.plan.rates import COMPUTE, completed

    if options.device is not None:
        if machine.unified:
            numbers = {
                name: rate
                for name, rate in machine.rates.numbers().items()
                if name not in machine.nominal and name not in COMPUTE
            }
            rates, nominal = completed(numbers, unified=False)
            machine = replace(machine, rates=rates, nominal=nominal)
        machine = replace(machine, device_bytes=options.device)
    if options.host is not None:
        machine = replace(machine, host_bytes=options.host)
    if options.disk is not None:
        machine = replace(machine, disk_bytes=options.disk)
    return _with_ranks(machine, options)


def _with_ranks(machine: PlanMachine, options: SearchOptions) -> PlanMachine:
    from infinity.plan.plan import LINKS
    from infinity.plan.rates import BETWEEN_NODES

    machine = machine.with_ranks(options.gpus or machine.gpus, options.nodes or machine.nodes)
    if options.link is not None and machine.ranks == 1:
        raise ConfigError(
            "--link is a rate between ranks, and there is one",
            remedy="add --gpus 4, or leave it out",
        )
    if options.between is not None and machine.nodes == 1:
        raise ConfigError(
            "--between is a rate between nodes, and there is one",
            remedy="add --nodes 2, or leave it out",
        )
    link_rates: dict[str, Any] = {}
    if options.link is not None:
        link_rates |= dict.fromkeys(LINKS, options.link)
    if options.between is not None:
        link_rates[BETWEEN_NODES] = options.between
    return replace(
        machine,
        rates=replace(machine.rates, **link_rates),
        nominal=tuple(name for name in machine.nominal if name not in link_rates),
    )
