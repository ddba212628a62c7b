"""DeepSpeed's activation checkpointing calls, over `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from infinity.errors import ConfigError


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are made again in backward instead of being kept."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Nothing to set: `checkpoint` keeps a function's inputs where they are.

    Raises `ConfigError` for `mpu_` and for `checkpoint_in_cpu`, which would change memory.
    """
    if mpu_ is not None:
        raise ConfigError(
            "checkpointing.configure(mpu_=...) is not supported",
            because="it says which processes share a model; there is one process",
            remedy="pass None",
        )
    if checkpoint_in_cpu:
        raise ConfigError(
            "checkpointing.configure(checkpoint_in_cpu=True) is not built here",
            remedy="write activations: {checkpoint: units, offload: host} in the config, or "
            "`with torch.autograd.graph.save_on_cpu():` around the forward",
        )


def is_configured() -> bool:
    """True: there is nothing to configure."""
    return True


def reset() -> None:
    """Nothing to do: nothing is kept from one backward to the next."""


__all__ = ["checkpoint", "configure", "is_configured", "reset"]
