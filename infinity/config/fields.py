"""Field types of a configuration, and the base class of its sections."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infinity.common.sizes import parse_size
from infinity.errors import ConfigError


def _parse_size(value: Any) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        details = [part for part in (error.because, error.remedy) if part]
        raise ValueError("; ".join([error.what, *details])) from None


def _parse_number(value: Any) -> Any:
    # YAML 1.1 parses 1e-4 as text; a dict may come from such a parser.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"should be a number, got {value!r}") from None
    return value


def _parse_integer(value: Any) -> Any:
    # YAML and JSON parse 1e9 as a float.
    number = _parse_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


_MAX_NAME_BYTES = 255  # bytes; limit of a file name on Linux


def as_path(value: Any) -> Path:
    """Return a path with `~` expanded; raise `ValueError` for an invalid one."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ValueError(f"should be a path, got {value!r}")
    try:
        path = Path(os.fsdecode(value)).expanduser()
        longest = max((len(name.encode()) for name in path.parts), default=0)
    except RuntimeError:
        raise ValueError(f"there is no such user, got {value!r}") from None
    except UnicodeEncodeError:
        raise ValueError(f"should be UTF-8, got {str(value)!r}") from None
    if longest > _MAX_NAME_BYTES:
        raise ValueError(f"has a name of {longest} bytes, more than {_MAX_NAME_BYTES}: {path}")
    return path


def as_paths(value: Any) -> tuple[Path, ...]:
    """Return one directory, or a list of them, as a tuple of paths; empty for None."""
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    paths = tuple(as_path(item) for item in values)
    if not paths and not isinstance(value, tuple):
        raise ValueError("is an empty list; give a path, or leave it out")
    seen: dict[Any, Path] = {}
    for path in paths:
        key: Any = path
        with suppress(OSError):  # missing, or on another machine
            status = os.stat(path)
            key = status.st_dev, status.st_ino  # equal for paths through links
        first = seen.setdefault(key, path)
        if first is not path:
            detail = "" if first == path else f": {first} and {path} are one directory"
            raise ValueError(f"names the same path twice{detail}")
    return paths


def as_tuple(value: Any) -> Any:
    """Convert a list to a tuple: YAML and JSON have only lists."""
    return tuple(value) if isinstance(value, list) else value


Size: TypeAlias = Annotated[int, BeforeValidator(_parse_size, json_schema_input_type=int | str)]
Integer: TypeAlias = Annotated[int, BeforeValidator(_parse_integer)]
Number: TypeAlias = Annotated[float, BeforeValidator(_parse_number), Field(allow_inf_nan=False)]
Paths: TypeAlias = Annotated[
    tuple[Path, ...],
    BeforeValidator(
        as_paths, json_schema_input_type=Path | Annotated[list[Path], Field(min_length=1)]
    ),
]
Weight: TypeAlias = Annotated[Number, Field(gt=0)]
Beta: TypeAlias = Annotated[Number, Field(ge=0, lt=1)]
SinglePath: TypeAlias = Annotated[Path, BeforeValidator(as_path)]


class Section(BaseModel):
    """Base class of the sections: frozen, strict, and an unknown key is an error."""

    # Docstrings of fields become descriptions in `model_json_schema()`.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
