"""Buffers of a module by name: lookup, restore, and isolation from recomputation.

[Note: buffers of recomputation]
Running statistics, counters and the like are updated by the call, not again by its recomputation,
which runs on copies that are then dropped. It starts from the values that the call started from,
because results may depend on them (spectral norms); these are saved only for buffers that the call
changed. A batch norm's statistics change without a version bump, but no training forward reads
them. Copies are separate tensors, never the same tensor with other values, because autograd graphs
reference buffers. Recomputation also gets the tensors that were attributes of the module itself
before the call: forward pre-hooks, which do not run again, set them (`nn.utils.spectral_norm`,
`nn.utils.weight_norm`, `nn.utils.prune`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from infinity.errors import CheckpointError

_Location = tuple[nn.Module, str]


@dataclass(frozen=True)
class Buffer:
    """One buffer with all its names; `persistent` if `module.state_dict()` includes it."""

    names: tuple[str, ...]
    persistent: bool
    locations: tuple[_Location, ...]

    @property
    def value(self) -> Tensor:
        """Return the tensor that is currently registered."""
        owner, key = self.locations[0]
        tensor = owner._buffers[key]
        assert tensor is not None
        return tensor


def find_buffers(module: nn.Module) -> list[Buffer]:
    """Return all buffers of a module tree, including non-persistent ones; shared ones once."""
    buffers: dict[int, Buffer] = {}
    for buffer in _named_buffers(module):
        known = buffers.setdefault(id(buffer.value), buffer)
        if known is not buffer:
            buffers[id(buffer.value)] = replace(
                known,
                names=(*known.names, *buffer.names),
                persistent=known.persistent or buffer.persistent,
                locations=(*known.locations, *buffer.locations),
            )
    return list(buffers.values())


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in `module.state_dict()`, by name."""
    return {b.names[0]: b.value for b in _named_buffers(module) if b.persistent}


def _named_buffers(module: nn.Module) -> Iterator[Buffer]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, value in child._buffers.items():
            if value is not None:
                name = f"{prefix}.{key}" if prefix else key
                persistent = key not in child._non_persistent_buffers_set
                yield Buffer((name,), persistent, ((child, key),))


def check_buffers(
    module: nn.Module,
    saved: Mapping[str, tuple[int, ...]],
    persistent: Iterable[Sequence[str]],
    *,
    strict: bool,
) -> None:
    """Raise `CheckpointError` if persistent buffers do not match the saved shapes (by name).

    `persistent` lists all names of each saved persistent buffer. Missing buffers raise only if
    `strict`; non-persistent ones never, since the module's code creates them.
    """
    buffers = find_buffers(module)
    known = {name for buffer in buffers for name in buffer.names}
    missing = [names[0] for names in persistent if known.isdisjoint(names)]
    problems = [f"{name!r} is not in the model" for name in missing] if strict else []
    for buffer in buffers:
        name, shape = buffer.names[0], tuple(buffer.value.shape)
        if name not in saved:
            problems += [f"{name!r} is missing"] if strict and buffer.persistent else []
        elif buffer.persistent and saved[name] != shape:
            problems.append(f"{name!r} has shape {saved[name]}, not {shape}")
    if problems:
        raise CheckpointError(f"buffers do not fit the model: {'; '.join(problems)}")


def restore_buffers(
    module: nn.Module, values: Mapping[str, Tensor], *, persistent_only: bool = False
) -> None:
    """Set buffers to saved values, in place if possible; others are unchanged.

    Persistent buffers keep their dtype, as in `load_state_dict`.
    """
    for buffer in find_buffers(module):
        value = values.get(buffer.names[0])
        if value is None or (persistent_only and not buffer.persistent):
            continue
        current = buffer.value
        matches = current.shape == value.shape and (
            buffer.persistent or current.dtype is value.dtype
        )
        # Elements of expanded tensors overlap: they cannot be written in place.
        dims = zip(current.stride(), current.shape, strict=True)
        expanded = any(stride == 0 and size > 1 for stride, size in dims)
        if matches and not expanded and not current.is_inference():
            with torch.no_grad():
                current.copy_(value)
        else:  # non-persistent buffers may change shape or dtype
            new = value.to(current.device, current.dtype if matches else None)
            for owner, key in buffer.locations:
                owner._buffers[key] = new


class RecomputeBuffers:
    """Recomputation of one call of a module without side effects on buffers.

    `parts` are the module and all its submodules.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._saved_buffers: dict[_Location, Tensor | None] = {}  # that the call changed
        self._saved_attributes: dict[str, Tensor] = {}  # of `parts[0]`

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the call itself: save the values of buffers that it changes."""
        snapshots = [
            (location, value, _version(value), _copy(value)) for location, value in self._buffers()
        ]
        self._saved_attributes = self._tensor_attributes()
        yield
        current = dict(self._buffers())
        self._saved_buffers = {
            location: copy
            for location, value, version, copy in snapshots
            if current.get(location) is not value
            or _version(value) != version
            or _differs(value, copy)
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of a recomputation: buffers start as in the call, and are restored afterwards."""
        live, attributes = list(self._buffers()), self._tensor_attributes()
        copies: dict[object, Tensor | None] = {}  # shared buffers stay shared
        try:
            for (owner, key), value in live:
                copy_key = (owner, key) if value is None else id(value)
                if copy_key not in copies:
                    copies[copy_key] = _copy(self._saved_buffers.get((owner, key), value))
                owner._buffers[key] = copies[copy_key]
            vars(self._parts[0]).update(self._saved_attributes)
            yield
        finally:
            vars(self._parts[0]).update(attributes)
            for (owner, key), value in live:
                owner._buffers[key] = value

    def _tensor_attributes(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self._parts[0]).items() if isinstance(v, Tensor)}

    def _buffers(self) -> Iterator[tuple[_Location, Tensor | None]]:
        for owner in self._parts:
            for key, value in owner._buffers.items():
                yield (owner, key), value


def _version(value: Tensor | None) -> int:
    return -1 if value is None or value.is_inference() else value._version


def _differs(value: Tensor | None, copy: Tensor | None) -> bool:
    """Return True if a CPU buffer was edited through `.data`, which does not bump its version.

    Buffers on a GPU are not compared, since the host would wait for it.
    """
    if value is None or copy is None or value is copy or value.device.type != "cpu":
        return False
    return not torch.equal(value, copy)


def _copy(value: Tensor | None) -> Tensor | None:
    """Return a clone, or the tensor itself if it requires grad and so is part of a graph."""
    return value if value is None or value.requires_grad else value.clone()
