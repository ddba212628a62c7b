"""Offload-first training engine for one machine.

>>> engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="run.yaml")
>>> for x, y in data:
...     loss = engine(x, y)
...     engine.backward(loss)
...     engine.step()
>>> engine.close()
"""

from __future__ import annotations

from importlib import import_module as _import_module

from infinity import integrations as integrations  # installs the import aliases
from infinity._version import __version__

# Public name -> module; `__init__.pyi` declares them to type checkers. They are imported on first
# use: the command line must not wait for torch, and `infinity doctor` must be able to report a
# module that cannot be imported.
_WHERE = {
    "Config": "infinity.config.schema",
    "load_config": "infinity.config.schema",
    "Engine": "infinity.engine",
    "CheckpointError": "infinity.errors",
    "ConfigError": "infinity.errors",
    "DoesNotFitError": "infinity.errors",
    "EngineClosedError": "infinity.errors",
    "EngineFailedError": "infinity.errors",
    "InfinityError": "infinity.errors",
    "InfinityWarning": "infinity.errors",
    "MachineError": "infinity.errors",
    "ResidencyError": "infinity.errors",
    "TrainingError": "infinity.errors",
    "TransferError": "infinity.errors",
    "Init": "infinity.model.meta_init",
    "initialize": "infinity.integrations.deepspeed.arguments",
    "CPUAdam": "infinity.optim.standalone",
    "FusedAdam": "infinity.optim.standalone",
    "StepReport": "infinity.profiling.step_report",
    "load_weights": "infinity.training.load_weights",
    "from_config": "infinity.integrations.huggingface.models",
    "from_pretrained": "infinity.integrations.huggingface.models",
    "save_pretrained": "infinity.integrations.huggingface.save",
    "InfinityTrainer": "infinity.integrations.huggingface.trainer",
    "TrainingArguments": "infinity.integrations.huggingface.settings",
    "as_deepspeed": "infinity.integrations.deepspeed.door",
    # For scripts written for DeepSpeed; also in infinity.deepspeed.
    "DeepSpeedEngine": "infinity.integrations.deepspeed",
    "OnDevice": "infinity.integrations.deepspeed",
    "add_config_arguments": "infinity.integrations.deepspeed",
    "init_distributed": "infinity.integrations.deepspeed",
    "translate_deepspeed": "infinity.integrations.deepspeed",
}


# `infinity.zero.Init`, `infinity.ops.adam...`, for `import infinity as deepspeed`.
_MODULES = ("checkpointing", "comm", "ops", "runtime", "utils", "zero")


def __getattr__(name: str) -> object:
    if name in ("deepspeed", *_MODULES):
        package = _import_module("infinity.integrations.deepspeed")
        return package if name == "deepspeed" else getattr(package, name)
    if name not in _WHERE:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "InfinityTrainer", "TrainingArguments", "deepspeed"})


# InfinityTrainer and TrainingArguments are not listed: their modules import transformers.
__all__ = [
    "CPUAdam",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DoesNotFitError",
    "Engine",
    "EngineClosedError",
    "EngineFailedError",
    "FusedAdam",
    "InfinityError",
    "InfinityWarning",
    "Init",
    "MachineError",
    "ResidencyError",
    "StepReport",
    "TrainingError",
    "TransferError",
    "__version__",
    "as_deepspeed",
    "from_config",
    "from_pretrained",
    "initialize",
    "load_config",
    "load_weights",
    "save_pretrained",
]
