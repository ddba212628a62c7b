"""Outline of a model: modules and parameters by name and shape, without torch.

Code that looks at a module to plan for it (`partitioner.py`, `targets.py`) asks for no more than
this, and gets it from a `torch.nn.Module` by the same names. Importing torch takes longer than most
plans.
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
    """A parameter that is only known by its sizes, in fp32."""

    shape: tuple[int, ...]
    requires_grad: bool = True

    dtype = "float32"
    is_meta = True

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
    """A module: children and parameters by name.

    Walks in the order of `torch.nn.Module`, and like it names a parameter once, where it is first.
    """

    is_table = False  # as `torch.nn.Embedding`
    infinity_stacks: tuple[str, ...] = ()  # see `model/stacks.py`

    def __init__(self) -> None:
        self.direct: dict[str, Shape] = {}
        self.below: dict[str, Outline] = {}

    def at(self, path: str) -> Outline:
        """The module of a dotted name; it is made, with those that it is in, if it is not there."""
        name, _, suffix = path.partition(".")
        child = self.below.setdefault(name, Outline())
        return child.at(suffix) if suffix else child

    def named_children(self) -> Iterator[tuple[str, Outline]]:
        """Direct children."""
        return iter(self.below.items())

    def children(self) -> Iterator[Outline]:
        """Direct children."""
        return iter(self.below.values())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Outline]]:
        """Yield the module itself and all below it, parents first."""
        yield prefix, self
        for name, child in self.below.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Outline]:
        """The module itself and all below it."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Shape]]:
        """Yield parameters with names, by default of children, too."""
        seen: set[int] = set()
        for prefix, module in self.named_modules() if recurse else [("", self)]:
            for name, parameter in module.direct.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def parameters(self, *, recurse: bool = True) -> Iterator[Shape]:
        """Yield parameters, by default of children, too."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))


def is_lookup(module: nn.Module | Outline) -> bool:
    """Whether a module is an embedding."""
    if isinstance(module, Outline):
        return module.is_table
    from torch import nn  # whoever has a module has imported torch already

    return isinstance(module, nn.Embedding)


def is_linear(module: nn.Module | Outline) -> bool:
    """Whether a module is a matrix that inputs are multiplied with, and perhaps a bias."""
    if isinstance(module, Outline):
        weight = module.direct.get("weight")
        return weight is not None and weight.dim() == 2 and not module.is_table
    from torch import nn

    return isinstance(module, nn.Linear)


def is_matrix(module: nn.Module | Outline, parameter: nn.Parameter | Shape) -> bool:
    """Return True for the matrix of a linear layer, and for a stack of matrices, as of experts."""
    if parameter.dim() == 2:
        return is_linear(module)
    if isinstance(module, Outline):
        return parameter.dim() == 3
    from torch import nn

    convolves = isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
    return parameter.dim() == 3 and min(parameter.shape) > 1 and not convolves


def is_list(module: nn.Module | Outline) -> bool:
    """Whether a module is a list or a dict of others."""
    if isinstance(module, Outline):
        return bool(module.below) and all(name.isdigit() for name in module.below)
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict)
