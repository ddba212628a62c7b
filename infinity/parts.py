"""The rooms of one engine, assembled from a model and a config, and taken down again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infinity.config import Config
from infinity.errors import ConfigError, EngineFailedError
from infinity.formats import MomentFormat
from infinity.heap import return_freed_memory
from infinity.memory.device import CpuDevice, Device
from infinity.memory.disk import Disk
from infinity.memory.durability import Durability
from infinity.memory.durable_runs import find_run, model_facts, read_run, remarks
from infinity.memory.gradients import GradientStore
from infinity.memory.lanes import Lanes
from infinity.memory.mover import Mover
from infinity.memory.reservations import PROCESS
from infinity.memory.state import StateStore
from infinity.model.cut import Cutter, UnitCut, UnitSpec
from infinity.model.materialize import Origins
from infinity.model.presence import Installation, ParameterMap, Presence, move_buffers
from infinity.optim.built_in import BuiltInRule
from infinity.optim.cpu import CpuKernels
from infinity.optim.guest import GuestRule
from infinity.optim.guest_probe import GuestMaker, open_guest
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.optim.tiles import Rule
from infinity.plan.layout import PRECISIONS, ParameterFacts, Tier, UnitLayout, lay_out
from infinity.plan.machine import default_host_budget_bytes, read_machine
from infinity.plan.plan import Plan, RuleFacts
from infinity.plan.planner import gradient_itemsize, make_plan
from infinity.plan.rates import Rates
from infinity.plan.reserve import Limits
from infinity.training.birth import Birth, Progress
from infinity.training.hooks import Hooks
from infinity.training.saving import Saver
from infinity.training.sweep import Sweep
from infinity.training.watch import MemoryWatch

PROCESS_BASE_BYTES = 320 << 20  # torch imported and one matmul done
AUTO_DEVICE_BUDGET = 0.9  # of the device memory that is free at start
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_TRAINABLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Cut:
    """The module's parameters, and the units they were cut into."""

    names: list[str]
    parameters: list[nn.Parameter]
    trained: list[bool]
    dtypes: list[torch.dtype]
    units: list[UnitCut]
    layouts: tuple[UnitLayout, ...]


class Grouped(Protocol):
    """Parameter groups as a torch optimizer has them; the plan of a run needs no more of one."""

    param_groups: list[dict[str, Any]]


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be owned: owned modules, several processes."""
    world_size = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: several processes are not supported yet",
            remedy="run one process, without a launcher (unset WORLD_SIZE)",
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module._parameters, ParameterMap):
            raise ConfigError(
                f"module {name or 'model'!r} is owned by another engine",
                remedy="close that engine first",
            )


def make_optimizer(
    model: nn.Module,
    config: Config,
    model_parameters: Iterable[Any] | None,
    given: torch.optim.Optimizer | GuestMaker | None = None,
) -> OffloadedOptimizer:
    """`engine.optimizer` over the given parameters or groups, else over all that require grad.

    `given` is what `initialize(optimizer=...)` got; without it the config's rule is used.
    """
    if isinstance(given, torch.optim.Optimizer):
        if model_parameters is not None:
            raise ConfigError(
                "an optimizer object has its parameters already; model_parameters came as well",
                remedy="give one of them, or optimizer=lambda groups: ...",
            )
        model_parameters = given.param_groups
    if model_parameters is None:
        groups: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if not groups:
            raise ConfigError(
                "no parameter of the model requires a gradient",
                remedy="call requires_grad_(True) on what should be trained before initialize()",
            )
    else:
        groups = list(model_parameters)
    own = {id(p) for p in model.parameters()}
    flat = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
    for parameter in flat:
        if id(parameter) not in own:
            raise ConfigError("model_parameters holds a parameter the model does not have")
        if parameter.dtype not in _TRAINABLE:
            raise ConfigError(
                f"a trained parameter has dtype {parameter.dtype}",
                remedy="train float32, bfloat16 or float16 parameters; freeze the others",
            )
    settings = config.optimizer
    if given is None:
        rule = BuiltInRule(settings.type, MomentFormat(settings.moments))
        return OffloadedOptimizer(groups, settings.parameters(), rule=rule)
    if settings.model_fields_set:
        raise ConfigError(
            "the config has an optimizer section, but initialize() got an optimizer as well",
            because=f"optimizer.{sorted(settings.model_fields_set)[0]} would not be used",
            remedy="leave one of them out",
        )
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    facts = open_guest(given, groups)
    return OffloadedOptimizer(facts.groups, facts.defaults, rule=GuestRule(facts))


def cut_model(
    model: nn.Module,
    config: Config,
    optimizer: Grouped,
    units: Sequence[UnitSpec] | None,
) -> Cut:
    """Cut into units and lay them out; trained is what the optimizer holds."""
    cutter = Cutter(model)
    precision = PRECISIONS[config.precision]
    compute = torch.bfloat16 if config.precision == "bf16" else torch.float32
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    dtypes: list[torch.dtype] = []
    trained: list[bool] = []
    for parameter in cutter.parameters:
        trained.append(id(parameter) in group_of)
        dtypes.append(compute if parameter.dtype in _CASTABLE else parameter.dtype)
    cuts = cutter.cut(units)
    layouts = []
    for index, cut in enumerate(cuts):
        facts = []
        for i in cut.parameters:
            p = cutter.parameters[i]
            dtype = str(dtypes[i]).removeprefix("torch.")
            facts.append(
                ParameterFacts(cutter.names[i], i, tuple(p.shape), dtype, p.numel(),
                               dtypes[i].itemsize, trained[i], group_of.get(id(p), -1))
            )  # fmt: skip
        layouts.append(lay_out(index, cut.name, facts, precision))
    return Cut(cutter.names, cutter.parameters, trained, dtypes, cuts, tuple(layouts))


def limits_for(config: Config, device: Device, model: nn.Module) -> Limits:
    """Budgets: given or derived, less what other engines of this process hold.

    The process keeps what it holds now, but for parameters; buffers on meta it will come to hold.
    """
    return_freed_memory()
    machine = read_machine(config.nvme_path)
    held = PROCESS.total("host") + (PROCESS.total("device") if device.unified else 0)
    storages = [p.untyped_storage() for p in model.parameters() if not p.is_meta]
    ours = {storage.data_ptr(): storage.nbytes() for storage in storages}
    coming = sum(b.nbytes for b in model.buffers() if b.is_meta) if device.unified else 0
    base = machine.own_rss_bytes - sum(ours.values()) - held + coming
    host = config.budget.host or default_host_budget_bytes(machine)
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
        device_budget = int(memory * AUTO_DEVICE_BUDGET)
    if device_budget is not None:
        device_budget = max(device_budget - PROCESS.total("device"), 0)
    base = max(base, PROCESS_BASE_BYTES)
    made = max((p.nbytes for p in model.parameters() if p.is_meta), default=0)
    return Limits(device_budget, max(host - held, 0), config.budget.disk, base, made)


class Parts:
    """Everything an engine is made of; `close` gives everything back, in reverse order."""

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        plan: Plan,
        config: Config,
        device: Device,
        optimizer: OffloadedOptimizer,
        origins: Origins,
        progress: Progress | None = None,
        poison: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.cut = cut
        self.plan = plan
        self.device = device
        self._undo: list[Callable[[], None]] = []
        self._born = False  # the initial state is home; the parameters' own memory is gone
        PROCESS.take(self, plan.tier_bytes)
        self._undo.append(lambda: PROCESS.release(self))
        try:
            self._assemble(model, config, optimizer, origins, progress, poison)
        except BaseException:
            self.close()
            raise

    def _assemble(
        self,
        model: nn.Module,
        config: Config,
        optimizer: OffloadedOptimizer,  # not kept: it refers to the engine
        origins: Origins,  # nor is this: it may hold values
        progress: Progress | None,
        poison: Callable[[Tensor], None] | None,
    ) -> None:
        plan, cut, undo = self.plan, self.cut, self._undo
        undo.append(self._give_memory_back)  # when nothing moves and nothing is pinned any more
        undo.append(self.device.close)
        num_threads = config.cpu.num_threads or read_machine().num_cpus
        self.kernels = CpuKernels(num_threads, config.cpu.isa)
        undo.append(self.kernels.close)
        if isinstance(self.device, CpuDevice):
            self.device.copier = self.kernels.copy
        stored = read_run(Path(plan.resumed), config.nvme_path) if plan.resumed else None
        needs_disk = any(plan.memory["disk"].values())
        placement = stored.placement if stored is not None else None
        self.disk = Disk(config.nvme_path, config.io, placement) if needs_disk else None
        if self.disk is not None:
            undo.append(self.disk.close)
        self.lanes = Lanes(self.device, self.disk)
        self.store = StateStore(plan, self.lanes)
        self.gradients = GradientStore(plan, self.lanes, self.kernels)
        if self.disk is not None:
            self.disk.allocate()
        self.durability: Durability | None = None
        self.resumed: bytes | None = None  # the document of the commit that this run goes on from
        if plan.durable:
            self.durability = Durability(plan, self.lanes, self.store, stored)
            undo.append(self.durability.close)
            self.resumed = self.durability.document if stored is not None else None
        self.presence = Presence(plan.units, cut.parameters, cut.dtypes, self.device.torch_device)
        self.mover = Mover(plan, self.lanes, self.store, self.presence, poison)
        rule, seed = optimizer.rule, config.seed or 0
        self.updater = rule.updater(self.kernels, cut.names, largest_trained_of(cut.layouts), seed)
        self.sweep = Sweep(
            plan, self.lanes, self.store, self.gradients, self.mover, self.updater, self.durability
        )
        undo.append(self._let_go)
        undo.append(self.sweep.close)
        self.saver = Saver(plan, self.store)
        undo.append(self.saver.abort)  # the sweep may be waiting for it
        self.sweep.open()
        index_of = {id(p): i for i, p in enumerate(cut.parameters)}
        hypers = optimizer.hypers(index_of).items()
        initial = {index: rule.initial(hyper) for index, hyper in hypers}
        undo.append(self.presence.return_to_meta)
        self.presence.leave_meta()
        if self.durability is not None and stored is not None:
            for layout in plan.units:
                self.presence.forget(layout.index)
            self.durability.fill_memory(progress)
        else:
            birth = Birth(plan, self.lanes, self.store, self.kernels, initial, origins.value)
            birth.write(cut.parameters, self.presence, progress)
            del birth  # and its buffers
        self.presence.settle()
        self._born = True
        self.gradients.write_once()
        move_buffers(model, self.device.torch_device, origins.value)
        origins.forget()
        return_freed_memory()  # of values that have gone home
        self.hooks = Hooks(self.mover, self.gradients, cut.units, cut.parameters, cut.trained)
        self.hooks.watch = MemoryWatch(plan, model, self.device, config.budget.host)
        undo.append(self.hooks.remove)
        self.installation = Installation(model, self.hooks.touch)
        undo.append(self.installation.remove)
        if self.disk is not None:
            facts = model_facts(plan.units, plan.precision.name, plan.rule, plan.gradient_itemsize)
            if stored is None:
                self.disk.warnings += remarks(self.disk.paths, config.resume, facts)
            if self.durability is not None and stored is None:
                self.durability.begin(facts)
            undo.append(self._commit_last)

    def _commit_last(self) -> None:
        """At the end of a durable run: the step that is under way counts, unless it failed."""
        durability, self.durability = self.durability, None  # once: an interruption ends the wait
        if durability is not None and self.sweep.can_finish:
            with contextlib.suppress(EngineFailedError):
                self.sweep.finish()
                durability.finish()

    def _let_go(self) -> None:
        """Make every parameter absent: a view would keep slots and homes alive."""
        if self._born:
            for layout in self.plan.units:
                self.presence.forget(layout.index)
        for slot in self.mover.ledger.slots:
            slot.residency = slot.lingering = None

    def _give_memory_back(self) -> None:
        """Drop every reserved range, whoever still refers to the engine.

        A range lives on while a tensor of the user's lies in it.
        """
        for name in ("store", "gradients", "mover", "sweep"):  # those that were made
            if hasattr(self, name):
                getattr(self, name).forget()
        return_freed_memory()

    @property
    def closed(self) -> bool:
        """Whether everything was given back."""
        return not self._undo

    def close(self) -> None:
        """Take everything down; every step is tried, the first error is raised at the end."""
        first: BaseException | None = None
        while self._undo:
            try:
                self._undo[-1]()
            except Exception as error:
                first = first or error
            except BaseException as error:  # an interruption cut the step short: once more
                first = first or error
                continue
            self._undo.pop()
        if first is not None:
            raise first


def largest_trained_of(layouts: Iterable[UnitLayout]) -> int:
    """Elements of the largest trained parameter."""
    return max((s.numel for layout in layouts for s in layout.trained_segments), default=0)


def facts_of(rule: Rule, layouts: Iterable[UnitLayout]) -> RuleFacts:
    """What the plan needs to know of the update rule."""
    return RuleFacts(
        name=rule.name,
        moments=rule.moments,
        whole=rule.whole,
        tile_elements=rule.tile_elements(largest_trained_of(layouts)),
        notes=rule.notes,
    )


def plan_for(
    model: nn.Module, cut: Cut, config: Config, device: Device, rule: Rule, rates: Rates | None
) -> Plan:
    """The plan of one engine on this machine; `rates` as `make_plan` takes them."""
    limits = limits_for(config, device, model)
    facts = facts_of(rule, cut.layouts)
    run = None
    if config.durable:
        here = model_facts(cut.layouts, config.precision, facts, gradient_itemsize(config))
        run = find_run(config.nvme_path, config.resume, here)
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
    )
    if reason and Tier.DEVICE in {homes.state for homes in plan.homes}:
        note = f"state that rests on the device is updated by the host, slower: {reason}"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan
