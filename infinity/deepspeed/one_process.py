"""What scripts written for DeepSpeed call around the engine, where there is one process.

Of DeepSpeed's `comm`, `checkpointing`, `runtime.dataloader` and `ops.adam`, and the two calls
before `initialize`: `add_config_arguments`, `init_distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from torch.utils import checkpoint as torch_checkpoint

from infinity.blueprint import check_processes
from infinity.errors import ConfigError
from infinity.optim import standalone


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
    """Nothing to do for one process, which needs no process group; arguments are ignored.

    Raises `ConfigError` if a launcher started several.
    """
    check_processes("DeepSpeed's calls")


def _always(value: Any, what: str) -> Callable[..., Any]:
    def function(group: Any = None) -> Any:
        return value

    function.__doc__ = what
    return function


is_initialized = _always(True, "True: one process is always in touch with itself.")
get_rank = get_local_rank = _always(0, "0: the only process.")
get_world_size = _always(1, "1: the only process.")
barrier = _always(None, "Nobody to wait for.")
destroy_process_group = _always(None, "There is none.")


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
            because="it says which processes share a model; there is one process",
            remedy="pass None",
        )
    if checkpoint_in_cpu:
        raise ConfigError(
            "checkpointing.configure(checkpoint_in_cpu=True) is not built here",
            remedy="write activations: {checkpoint: units, offload: host} in the config, or "
            "`with torch.autograd.graph.save_on_cpu():` around the forward",
        )


is_configured = _always(True, "True: there is nothing to configure.")
reset = _always(None, "Nothing to do: nothing is kept from one backward to the next.")


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
