"""Modules whose parameters are stacks of experts, and how they read a range of them.

[Note: stacks]
A layer's experts are often a few parameters with one row an expert: `down_proj (E, H, I)`. A module
names them in its attribute `infinity_stacks`, and its forward asks `stack_ranges` for them. Then an
engine may cut them into units of a few experts each, which is placement: the module computes range
after range, in order, whatever the ranges are. To read such a parameter whole, by its attribute,
during a call is an error. The rows of an expert are updated and summed for the norm by themselves,
so neither shows how many travel together.

>>> class Experts(nn.Module):
...     infinity_stacks = ("up", "down")
...     def forward(self, x, expert):  # expert: of each row of x, sorted
...         counts = torch.bincount(expert, minlength=len(self.up)).tolist()
...         parts = []
...         for rows in stack_ranges(self, counts):
...             at = slice(sum(counts[: rows.first]), sum(counts[: rows.end]))
...             parts.append(my_grouped_matmul(x[at], rows["up"], rows["down"], counts[...]))
...         return torch.cat(parts)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError
from infinity.model.shapes import Outline

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTRIBUTE = "infinity_stacks"
_LENDER = "_infinity_ranges"


class StackRange:
    """Experts from `first` to before `end`; index it by a parameter's name for their rows."""

    __slots__ = ("_read", "end", "first")

    def __init__(self, first: int, end: int, read: Callable[[str], Tensor]) -> None:
        self.first = first
        self.end = end
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        """Return the rows of the parameter `name`, fetched now. Do not keep them."""
        return self._read(name)


Lender = Callable[[Sequence[int] | None], Iterator[StackRange]]


def stack_ranges(module: nn.Module, counts: Sequence[int] | None = None) -> Iterator[StackRange]:
    """Yield the ranges of experts of a module, in order; without an engine there is one.

    Args:
        module: The module, with `infinity_stacks`.
        counts: Tokens of each expert. Ranges without any, on all ranks, are left out.
    """
    lender: Lender | None = vars(module).get(_LENDER)
    if lender is not None:
        yield from lender(counts)
        return
    names = stacks_of(module)
    yield StackRange(0, len(getattr(module, names[0])), lambda name: getattr(module, name))


def lend_ranges(module: nn.Module, lender: Lender | None) -> None:
    """Set what `stack_ranges` yields for a module, or with None reset it."""
    if lender is None:
        vars(module).pop(_LENDER, None)
    else:
        vars(module)[_LENDER] = lender


def stacks_of(module: nn.Module | Outline) -> tuple[str, ...]:
    """Return the names of a module's parameters that are stacks of experts.

    Raises:
        ConfigError: A name is none of the module's parameters, or stacks have other lengths.
    """
    names: Any = getattr(module, ATTRIBUTE, ())
    if not names:
        return ()
    own: Mapping[str, Any] = dict(module.named_parameters(recurse=False))
    kind = type(module).__name__
    missing = [name for name in names if name not in own]
    if isinstance(names, str) or missing:
        raise ConfigError(
            f"{ATTRIBUTE} of a {kind} is {names!r}: {', '.join(map(repr, missing))} is none of its "
            f"parameters, which are {', '.join(own)}",
            remedy="a tuple of names of parameters, with one row an expert",
        )
    lengths = {name: own[name].shape[0] if own[name].dim() else 0 for name in names}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise ConfigError(
            f"{ATTRIBUTE} of a {kind}: stacks have one row an expert, and these "
            f"have {', '.join(f'{n} in {name}' for name, n in lengths.items())}",
            remedy="name only parameters with one row an expert",
        )
    return tuple(names)
