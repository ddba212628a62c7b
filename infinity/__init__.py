"""An offload-first training engine for one machine.

>>> engine, optimizer, loader, scheduler = infinity.initialize(model=model, config="run.yaml")
>>> for x, y in data:
...     loss = engine(x, y)
...     engine.backward(loss)
...     engine.step()
>>> engine.close()
"""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING


def _check_ours() -> str:
    """The version of our distribution; another package also installs the name `infinity`."""
    try:
        return _metadata.version("torch-infinity")
    except _metadata.PackageNotFoundError:
        raise ImportError(
            f"the package imported as 'infinity' from {__file__} is not installed as "
            "'torch-infinity'; run `make setup`, or `pip install -e .` in a virtual environment "
            "of its own (the distributions 'infinity' and 'infinity-sdk' use the same import name)"
        ) from None


__version__ = _check_ours()

if _TYPE_CHECKING:
    from infinity.config import Config as Config
    from infinity.config import load_config as load_config
    from infinity.deepspeed.config import translate_deepspeed as translate_deepspeed
    from infinity.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from infinity.deepspeed.one_process import add_config_arguments as add_config_arguments
    from infinity.deepspeed.one_process import init_distributed as init_distributed
    from infinity.deepspeed.utils import OnDevice as OnDevice
    from infinity.engine import Engine as Engine
    from infinity.errors import InfinityError as InfinityError
    from infinity.huggingface.engines import from_config as from_config
    from infinity.huggingface.engines import from_pretrained as from_pretrained
    from infinity.huggingface.saving import save_pretrained as save_pretrained
    from infinity.huggingface.trainer import InfinityTrainer as InfinityTrainer
    from infinity.huggingface.trainer_arguments import TrainingArguments as TrainingArguments
    from infinity.model.materialize import Init as Init
    from infinity.optim.standalone import CPUAdam as CPUAdam
    from infinity.optim.standalone import FusedAdam as FusedAdam
    from infinity.startup import initialize as initialize
    from infinity.training.report import StepReport as StepReport
    from infinity.weights import load_weights as load_weights

# Where the public names live. They are imported when first used: the command line must not wait
# for torch, and a broken part must not keep `infinity doctor` from saying so.
_HOMES = {
    "Config": "infinity.config",
    "load_config": "infinity.config",
    "Engine": "infinity.engine",
    "DeepSpeedEngine": "infinity.deepspeed",
    "InfinityError": "infinity.errors",
    "Init": "infinity.model.materialize",
    "initialize": "infinity.startup",
    "CPUAdam": "infinity.optim.standalone",
    "FusedAdam": "infinity.optim.standalone",
    "StepReport": "infinity.training.report",
    "load_weights": "infinity.weights",
    "OnDevice": "infinity.deepspeed",
    "from_config": "infinity.huggingface.engines",
    "from_pretrained": "infinity.huggingface.engines",
    "save_pretrained": "infinity.huggingface.saving",
    "InfinityTrainer": "infinity.huggingface.trainer",
    "TrainingArguments": "infinity.huggingface.trainer_arguments",
    "add_config_arguments": "infinity.deepspeed",
    "init_distributed": "infinity.deepspeed",
    "translate_deepspeed": "infinity.deepspeed",
}


# `infinity.zero.Init`, `infinity.ops.adam...`, for `import infinity as deepspeed`.
_MODULES = ("checkpointing", "comm", "ops", "runtime", "utils", "zero")


def __getattr__(name: str) -> object:
    if name in ("deepspeed", *_MODULES):
        wing = _import_module("infinity.deepspeed")
        return wing if name == "deepspeed" else getattr(wing, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "deepspeed"})


# Without InfinityTrainer and TrainingArguments, whose modules need the package transformers.
__all__ = [
    "CPUAdam",
    "Config",
    "DeepSpeedEngine",
    "Engine",
    "FusedAdam",
    "InfinityError",
    "Init",
    "OnDevice",
    "StepReport",
    "__version__",
    "add_config_arguments",
    "from_config",
    "from_pretrained",
    "init_distributed",
    "initialize",
    "load_config",
    "load_weights",
    "save_pretrained",
    "translate_deepspeed",
]
