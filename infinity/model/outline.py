"""The outline of a model: modules and parameters by name and shape, without torch.

Whoever looks at a module to plan for it (`cut.Cutter`, `target.target_of`) asks no more than what
stands here, and gets it from a `torch.nn.Module` in the same words. Importing torch takes longer
than most plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_MOST_BYTES = 2**63 - 1  # torch counts bytes in 64 bits


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """A parameter that is only known by its sizes, in fp32 and trained."""

    shape: tuple[int, ...]

    dtype = "float32"
    is_meta = True
    requires_grad = True

    def __post_init__(self) -> None:
        if self.nbytes > _MOST_BYTES:
            raise OverflowError(f"a parameter of {' x '.join(map(str, self.shape))} values")

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """How many sizes it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return 4 * self.numel()


class Outline:
    """A module: children and parameters by name; members that are None are left out.

    Walks in the order of `torch.nn.Module`, and like it names everything once, where it is first.
    """

    def __init__(self, **members: Outline | Shape | None) -> None:
        self.own: dict[str, Shape] = {}
        self.below: dict[str, Outline] = {}
        for name, member in members.items():
            self.add(name, member)

    def add(self, name: str, member: Outline | Shape | None) -> None:
        """One more child or parameter; None is left out."""
        if isinstance(member, Shape):
            self.own[name] = member
        elif member is not None:
            self.below[name] = member

    def named_children(self) -> Iterator[tuple[str, Outline]]:
        """Direct children."""
        seen: set[int] = set()
        for name, child in self.below.items():
            if id(child) not in seen:
                seen.add(id(child))
                yield name, child

    def children(self) -> Iterator[Outline]:
        """Direct children."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Outline]]:
        """The module itself and all below it, each before what is in it."""
        seen: set[int] = set()
        waiting = [(prefix, self)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            below = [(f"{name}.{key}" if name else key, m) for key, m in module.below.items()]
            waiting.extend(reversed(below))

    def modules(self) -> Iterator[Outline]:
        """The module itself and all below it."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Shape]]:
        """Parameters, of children too unless told otherwise."""
        seen: set[int] = set()
        for prefix, module in self.named_modules() if recurse else [("", self)]:
            for name, parameter in module.own.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def parameters(self, *, recurse: bool = True) -> Iterator[Shape]:
        """Parameters, of children too unless told otherwise."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))


class Lookup(Outline):
    """As `torch.nn.Embedding`."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(weight=Shape((rows, width)))


class OutlineList(Outline):
    """As `torch.nn.ModuleList`."""

    def __init__(self, members: list[Outline]) -> None:
        super().__init__(**{str(index): member for index, member in enumerate(members)})


def linear(inputs: int, outputs: int, *, bias: bool = True) -> Outline:
    """As `torch.nn.Linear`."""
    return Outline(weight=Shape((outputs, inputs)), bias=Shape((outputs,)) if bias else None)


def layer_norm(width: int) -> Outline:
    """As `torch.nn.LayerNorm`."""
    return Outline(weight=Shape((width,)), bias=Shape((width,)))


def is_lookup(module: nn.Module | Outline) -> bool:
    """Whether a module is an embedding."""
    if isinstance(module, Outline):
        return isinstance(module, Lookup)
    from torch import nn  # whoever has a module has imported torch already

    return isinstance(module, nn.Embedding)


def is_list(module: nn.Module | Outline) -> bool:
    """Whether a module is a list or a dict of others."""
    if isinstance(module, Outline):
        return isinstance(module, OutlineList)
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict)
