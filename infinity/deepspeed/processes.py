"""What scripts written for DeepSpeed call around the engine.

Of DeepSpeed's `comm`, `checkpointing`, `runtime.dataloader` and `ops.adam`, and the two calls
before `initialize`: `add_config_arguments`, `init_distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch.distributed as dist
from torch.utils import checkpoint as torch_checkpoint

from infinity.errors import ConfigError
from infinity.optim import standalone
from infinity.ranks import find_ranks, launched_rank, num_launched


def add_config_arguments(parser: Any) -> Any:
    """Add `--deepspeed` and `--deepspeed_config PATH` to an `argparse` parser; returns it.

    Pass what it parses as `initialize(args=...)`. The flag is taken and changes nothing.
    """
    group = parser.add_argument_group("infinity", "options of the training engine")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="taken for scripts that were written for DeepSpeed; changes nothing",
    )
    group.add_argument(
        "--deepspeed_config",
        default=None,
        type=str,
        metavar="PATH",
        help="a configuration, DeepSpeed's or ours",
    )
    return parser


# --- comm ----------------------------------------------------------------------------------------


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Make torch's default process group of what a launcher started; one process needs none.

    Of NCCL where there are GPUs, else of gloo, as `initialize` would; arguments are ignored. One
    that is there stays. Raises `ConfigError` or `MachineError` where that cannot be.
    """
    if num_launched() > 1:
        find_ranks()


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_initialized() -> bool:
    """Whether processes are in touch, as one process always is with itself."""
    return _has_group() or num_launched() == 1


def get_rank(group: Any = None) -> int:
    """The number of this process; 0 where there is one."""
    return dist.get_rank(group) if _has_group() else launched_rank("RANK")


def get_local_rank() -> int:
    """Its number on this machine."""
    return launched_rank("LOCAL_RANK")


def get_world_size(group: Any = None) -> int:
    """How many processes there are."""
    return dist.get_world_size(group) if _has_group() else num_launched()


def destroy_process_group(group: Any = None) -> None:
    """As torch's; nothing where there is none."""
    if _has_group():
        dist.destroy_process_group(group)


def _passed_on(name: str, alone: Callable[..., Any]) -> Callable[..., Any]:
    """torch.distributed's function; `alone` where there is one process, and no group."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if _has_group() or num_launched() > 1:
            return getattr(dist, name)(*args, **kwargs)
        return alone(*args, **kwargs)

    function.__doc__ = f"`torch.distributed.{name}`, whose arguments it has."
    return function


def _nothing(*args: Any, **kwargs: Any) -> None:
    """One process has what all have."""


def _fill(tensor_list: list[Any], tensor: Any, *args: Any, **kwargs: Any) -> None:
    tensor_list[0].copy_(tensor)


def _put(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    object_list[0] = obj


barrier = _passed_on("barrier", _nothing)
all_reduce = _passed_on("all_reduce", _nothing)
reduce = _passed_on("reduce", _nothing)
broadcast = _passed_on("broadcast", _nothing)
broadcast_object_list = _passed_on("broadcast_object_list", _nothing)
all_gather = _passed_on("all_gather", _fill)
all_gather_object = _passed_on("all_gather_object", _put)


# --- checkpointing -------------------------------------------------------------------------------


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
            because="it says which processes share a model; here all share all of it",
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


# --- runtime.dataloader --------------------------------------------------------------------------


class RepeatingLoader:
    """Another loader's batches, over and over; raises `StopIteration` if it has none at all."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


# --- ops.adam: ours, with DeepSpeed's order of arguments and defaults -----------------------------


class DeepSpeedCPUAdam(standalone.CPUAdam):
    """`infinity.CPUAdam`; weight decay starts from 0.

    In `initialize(optimizer=...)` it means the built-in rule with these settings;
    `fp32_optimizer_states=False` (moments in bf16) is for there only.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adamw_mode,
            bias_correction=bias_correction,
            moments="fp32" if fp32_optimizer_states else "bf16",
        )


class FusedAdam(standalone.FusedAdam):
    """`infinity.FusedAdam`; as `DeepSpeedCPUAdam`. `set_grad_none` changes nothing."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adamw_mode=adam_w_mode,
            bias_correction=bias_correction,
        )
