"""DeepSpeed's public names, over our engine: `import infinity.deepspeed as deepspeed`.

Every path of DeepSpeed's that is served is found by attribute and by import:
`from infinity.deepspeed.ops.adam import DeepSpeedCPUAdam`. What stands behind a name is imported
when it is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_HERE = "infinity.deepspeed"
# DeepSpeed's modules ("" is the package) and their names, by the modules of ours that have them;
# `theirs=ours` where ours is called otherwise. `zero`, `utils` and `utils.zero_to_fp32` are files.
NAMES: dict[str, dict[str, str]] = {
    "": {
        f"{_HERE}.engine": "DeepSpeedEngine",
        f"{_HERE}.config": "translate_deepspeed",
        f"{_HERE}.processes": "add_config_arguments init_distributed",
        f"{_HERE}.utils": "OnDevice",
        "infinity.startup": "initialize=initialize_deepspeed",
    },
    "checkpointing": {
        f"{_HERE}.processes": "checkpoint configure is_configured reset",
    },
    "comm": {
        f"{_HERE}.processes": "all_gather all_gather_object all_reduce barrier broadcast "
        "broadcast_object_list destroy_process_group get_local_rank get_rank get_world_size "
        "init_distributed is_initialized reduce",
        "torch.distributed": "ReduceOp",
    },
    "ops": {},
    "ops.adam": {f"{_HERE}.processes": "DeepSpeedCPUAdam FusedAdam"},
    "runtime": {},
    "runtime.dataloader": {f"{_HERE}.processes": "RepeatingLoader"},
    "runtime.engine": {f"{_HERE}.engine": "DeepSpeedEngine"},
    "runtime.lr_schedules": {
        "infinity.schedules": "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR "
        "WarmupDecayLR WarmupLR",
    },
    "runtime.zero": {},
    "runtime.zero.offload_config": {
        "infinity.training.parameter_access": "OffloadDeviceEnum OffloadStateTypeEnum",
    },
}


def _getter(module: str, names: dict[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """The names of a module, and its `__getattr__`."""
    found = {}
    for ours, text in names.items():
        for theirs, _, other in (word.partition("=") for word in text.split()):
            found[theirs] = (ours, other or theirs)

    def get(name: str) -> Any:
        if module == _HERE and name in ("utils", "zero"):
            return import_module(f"{module}.{name}")
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        ours, attribute = found[name]
        value = getattr(import_module(ours), attribute)
        setattr(sys.modules[module], name, value)
        return value

    return list(found), get


__all__, __getattr__ = _getter(_HERE, NAMES[""])

for _path in NAMES:
    if _path:
        _module = ModuleType(f"{_HERE}.{_path}", f"DeepSpeed's `{_path}`: see {_HERE}.")
        _names, _get = _getter(_module.__name__, NAMES[_path])
        _module.__dict__.update(__path__=[], __all__=_names, __getattr__=_get)
        sys.modules[_module.__name__] = _module
        _parent, _, _last = _module.__name__.rpartition(".")
        setattr(sys.modules[_parent], _last, _module)
