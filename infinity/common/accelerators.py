"""Access to torch's device modules; the only file of the core that names accelerator types.

To support another type, add an entry to `TYPES`, a `Device` in `storage/` with its row in
`storage/devices.py`, and kernels in `optim/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

TYPES = ("cuda",)


def accelerator_type() -> str | None:
    """Return the type of accelerator that this process can use, or None."""
    return next((kind for kind in TYPES if module_of(kind).is_available()), None)


def module_of(kind: str) -> Any:
    """Return torch's module for a device type, such as `torch.cuda`."""
    return torch.get_device_module(kind)


def is_accelerator(device: torch.device) -> bool:
    """Return True for an accelerator, False for the CPU."""
    return device.type in TYPES


def num_accelerators() -> int:
    """Return the number of accelerators that this process can use."""
    kind = accelerator_type()
    return 0 if kind is None else int(module_of(kind).device_count())


def name_of(device: torch.device) -> str:
    """Return the name of an accelerator as its driver reports it."""
    return str(module_of(device.type).get_device_name(device))


def backend() -> str:
    """Return the `torch.distributed` backend for the devices of this process."""
    kind = accelerator_type()
    return "gloo" if kind is None else torch.distributed.get_default_backend_for_device(kind)


def fork_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores the generators of the CPU and of these accelerators."""
    accelerators = {device for device in devices if is_accelerator(device)}
    kind = next((device.type for device in accelerators), TYPES[0])
    return torch.random.fork_rng(accelerators, device_type=kind)


def rng_states() -> dict[str, list[Tensor]]:
    """Return the generator states of all accelerators by type; empty if none was used."""
    initialized = [kind for kind in TYPES if module_of(kind).is_initialized()]
    return {kind: module_of(kind).get_rng_state_all() for kind in initialized}


def set_rng_states(states: Mapping[str, Sequence[Tensor]]) -> None:
    """Restore the result of `rng_states`; states of missing devices are ignored."""
    for kind in TYPES:
        module = module_of(kind)
        if module.is_available():
            for index, state in enumerate(states.get(kind, ())[: module.device_count()]):
                module.set_rng_state(state, index)
