"""What DeepSpeed's users import from `deepspeed.runtime.zero`."""

from __future__ import annotations

from infinity.runtime.zero import offload_config

__all__ = ["offload_config"]
