"""Names of kinds of state and of places, for `engine.offload_states`."""

from __future__ import annotations

from infinity.training.state_places import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
