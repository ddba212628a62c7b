"""Parameter grids of which quick runs test a diagonal, and `make test-big` all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def diagonal(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of `axes` for `parametrize`, marked `big` but for a diagonal.

    Each value of each axis is in a row of the diagonal.
    """
    length = max(map(len, axes))
    quick = {tuple(index % len(axis) for axis in axes) for index in range(length)}
    rows = []
    for indices in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, indices, strict=True)]
        rows.append(pytest.param(*values, marks=() if indices in quick else pytest.mark.big))
    return rows
