"""Build a model on a device and in a dtype, by DeepSpeed's name for it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import torch


class OnDevice:
    """`with OnDevice(dtype, device="meta"): model = Build()`.

    On "meta" a model takes no memory; `initialize` makes its values.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:  # fmt: skip
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled:
            with ExitStack() as undo:
                undo.enter_context(self._device)
                if self._dtype is not None:
                    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
                    torch.set_default_dtype(self._dtype)
                self._undo = undo.pop_all()
        return self

    def __exit__(self, *rest: object) -> None:
        self._undo.close()
