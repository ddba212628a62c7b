"""Tests of parsing and formatting sizes, rates, counts and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.common.sizes import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_size,
)
from infinity.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("512m", 512 * 2**20),
        ("  1.5 gib ", 3 * 2**29),
        ("1TiB", 2**40),
        ("3kB", 3000),
        ("3KB", 3000),
        ("3 KiB", 3072),
        ("100B", 100),
        ("100", 100),
        ("1e9", 10**9),
        ("1.1KiB", 1126),
        (4096, 4096),
        (4096.0, 4096),
        (0, 0),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_parse_size(text: str | float, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "wrong",
    [
        *("", " ", "GiB", "24 XB", "-1", "-1GiB", "1.5", "1,5GiB", "nan", "inf", "1 2", "1e99GB"),
        *("\uff11GB", True, None, 1.5, -1, 2**63, float("nan"), float("inf"), [1], b"1"),
    ],
)
def test_parse_size_invalid_value_rejected_with_example(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in caught.value.what
    assert '"24GiB"' in str(caught.value.remedy)


def test_parse_size_unknown_unit_rejected() -> None:
    with pytest.raises(ConfigError, match="'XB' is none of B, KiB"):
        parse_size("24 XB")


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_parse_size_of_bytes_is_exact(num_bytes: int) -> None:
    assert parse_size(num_bytes) == parse_size(str(num_bytes)) == parse_size(f"{num_bytes} B")


@given(st.integers(min_value=0, max_value=2**62))
def test_format_size_parses_back_within_rounding(num_bytes: int) -> None:
    shown = format_size(num_bytes)
    if "PiB" in shown or "EiB" in shown:
        return
    # Two decimals of a number that is at least 1.
    assert abs(parse_size(shown) - num_bytes) <= 1 + num_bytes * 0.0051


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.23 * 2**30, "1.23 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (2**70, "1024.00 EiB"),
    ],
)
def test_format_size(num_bytes: float, text: str) -> None:
    assert format_size(num_bytes) == text


def test_format_rate_and_count_are_decimal() -> None:
    assert format_rate(1.7e9) == "1.70 GB/s"
    assert format_rate(12) == "12 B/s"
    assert format_count(124.4e6) == "124.4M"
    assert format_count(999) == "999"
    assert format_count(999_960) == "1.0M"
    assert format_count(7.24e9) == "7.2B"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 s"),
        (5e-6, "5 µs"),
        (0.35, "350 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (86400 * 3 + 4 * 3600, "3 d 04 h"),
        (-2, "-2.0 s"),
    ],
)
def test_format_duration(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text
