"""What is settled before anything is allocated: parameter groups, limits, the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from infinity.calibration import KnownRates, kept_rates
from infinity.checkpoint.durable_runs import find_run, model_facts
from infinity.config.schema import Config
from infinity.cutting import (
    AUTO_DEVICE_BUDGET,
    PROCESS_BASE_BYTES,
    Cut,
    case_for,
    complete_groups,
    cut_model,
    groups_of,
)
from infinity.errors import ConfigError
from infinity.formats import MomentFormat
from infinity.heap import return_freed_memory
from infinity.model.meta_init import Origins
from infinity.model.offloaded_parameter import engine_of
from infinity.model.parameters import ParameterMap, recomputed_weights
from infinity.model.shapes import Target, target_of
from infinity.model.torch_private import has_memory, storage_address
from infinity.optim.adapter import AdapterRule
from infinity.optim.adapter_probe import OptimizerMaker, open_adapter
from infinity.optim.offloaded import OffloadedOptimizer, refuse_hooks
from infinity.optim.standalone import built_in_of
from infinity.optim.update import BuiltInRule, Rule
from infinity.plan.activations import ActivationModel
from infinity.plan.budget import Limits
from infinity.plan.case import Case, activations_on_device, leaving_activations
from infinity.plan.cost import Rates
from infinity.plan.forecast import forecast_bytes
from infinity.plan.layout import Tier, UnitLayout, largest_trained_of
from infinity.plan.machine import PlanMachine, default_host_budget_bytes, read_machine
from infinity.plan.plan import Plan, RuleFacts
from infinity.plan.planner import gradient_itemsize, make_plan
from infinity.ranks import ALONE, Ranks
from infinity.rules import RULES, SGD
from infinity.storage.device import PROCESS, Device
from infinity.storage.shared import can_share

_TRAINABLE = (torch.float32, torch.float16, torch.bfloat16)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_WRAPPERS = (
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule",
    "OptimizedModule",
)  # fmt: skip


def check_model(model: nn.Module) -> None:
    """Raise `ConfigError` for what cannot be owned."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name or 'model'!r} is a TorchScript module",
                because="it takes no hooks, which fetch weights",
                remedy="use the module it was scripted from",
            )
        wrapper = next((b.__name__ for b in type(module).__mro__ if _wraps(b)), None)
        if wrapper is not None:
            compiled = wrapper == "OptimizedModule"
            raise ConfigError(
                f"module {name or 'model'!r} is torch's {wrapper}",
                because="hooks, which fetch weights, would be compiled with it"
                if compiled
                else "the engine shares weights and gradients out among ranks itself",
                remedy="pass the module without it"
                + (", and write compile: true" if compiled else ", the same on all ranks"),
            )
        if isinstance(module._parameters, ParameterMap):
            raise ConfigError(
                f"module {name or 'model'!r} is owned by another engine",
                remedy="close that engine first",
            )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet",
                remedy="pass a batch through the model before initialize()",
            )
        if type(parameter) is nn.Parameter and not has_memory(parameter):
            raise ConfigError(
                f"parameter {name!r} has no memory",
                because="its .data was taken from a weight that is still in a file",
                remedy="make it a parameter of its own, or tie it: head.weight = embedding.weight",
            )
        if engine_of(parameter) is not None:
            raise ConfigError(
                f"parameter {name!r} is owned by another engine",
                remedy="close that engine first, or put both models into one module",
            )
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, _EMBEDDINGS):
            raise ConfigError(
                f"{name!r}, an nn.{type(module).__name__}, has max_norm",
                because="its forward edits the weight, of which the engine lends a copy",
                remedy="leave max_norm out, and shorten rows in engine.materialized(...) now and "
                "then",
            )
    _refuse_shared_memory(model)


def _wraps(kind: type) -> bool:
    """Whether it is one of torch's classes around a module, which need not be imported."""
    return kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.")


def _refuse_shared_memory(model: nn.Module) -> None:
    """What is trained has memory of its own: others that share it would stay behind."""
    held = []
    left = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if name not in recomputed_weights(module)
    ]
    for name, tensor in [*model.named_parameters(), *model.named_buffers(), *left]:
        # Strides may leave gaps, as those of parameters that are interleaved.
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        dense = tensor.is_contiguous() or not isinstance(tensor, nn.Parameter)
        if dense and (base := storage_address(tensor)):
            start = base + int(tensor.storage_offset()) * tensor.element_size()
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            span = (1 + sum((n - 1) * stride for n, stride in sides)) * tensor.element_size()
            trained = tensor.requires_grad and isinstance(tensor, nn.Parameter)
            held.append((start, start + span, name, trained))
    reach, before, also = 0, "", False  # where memory ends that was seen, and whose it is
    for begin, end, name, trained in sorted(held):
        if begin < reach and (trained or also):
            raise ConfigError(
                f"{before!r} and {name!r} share memory and are not one parameter",
                because="the engine moves each by itself: one would not follow the other",
                remedy="tie them: head.weight = embedding.weight; or give one a .clone()",
            )
        if end > reach:
            reach, before, also = end, name, trained


def make_optimizer(
    model: nn.Module,
    config: Config,
    model_parameters: Iterable[Any] | None,
    given: torch.optim.Optimizer | OptimizerMaker | None = None,
    *,
    trains: bool = True,
) -> OffloadedOptimizer:
    """`engine.optimizer` over the given parameters or groups, else over all that require grad.

    `given` is what `initialize(optimizer=...)` got; without it the config's rule is used. Over no
    parameter at all if nothing is given and no parameter requires grad, or `trains` is false.
    """
    settings = config.optimizer
    if model_parameters is not None:
        model_parameters = list(model_parameters)
        for group in (g for g in model_parameters if isinstance(g, dict)):
            if not isinstance(
                group["params"], nn.Parameter
            ):  # an iterator is over once it was read
                group["params"] = list(group["params"])
    if isinstance(given, torch.optim.Optimizer):
        refuse_hooks(given)
        model_parameters = given.param_groups
    if model_parameters is None or not trains:
        groups: list[Any] = [p for p in model.parameters() if p.requires_grad] if trains else []
        if not groups and given is None:
            rule = BuiltInRule(SGD.__name__)
            nothing = {**SGD.defaults(), "params": []}
            return OffloadedOptimizer([nothing], {}, rule=rule)
    else:
        groups = model_parameters
    flat = _flat(groups)
    if not flat:
        raise ConfigError(
            "there is an optimizer, and no parameter for it",
            remedy="call requires_grad_(True) on what should be trained before initialize()",
        )
    own = {id(p): name for name, p in model.named_parameters()}
    for parameter in flat:
        if id(parameter) not in own:
            raise ConfigError(
                f"{'model_parameters' if given is None else 'the optimizer'} has a parameter of "
                f"shape {tuple(parameter.shape)} that the model does not have",
                because="it is another model's, or was replaced since the optimizer was made",
                remedy="make the optimizer of the parameters of the model that you pass"
                + (
                    "; to train two models with one optimizer, put both into one module"
                    if any(id(p) in own for p in flat)
                    else ""
                ),
            )
        if parameter.dtype not in _TRAINABLE:
            raise ConfigError(
                f"the trained parameter {own[id(parameter)]!r} has dtype {parameter.dtype}",
                remedy="train float32, bfloat16 or float16 parameters; freeze the others",
            )
    if given is None:
        built_in = BuiltInRule(settings.type, MomentFormat(settings.moments))
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = complete_groups(model, config, groups)
        alike = settings.parameters() if RULES[settings.type].kernel else {}
        return OffloadedOptimizer(groups, alike, rule=built_in)
    if settings.model_fields_set:
        raise ConfigError(
            "the config has an optimizer section, but initialize() got an optimizer as well",
            because=f"optimizer.{sorted(settings.model_fields_set)[0]} would not be used",
            remedy="leave one of them out",
        )
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    if (ours := built_in_of(given, groups)) is not None:
        return ours
    facts = open_adapter(given, groups)
    return OffloadedOptimizer(facts.groups, facts.defaults, rule=AdapterRule(facts))


def _flat(groups: Iterable[Any]) -> list[Any]:
    """The parameters of parameters or groups of them."""
    return [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]


def check_same(given: torch.optim.Optimizer, model_parameters: Iterable[Any] | None) -> None:
    """Raise `ConfigError` unless the optimizer object holds just these parameters."""
    if model_parameters is None:
        return
    ours = {id(p) for p in _flat(given.param_groups)}
    theirs = {id(p): p for p in _flat(model_parameters)}
    missing = [p for key, p in theirs.items() if key not in ours and p.requires_grad]
    extra = ours - theirs.keys()
    if missing or extra:
        raise ConfigError(
            f"the optimizer holds {len(ours)} parameters, model_parameters are {len(theirs)}: "
            f"{len(missing)} that require grad are not in the optimizer, {len(extra)} of the "
            "optimizer not in model_parameters",
            remedy="leave model_parameters out, or give optimizer=lambda groups: ...",
        )


def limits_for(
    config: Config,
    device: Device,
    model: nn.Module,
    ranks: Ranks = ALONE,
    origins: Origins | None = None,
) -> Limits:
    """Budgets: given or derived, less what other engines of this process hold.

    Those of RAM and disk are a machine's: of its ranks each gets an equal part.
    The process keeps what it holds now, but for parameters; buffers on meta it will come to hold.
    Without `origins` values that are to come are taken to come whole.
    """
    return_freed_memory()
    device.return_freed_memory()
    machine = read_machine(config.nvme_path)
    held = PROCESS.ram()
    at = {storage_address(p): p for p in model.parameters() if p.device.type == "cpu"}
    ours = {address: p.untyped_storage().nbytes() for address, p in at.items() if address}
    coming = sum(b.nbytes for b in model.buffers() if b.is_meta) if device.unified else 0
    base = machine.own_rss_bytes - sum(ours.values()) - held + coming
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
        memory += PROCESS.on_device(device, only_real=True)  # what is free is less than that
        device_budget = int(memory * AUTO_DEVICE_BUDGET)
    if device_budget is not None:
        device_budget = max(device_budget - PROCESS.on_device(device), 0)
    base = max(base, 0 if held else PROCESS_BASE_BYTES)  # another engine counts the process
    made = max((p.nbytes for p in model.parameters() if p.is_meta), default=0)
    if origins is not None:
        made = origins.most_bytes(model.parameters(), quantises=config.frozen.rest != "as_is")
    return Limits(device_budget, max(host - held, 0), disk, base, made)


def _agreed(limits: Limits, ranks: Ranks) -> Limits:
    """The least that any rank has: so all make one plan."""
    if ranks.count == 1:
        return limits
    ranks.meet("plans")
    told = [Limits(**words) for words in ranks.gather_words(asdict(limits))]

    def least(found: Iterable[int | None]) -> int | None:
        return min((n for n in found if n is not None), default=None)

    return Limits(
        device=least(one.device for one in told),
        host=least(one.host for one in told),
        disk=least(one.disk for one in told),
        base=max(one.base for one in told),
        made=max(one.made for one in told),
        activations=max((n for one in told if (n := one.activations) is not None), default=None),
    )


def facts_of(rule: Rule, layouts: Iterable[UnitLayout]) -> RuleFacts:
    """What the plan needs to know of the update rule."""
    return RuleFacts(
        name=rule.name,
        moments=rule.moments,
        whole=rule.whole,
        tile_elements=rule.tile_elements(largest_trained_of(layouts)),
        matrix_steps=rule.matrix_steps,
        notes=rule.notes,
    )


def rates_here(config: Config, device: Device, ranks: Ranks = ALONE) -> KnownRates:
    """What is kept of this machine's rates: measuring takes seconds, and is for `infinity plan`.

    Of all the machine's ranks together, but for links; see `rates_of_rank`.
    """
    paths = config.nvme_path
    known = all(path.is_dir() for path in paths)  # if not, the disk tier says what is wrong
    return kept_rates(
        paths if known else (),
        device,
        io=config.io,
        num_threads=config.cpu.num_threads,
        gpus=ranks.local_count,
        nodes=ranks.num_nodes,
    )


def rates_of_rank(config: Config, device: Device, ranks: Ranks) -> KnownRates:
    """What one rank gets of them: the least that any has, so that all make one plan."""
    known = rates_here(config, device, ranks)
    if ranks.count == 1:
        return known
    own = known.rates.of_rank(ranks.local_count, ranks.num_nodes, unified=device.unified)
    ranks.meet("compares rates")
    told = ranks.gather_words([own.numbers(), known.measured, known.nominal])
    every = [numbers for numbers, _, _ in told]
    least = {n: min(one[n] for one in every) for n in every[0] if all(n in one for one in every)}
    days = [day for _, day, _ in told if day is not None]
    guessed = tuple(dict.fromkeys(name for _, _, nominal in told for name in nominal))
    return KnownRates(Rates.of(least), min(days, default=None), guessed)


def case_here(
    name: str,
    model: nn.Module,
    facts: Mapping[str, Any],
    config: Config,
    device: Device,
    tokens: int,
    length: int,
    *,
    recompute: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[Case, Target, Cut]:
    """A model on this machine with `tokens` in a micro-batch: the case, the model, its units.

    `length` are the tokens of a sample.

    Of several ranks `tokens` are those of one; each may find another case, where machines differ.

    `facts` are what its own config says, {} where it has none; `recompute` says that it recomputes
    blocks by itself. Rates are those that are kept, else nominal: nothing is measured here.
    """
    groups = groups_of(model, config)
    cut = cut_model(model, config, groups, None, ranks.count)
    target = target_of(name, model, facts)
    known, limits = rates_here(config, device, ranks), limits_for(config, device, model, ranks)
    paths = [path for path in config.nvme_path if path.is_dir()]
    machine = PlanMachine.here(paths, device.memory_bytes(), known.rates)
    machine = replace(machine, nominal=known.nominal, measured=known.measured,
                      gpus=ranks.local_count, nodes=ranks.num_nodes)  # fmt: skip
    case = case_for(
        target, cut, groups, config, machine, tokens,
        recompute=recompute, base=limits.base, made=limits.made, length=length,
    )  # fmt: skip
    return case, target, cut


def _leaving_room(
    limits: Limits, config: Config, device: Device, model: nn.Module, cut: Cut
) -> Limits:
    """With what activations are expected to take, where the tokens of a micro-batch are told."""
    target, settings = target_of("", model, {}), config.activations
    shape = ActivationModel(cut.layouts, lookups=target.lookups, heads=target.heads)
    assert settings.tokens is not None
    found = activations_on_device(
        shape, settings, settings.tokens, settings.recompute, device.unified
    )
    memory = device.memory_bytes()
    whole = limits.host if memory is None else int(memory * AUTO_DEVICE_BUDGET)
    assert whole is not None
    tier = Tier.HOST if device.unified else Tier.DEVICE
    return leaving_activations(limits, found, tier, whole)


def plan_for(
    model: nn.Module,
    cut: Cut,
    config: Config,
    device: Device,
    rule: Rule,
    rates: Rates | None,
    ranks: Ranks,
    origins: Origins,
) -> Plan:
    """The plan of one engine on this machine; `rates` as `make_plan` takes them."""
    limits = limits_for(config, device, model, ranks, origins)
    if config.activations.tokens is not None:
        limits = _leaving_room(limits, config, device, model, cut)
    limits = _agreed(limits, ranks)
    facts = facts_of(rule, cut.layouts)
    run = None
    if config.durable:
        here = model_facts(
            cut.layouts, config.precision, facts, gradient_itemsize(config, ranks.count)
        )
        run = find_run(config.nvme_path, config.resume, here, config.journal, ranks)
    reason = "" if device.unified else device.why_no_kernels()
    plan = make_plan(
        cut.layouts,
        config,
        limits,
        unified=device.unified,
        rule=facts,
        device_kernels=reason is None,
        rates=rates,
        stored=run.stored if run is not None else None,
        rank=ranks.rank,
        nodes=ranks.num_nodes,
        may_share=config.placement.shared is not False and can_share(ranks),
    )
    if plan.micro_batches > 1 and any(unit.is_block for unit in plan.units):
        whole = replace(plan, micro_batches=1)  # gradients are fp32 either way
        plan = replace(plan, whole_batch_bytes=forecast_bytes(whole))
    if reason and Tier.DEVICE in {placement.state for placement in plan.placements}:
        note = f"state that rests on the device is updated by the host, slower: {reason}"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan
