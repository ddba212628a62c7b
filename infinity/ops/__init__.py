"""What DeepSpeed's users import from `deepspeed.ops`."""

from __future__ import annotations

from infinity.ops import adam

__all__ = ["adam"]
