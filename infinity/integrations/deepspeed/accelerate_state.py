"""Number of processes that accelerate counts, for transformers' Trainer and scripts with it.

[Note: accelerate without accelerators]
In a launched process accelerate takes the backend of the accelerators that it finds. Without any
it creates a process group, but counts one process, unless `cpu=True`: each process would then train
on the same batches. With `ACCELERATE_USE_CPU` or `cpu=True` it counts the ranks, but an
`Accelerator` ignores its DeepSpeed plugin, so that no engine is created.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from infinity.distributed.context import DistContext
from infinity.errors import ConfigError


def set_backend() -> None:
    """Set the group's backend in the state that accelerate is creating, if it found none.

    accelerate calls `comm.is_initialized()` and `comm.init_distributed()` between the choice of the
    backend and the count of processes; see [Note: accelerate without accelerators].
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not (dist.is_available() and dist.is_initialized()):
        return
    state = module.PartialState._shared_state
    if "num_processes" not in state and state.get("backend", "") is None:
        state["backend"] = dist.get_backend()


def check_accelerate(ranks: DistContext) -> None:
    """Raise `ConfigError` if an `Accelerator` with a DeepSpeed plugin counts other processes."""
    module = sys.modules.get("accelerate.state")
    state = {} if module is None else module.PartialState._shared_state
    if state.get("distributed_type") == "DEEPSPEED":
        check_num_processes(state.get("num_processes", ranks.count), ranks)


def check_num_processes(num_processes: int, ranks: DistContext) -> None:
    """Raise `ConfigError` if accelerate counts another number of processes than there are ranks."""
    if num_processes != ranks.count:
        raise ConfigError(
            f"num_processes of accelerate is {num_processes}, and the engine has "
            f"{ranks.count} rank(s)",
            because="accelerate divides batches among its processes: it finds them by LOCAL_RANK, "
            "when TrainingArguments, an Accelerator or a PartialState is first created",
            remedy="torchrun or infinity run --gpus N, which set LOCAL_RANK; without a GPU also "
            "TrainingArguments(use_cpu=True), and no PartialState before the Accelerator",
        )
