"""What DeepSpeed's users import from `deepspeed.runtime`."""

from __future__ import annotations

from infinity.runtime import dataloader, engine, lr_schedules, zero

__all__ = ["dataloader", "engine", "lr_schedules", "zero"]
