"""Number of processes that accelerate counts, for transformers' Trainer and scripts with it.

[Note: accelerate without accelerators]
In a launched process accelerate takes the backend of the accelerators that it finds. Without any
it creates a process group, but counts one process, unless `cpu=True`: each process would then train
on the same batches. With `ACCELERATE_USE_CPU` or `cpu=True` it counts the ranks, but an
`Accelerator` ignores its DeepSpeed plugin, so that no engine is created.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import wraps
from typing import Any

import torch.distributed as dist

from infinity.common.accelerators import num_accelerators
from infinity.distributed.context import DistContext
from infinity.distributed.environment import num_launched
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


def count_ranks_without_accelerators() -> None:
    """Make accelerate count launched processes also on a machine without accelerators.

    See [Note: accelerate without accelerators]. States that exist already do not change.
    """
    module: Any = importlib.import_module("accelerate.state")
    original = module.PartialState._prepare_backend

    @wraps(original)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        backend, kind = original(self, *args, **kwargs)
        is_rank = "LOCAL_RANK" in os.environ and num_launched() > 1
        if kind == module.DistributedType.NO and is_rank and not num_accelerators():
            return backend or "gloo", module.DistributedType.MULTI_CPU
        return backend, kind

    module.PartialState._prepare_backend = prepare_backend


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
