"""Outline of a model: modules and parameters by name and shape, without torch.

Code that inspects a module to plan for it (`partitioner.py`, `targets.py`) uses only these methods,
which a `torch.nn.Module` has under the same names. Importing torch takes longer than most plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """An fp32 parameter of which only the shape is known."""

    shape: tuple[int, ...]
    requires_grad: bool = True

    dtype = "float32"
    is_meta = True

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return 4 * self.numel()


class Outline:
    """A module without torch: children and parameters by name.

    Iterates in the order of `torch.nn.Module`, and like it yields a shared parameter once, under
    its first name.
    """

    is_embedding_table = False  # stands for a `torch.nn.Embedding`
    infinity_stacks: tuple[str, ...] = ()  # see `model/stacks.py`

    def __init__(self) -> None:
        self.direct: dict[str, Shape] = {}
        self.below: dict[str, Outline] = {}

    def at(self, path: str) -> Outline:
        """Return the module with a dotted name; create it and its ancestors if they are missing."""
        name, _, suffix = path.partition(".")
        child = self.below.setdefault(name, Outline())
        return child.at(suffix) if suffix else child

    def named_children(self) -> Iterator[tuple[str, Outline]]:
        """Iterate over direct children and their names."""
        return iter(self.below.items())

    def children(self) -> Iterator[Outline]:
        """Iterate over direct children."""
        return iter(self.below.values())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Outline]]:
        """Yield the module itself and all descendants with their names, parents first."""
        yield prefix, self
        for name, child in self.below.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Outline]:
        """Iterate over the module itself and all descendants, parents first."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Shape]]:
        """Yield parameters with names; with `recurse` also those of descendants."""
        seen: set[int] = set()
        for prefix, module in self.named_modules() if recurse else [("", self)]:
            for name, parameter in module.direct.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def parameters(self, *, recurse: bool = True) -> Iterator[Shape]:
        """Iterate over parameters; with `recurse` also those of descendants."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))


def is_embedding(module: nn.Module | Outline) -> bool:
    """Return True for an embedding."""
    if isinstance(module, Outline):
        return module.is_embedding_table
    from torch import nn  # imported already if there is a module

    return isinstance(module, nn.Embedding)


def is_linear(module: nn.Module | Outline) -> bool:
    """Return True for a linear layer."""
    if isinstance(module, Outline):
        weight = module.direct.get("weight")
        return weight is not None and weight.dim() == 2 and not module.is_embedding_table
    from torch import nn

    return isinstance(module, nn.Linear)


def is_matrix(module: nn.Module | Outline, parameter: nn.Parameter | Shape) -> bool:
    """Return True for the weight of a linear layer, and for a stack of matrices, as of experts."""
    if parameter.dim() == 2:
        return is_linear(module)
    if isinstance(module, Outline):
        return parameter.dim() == 3
    from torch import nn

    convolves = isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
    return parameter.dim() == 3 and min(parameter.shape) > 1 and not convolves


def is_list(module: nn.Module | Outline) -> bool:
    """Return True for a list or dict of modules."""
    if isinstance(module, Outline):
        return bool(module.below) and all(name.isdigit() for name in module.below)
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict)
