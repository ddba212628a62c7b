"""Modules whose parameters are stacks of experts, computed range by range.

[Note: stacks]
The experts of a layer are often a few parameters with one row per expert: `down_proj (E, H, I)`. A
module declares them in its attribute `infinity_stacks`, and its forward passes the computation of
experts to `compute_ranges`. An engine may then split them into units of a few experts each; the
ranges are computed one after the other, in order. Reading the full parameter by its attribute
during a call is an error. Updates and the gradient norm are computed expert by expert, so neither
depends on the number of experts in a unit.

>>> class Experts(nn.Module):
...     infinity_stacks = ("up", "down")  # created in `__init__`, as is `num_experts`
...     def forward(self, x, expert):  # expert: index for each row of x, sorted
...         counts = torch.bincount(expert, minlength=self.num_experts).tolist()
...         return compute_ranges(self, my_grouped_matmul, counts, x)
...
... def my_grouped_matmul(experts, x):  # x: the rows of these experts
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
_COMPUTER_ATTRIBUTE = "_infinity_ranges"


class StackRange:
    """Experts `first` to `end` (exclusive), indexed by parameter name for their rows of a stack.

    `counts` has the number of token rows of each of these experts.
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
        """Fetch and return the rows of the parameter `name`. Do not store them."""
        return self._read(name)


class Bounds(Protocol):
    """A range of experts, `first` to `end` (exclusive)."""

    @property
    def first(self) -> int:
        """Index of the first expert."""

    @property
    def end(self) -> int:
        """Index after the last expert."""


Compute = Callable[..., "Tensor"]  # takes a `StackRange` and the token rows of its experts
RangeExecutor = Callable[["RangeCall"], "Tensor"]


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
        """Return, for each range, its rows of each tensor.

        Ranges that are omitted have no rows. Each tensor is split once, so its gradient is
        concatenated once.
        """
        sizes = [self.rows_of(experts) for experts in ranges]
        rows: tuple[Any, ...] = self.rows
        columns = [[None] * len(sizes) if t is None else t.split(sizes) for t in rows]
        return [*zip(*columns, strict=True)]


def compute_ranges(
    module: nn.Module, compute: Compute, counts: Sequence[int], *rows: Tensor | None
) -> Tensor:
    """Compute a module's experts range by range; without an engine there is one range.

    Args:
        module: The module, with `infinity_stacks`.
        compute: Called with a `StackRange` and the rows of its experts in each of `rows`; returns a
            tensor with the same number of rows. It may be called again in backward, and must not
            use other tensors that require grad.
        counts: Number of rows of each expert. Ranges that have none on all ranks are skipped.
        rows: Tensors with a row for each pair of token and expert, sorted by expert; None is passed
            through.

    Returns:
        The concatenated results.
    """
    call = RangeCall(compute, counts, rows)
    computer: RangeExecutor | None = vars(module).get(_COMPUTER_ATTRIBUTE)
    return compute_full(module, call) if computer is None else computer(call)


def compute_full(module: nn.Module, call: RangeCall) -> Tensor:
    """Compute a call of a module's experts in one range."""
    count = len(getattr(module, stacks_of(module)[0]))
    experts = StackRange(0, count, call.counts, lambda name: getattr(module, name))
    return call.compute(experts, *call.rows)


def full_gradient_error(name: str, what: str) -> ResidencyError:
    """Return the error for a use of the gradient of a stack that is cut into ranges."""
    return ResidencyError(
        f"{what} of {name!r}, a stack of experts that is cut into ranges: its gradient arrives "
        "range by range, and never in full",
        remedy="read engine.gradient(p), and change it by engine.set_gradient(p, value), between "
        "backward and step(); or register a hook before initialize(): the layer is not cut then",
    )


def gradient_hooks(parameter: Any) -> list[Any]:
    """Return the hooks on the gradient of a parameter."""
    attributes = "_backward_hooks", "_post_accumulate_grad_hooks"
    hook_dicts = (getattr(parameter, attribute, None) or {} for attribute in attributes)
    return [hook for hooks in hook_dicts for hook in hooks.values()]


def set_range_executor(module: nn.Module, computer: RangeExecutor | None) -> None:
    """Set the function that `compute_ranges` calls for a module; None resets it."""
    if computer is None:
        vars(module).pop(_COMPUTER_ATTRIBUTE, None)
    else:
        vars(module)[_COMPUTER_ATTRIBUTE] = computer


def has_range_executor(module: nn.Module) -> bool:
    """Return True if an engine has set a function with `set_range_executor`."""
    return _COMPUTER_ATTRIBUTE in vars(module)


def stacks_of(module: nn.Module | Outline) -> tuple[str, ...]:
    """Return the names of a module's parameters that are stacks of experts.

    Raises:
        ConfigError: A name is not a parameter of the module, or the stacks differ in length.
    """
    # Not `getattr` of the instance: peft's wrappers forward that to the wrapped module.
    names: Any = vars(module).get(ATTRIBUTE, getattr(type(module), ATTRIBUTE, ()))
    if not names:
        return ()
    direct: Mapping[str, Any] = dict(module.named_parameters(recurse=False))
    class_name = type(module).__name__
    if isinstance(names, str):
        raise ConfigError(
            f"{ATTRIBUTE} of a {class_name} is the string {names!r}",
            remedy=f"a tuple of names of parameters: ({names!r},)",
        )
    missing = [name for name in names if name not in direct]
    if missing:
        raise ConfigError(
            f"{ATTRIBUTE} of a {class_name} is {names!r}: {', '.join(map(repr, missing))} is none "
            f"of its parameters, which are {', '.join(direct)}",
            remedy="a tuple of names of parameters, with one row an expert",
        )
    lengths = {name: direct[name].shape[0] if direct[name].dim() else 0 for name in names}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise ConfigError(
            f"{ATTRIBUTE} of a {class_name}: stacks have one row an expert, and these "
            f"have {', '.join(f'{n} in {name}' for name, n in lengths.items())}",
            remedy="name only parameters with one row an expert",
        )
    return tuple(names)
