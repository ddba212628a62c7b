"""Memory limits, rates and plan of an engine on this machine, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from infinity.checkpoint.durable_plan import model_facts
from infinity.checkpoint.durable_runs import find_run
from infinity.common.malloc import return_freed_memory
from infinity.config.schema import Config
from infinity.distributed.context import SINGLE_PROCESS, DistContext
from infinity.distributed.shared_memory import can_share_memory
from infinity.errors import ConfigError
from infinity.model.checks import recomputes_itself
from infinity.model.meta_init import InitialValues
from infinity.model.partition import (
    AUTO_DEVICE_BUDGET,
    PROCESS_BASE_BYTES,
    Partition,
    case_for,
    groups_of,
    partition_model,
)
from infinity.model.targets import Target, target_of
from infinity.model.torch_private import storage_address
from infinity.optim.update import Rule
from infinity.plan.activations import ActivationModel
from infinity.plan.budget import Limits
from infinity.plan.inputs import PlanInput, activations_on_device, limits_leaving_activations
from infinity.plan.layout import UnitLayout, largest_trained_of
from infinity.plan.machine import default_host_budget_bytes, read_machine
from infinity.plan.plan import Plan, RuleFacts
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.planner import gradient_itemsize, make_plan
from infinity.plan.rates import Rates
from infinity.profiling.calibration import KnownRates, cached_or_nominal_rates
from infinity.storage.device import Device
from infinity.storage.reservations import PROCESS
from infinity.types import Tier


def limits_for(
    config: Config,
    device: Device,
    model: nn.Module,
    ranks: DistContext = SINGLE_PROCESS,
    initial_values: InitialValues | None = None,
) -> Limits:
    """Return the configured or derived budgets, less the bytes that other engines reserve.

    Budgets of RAM and disk are divided equally among the ranks of the machine. `base` is the RAM
    that the process uses now, without parameters; on a unified device it includes buffers that are
    on meta now. Without `initial_values` every value is assumed to be created as one tensor.

    Raises:
        ConfigError: `budget.host` is larger than the RAM this process may use.
    """
    return_freed_memory()
    device.return_freed_memory()
    machine = read_machine(config.nvme_path)
    reserved_ram = PROCESS.ram()
    by_address = {storage_address(p): p for p in model.parameters() if p.device.type == "cpu"}
    parameter_bytes = sum(
        p.untyped_storage().nbytes() for address, p in by_address.items() if address
    )
    meta_buffer_bytes = sum(b.nbytes for b in model.buffers() if b.is_meta) if device.unified else 0
    base = machine.process_rss_bytes - parameter_bytes - reserved_ram + meta_buffer_bytes
    host = (config.budget.host or default_host_budget_bytes(machine)) // ranks.local_count
    disk = config.budget.disk
    if disk is not None:
        disk = max(disk // ranks.local_count - PROCESS.total(Tier.DISK), 0)
    if config.budget.host and config.budget.host > machine.host_ram_bytes:
        raise ConfigError(
            f"budget.host is {config.budget.host} bytes, but this process may use at most "
            f"{machine.host_ram_bytes}",
            because="the machine's RAM, or a cgroup's limit, is smaller",
            remedy="lower budget.host, or leave it out",
        )
    memory = device.memory_bytes()
    device_budget = config.budget.device
    if device_budget is None and memory is not None:
        memory += PROCESS.on_device(device, only_real=True)  # free bytes exclude them
        device_budget = int(memory * AUTO_DEVICE_BUDGET)
    if device_budget is not None:
        device_budget = max(device_budget - PROCESS.on_device(device), 0)
    base = max(base, 0 if reserved_ram else PROCESS_BASE_BYTES)  # counted by the other engine
    made = max((p.nbytes for p in model.parameters() if p.is_meta), default=0)
    if initial_values is not None:
        made = initial_values.largest_value_bytes(
            model.parameters(), quantizes=config.frozen.format != "as_is"
        )
    return Limits(device_budget, max(host - reserved_ram, 0), disk, base, made)


def _strictest(limits: Limits, ranks: DistContext) -> Limits:
    """Return the strictest limits of all ranks, so that all make the same plan."""
    if ranks.count == 1:
        return limits
    ranks.synchronize("plans")
    all_limits = [Limits(**fields) for fields in ranks.all_gather_object(asdict(limits))]

    def smallest(budgets: Iterable[int | None]) -> int | None:
        return min((nbytes for nbytes in budgets if nbytes is not None), default=None)

    activations = [rank_limits.activations for rank_limits in all_limits]
    return Limits(
        device=smallest(rank_limits.device for rank_limits in all_limits),
        host=smallest(rank_limits.host for rank_limits in all_limits),
        disk=smallest(rank_limits.disk for rank_limits in all_limits),
        base=max(rank_limits.base for rank_limits in all_limits),
        made=max(rank_limits.made for rank_limits in all_limits),
        activations=max((nbytes for nbytes in activations if nbytes is not None), default=None),
    )


def facts_of(rule: Rule, layouts: Iterable[UnitLayout]) -> RuleFacts:
    """Return the facts of the update rule that a plan needs."""
    return RuleFacts(
        name=rule.name,
        moments=rule.moments,
        needs_full=rule.needs_full,
        tile_elements=rule.tile_elements(largest_trained_of(layouts)),
        matrix_steps=rule.matrix_steps,
        notes=rule.notes,
    )


def machine_rates(config: Config, device: Device, ranks: DistContext) -> KnownRates:
    """Return cached or nominal rates of this machine; measuring is left to `infinity plan`.

    They are totals of the machine's ranks, except rates of links; see `rates_per_rank`.
    """
    paths = config.nvme_path
    paths_exist = all(path.is_dir() for path in paths)  # otherwise the disk tier raises
    return cached_or_nominal_rates(
        paths if paths_exist else (),
        device,
        io=config.io,
        num_threads=config.cpu.num_threads,
        gpus=ranks.local_count,
        nodes=ranks.num_nodes,
    )


def rates_per_rank(config: Config, device: Device, ranks: DistContext) -> KnownRates:
    """Return the rates of one rank: the minimum over ranks, so that all make the same plan."""
    known = machine_rates(config, device, ranks)
    if ranks.count == 1:
        return known
    local = known.rates.of_rank(ranks.local_count, ranks.num_nodes, unified=device.unified)
    ranks.synchronize("compares rates")
    reports = ranks.all_gather_object([local.numbers(), known.measured, known.nominal])
    all_numbers = [numbers for numbers, _, _ in reports]
    common = [name for name in all_numbers[0] if all(name in numbers for numbers in all_numbers)]
    smallest = {name: min(numbers[name] for numbers in all_numbers) for name in common}
    days = [day for _, day, _ in reports if day is not None]
    nominal = tuple(dict.fromkeys(name for _, _, names in reports for name in names))
    return KnownRates(Rates.of(smallest), min(days, default=None), nominal)


def plan_input_for(
    name: str,
    model: nn.Module,
    facts: Mapping[str, Any],
    config: Config,
    device: Device,
    tokens: int,
    length: int,
    *,
    recompute: bool,
    ranks: DistContext,
) -> tuple[PlanInput, Target, Partition]:
    """Return the planner's input for a model on this machine, its target and its partition.

    `tokens` is the size of a micro-batch of one rank, `length` that of a sample. `facts` is the
    model's own config, {} if it has none; `recompute` is True if the model recomputes its blocks.
    Rates are cached or nominal; nothing is measured. Inputs of ranks differ if their machines do.
    """
    groups = groups_of(model, config)
    partition = partition_model(model, config, groups, None, ranks.count)
    target = target_of(name, model, facts)
    known = machine_rates(config, device, ranks)
    limits = limits_for(config, device, model, ranks)
    paths = [path for path in config.nvme_path if path.is_dir()]
    machine = PlanMachine.this_machine(paths, device.memory_bytes(), known.rates)
    machine = replace(machine, nominal=known.nominal, measured=known.measured,
                      gpus=ranks.local_count, nodes=ranks.num_nodes)  # fmt: skip
    case = case_for(
        target, partition, groups, config, machine, tokens,
        recompute=recompute, base=limits.base, made=limits.made, length=length,
    )  # fmt: skip
    return case, target, partition


def _reserve_activations(
    limits: Limits, config: Config, device: Device, model: nn.Module, partition: Partition
) -> Limits:
    """Return the limits with the estimated bytes of activations; `tokens` must be configured."""
    target = target_of("", model, {})
    settings = config.activations
    shape = ActivationModel(partition.layouts, lookups=target.lookups, heads=target.heads)
    assert settings.tokens is not None
    activations = activations_on_device(
        shape, settings, settings.tokens, settings.recompute, device.unified
    )
    memory = device.memory_bytes()
    budget = limits.host if memory is None else int(memory * AUTO_DEVICE_BUDGET)
    assert budget is not None
    tier = Tier.HOST if device.unified else Tier.DEVICE
    return limits_leaving_activations(limits, activations, tier, budget)


def plan_for(
    model: nn.Module,
    partition: Partition,
    config: Config,
    device: Device,
    rule: Rule,
    ranks: DistContext,
    initial_values: InitialValues,
) -> Plan:
    """Return the plan of one engine, from cached or nominal rates of this machine."""
    known = rates_per_rank(config, device, ranks)
    limits = limits_for(config, device, model, ranks, initial_values)
    if config.activations.tokens is not None:
        limits = _reserve_activations(limits, config, device, model, partition)
    limits = _strictest(limits, ranks)
    facts = facts_of(rule, partition.layouts)
    facts = replace(facts, notes=(*facts.notes, *partition.notes))
    run = None
    if config.durable:
        current_facts = model_facts(
            partition.layouts, config.precision, facts, gradient_itemsize(config, ranks.count)
        )
        run = find_run(config.nvme_path, config.resume, current_facts, config.step_log, ranks)
    reason = "" if device.unified else device.why_no_kernels()
    plan = make_plan(
        partition.layouts,
        config,
        limits,
        unified=device.unified,
        rule=facts,
        device_kernels=reason is None,
        rates=known.rates,
        stored=run.stored if run is not None else None,
        rank=ranks.rank,
        nodes=ranks.num_nodes,
        may_share=config.placement.shared is not False and can_share_memory(ranks),
        model_recomputes=recomputes_itself(model),
    )
    if reason and Tier.DEVICE in {placement.state for placement in plan.placements}:
        note = f"state on the device is updated by the host, which is slower: {reason}"
        plan = replace(plan, notes=(*plan.notes, note))
    if "auto" in config.placement.model_dump().values():
        plan = replace(plan, rates_origin=known.origin)
    return plan
