"""Which engine a parameter belongs to, known by the parameter itself: nothing is global."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import Tensor, nn

_NAME = "_infinity_engine"


class _Mark:
    """A reference that does not keep the engine alive, and stays behind where pickle goes."""

    def __init__(self, engine: object) -> None:
        self.engine = weakref.ref(engine)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()  # what torch's safe loader knows

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def name_engine(parameters: Iterable[nn.Parameter], engine: object | None) -> None:
    """From now on these parameters belong to `engine`, or to none."""
    for parameter in parameters:
        if engine is None:
            vars(parameter).pop(_NAME, None)
        else:
            setattr(parameter, _NAME, _Mark(engine))


def engine_of(tensor: Tensor) -> Any:
    """The engine that a parameter belongs to, None where there is none."""
    mark = getattr(tensor, _NAME, None)
    return mark.engine() if isinstance(mark, _Mark) else None


def freeze(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Make these parameters require no gradient; returns what undoes that."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)

    def undo() -> None:
        for parameter in changed:
            parameter.requires_grad_(True)

    return undo
