"""A case: what a plan, its times and its activations are computed from, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from infinity.config import Config
from infinity.errors import DoesNotFitError
from infinity.formats import MomentFormat
from infinity.plan.activations import Activations, estimate_activations
from infinity.plan.cost import StepCost, Work, step_cost
from infinity.plan.layout import PRECISIONS, ParameterFacts, UnitLayout, lay_out
from infinity.plan.machine_file import PlanMachine
from infinity.plan.plan import Plan, RuleFacts
from infinity.plan.planner import make_plan
from infinity.plan.reserve import Limits, budgeted_bytes
from infinity.plan.saved import away_bytes, plan_saved
from infinity.sizes import format_size


@dataclass(frozen=True)
class Case:
    """Everything that a plan, its times and its activations are computed from.

    `heads` are parameters that make logits. `base` is RAM in bytes that the process needs itself,
    `made` the largest value made at birth (see `Limits`), `device_share` the part of the device's
    memory that a run takes.
    """

    units: tuple[UnitLayout, ...]
    config: Config
    machine: PlanMachine
    work: Work
    rule: RuleFacts
    heads: frozenset[int] = frozenset()
    base: int = 0
    made: int = 0
    device_share: float = 1.0

    def __post_init__(self) -> None:
        if self.config.activations.checkpoint == "units" and not self.work.recompute:
            object.__setattr__(self, "work", replace(self.work, recompute=True))

    @property
    def limits(self) -> Limits:
        """Budgets as a run would derive them on this machine."""
        budget, machine = self.config.budget, self.machine
        device = None
        if machine.device_bytes is not None:
            device = budget.device or int(self.device_share * machine.device_bytes)
        disk = machine.disk_bytes if budget.disk is None else min(budget.disk, machine.disk_bytes)
        host = budget.host or machine.host_budget_bytes
        return Limits(device=device, host=host, disk=disk, base=self.base, made=self.made)

    @property
    def compute_tier(self) -> str:
        """The tier whose memory holds activations."""
        return "host" if self.machine.unified else "device"

    @property
    def compute_bytes(self) -> int:
        """What a run could take of that tier, whatever its configuration leaves to the plan."""
        if self.machine.device_bytes is None:
            return self.machine.host_budget_bytes
        return int(self.device_share * self.machine.device_bytes)

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.config.gradient_accumulation_steps

    def activations(self) -> Activations:
        """Of one micro-batch; inputs of blocks that wait elsewhere are not counted."""
        work = self.work
        found = estimate_activations(
            self.units,
            work.tokens,
            lookups=work.lookups,
            heads=self.heads,
            shares=work.shares,
            recompute=work.recompute,
        )
        told = self._with_tokens(self.config).activations
        saved, _ = plan_saved(told, self.units, unified=self.machine.unified)
        away = away_bytes(saved)
        return replace(found, boundaries=max(found.boundaries - away, 0)) if away else found

    def _with_tokens(self, config: Config) -> Config:
        """With the tokens of a micro-batch told where only the case knows them."""
        told = config.activations
        if told.offload == "none" or told.tokens is not None:
            return config
        told = told.model_copy(update={"tokens": self.work.tokens})
        return config.model_copy(update={"activations": told})

    def plan(self, config: Config | None = None) -> Plan:
        """The plan of this case; raises `DoesNotFitError` or `ConfigError`."""
        return make_plan(
            self.units,
            self._with_tokens(config or self.config),
            self.limits,
            unified=self.machine.unified,
            rule=self.rule,
            device_kernels=not self.machine.unified and bool(self.machine.rates.device_update),
            rates=self.machine.rates,
        )

    def with_config(self, **changes: Any) -> Case:
        """With other values in the configuration."""
        return replace(self, config=self.config.model_copy(update=changes))

    def with_budget(self, tier: str, nbytes: int | None) -> Case:
        """With another budget in the configuration; None leaves it to the machine."""
        return self.with_config(budget=self.config.budget.model_copy(update={tier: nbytes}))

    def with_machine(self, **changes: Any) -> Case:
        """With other facts of the machine."""
        return replace(self, machine=replace(self.machine, **changes))

    def with_moments(self, name: str) -> Case:
        """With moments in another format."""
        form = MomentFormat(name)
        settings = self.config.optimizer.model_copy(update={"moments": name})
        notes = tuple(n for n in self.rule.notes if "lossy" not in n)
        rule = replace(self.rule, moments=(form,) * len(self.rule.moments), notes=notes)
        return replace(self.with_config(optimizer=settings), rule=rule)

    def with_precision(self, name: str) -> Case:
        """With all parameters, which must be trained ones, in another precision."""
        precision = PRECISIONS[name]
        units = []
        for unit in self.units:
            facts = [
                ParameterFacts(s.name, s.parameter, s.shape, precision.dtype, s.numel,
                               precision.weight, s.trained, s.group)
                for s in unit.segments
            ]  # fmt: skip
            units.append(lay_out(unit.index, unit.name, facts, precision))
        return replace(self.with_config(precision=name), units=tuple(units))

    def with_step(self, tokens: int, micro_batches: int, recompute: bool | None = None) -> Case:
        """With other micro-batches, of `tokens` each."""
        again = self.work.recompute if recompute is None else recompute
        case = replace(self, work=replace(self.work, tokens=tokens, recompute=again))
        return case.with_config(gradient_accumulation_steps=micro_batches)


@dataclass(frozen=True)
class Priced:
    """A case with its plan, and what follows from it."""

    case: Case
    plan: Plan
    cost: StepCost
    activations: Activations

    @property
    def tokens_per_s(self) -> float:
        """Of a steady step; 0 where nothing costs time."""
        tokens = self.case.work.tokens * self.case.micro_batches
        return tokens / self.cost.seconds if self.cost.seconds else 0.0

    @property
    def room(self) -> int:
        """Bytes that the plan leaves to activations."""
        return self.case.compute_bytes - budgeted_bytes(self.plan)[self.case.compute_tier]

    @property
    def missing(self) -> int:
        """Bytes of activations that find no room; 0 where all do."""
        return max(self.activations.total - self.room, 0)

    def require_room(self) -> None:
        """Raise `DoesNotFitError` if activations find no room."""
        if not self.missing:
            return
        tier, parts = self.case.compute_tier, self.activations
        raise DoesNotFitError(
            f"the plan leaves {format_size(max(self.room, 0))} of the {tier}'s "
            f"{format_size(self.case.compute_bytes)} to activations, and "
            f"{self.case.work.tokens:,} tokens at once need about {format_size(parts.total)}: "
            f"{format_size(self.missing)} too much",
            because=f"saved {format_size(parts.saved)}, boundaries {format_size(parts.boundaries)}"
            f", logits {format_size(parts.logits)}, gradients {format_size(parts.gradients)}",
            remedy="more and smaller micro-batches, recompute blocks in backward, or more memory",
        )


def price(case: Case) -> Priced:
    """The plan of a case with times and activations; raises where no plan fits.

    Activations that find no room are not an error here: see `Priced.missing`.
    """
    plan = case.plan()
    return Priced(case, plan, step_cost(plan, case.machine.rates, case.work), case.activations())
