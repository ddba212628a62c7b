"""What values a key of a DeepSpeed configuration takes, and how they are read.

JSON knows one kind of number, so `1e9` is a whole number here, and texts that are numbers too.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: `read` returns it as Python wants it, or raises `ValueError`."""

    name: str
    read: Callable[[Any], Any]


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("should be true or false")


def _number(value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("should be a number") from None
    real = not isinstance(value, bool) and isinstance(value, numbers.Real)  # NumPy's too
    if not real or not math.isfinite(value):
        raise ValueError("should be a number")
    return float(value)


def _whole_from(least: int | None) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, bool) and isinstance(value, numbers.Integral):
            whole = int(value)
        else:
            number = _number(value)
            whole = int(number)
            if whole != number:
                raise ValueError("should be a whole number")
        if least is not None and whole < least:
            raise ValueError(f"should be {least} or more")
        return whole

    return read


def _interval(value: Any) -> float:
    return math.inf if value in (math.inf, "Infinity", "inf") else _whole_from(0)(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("should be text")


def _names(value: Any) -> tuple[str, ...]:
    parts = (value,) if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
        return tuple(parts)
    raise ValueError("should be a list of texts")


def _numbers(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_number(part) for part in value]
    return _number(value)


def _pair(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return [_number(part) for part in value]
    raise ValueError("should be two numbers")


def _section(value: Any) -> Any:
    if isinstance(value, Mapping | bool):
        return value
    raise ValueError("should be a section of keys and values")


FLAG = Kind("true or false", _flag)
NUMBER = Kind("number", _number)
NUMBERS = Kind("number, or one per group", _numbers)
PAIR = Kind("two numbers", _pair)
WHOLE = Kind("whole number", _whole_from(0))
COUNT = Kind("whole number above 0", _whole_from(1))
SIGNED = Kind("whole number, may be negative", _whole_from(None))
INTERVAL = Kind("whole number or Infinity", _interval)
TEXT = Kind("text", _text)
NAMES = Kind("text or list of texts", _names)
ANYTHING = Kind("anything", lambda value: value)
SECTION = Kind("section", _section)


def one_of(*words: str) -> Kind:
    """One of these words, in upper or lower case."""

    def read(value: Any) -> str:
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        raise ValueError(f"should be one of {', '.join(map(repr, words))}")

    return Kind(" | ".join(words), read)
