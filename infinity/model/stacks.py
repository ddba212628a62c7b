"""Modules whose parameters are stacks of experts, and how they compute a range of them.

[Note: stacks]
A layer's experts are often a few parameters with one row an expert: `down_proj (E, H, I)`. A module
names them in its attribute `infinity_stacks`, and its forward hands the computation of some experts
to `compute_ranges`. Then an engine may cut them into units of a few experts each, which is
placement: range after range is computed, in order, whatever the ranges are. To read such a
parameter whole, by its attribute, during a call is an error. The rows of an expert are updated and
summed for the norm by themselves, so neither shows how many travel together.

>>> class Experts(nn.Module):
...     infinity_stacks = ("up", "down")
...     def forward(self, x, expert):  # expert: of each row of x, sorted
...         counts = torch.bincount(expert, minlength=len(self.up)).tolist()
...         return compute_ranges(self, my_grouped_matmul, counts, x)
...
... def my_grouped_matmul(experts, x):  # the rows of x of these experts
...     up, down, counts = experts["up"], experts["down"], experts.counts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infinity.errors import ConfigError, ResidencyError
from infinity.model.outline import Outline

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTRIBUTE = "infinity_stacks"
_COMPUTER = "_infinity_ranges"


class StackRange:
    """Experts from `first` to before `end`; index it by a parameter's name for their rows.

    `counts` are the numbers of rows of each of them.
    """

    __slots__ = ("_read", "counts", "end", "first")

    def __init__(
        self, first: int, end: int, counts: Sequence[int], read: Callable[[str], Tensor]
    ) -> None:
        self.first = first
        self.end = end
        self.counts = counts[first:end]
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        """Return the rows of the parameter `name`, fetched now. Do not keep them."""
        return self._read(name)


class Bounds(Protocol):
    """Experts from `first` to before `end`."""

    @property
    def first(self) -> int:
        """The first expert."""

    @property
    def end(self) -> int:
        """The one behind the last."""


Compute = Callable[..., "Tensor"]  # of a range, and the rows of its experts
Computer = Callable[["RangeCall"], "Tensor"]


@dataclass(frozen=True, slots=True)
class RangeCall:
    """The arguments of `compute_ranges`."""

    compute: Compute
    counts: Sequence[int]
    rows: tuple[Tensor | None, ...]

    def rows_of(self, experts: Bounds) -> int:
        """Return the number of rows of some experts."""
        return sum(self.counts[experts.first : experts.end])

    def split(self, ranges: Sequence[Bounds]) -> list[tuple[Any, ...]]:
        """Return for each range of experts its rows of each tensor.

        Ranges that are left out have no rows. Gradients of what is split are put together once.
        """
        sizes = [self.rows_of(one) for one in ranges]
        rows: tuple[Any, ...] = self.rows
        each = [[None] * len(sizes) if t is None else t.split(sizes) for t in rows]
        return [*zip(*each, strict=True)]


def compute_ranges(
    module: nn.Module, compute: Compute, counts: Sequence[int], *rows: Tensor | None
) -> Tensor:
    """Compute a module's experts range by range; without an engine there is one range.

    Args:
        module: The module, with `infinity_stacks`.
        compute: Called with a `StackRange` and the rows of its experts in each of `rows`; returns a
            tensor with as many rows. It may be called again in backward, and uses no other tensors
            that need a gradient.
        counts: Rows of each expert. Ranges without any, on all ranks, are left out.
        rows: Tensors with a row for each token and expert, sorted by expert; None is passed on.

    Returns:
        The results, one after the other.
    """
    call = RangeCall(compute, counts, rows)
    computer: Computer | None = vars(module).get(_COMPUTER)
    return compute_full(module, call) if computer is None else computer(call)


def compute_full(module: nn.Module, call: RangeCall) -> Tensor:
    """Compute a call of a module's experts in one range."""
    count = len(getattr(module, stacks_of(module)[0]))
    experts = StackRange(0, count, call.counts, lambda name: getattr(module, name))
    return call.compute(experts, *call.rows)


def no_full_gradient(name: str, what: str) -> ResidencyError:
    """Return the error for a use of the gradient of a stack that is cut into ranges."""
    return ResidencyError(
        f"{what} of {name!r}, a stack of experts that is cut into ranges: its gradient arrives "
        "range by range, and never whole",
        remedy="read engine.gradient(p), and change it by engine.set_gradient(p, value), between "
        "backward and step(); or register a hook before initialize(): the layer is not cut then",
    )


def gradient_hooks(parameter: Any) -> list[Any]:
    """Return the hooks that wait for the gradient of a parameter."""
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    found = (getattr(parameter, name, None) or {} for name in names)
    return [hook for hooks in found for hook in hooks.values()]


def set_computer(module: nn.Module, computer: Computer | None) -> None:
    """Set what computes a module's `compute_ranges`, or with None reset it."""
    if computer is None:
        vars(module).pop(_COMPUTER, None)
    else:
        vars(module)[_COMPUTER] = computer


def has_computer(module: nn.Module) -> bool:
    """Return True if an engine computes a module's `compute_ranges`."""
    return _COMPUTER in vars(module)


def stacks_of(module: nn.Module | Outline) -> tuple[str, ...]:
    """Return the names of a module's parameters that are stacks of experts.

    Raises:
        ConfigError: A name is none of the module's parameters, or stacks have other lengths.
    """
    # Of the module itself: peft's wrappers have the attributes of the module inside.
    names: Any = vars(module).get(ATTRIBUTE, getattr(type(module), ATTRIBUTE, ()))
    if not names:
        return ()
    direct: Mapping[str, Any] = dict(module.named_parameters(recurse=False))
    kind = type(module).__name__
    missing = [name for name in names if name not in direct]
    if isinstance(names, str) or missing:
        raise ConfigError(
            f"{ATTRIBUTE} of a {kind} is {names!r}: {', '.join(map(repr, missing))} is none of its "
            f"parameters, which are {', '.join(direct)}",
            remedy="a tuple of names of parameters, with one row an expert",
        )
    lengths = {name: direct[name].shape[0] if direct[name].dim() else 0 for name in names}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise ConfigError(
            f"{ATTRIBUTE} of a {kind}: stacks have one row an expert, and these "
            f"have {', '.join(f'{n} in {name}' for name, n in lengths.items())}",
            remedy="name only parameters with one row an expert",
        )
    return tuple(names)
