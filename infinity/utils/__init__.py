"""What DeepSpeed's users import from `deepspeed.utils`, over our engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.utils.init_on_device import OnDevice
from infinity.utils.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    unset_z3_leaf_modules_by_name,
    unset_z3_leaf_modules_by_suffix,
    z3_leaf_module,
    z3_leaf_parameter,
)
from infinity.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

logger = logging.getLogger("infinity")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message, if rank 0 is among those that shall: there is no other."""
    if not ranks or 0 in ranks or -1 in ranks:
        logger.log(level, message)


__all__ = [
    "OnDevice",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "unset_z3_leaf_modules_by_name",
    "unset_z3_leaf_modules_by_suffix",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
