"""A block that runs its batch slice by slice, on weights that are fetched once for all.

[Note: what slices change]
The batch is split along the first dimension, each slice runs alone, and results are put behind one
another. Where no sample sees another, the numbers are those of plain torch run with the same
slices, bit for bit. They are not those of the whole batch at once: matrix products of other shapes
round differently, and autograd adds the gradients of slices in the compute dtype. What cannot be
sliced is refused by name; and the first call of each kind of block is tried out, on two slices
together and on the first of them alone, which leaves no trace in its buffers. A slice is a call of
its own: what a forward counts in a buffer is counted once a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import TrainingError
from infinity.training.arguments import put_together, take_apart
from infinity.training.buffers import Rerun

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# By how much rows of one block may differ between two shapes of a batch, relative to the largest.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 5e-2

Forward = Callable[..., Any]


class Slicer:
    """Slices the calls of one block; `tried` holds the kinds of blocks that were tried out."""

    def __init__(
        self, module: nn.Module, plain: Forward, name: str, count: int, tried: set[object]
    ) -> None:
        self._module = module
        self._plain = plain
        self._name = name
        self._count = count
        self._tried = tried
        self._kind = (type(module), tuple(tuple(p.shape) for p in module.parameters()))
        for path, part in module.named_modules():
            if getattr(part, "batch_first", True) is False:
                raise self._refusal(
                    f"{path or 'it'} has batch_first=False", "its first dimension is not the batch"
                )

    def __call__(self, run: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`run(*args, **kwargs)`, slice by slice; raises `TrainingError` for what has no slices."""
        for path, part in self._module.named_modules():
            whole = part.training or getattr(part, "running_mean", None) is None
            if isinstance(part, _BATCH_NORMS) and whole:
                raise self._refusal(
                    f"{path or 'it'} is a {type(part).__name__} in training",
                    "it normalises over the batch",
                )
        tensors: list[Tensor] = []
        shape = take_apart((args, dict(kwargs)), tensors)
        rows, sliced = self._sliced(tensors)
        size = -(-rows // self._count)
        if size == rows:
            return run(*args, **kwargs)
        parts = [torch.split(t, size) if s else (t,) for t, s in zip(tensors, sliced, strict=True)]
        calls = []
        for index in range(-(-rows // size)):
            given = [p[index] if s else p[0] for p, s in zip(parts, sliced, strict=True)]
            calls.append(put_together(shape, given))
        self._try_out(shape, tensors, sliced, size)
        results: list[list[Tensor]] = []
        forms: list[Any] = []
        for slice_args, slice_kwargs in calls:
            found: list[Tensor] = []
            forms.append(take_apart(run(*slice_args, **slice_kwargs), found))
            results.append(found)
        return self._joined(forms, results, rows, size)

    def _sliced(self, tensors: Sequence[Tensor]) -> tuple[int, list[bool]]:
        """How many samples there are, and which tensors have one row for each."""
        main = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
        if main is None:
            raise self._refusal("it is given no tensor of (batch, ...)", "there is nothing to cut")
        rows = main.shape[0]
        if rows > 1 and main.shape[1] == rows:
            for tensor in tensors:
                if tensor is not main and 0 < tensor.dim() < 3 and tensor.shape[0] == rows:
                    raise self._refusal(
                        f"a tensor of shape {tuple(tensor.shape)} may have a row for each sample "
                        "or for each position",
                        f"batch and sequence are both {rows} long",
                        "use another micro-batch size, or activations.slices=1",
                    )
        return rows, [t.dim() > 0 and t.shape[0] == rows for t in tensors]

    def _try_out(
        self, shape: Any, tensors: Sequence[Tensor], sliced: Sequence[bool], size: int
    ) -> None:
        """Raise if the first slice computes something else when a second one is beside it."""
        if self._kind in self._tried:
            return
        module = self._module
        if module.training and any(isinstance(m, _DROPOUTS) and m.p for m in module.modules()):
            return  # random numbers differ
        with torch.no_grad(), torch.random.fork_rng(), Rerun(module).again():
            alone, beside = (
                self._first_rows(
                    shape, [t[:n] if s else t for t, s in zip(tensors, sliced, strict=True)], size
                )
                for n in (size, 2 * size)
            )
        for one, other in zip(alone, beside, strict=True):
            allowed = _TOLERANCE.get(one.dtype, _COARSE) * float(other.abs().max())
            if one.shape != other.shape or float((one - other).abs().max()) > allowed:
                raise self._refusal(
                    f"the first {size} samples give other results when more are beside them",
                    "its samples see one another, or its first dimension is not the batch",
                )
        self._tried.add(self._kind)

    def _first_rows(self, shape: Any, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
        args, kwargs = put_together(shape, tensors)
        found: list[Tensor] = []
        take_apart(self._plain(*args, **kwargs), found)
        return [t[:size] for t in found if t.is_floating_point() and t.dim() > 0]

    def _joined(
        self, forms: Sequence[Any], results: Sequence[Sequence[Tensor]], rows: int, size: int
    ) -> Any:
        if any(form != forms[0] for form in forms):
            raise self._refusal("its slices return different things", "they cannot be joined")
        joined = []
        for tensors in zip(*results, strict=True):
            for index, tensor in enumerate(tensors):
                expected = min(size, rows - index * size)
                if tensor.dim() == 0 or tensor.shape[0] != expected:
                    raise self._refusal(
                        f"it returns a tensor of shape {tuple(tensor.shape)} for {expected} "
                        "samples",
                        "results of slices are joined sample by sample",
                    )
            joined.append(torch.cat(tensors))
        return put_together(forms[0], joined)

    def _refusal(self, what: str, because: str, remedy: str | None = None) -> TrainingError:
        return TrainingError(
            f"block {self._name!r} cannot run in slices: {what}",
            because=because,
            remedy=remedy or "activations.slices=1, and smaller micro-batches if memory is short",
        )
