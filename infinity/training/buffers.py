"""A module's buffers by name: taken as copies, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from infinity.errors import CheckpointError


@dataclass(frozen=True)
class Buffer:
    """One buffer under all its names; `persistent` where `module.state_dict()` has it."""

    names: tuple[str, ...]
    persistent: bool
    owner: nn.Module
    key: str

    @property
    def value(self) -> Tensor:
        """The tensor that is registered now."""
        found = self.owner._buffers[self.key]
        assert found is not None
        return found


def find_buffers(module: nn.Module) -> list[Buffer]:
    """All buffers of a tree, those not persistent too; shared ones once."""
    found: dict[int, Buffer] = {}
    for buffer in _each_name(module):
        old = found.setdefault(id(buffer.value), buffer)
        if old is not buffer:
            found[id(buffer.value)] = replace(
                old,
                names=(*old.names, *buffer.names),
                persistent=old.persistent or buffer.persistent,
            )
    return list(found.values())


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that `module.state_dict()` has, by name."""
    return {b.names[0]: b.value for b in _each_name(module) if b.persistent}


def _each_name(module: nn.Module) -> Iterator[Buffer]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, value in child._buffers.items():
            if value is not None:
                name = f"{prefix}.{key}" if prefix else key
                yield Buffer((name,), key not in child._non_persistent_buffers_set, child, key)


def check_buffers(module: nn.Module, saved: Mapping[str, tuple[int, ...]], *, strict: bool) -> None:
    """Raise `CheckpointError` where persistent buffers and saved shapes (by name) disagree."""
    problems = []
    for buffer in find_buffers(module):
        name, shape = buffer.names[0], tuple(buffer.value.shape)
        if name not in saved:
            problems += [f"{name!r} is missing"] if strict else []
        elif buffer.persistent and saved[name] != shape:
            problems.append(f"{name!r} has shape {saved[name]}, not {shape}")
    if problems:
        raise CheckpointError(f"buffers do not fit the model: {'; '.join(problems)}")


def put_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers saved values, in place where shape and dtype allow it; others are left."""
    for buffer in find_buffers(module):
        value = values.get(buffer.names[0])
        if value is None:
            continue
        here = buffer.value
        if here.shape == value.shape and here.dtype is value.dtype:
            with torch.no_grad():
                here.copy_(value)
        else:  # modules may grow what is not persistent
            buffer.owner._buffers[buffer.key] = value.to(here.device)
