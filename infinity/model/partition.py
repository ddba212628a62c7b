"""Partitioning of a model into units, and the planner's input for them; without torch.

A model is a module or an `Outline`: `infinity plan` partitions models that were never built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from infinity.config.schema import Config
from infinity.errors import ConfigError, listed
from infinity.model.outline import Outline, is_matrix
from infinity.model.partitioner import Partitioner, Rows, Stacks, UnitModules, UnitSpec
from infinity.model.stacks import gradient_hooks
from infinity.model.targets import Target, is_expert, is_stack_of_experts, target_of
from infinity.optim.rules import RULES, lossy_notes, matrix_steps, reserved_moments
from infinity.plan.cost import USUAL_CONTEXT, StepWork
from infinity.plan.inputs import PlanInput
from infinity.plan.layout import (
    PRECISIONS,
    SQUARE_BLOCK,
    ParameterFacts,
    Precision,
    StackRows,
    UnitLayout,
    lay_out,
)
from infinity.plan.plan import RuleFacts
from infinity.plan.plan_machine import PlanMachine
from infinity.types import MXFP4_BLOCK, FrozenFormat, MomentFormat

if TYPE_CHECKING:
    import torch
    from torch import nn

Groups: TypeAlias = list[dict[str, Any]]  # an optimizer's `param_groups`

PROCESS_BASE_BYTES = 320 << 20  # RAM of a process that has imported torch and run a matmul
AUTO_DEVICE_BUDGET = 0.9  # share of the device memory that is free at start
_CASTABLE = ("float32", "float16", "bfloat16", "float64")
# Bounds of the bytes of a range with experts_per_unit: auto. Within them, the limit is the bytes of
# all experts / MAX_AUTO_RANGES.
EXPERTS_BYTES = 512 << 20, 1 << 30
MAX_AUTO_RANGES = 256
RANGE_BYTES = 256 << 20, 2 << 30  # bounds of the slot of a range that a plan chooses


@dataclass
class Partition:
    """Parameters of a module, and the units they are partitioned into.

    `dtype_names` are torch's names of the dtypes in which parameters compute. Rows of stacks of
    experts (`rows`) are parameters with indices from `num_model_params` on; `pieces` maps a stack
    that is cut to the indices of its rows. `notes` describe experts that could not be cut.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    trained: list[bool]
    dtype_names: list[str]
    units: list[UnitModules]
    layouts: tuple[UnitLayout, ...]
    num_model_params: int = 0
    rows: list[Rows] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def pieces(self) -> dict[int, tuple[int, ...]]:
        """Return the indices of rows, in order, by index of the stack that is cut into them."""
        pieces: dict[int, tuple[int, ...]] = {}
        for rows in self.rows:
            for name, origin in rows.stacks.members:
                pieces[origin] = (*pieces.get(origin, ()), rows.parameters[name])
        return pieces

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Return `dtype_names` as torch dtypes."""
        import torch

        return [getattr(torch, name) for name in self.dtype_names]


def groups_of(model: nn.Module | Outline, config: Config) -> Groups:
    """Return the groups of the configured optimizer over all parameters that require grad.

    No optimizer is created, since that would make torch import its compiler.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return complete_groups(model, config, [{"params": trained}])


def complete_groups(model: nn.Module | Outline, config: Config, groups: Groups) -> Groups:
    """Return groups with all entries of the configured update rule, split if the rule requires it.

    Hidden matrices, which Muon updates, do not include embeddings and the head, whatever their
    shape; each expert of a stack counts as a matrix. DeepSpeed's attribute `p.use_muon` overrides
    this for a parameter.
    """
    settings = config.optimizer

    @cache
    def stack_ids() -> set[int]:
        named = model.named_parameters()
        return {id(p) for name, p in named if is_stack_of_experts(name, p.dim())}

    @cache
    def hidden_ids() -> set[int]:
        target = target_of("", model, {})
        excluded = target.lookups | target.heads
        parameters = list[Any](model.parameters())
        candidates = (p for i, p in enumerate(parameters) if i not in excluded)
        return {id(p) for p in candidates if p.dim() == 2 + (id(p) in stack_ids())}

    rule = RULES[settings.type]
    return rule.groups(
        groups,
        settings.parameters(),
        lambda p: getattr(p, "use_muon", id(p) in hidden_ids()),
        lambda p: id(p) in stack_ids(),
    )


def partition_model(
    model: nn.Module | Outline,
    config: Config,
    groups: Groups,
    units: Sequence[UnitSpec] | None,
    ranks: int = 1,
    *,
    needs_full: bool = False,
) -> Partition:
    """Partition a model into units laid out for `ranks`; parameters in `groups` are trained.

    With `needs_full`, the update rule needs all parameters unsharded and uncut.
    """
    cutter = Partitioner(model)
    precision = PRECISIONS[config.precision]
    group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
    is_muon = not RULES[config.optimizer.type].kernel  # other rules' groups may have the same key
    facts: list[ParameterFacts] = []
    for index, p in enumerate(cutter.parameters):
        dtype = str(p.dtype).removeprefix("torch.")
        itemsize = p.nbytes // max(p.numel(), 1)
        if dtype in _CASTABLE:
            dtype, itemsize = precision.dtype, precision.weight
        group = group_of.get(id(p), -1)
        facts.append(
            ParameterFacts(cutter.names[index], index, tuple(p.shape), dtype, p.numel(), itemsize,
                           group >= 0, group,
                           needs_full=is_muon and group >= 0 and groups[group]["use_muon"])
        )  # fmt: skip
    if config.frozen.format != "as_is":
        facts = _quantized(cutter, facts, config)
    stacks, notes = _stacks_to_cut(cutter, facts, config, needs_full=needs_full)
    cuts, rows = cutter.cut_stacks(
        cutter.cut(units), _range_sizes(stacks, facts, config, precision)
    )
    for expert_rows in rows:
        for name, origin in expert_rows.stacks.members:
            count = expert_rows.end - expert_rows.first
            facts.append(facts[origin].rows(expert_rows.parameters[name], expert_rows.first, count))
    layouts = [
        lay_out(
            index,
            cut.name,
            [facts[i] for i in cut.parameters],
            precision,
            is_block=cut.is_block,
            ranks=ranks,
            needs_full=needs_full,
        )
        for index, cut in enumerate(cuts)
    ]
    return Partition(
        cutter.names,
        cutter.parameters,
        [fact.trained for fact in facts],
        [fact.dtype for fact in facts],
        cuts,
        _with_usage_flags(layouts, target_of("", model, {})),
        cutter.num_model_params,
        rows,
        notes,
    )


def _with_usage_flags(layouts: Sequence[UnitLayout], target: Target) -> tuple[UnitLayout, ...]:
    """Return the layouts with `at_end` and `looked_up` set for those outside blocks."""
    last = max((s.origin for u in layouts if u.is_block for s in u.segments), default=None)
    embeddings = target.lookups | target.heads
    flagged = list[UnitLayout]()
    for unit in layouts:
        if last is not None and not unit.is_block and not unit.is_range:
            origins = {s.origin for s in unit.segments}
            before = {i for i in origins if i < last}
            unit = replace(
                unit,
                at_end=bool(before) and (before != origins or not origins.isdisjoint(target.heads)),
                looked_up=bool(before) and before <= embeddings,
            )
        flagged.append(unit)
    return tuple(flagged)


def _stacks_to_cut(
    cutter: Partitioner, facts: list[ParameterFacts], config: Config, *, needs_full: bool
) -> tuple[list[Stacks], tuple[str, ...]]:
    """Return the stacks that may be cut, marked in `facts`, and notes on all others."""
    stacks_to_cut: list[Stacks] = []
    paths_by_reason: dict[str, list[str]] = {}
    declared: set[int] = set()
    for stacks in cutter.stacks():
        declared.update(index for _, index in stacks.members)
        adapted = "base_layer" in stacks.path.split(".")
        reason = "peft adapts a stack as a whole" if adapted else None
        for _, index in stacks.members:
            fact, parameter = facts[index], cutter.parameters[index]
            expert_numel = fact.numel // fact.shape[0]
            if expert_numel % SQUARE_BLOCK:
                reason = f"an expert has {expert_numel} elements, no multiple of {SQUARE_BLOCK}"
                continue
            facts[index] = replace(fact, stack=StackRows(index, 0, stacks.count))
            if fact.trained and (needs_full or fact.needs_full):
                reason = "the optimizer needs full parameters"
            elif fact.dtype not in _CASTABLE and not fact.form:
                reason = f"{fact.dtype} is no dtype that computes"
            elif gradient_hooks(parameter):
                reason = "a hook waits for the gradient of all experts"
        if reason is None:
            stacks_to_cut.append(stacks)
        else:
            paths_by_reason.setdefault(reason, []).append(stacks.path)
    stacked = (f for f in facts if len(f.shape) == 3 and is_expert(f.name))
    undeclared = [f.name for f in stacked if f.parameter not in declared]
    if undeclared:
        paths_by_reason["the module does not name its stacks (infinity_stacks)"] = undeclared
    if not stacks_to_cut and not paths_by_reason and config.experts_per_unit != "auto":
        paths_by_reason["the model has no stacks of experts"] = ["experts_per_unit has no effect"]
    notes = [
        f"experts are stored with their layer, not in ranges: {listed(names, 2)}: {reason}"
        for reason, names in paths_by_reason.items()
    ]
    return stacks_to_cut, tuple(notes)


def _range_sizes(
    stacks: Sequence[Stacks],
    facts: Sequence[ParameterFacts],
    config: Config,
    precision: Precision,
) -> list[tuple[Stacks, int]]:
    """Return the modules whose experts are cut into ranges, and the experts per range.

    "auto" depends only on the model, so that a durable run resumes with the same units.
    """
    chosen = config.experts_per_unit
    if chosen != "auto":
        return [(experts, min(chosen, experts.count)) for experts in stacks]

    def expert_bytes(experts: Stacks) -> int:
        facts_of = [facts[index] for _, index in experts.members]
        computes = [f.trained or bool(f.form) for f in facts_of]
        itemsizes = [
            precision.weight if c else f.itemsize for f, c in zip(facts_of, computes, strict=True)
        ]
        return sum(f.numel // experts.count * n for f, n in zip(facts_of, itemsizes, strict=True))

    total = sum(expert_bytes(experts) * experts.count for experts in stacks)
    lower, upper = EXPERTS_BYTES
    limit = min(max(lower, total // MAX_AUTO_RANGES), upper)
    sizes = []
    for experts in stacks:
        num_fitting = max(limit // max(expert_bytes(experts), 1), 1)
        if num_fitting < experts.count:
            num_ranges = -(-experts.count // num_fitting)
            sizes.append((experts, -(-experts.count // num_ranges)))
    return sizes


def _quantized(
    cutter: Partitioner, facts: list[ParameterFacts], config: Config
) -> list[ParameterFacts]:
    """Return `facts` with the storage format of frozen matrices and stacks of matrices set."""
    form = FrozenFormat(config.frozen.format)
    keep = set(config.frozen.keep)
    is_candidate = dict[int, bool]()  # by id: a matrix in all modules, not in `keep`
    for name, module in cutter.root.named_modules():
        for param_name, param in dict(module.named_parameters(recurse=False)).items():
            kept = not keep.isdisjoint([*name.split("."), param_name])
            candidate = is_matrix(module, param) and not kept
            is_candidate[id(param)] = is_candidate.get(id(param), True) and candidate
    num_dims = (3,) if form is FrozenFormat.MXFP4 else (2, 3)
    matrices = {
        i for i, p in enumerate(cutter.parameters)
        if is_candidate[id(p)] and p.numel() and p.dim() in num_dims
    }  # fmt: skip
    chosen = {i for i in matrices if not facts[i].trained and facts[i].dtype in _CASTABLE}
    layer = "stack of experts" if form is FrozenFormat.MXFP4 else "nn.Linear layer"
    if not chosen:
        raise ConfigError(
            f"frozen.format is {form}, but nothing is frozen that could be quantized: "
            f"all {len(matrices)} matrices of {layer}s are trained"
            if matrices
            else f"frozen.format is {form}, but no {layer} is left to quantize",
            because="trained weights are never quantized: updates would be lost in the rounding"
            if matrices
            else "frozen.keep names them, or there are none",
            remedy="freeze the base, e.g. with peft.get_peft_model, before initialize(), and leave "
            "frozen parameters out of the optimizer; or leave frozen.format out",
        )
    if unfit := [facts[i] for i in sorted(chosen) if not form.fits(facts[i].shape)]:
        raise ConfigError(
            f"frozen.format is {form}, and {unfit[0].name!r} of shape {unfit[0].shape} cannot be "
            f"stored in it ({len(unfit)} such)",
            because=f"blocks have {MXFP4_BLOCK} elements along the second dimension",
            remedy="frozen.format: nf4, which takes every shape; or name it in frozen.keep",
        )
    return [replace(f, form=form.value) if i in chosen else f for i, f in enumerate(facts)]


def case_for(
    target: Target,
    cut: Partition,
    groups: Groups,
    config: Config,
    machine: PlanMachine,
    tokens: int,
    *,
    recompute: bool,
    base: int = PROCESS_BASE_BYTES,
    made: int,
    length: int | None = None,
) -> PlanInput:
    """Return the planner's input for a model on a machine, with `tokens` per micro-batch.

    `base` and `made` are bytes, see `plan.budget.Limits`; `length` is the number of tokens of a
    sample, `USUAL_CONTEXT` if None.
    """
    name, form = config.optimizer.type, MomentFormat(config.optimizer.moments)
    rule = RuleFacts(
        name=name,
        moments=reserved_moments(name, groups, form),
        matrix_steps=matrix_steps(name, groups),
        notes=(*lossy_notes(form), *cut.notes),
    )
    return PlanInput(
        units=cut.layouts,
        config=config,
        machine=machine,
        work=StepWork(
            tokens,
            "all" if recompute else 0,
            context=min(length or USUAL_CONTEXT, tokens),
            lookups=target.lookups,
            heads=target.heads,
            shares=target.shares,
        ),
        rule=rule,
        base=base,
        made=made,
        device_share=AUTO_DEVICE_BUDGET,
    )


def finer_units(cut: Partition) -> list[str]:
    """Return the children of every unit of one module, as names of smaller units; may be empty."""
    names = []
    for unit in cut.units:
        for module in unit.modules[:1] if len(unit.modules) == 1 else []:
            children = [n for n, c in module.named_children() if any(True for _ in c.parameters())]
            if len(children) > 1:
                names += [f"{unit.name}.{child}" for child in children]
    return names


def range_size_variants(case: PlanInput, target: Target) -> Iterator[PlanInput]:
    """Yield the case with twice, half and a quarter of the ranges of experts in a layer.

    Larger ranges are fetched less often, since a backward that recomputes finds them in their
    slots; smaller ones leave memory for weights and activations. Slots are within `RANGE_BYTES`;
    nothing is yielded if the configuration sets `experts_per_unit`.

    Args:
        case: A case of `target`.
        target: The model; it is not modified.
    """
    ranges = [unit for unit in case.units if unit.is_range]
    if case.config.experts_per_unit != "auto" or not ranges:
        return
    slot_bytes = max(unit.slot_bytes for unit in ranges)
    current_size, count = max(
        (s.shape[0], s.stack.total) for unit in ranges for s in unit.segments if s.stack is not None
    )
    num_ranges = -(-count // current_size)
    sizes = {current_size}
    for other in (2 * num_ranges, -(-num_ranges // 2), -(-num_ranges // 4)):
        size = -(-count // min(other, count))
        other_bytes = slot_bytes * size // current_size
        if size in sizes or not RANGE_BYTES[0] <= other_bytes <= RANGE_BYTES[1]:
            continue
        sizes.add(size)
        config = case.config.model_copy(update={"experts_per_unit": size})
        groups = groups_of(target.module, config)
        partition = partition_model(target.module, config, groups, None, case.machine.ranks)
        yield replace(case, config=config, units=partition.layouts)


def adapter_plan_input(case: PlanInput, target: Target, rank: int, frozen_format: str) -> PlanInput:
    """Return the case of the same step with adapters trained on a frozen base.

    Args:
        case: The case of `target` with all its parameters trained.
        target: The model; it is not modified.
        rank: Inner dimension of the adapters' matrices (LoRA, arXiv:2106.09685).
        frozen_format: Format of frozen matrices, as in `frozen.format` of a configuration.

    Raises:
        ConfigError: If the model has no linear layers.
    """
    adapted = target.with_adapters(rank)
    frozen = case.config.frozen.model_copy(update={"format": frozen_format})
    config = case.config.model_copy(update={"frozen": frozen})
    groups = groups_of(adapted.module, config)
    partition = partition_model(adapted.module, config, groups, None, case.machine.ranks)
    changed = case_for(
        adapted,
        partition,
        groups,
        config,
        case.machine,
        case.work.tokens,
        recompute=case.work.recompute == "all",
        base=case.base,
        made=adapted.max_initial_bytes(quantizes=frozen_format != "as_is"),
        length=case.work.context,
    )
    return replace(changed, device_share=case.device_share)
