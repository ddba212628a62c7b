"""Tests of records made from parsed JSON: members have strict types without conversion."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from infinity.checkpoint import commits, manifest
from infinity.common.parsed_json import LARGEST, Count, Flag, Text, made
from infinity.storage import run_dir
from infinity.train import directory

RECORDS: list[Any] = [
    manifest.BufferRecord,
    manifest.FileRecord,
    manifest.Manifest,
    manifest.ParameterRecord,
    commits.CommitRecord,
    commits.OpenWindow,
    run_dir._OwnerRecord,
    directory._RunRecord,
]
WRONG: dict[Any, list[Any]] = {
    Text: [1, None, True, ["x"], "\ud800"],
    Flag: [0, 1, "true", None, [True]],
    Count: [True, 1.0, "1", None, -1, LARGEST + 1, 10**4000, [1]],
}


@pytest.mark.parametrize("record", RECORDS)
def test_record_members_use_strict_types(record: Any) -> None:
    """A plain `int` would accept "1", 1.0 and true."""
    hints = get_type_hints(record, include_extras=True)
    assert not [field.name for field in fields(record) if hints[field.name] in (str, bool, int)]


def window(**members: Any) -> Any:
    return {"root": "r", "tag": "t", "manifest_crc32c": 0, **members}


@pytest.mark.parametrize("kind", [Text, Count], ids=["text", "count"])
def test_values_of_other_types_rejected_by_name(kind: Any) -> None:
    name = "tag" if kind is Text else "manifest_crc32c"
    for value in WRONG[kind]:
        with pytest.raises(ValueError, match=rf"^{name} is "):
            made(commits.OpenWindow, window(**{name: value}))


def test_flags_accept_only_booleans() -> None:
    record = {"name": "n", "aliases": [], "shape": [2], "dtype": "bool", "persistent": True}
    assert made(manifest.BufferRecord, record).shape == (2,)
    for value in WRONG[Flag]:
        with pytest.raises(ValueError, match=r"^persistent is "):
            made(manifest.BufferRecord, record | {"persistent": value})


def test_unknown_members_ignored_and_missing_reported() -> None:
    assert made(commits.OpenWindow, window(other=1)) == commits.OpenWindow("r", "t", 0)
    with pytest.raises(ValueError, match=r"^tag is missing$"):
        made(commits.OpenWindow, {"root": "r", "manifest_crc32c": 0})
    with pytest.raises(ValueError, match=r"^it is \[\]: "):
        made(commits.OpenWindow, [])
