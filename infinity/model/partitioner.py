"""Partitioning of a module into units, by its structure alone.

Blocks are repeated children of one module: equal parameter names, shapes and dtypes. In a list,
children of one class that share most of these are blocks too (the first block of a T5 has an extra
position bias; dense layers alternate with mixture-of-experts layers), and so is a single child.
Experts (a repeated ModuleList inside a block) are separate units. Large modules outside blocks
(embeddings, heads) are units; smaller ones are packed into units no larger than a block, because
slots have the size of the largest unit. A parameter belongs to the first unit that reaches it, so
tied weights are stored once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

from infinity.errors import ConfigError
from infinity.model.outline import Outline, Shape, is_list
from infinity.model.stacks import stacks_of

if TYPE_CHECKING:
    from torch import nn

# A module outside blocks is a unit if it has 1/16 of all elements, or half of the largest block.
ALONE_SHARE = 16
OUTSIDE = "outside blocks"  # name of the units of packed modules
PACKED_SHARE = 8  # packed units have at most 1/8 of all elements, and at most the largest block


@dataclass
class UnitModules:
    """Unit without a layout: its name, the modules to hook, and its parameter indices."""

    name: str
    modules: list[nn.Module]
    parameters: list[int] = field(default_factory=list)
    is_block: bool = False  # the forward of its modules can be recomputed, or run on slices


@dataclass(frozen=True)
class Stacks:
    """Stacks of one module of experts.

    `path` is the module's name; `members` are the stacks' names in it and parameter indices.
    """

    path: str
    module: nn.Module
    members: tuple[tuple[str, int], ...]
    count: int  # number of experts


@dataclass
class Rows:
    """Experts `first` to `end` (exclusive) of a module, their unit, and its parameter indices."""

    stacks: Stacks
    first: int
    end: int
    unit: UnitModules
    parameters: dict[str, int] = field(default_factory=dict)


UnitSpec: TypeAlias = "str | nn.Module | Sequence[str | nn.Module]"


class Partitioner:
    """A single pass over a module; `parameters` and `names` are deduplicated, in module order.

    For an `Outline`, which has the same interface as a module, the units hold outlines.
    """

    def __init__(self, root: nn.Module | Outline) -> None:
        self.root = cast("nn.Module", root)
        named = list(self.root.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self.num_model_params = len(self.parameters)  # rows of stacks follow them
        self._taken: set[int] = set()
        self._total_numel = sum(p.numel() for p in self.parameters)

    def stacks(self) -> list[Stacks]:
        """Return the modules that declare stacks of experts, except those that share a stack."""
        owners = Counter(
            self._index[id(p)] for m in self.root.modules() for p in m.parameters(recurse=False)
        )
        unshared = []
        for path, module in self.root.named_modules():
            direct = dict(module.named_parameters(recurse=False))
            members = tuple((name, self._index[id(direct[name])]) for name in stacks_of(module))
            if members and all(owners[index] == 1 for _, index in members):
                count = self.parameters[members[0][1]].shape[0]
                unshared.append(Stacks(path, module, members, count))
        return unshared

    def cut_stacks(
        self, cuts: list[UnitModules], sizes: Sequence[tuple[Stacks, int]]
    ) -> tuple[list[UnitModules], list[Rows]]:
        """Move stacks out of their units, into units of a few experts each.

        The rows of each unit become parameters, appended to those of the model. `sizes` has the
        number of experts in a unit.
        """
        ranges: list[Rows] = []
        for stacks, size in sizes:
            origins = {index for _, index in stacks.members}
            for cut in cuts:
                cut.parameters = [i for i in cut.parameters if i not in origins]
            for first in range(0, stacks.count, size):
                end = min(first + size, stacks.count)
                rows = Rows(stacks, first, end, UnitModules(f"{stacks.path}[{first}:{end}]", []))
                for name, origin in stacks.members:
                    rows.parameters[name] = len(self.parameters)
                    self.names.append(self.names[origin])
                    self.parameters.append(_rows_like(self.parameters[origin], end - first))
                rows.unit.parameters.extend(rows.parameters.values())
                ranges.append(rows)
        origin_of = {
            index: (origin, rows.first)
            for rows in ranges
            for (_, origin), index in zip(
                rows.stacks.members, rows.parameters.values(), strict=True
            )
        }
        cuts = [c for c in (*cuts, *(rows.unit for rows in ranges)) if c.parameters]
        cuts.sort(key=lambda c: origin_of.get(c.parameters[0], (c.parameters[0], 0)))
        return cuts, ranges

    def cut(self, units: Sequence[UnitSpec] | None = None) -> list[UnitModules]:
        """Return the units in module order; `units` replaces the detection of blocks."""
        cuts = [self._explicit(spec) for spec in units] if units is not None else []
        if units is None:
            cuts.extend(self._blocks(self.root, ""))
        unit_numels = [sum(self.parameters[i].numel() for i in cut.parameters) for cut in cuts]
        cuts.extend(self._leftovers(max(unit_numels, default=0)))
        cuts = [c for c in cuts if c.parameters]
        return sorted(cuts, key=lambda c: c.parameters[0])

    def _explicit(self, spec: UnitSpec) -> UnitModules:
        is_single = isinstance(spec, str) or hasattr(spec, "named_parameters")
        members = cast("Sequence[str | nn.Module]", [spec] if is_single else spec)
        by_name = dict(self.root.named_modules())
        names = {id(m): n for n, m in by_name.items()}
        modules: list[nn.Module] = []
        for member in members:
            module = by_name.get(member) if isinstance(member, str) else member
            if module is None or id(module) not in names:
                raise ConfigError(
                    f"units name {member!r}, which is not a module of the model",
                    remedy="use names from model.named_modules()",
                )
            modules.append(module)
        cut = UnitModules(
            "+".join(names[id(m)] or "model" for m in modules), modules, is_block=True
        )
        for module in modules:
            cut.parameters.extend(self._take_indices(module))
        return cut

    def _take_indices(self, module: nn.Module, *, recurse: bool = True) -> list[int]:
        """Return the indices of the module's parameters that are in no unit yet, and mark them."""
        indices = [self._index[id(p)] for p in module.parameters(recurse=recurse)]
        untaken = sorted(set(indices) - self._taken)
        self._taken.update(untaken)
        return untaken

    def _blocks(self, module: nn.Module, prefix: str) -> Iterator[UnitModules]:
        """Yield the outermost repeated children as units, each after the experts inside it."""
        stacked = _block_ids(module)
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if id(child) in stacked:
                yield from self._experts(child, f"{path}.")
                yield UnitModules(path, [child], self._take_indices(child), is_block=True)
            else:
                yield from self._blocks(child, f"{path}.")

    def _experts(self, block: nn.Module, prefix: str) -> Iterator[UnitModules]:
        for name, child in block.named_modules():
            if is_list(child):
                repeated = _repeated_ids(child)
                for key, expert in child.named_children():
                    if id(expert) in repeated:
                        path = f"{prefix}{name}.{key}"
                        yield UnitModules(path, [expert], self._take_indices(expert))

    def _leftovers(self, block_numel: int) -> Iterator[UnitModules]:
        """Yield the modules outside all blocks: large ones as units, the others packed in order.

        `block_numel` is that of the largest unit so far, 0 if there is none.
        """
        min_alone = self._total_numel / ALONE_SHARE
        max_packed = self._total_numel / PACKED_SHARE
        if block_numel:
            min_alone = min(min_alone, block_numel / 2)
            max_packed = min(max_packed, block_numel)
        packed = UnitModules(OUTSIDE, [])
        packed_numel = num_packed = 0
        for name, module in self.root.named_modules():
            indices = self._take_indices(module, recurse=False)
            if not indices:
                continue
            numel = sum(self.parameters[i].numel() for i in indices)
            if numel >= min_alone:
                yield UnitModules(name or "model", [module], indices)
                continue
            if packed.parameters and packed_numel + numel > max_packed:
                yield packed
                num_packed += 1
                packed, packed_numel = UnitModules(f"{OUTSIDE}.{num_packed}", []), 0
            packed.modules.append(module)
            packed.parameters.extend(indices)
            packed_numel += numel
        yield packed


def _rows_like(stack: nn.Parameter, count: int) -> nn.Parameter:
    """Return a parameter without memory that stands for `count` rows of a stack."""
    shape = (count, *stack.shape[1:])
    outline = cast("object", stack)
    if isinstance(outline, Shape):
        return cast("nn.Parameter", Shape(shape, outline.requires_grad))
    import torch  # a model with parameters has imported it already

    values = torch.zeros((), dtype=stack.dtype, device="cpu").expand(shape)
    return torch.nn.Parameter(values, stack.requires_grad)


# Names, shapes and dtypes of parameters, which repeated modules have in common.
_Signature: TypeAlias = frozenset[tuple[str, tuple[int, ...], object]]


def _ids_by_signature(module: nn.Module) -> dict[tuple[type, _Signature], list[int]]:
    """Return the ids of the children that have a matrix, by class and signature."""
    ids: dict[tuple[type, _Signature], list[int]] = {}
    for child in module.children():
        parameters = [(n, tuple(p.shape), p.dtype) for n, p in child.named_parameters()]
        if any(len(shape) >= 2 for _, shape, _ in parameters):
            ids.setdefault((type(child), frozenset(parameters)), []).append(id(child))
    return ids


def _repeated_ids(module: nn.Module) -> set[int]:
    """Return the ids of the children whose class and signature a sibling has too."""
    return {i for ids in _ids_by_signature(module).values() if len(ids) > 1 for i in ids}


def _block_ids(module: nn.Module) -> set[int]:
    """Return the ids of repeated children; in a list also of similar ones and of a single one."""
    stacked = _repeated_ids(module)
    if not is_list(module) or not all(name.isdigit() for name, _ in module.named_children()):
        return stacked
    ids_by_key = _ids_by_signature(module)
    num_children = sum(map(len, ids_by_key.values()))
    for key, ids in ids_by_key.items():
        # A single child is compared with itself.
        others = [other for other in ids_by_key if other != key] if num_children > 1 else [key]
        for kind, signature in others:
            common = key[1] & signature
            num_matrices = sum(len(shape) >= 2 for _, shape, _ in common)
            has_half = 2 * len(common) >= min(len(key[1]), len(signature))
            if kind is key[0] and num_matrices >= 2 and has_half:
                stacked.update(ids)
    return stacked
