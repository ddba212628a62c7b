"""Functions of DeepSpeed that scripts call in addition to the engine's.

They belong to `comm`, `checkpointing`, `runtime.dataloader` and `ops.adam`, or are called before
`initialize`: `add_config_arguments`, `init_distributed`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils import checkpoint as torch_checkpoint

from infinity.common import accelerators
from infinity.distributed.environment import int_from_env, num_launched
from infinity.distributed.launch import find_ranks
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import accelerate_state
from infinity.optim import standalone

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # accelerate writes variables to this file
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def add_config_arguments(parser: Any) -> Any:
    """Add `--deepspeed`, without effect, and `--deepspeed_config PATH` to an `argparse` parser.

    Pass the result of `parse_args()` to `initialize(args=...)`. Arguments are DeepSpeed's.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("infinity", "options of the training engine")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="accepted for scripts written for DeepSpeed; has no effect",
    )
    group.add_argument(
        "--deepspeed_config",
        default=None,
        type=str,
        metavar="PATH",
        help="a configuration in DeepSpeed's or infinity's format",
    )
    return parser


# --- comm ----------------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch's default process group, unless there is one.

    The default backend is NCCL with GPUs, else gloo. For a single process, a group is created only
    if a launcher started it.

    Args:
        dist_backend: Backend, if no launcher started this process.
        timeout: Timeout of collectives, a `timedelta`.
        init_method: Address of the rendezvous, if no launcher started this process.
        rank: Rank of this process, if no launcher started it.
        world_size: Number of processes, if no launcher started this one.

    Other arguments are accepted for compatibility and have no effect.

    Raises:
        ConfigError: Arguments contradict the launcher.
        MachineError: Processes cannot be reached.
    """
    has_no_launcher = "WORLD_SIZE" not in os.environ
    mpi_variable = next(
        (n for n in _MPI_SIZES if has_no_launcher and int(os.environ.get(n) or 1) > 1), None
    )
    if num_launched() > 1:
        find_ranks(timeout)
    elif world_size > 1 and rank >= 0 and not _has_group():
        backend = dist_backend or accelerators.backend()
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, world_size=world_size, rank=rank
        )
    elif mpi_variable and not _has_group():
        raise ConfigError(
            f"{mpi_variable} is {os.environ[mpi_variable]}, but WORLD_SIZE is not set",
            because="processes that MPI starts find each other by variables that torchrun sets",
            remedy="torchrun --nproc-per-node N train.py, or infinity run --gpus N train.py",
        )
    elif "RANK" in os.environ and dist.is_available() and not dist.is_initialized():
        kind = accelerators.accelerator_type()
        backend = f"cpu:gloo,{kind}:{accelerators.backend()}" if kind else "gloo"
        store = vars(dist)["HashStore"]()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    accelerate_state.set_backend()


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_initialized() -> bool:
    """Return whether communication works; True for a single process without a launcher."""
    accelerate_state.set_backend()
    return _has_group() or (num_launched() == 1 and "RANK" not in os.environ)


def get_rank(group: Any = None) -> int:
    """Return the rank of this process; 0 for a single process."""
    return dist.get_rank(group) if _has_group() else int_from_env("RANK")


def get_local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int_from_env("LOCAL_RANK")


def get_world_size(group: Any = None) -> int:
    """Return the number of processes."""
    return dist.get_world_size(group) if _has_group() else num_launched()


def destroy_process_group(group: Any = None) -> None:
    """Destroy a process group, if there is one."""
    if _has_group():
        dist.destroy_process_group(group)


def get_world_group() -> Any:
    """Return torch's default process group; None if there is none."""
    return dist.group.WORLD if _has_group() else None


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of a rank in a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def no_group() -> None:
    """Return None: there are no tensor-parallel or sequence-parallel groups."""


def get_zero() -> int:
    """Return 0, the rank in a group of one process."""
    return 0


def get_one() -> int:
    """Return 1, the size of a group of one process."""
    return 1


_LOG_ARGUMENTS = ("prof", "log_name", "debug")  # of DeepSpeed's communication log, ignored


def _collective(
    name: str, copies: tuple[str, str] | None = None, **renamed: str
) -> Callable[..., Any]:
    """Return a collective of torch.distributed that also works in a process without a group.

    Args:
        name: Name in torch.distributed.
        copies: Parameters that receive the result and that are sent, which a single process copies;
            None if its tensors stay unchanged.
        renamed: Names of torch's parameters by DeepSpeed's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {renamed.get(key, key): v for key, v in kwargs.items() if key not in _LOG_ARGUMENTS}
        function = getattr(dist, name)
        if _has_group() or num_launched() > 1:
            return function(*args, **named)
        arguments: Any = inspect.signature(function).bind(*args, **named).arguments
        if copies is not None:
            target, source = (arguments.get(parameter) for parameter in copies)
            if name == "all_gather_object":
                target[0] = source
            else:
                for destination, value in zip(_as_list(target), _as_list(source), strict=False):
                    destination.copy_(value)
        finished = SimpleNamespace(wait=lambda timeout=None: True, is_completed=lambda: True)
        return finished if arguments.get("async_op") else None

    return call


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value or ())


all_reduce = _collective("all_reduce")
barrier = _collective("barrier")
broadcast = _collective("broadcast")
broadcast_object_list = _collective("broadcast_object_list")
monitored_barrier = _collective("monitored_barrier")
reduce = _collective("reduce")
all_gather = _collective("all_gather", ("tensor_list", "tensor"))
all_gather_into_tensor = _collective(
    "all_gather_into_tensor", ("output_tensor", "input_tensor"), tensor="input_tensor"
)
all_gather_object = _collective("all_gather_object", ("object_list", "obj"))
all_to_all = _collective("all_to_all", ("output_tensor_list", "input_tensor_list"))
all_to_all_single = _collective("all_to_all_single", ("output", "input"), tensor="input")
gather = _collective("gather", ("gather_list", "tensor"))
reduce_scatter = _collective("reduce_scatter", ("output", "input_list"))
reduce_scatter_tensor = _collective(
    "reduce_scatter_tensor", ("output", "input"), tensor="input", output_tensor="output"
)
scatter = _collective("scatter", ("tensor", "scatter_list"))


# --- checkpointing -------------------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args)`, recomputing its activations in backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


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
    """Check the options; none has an effect on `checkpoint`.

    Raises `ConfigError` for `mpu_`, and for `checkpoint_in_cpu`, without which memory use differs.
    """
    if mpu_ is not None:
        raise ConfigError(
            "checkpointing.configure(mpu_=...) is not supported",
            because="it selects processes that share a model; here the model is sharded over all",
            remedy="pass None",
        )
    if checkpoint_in_cpu:
        raise ConfigError(
            "checkpointing.configure(checkpoint_in_cpu=True) is not supported",
            remedy="write activations: {checkpoint: units, offload: host} in the config, or "
            "`with torch.autograd.graph.save_on_cpu():` around the forward",
        )


def is_configured() -> bool:
    """Return True: `checkpoint` needs no configuration."""
    return True


def reset() -> None:
    """Do nothing: `checkpoint` has no state between backwards."""


# --- runtime.dataloader --------------------------------------------------------------------------


class RepeatingLoader:
    """Iterator that repeats the batches of a loader; raises `StopIteration` if it has none."""

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


# --- ops.adam: infinity's optimizers with DeepSpeed's arguments and defaults ---------------------


class DeepSpeedCPUAdam(standalone.CPUAdam):
    """`infinity.CPUAdam` with DeepSpeed's arguments; the default weight decay is 0.

    `initialize(optimizer=...)` translates it to the built-in rule with these settings. Moments in
    bf16 (`fp32_optimizer_states=False`) are supported there only.
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
    """`infinity.FusedAdam` with DeepSpeed's arguments; `set_grad_none` has no effect."""

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


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """`torch.optim.Adagrad`, which `initialize` runs tile by tile on offloaded state."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ConfigError(
                "DeepSpeedCPUAdagrad stores fp32 sums of squares",
                remedy="leave amsgrad and fp32_optimizer_states out",
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
