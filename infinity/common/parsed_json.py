"""Validation of parsed JSON into dataclasses with strictly typed members."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, TypeAdapter, ValidationError

_T = TypeVar("_T")
LARGEST = 2**63 - 1  # limit of `Count`
# Texts and flags are not converted to numbers. `min_length` rejects strings without a UTF-8 form.
Text = Annotated[str, Field(strict=True, min_length=0)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
# Reports only the first invalid item: a tuple may have a million checksums.
Texts = Annotated[tuple[Text, ...], FailFast()]
Counts = Annotated[tuple[Count, ...], FailFast()]

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def made(kind: type[_T], value: Any) -> _T:
    """Convert parsed JSON to a `kind`: a dataclass of the types above, or a pydantic model.

    Unknown members are ignored; members with a default may be missing, as in files of older
    versions. Raises `ValueError` with the path of the first invalid value.
    """
    try:
        validated: _T = _adapter(kind).validate_python(value)
        return validated
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    steps = (f"[{step}]" if type(step) is int else f".{step}" for step in first["loc"])
    location = "".join(steps).removeprefix(".") or "it"
    if first["type"] == "missing":
        raise ValueError(f"{location} is missing")
    raise ValueError(f"{location} is {first['input']!r:.60}: {first['msg']}")
