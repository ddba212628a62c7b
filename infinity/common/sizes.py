"""Parsing and formatting of numbers with units."""

from __future__ import annotations

import re
from decimal import Decimal

from infinity.errors import ConfigError

_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST_SIZE = 2**63 - 1
_EXAMPLE = 'write a size like "24GiB", "500 MB" or 1048576 (a bare number is bytes)'


def parse_size(value: str | int | float) -> int:
    """Parse a size to a number of bytes.

    KiB, MiB, GiB and TiB are powers of 1024, as are the bare letters k, m, g and t; kB, MB, GB
    and TB are powers of 1000. Case does not matter. A bare number is bytes. Fractions of a byte are
    dropped: "1.1KiB" is 1126.

    Raises `ConfigError` for anything else: another unit, a negative number, a bool, a bare float
    with a fraction, more than 2**63 - 1 bytes.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{value!r} is not a size", remedy=_EXAMPLE)
    if isinstance(value, str):
        num_bytes = _parse_text(value)
    elif isinstance(value, float) and not value.is_integer():
        because = "a bare number is bytes, and bytes are whole numbers"
        raise ConfigError(f"{value!r} is not a size", because=because, remedy=_EXAMPLE)
    else:
        num_bytes = int(value)
    if not 0 <= num_bytes <= _LARGEST_SIZE:
        because = f"a size lies between 0 and {format_size(_LARGEST_SIZE)}"
        raise ConfigError(f"{value!r} is not a size", because=because, remedy=_EXAMPLE)
    return num_bytes


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size", remedy=_EXAMPLE)
    number, unit = match.groups()
    if unit.lower() not in _BYTES_PER_UNIT:
        because = f"the unit {unit!r} is none of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        raise ConfigError(f"{text!r} is not a size", because=because, remedy=_EXAMPLE)
    exact = Decimal(number) * _BYTES_PER_UNIT[unit.lower()]
    if not unit and exact != int(exact):
        because = "a bare number is bytes, and bytes are whole numbers"
        raise ConfigError(f"{text!r} is not a size", because=because, remedy=_EXAMPLE)
    return int(exact)


def format_size(num_bytes: int | float) -> str:
    """Return a size in powers of 1024, for example "1.23 GiB"; without decimals below 1 KiB."""
    return _format(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in powers of 1000, as in data sheets of drives, for example "1.70 GB/s"."""
    return _format(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_count(count: int | float) -> str:
    """Return a count in powers of 1000, for example "124.4M"."""
    return _format(count, 1000, ("", "K", "M", "B", "T"), num_digits=1, space="")


def format_parameters(total: int, active: int | None) -> str:
    """Return for example "30.5B parameters, 3.4B active a token"; `active` only if it differs."""
    if active is None or active == total:
        return f"{format_count(total)} parameters"
    return f"{format_count(total)} parameters, {format_count(active)} active a token"


def _format(
    amount: float, base: int, units: tuple[str, ...], num_digits: int = 2, space: str = " "
) -> str:
    scaled, index = float(amount), 0
    # A number that would be rounded to `base` is shown in the next unit.
    while index + 1 < len(units) and round(abs(scaled), num_digits if index else 0) >= base:
        scaled /= base
        index += 1
    number = f"{scaled:.0f}" if index == 0 else f"{scaled:.{num_digits}f}"
    return f"{number}{space if units[index] else ''}{units[index]}"


def format_duration(duration_s: float) -> str:
    """Return a duration: "0 s", "350 ms", "12.3 s", "4 min 05 s", "2 h 03 min" or "3 d 04 h"."""
    if duration_s < 0:
        return f"-{format_duration(-duration_s)}"
    if duration_s < 0.5e-6:
        return "0 s"
    if duration_s < 0.9995e-3:
        return f"{duration_s * 1e6:.0f} µs"
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.0f} ms"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    num_seconds = round(duration_s)
    if num_seconds < 3600:
        return f"{num_seconds // 60} min {num_seconds % 60:02d} s"
    num_minutes = round(duration_s / 60)
    if num_minutes < 24 * 60:
        return f"{num_minutes // 60} h {num_minutes % 60:02d} min"
    num_hours = round(duration_s / 3600)
    return f"{num_hours // 24} d {num_hours % 24:02d} h"
