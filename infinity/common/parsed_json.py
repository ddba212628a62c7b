"""Dataclasses made of parsed JSON: strict types of their members, and the check of all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, TypeAdapter, ValidationError

_T = TypeVar("_T")
LARGEST = 2**63 - 1  # number
# No number is made of a text or a flag. `min_length` refuses texts that have no UTF-8.
Text = Annotated[str, Field(strict=True, min_length=0)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
# Of a million checksums the first wrong one is enough.
Texts = Annotated[tuple[Text, ...], FailFast()]
Counts = Annotated[tuple[Count, ...], FailFast()]

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def made(kind: type[_T], value: Any) -> _T:
    """Return parsed JSON as a `kind`: a dataclass of the types above, or a model.

    Members that the kind does not have are left out; those with a default may be missing, for they
    came later. Raises `ValueError` that names the place of the first value at fault.
    """
    try:
        found: _T = _adapter(kind).validate_python(value)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    steps = (f"[{step}]" if type(step) is int else f".{step}" for step in first["loc"])
    location = "".join(steps).removeprefix(".") or "it"
    if first["type"] == "missing":
        raise ValueError(f"{location} is missing")
    raise ValueError(f"{location} is {first['input']!r:.60}: {first['msg']}")
