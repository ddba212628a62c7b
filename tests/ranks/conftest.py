"""Fixtures of the tests of ranks."""

from __future__ import annotations

import pytest
from torch import Tensor

from infinity.model.safetensors_file import SafetensorsFile


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of each read of a tensor, or of a range of one, from a weight file."""
    sizes: list[int] = []
    read = SafetensorsFile.read

    def counted(
        self: SafetensorsFile, name: str, first: int = 0, count: int | None = None
    ) -> Tensor:
        value = read(self, name, first, count)
        sizes.append(value.nbytes)
        return value

    monkeypatch.setattr(SafetensorsFile, "read", counted)
    return sizes
