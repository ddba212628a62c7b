"""Inputs and results of planning: `PlanInput`, and a plan with its cost and activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.common.sizes import format_size
from infinity.config.schema import (
    ActivationsConfig,
    Config,
    Offload,
    PlacementConfig,
    Recompute,
    checkpoint_setting,
)
from infinity.errors import DoesNotFitError
from infinity.plan.activations import CHUNK_TOKENS, ActivationModel, Activations
from infinity.plan.budget import AUTO_SHARE, Limits, budgeted_bytes
from infinity.plan.cost import StepCost, StepWork, step_cost
from infinity.plan.layout import PRECISIONS, UnitLayout, relayout
from infinity.plan.plan import Plan, RuleFacts, UnitFacts
from infinity.plan.plan_machine import PlanMachine
from infinity.plan.planner import make_plan
from infinity.plan.saved_plan import off_device_bytes, plan_saved
from infinity.types import MomentFormat, Tier

# Memory that automatic placement leaves free, relative to estimated activations: estimates are
# within 10 % (tests/unit/offload/test_activation_peak.py), and allocators do not use
# every byte.
MARGIN = 1.15


def limits_leaving_activations(
    limits: Limits, activations: Activations, tier: Tier, memory: int
) -> Limits:
    """Return `limits` with the bytes that placement leaves to activations on `tier`.

    `memory` are all bytes of the tier that the run may use, outside the budget as well. Of the
    budget, at least the share that would be left if activations were unknown stays free if they
    need it, since memory outside the budget may be in use by others.
    """
    budget = limits.budgets[tier] or memory
    needed, outside_budget = int(MARGIN * activations.total), max(memory - budget, 0)
    least = min(needed, int((1 - AUTO_SHARE) * budget))
    return replace(limits, activations=max(needed - outside_budget, least))


def activations_on_device(
    model: ActivationModel,
    settings: ActivationsConfig,
    tokens: int,
    recompute: Recompute,
    unified: bool,
) -> Activations:
    """Return the activations of a micro-batch of `tokens`, without offloaded inputs of blocks."""
    activations = model.of(
        tokens, recompute=recompute, slices=settings.slices, logits_at_once=logits_at_once(settings)
    )
    saved, _ = plan_saved(settings, model.units, unified=unified, widths=model.widths)
    if not (offloaded := off_device_bytes(saved)):
        return activations
    return replace(activations, boundaries=max(activations.boundaries - offloaded, 0))


def logits_at_once(settings: ActivationsConfig) -> int | None:
    """Return the number of tokens whose logits exist at a time; None for all."""
    return CHUNK_TOKENS if settings.logits == "chunked" else None


@dataclass(frozen=True)
class PlanInput:
    """Complete input for a plan, its cost and its activations; called a case.

    Units are laid out for the machine's ranks; plan, cost and activations are those of one rank,
    budgets of RAM and disk those of a node. `base` are the bytes of RAM of the process itself,
    `made` those of the largest value of the initial write (see `Limits`), `device_share` is the
    fraction of device memory that a run uses. `model` and `facts` are derived from units and work,
    and cached for cases derived from this one.
    """

    units: tuple[UnitLayout, ...]
    config: Config
    machine: PlanMachine
    work: StepWork
    rule: RuleFacts
    base: int = 0
    made: int = 0
    device_share: float = 1.0
    model: ActivationModel | None = field(default=None, compare=False, repr=False)
    facts: UnitFacts | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        settings = self.config.activations
        work = replace(
            self.work, slices=settings.slices, recompute=settings.recompute or self.work.recompute
        )
        object.__setattr__(self, "work", work)
        if self.model is None or self.model.units is not self.units:
            model = ActivationModel(
                self.units, lookups=work.lookups, heads=work.heads, shares=work.shares
            )
            object.__setattr__(self, "model", model)
        if self.facts is None or self.facts.units is not self.units:
            object.__setattr__(self, "facts", UnitFacts(self.units))

    @property
    def limits(self) -> Limits:
        """Budgets of one rank, as a run derives them on this machine."""
        budget, machine = self.config.budget, self.machine
        device = None
        if machine.device_bytes is not None:
            device = budget.device or int(self.device_share * machine.device_bytes)
        disk = machine.disk_bytes if budget.disk is None else min(budget.disk, machine.disk_bytes)
        disk //= machine.gpus
        limits = Limits(
            device=device, host=self.host_bytes, disk=disk, base=self.base, made=self.made
        )
        if self.config.activations.tokens is None:
            return limits
        activations = self.activations()
        return limits_leaving_activations(
            limits, activations, self.compute_tier, self.compute_bytes
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM of one rank."""
        return (self.config.budget.host or self.machine.host_budget_bytes) // self.machine.gpus

    @property
    def compute_tier(self) -> Tier:
        """The tier whose memory holds activations."""
        return Tier.HOST if self.machine.unified else Tier.DEVICE

    @property
    def compute_bytes(self) -> int:
        """Bytes of `compute_tier` that a run may use; budget.host limits the whole process."""
        if self.machine.device_bytes is None:
            return self.host_bytes
        return int(self.device_share * self.machine.device_bytes)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return self.config.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of all ranks together."""
        return self.work.tokens * self.micro_batches * self.machine.ranks

    def activations(self) -> Activations:
        """Return the activations of one micro-batch, without offloaded inputs of blocks."""
        assert self.model is not None
        settings = self._with_tokens(self.config).activations
        return activations_on_device(
            self.model, settings, self.work.tokens, self.work.recompute, self.machine.unified
        )

    def _with_tokens(self, config: Config) -> Config:
        """Return `config` with the tokens of a micro-batch, if inputs of blocks are offloaded."""
        activations = config.activations
        if activations.offload == "none" or activations.tokens is not None:
            return config
        activations = activations.model_copy(update={"tokens": self.work.tokens})
        return config.model_copy(update={"activations": activations})

    def plan(self, config: Config | None = None) -> Plan:
        """Make the plan of this case; raise `DoesNotFitError` or `ConfigError` if there is none."""
        return make_plan(
            self.units,
            self._with_tokens(config or self.config),
            self.limits,
            unified=self.machine.unified,
            rule=self.rule,
            device_kernels=not self.machine.unified and bool(self.machine.rates.device_update),
            rates=self.machine.rank_rates,
            nodes=self.machine.nodes,
            may_share=self.machine.ranks > 1,
            facts=self.facts,
            model_recomputes=self.work.recompute == "all",
        )

    def lowest_tier_plans(self) -> Iterator[Plan]:
        """Yield plans that fit, with automatic kinds on the lowest tier, then fewer on disk.

        A search for placement also moves kinds from disk to RAM if the disk is too small.
        """
        choices = self.config.placement.model_dump()
        lowest = "disk" if self.config.nvme_path else "host"
        for on_host in ((), ("gradients",), ("gradients", "weights"), tuple(choices)):
            tiers = {
                name: ("host" if name in on_host else lowest) if choice == "auto" else choice
                for name, choice in choices.items()
            }
            placement = PlacementConfig.model_validate(tiers)
            try:
                yield self.plan(self.config.model_copy(update={"placement": placement}))
            except DoesNotFitError:
                continue

    def with_config(self, **changes: Any) -> PlanInput:
        """Return the case with other configuration values."""
        return replace(self, config=self.config.model_copy(update=changes))

    def with_budget(self, tier: str, nbytes: int | None) -> PlanInput:
        """Return the case with another configured budget; None derives it from the machine."""
        return self.with_config(budget=self.config.budget.model_copy(update={tier: nbytes}))

    def with_machine(self, **changes: Any) -> PlanInput:
        """Return the case with other machine values."""
        return replace(self, machine=replace(self.machine, **changes))

    def with_moments(self, name: str) -> PlanInput:
        """Return the case with moments in another format."""
        moment_format = MomentFormat(name)
        settings = self.config.optimizer.model_copy(update={"moments": name})
        notes = tuple(n for n in self.rule.notes if "lossy" not in n)
        rule = replace(self.rule, moments=(moment_format,) * len(self.rule.moments), notes=notes)
        return replace(self.with_config(optimizer=settings), rule=rule)

    def with_precision(self, name: str) -> PlanInput:
        """Return the case in another precision; all parameters must be trained."""
        precision, full = PRECISIONS[name], self.rule.needs_full
        units = relayout(self.units, precision, self.machine.ranks, needs_full=full, cast=True)
        return replace(self.with_config(precision=name), units=units)

    def with_gpus(self, gpus: int) -> PlanInput:
        """Return the case with another number of GPUs per node and the same tokens per step."""
        machine = self.machine.with_ranks(gpus, self.machine.nodes)
        precision, full = PRECISIONS[self.config.precision], self.rule.needs_full
        units = relayout(self.units, precision, machine.ranks, needs_full=full)
        case = replace(self, machine=machine, units=units)
        tokens = -(-self.work.tokens * self.machine.ranks // machine.ranks)
        return case.with_step(tokens, self.micro_batches)

    def with_step(self, tokens: int, micro_batches: int) -> PlanInput:
        """Return the case with `micro_batches` of `tokens` each."""
        case = replace(self, work=replace(self.work, tokens=tokens))
        return case.with_config(gradient_accumulation_steps=micro_batches)

    def with_schedule(
        self, micro_batches: int, tokens: int, slices: int, recompute: Recompute, offload: Offload
    ) -> PlanInput:
        """Return the case with another batch schedule; see `plan.batch_schedule`."""
        update: dict[str, Any] = {
            "tokens": tokens, "slices": slices, "checkpoint": checkpoint_setting(recompute),
            "offload": offload,
        }  # fmt: skip
        if offload != self.config.activations.offload:  # sizes refer to the configured tier
            update |= {"host": None, "disk": None}
        settings = self.config.activations.model_copy(update=update)
        changes = {"gradient_accumulation_steps": micro_batches, "activations": settings}
        return replace(
            self,
            work=replace(self.work, tokens=tokens, recompute=0),
            config=self.config.model_copy(update=changes),
        )


@dataclass(frozen=True)
class PlanEstimate:
    """A case with its plan, cost and activations."""

    case: PlanInput
    plan: Plan
    cost: StepCost
    activations: Activations

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of a steady step on all ranks together; 0 if the cost is 0."""
        tokens = self.case.tokens_per_step
        return tokens / self.cost.seconds if self.cost.seconds else 0.0

    @property
    def activation_headroom(self) -> int:
        """Bytes that the plan leaves to activations."""
        return self.case.compute_bytes - budgeted_bytes(self.plan)[self.case.compute_tier]

    @property
    def missing(self) -> int:
        """Bytes of activations that do not fit; 0 if all fit."""
        return max(self.activations.total - self.activation_headroom, 0)

    def require_fit(self) -> None:
        """Raise `DoesNotFitError` if activations do not fit."""
        if not self.missing:
            return
        tier, parts = self.case.compute_tier, self.activations
        raise DoesNotFitError(
            f"the plan leaves {format_size(max(self.activation_headroom, 0))} of the {tier}'s "
            f"{format_size(self.case.compute_bytes)} to activations, and "
            f"{self.case.work.tokens:,} tokens at once need about {format_size(parts.total)}: "
            f"{format_size(self.missing)} too much",
            because=f"saved {format_size(parts.saved)}, boundaries {format_size(parts.boundaries)}"
            f", logits {format_size(parts.logits)}, gradients {format_size(parts.gradients)}",
            remedy="more and smaller micro-batches, recompute blocks in backward, or more memory",
        )


def price(case: PlanInput) -> PlanEstimate:
    """Plan a case and estimate its cost and activations; raise like `PlanInput.plan`.

    Activations that do not fit are not an error: see `PlanEstimate.missing`.
    """
    plan = case.plan()
    return PlanEstimate(
        case, plan, step_cost(plan, case.machine.rank_rates, case.work), case.activations()
    )
