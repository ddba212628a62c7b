"""The engine under DeepSpeed's name, for `isinstance`."""

from __future__ import annotations

from infinity.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
