"""Calls of experts: their handler, token counts, and auxiliary losses of routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from infinity.model.torch_private import inside_backward

_MAX_PENDING = 64  # calls of a module before their counts are merged


class ExpertCalls:
    """Number of calls of ranges, and token counts by module since the last step."""

    def __init__(self) -> None:
        self.num_range_calls = 0  # calls of ranges since the start
        self._computer: Callable[..., Tensor] | None = None
        self._counts: dict[str, list[Sequence[int]]] = {}
        self._loss: Tensor | None = None
        self._paused = False

    def begin_range_call(self) -> Callable[..., Tensor] | None:
        """Count a call of ranges; return the function that handles it, if one is set."""
        self.num_range_calls += 1
        return self._computer

    @contextmanager
    def handled_by(self, computer: Callable[..., Tensor]) -> Iterator[None]:
        """Handle calls of ranges in the block by `computer(experts, call)`."""
        outer, self._computer = self._computer, computer
        try:
            yield
        finally:
            self._computer = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no tokens in the block."""
        was_paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was_paused

    def add(self, module: nn.Module, path: str, counts: Sequence[int]) -> None:
        """Add the tokens of each expert, in a training forward only, not in its recomputation."""
        if module.training and not self._paused and not inside_backward():
            pending = self._counts.setdefault(path, [])
            pending.append(counts)
            if len(pending) == _MAX_PENDING:
                pending[:] = [_sum(pending)]

    def see(self, output: Any) -> None:
        """Add the auxiliary loss of a model's output, if it has one that requires a gradient."""
        loss = getattr(output, "aux_loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            loss = loss.detach().double().reshape(())
            self._loss = loss if self._loss is None else self._loss + loss

    def reset(self) -> None:
        """Discard counts and losses: the accumulation window starts over."""
        self._counts, self._loss = {}, None

    def take(self) -> tuple[dict[str, list[int]], float | None]:
        """Return the tokens of each expert by module, and the sum of losses; then reset."""
        counts, loss = self._counts, self._loss
        self.reset()
        tokens = {path: _sum(pending) for path, pending in counts.items()}
        return tokens, None if loss is None else float(loss)


def _sum(counts: list[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]
