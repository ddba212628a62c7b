"""Values and sections that a configuration is made of, and what each may look like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infinity.errors import ConfigError
from infinity.sizes import parse_size


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        details = [part for part in (error.because, error.remedy) if part]
        raise ValueError("; ".join([error.what, *details])) from None


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-4 as text, and so does a dict that came from elsewhere.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"should be a number, got {value!r}") from None
    return value


def _whole(value: Any) -> Any:
    # 1e9 is a float to YAML and JSON.
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_path(value: Any) -> Path:
    """A path, `~` expanded."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ValueError(f"should be a path, got {value!r}")
    try:
        return Path(os.fsdecode(value)).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no such user, got {value!r}") from None


def as_paths(value: Any) -> tuple[Path, ...]:
    """One path or a list of them; `None` is none of them."""
    if value is None:
        return ()
    parts = value if isinstance(value, (list, tuple)) else [value]
    paths = tuple(as_path(part) for part in parts)
    if not paths and not isinstance(value, tuple):
        raise ValueError("is an empty list; give a path, or leave it out")
    if len(set(paths)) < len(paths):
        raise ValueError("names the same path twice")
    return paths


def as_pair(value: Any) -> Any:
    """A list as a tuple; YAML and JSON know lists only."""
    return tuple(value) if isinstance(value, list) else value


Size: TypeAlias = Annotated[int, BeforeValidator(_size)]
Whole: TypeAlias = Annotated[int, BeforeValidator(_whole)]
Number: TypeAlias = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Weight: TypeAlias = Annotated[Number, Field(gt=0)]
Beta: TypeAlias = Annotated[Number, Field(ge=0, lt=1)]
OnePath: TypeAlias = Annotated[Path, BeforeValidator(as_path)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)
