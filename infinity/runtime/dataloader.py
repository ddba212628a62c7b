"""A loader that never ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self


class RepeatingLoader:
    """Another loader's batches, over and over; raises `StopIteration` if it has none at all."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


__all__ = ["RepeatingLoader"]
