"""Registry of `Device` implementations by device type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.common.accelerators import accelerator_type
from infinity.errors import ConfigError
from infinity.storage.cuda import CudaDevice
from infinity.storage.device import CpuDevice, Device

ACCELERATORS: dict[str, Callable[[torch.device], Device]] = {
    "cuda": CudaDevice
}  # one entry for each of `accelerators.TYPES`


def resolve_device(device: Device | torch.device | str | None) -> Device:
    """Return the `Device` for a user's argument.

    Args:
        device: Compute device; None for the accelerator if there is one, else the CPU.

    Returns:
        The device; a `Device` is returned unchanged.

    Raises:
        ConfigError: No device of that type is supported.
    """
    if isinstance(device, Device):
        return device
    torch_device = torch.device(device or accelerator_type() or "cpu")
    if torch_device.type == "cpu":
        return CpuDevice()
    if torch_device.type in ACCELERATORS:
        return ACCELERATORS[torch_device.type](torch_device)
    known = ", ".join(repr(kind) for kind in ("cpu", *ACCELERATORS))
    raise ConfigError(
        f"device {str(torch_device)!r} is not supported yet", remedy=f"use one of {known}"
    )
