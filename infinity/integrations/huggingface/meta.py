"""transformers models on the meta device, for planning.

Only a config is needed: a file, a directory, or a Hub id, of which only config.json is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infinity.errors import ConfigError, explained
from infinity.integrations.huggingface.build import build_model, class_for, read_config
from infinity.integrations.huggingface.experts import declare_experts
from infinity.integrations.huggingface.hub import CONFIG_NAME, find_directory
from infinity.model.named_models import PUBLISHED
from infinity.model.targets import Target, read_model_config, target_of
from infinity.model.weight_directory import holds_weights

# Far above every published model. A larger number is a typo, and takes minutes to build.
MAX_LAYERS = 4096
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers",
               "decoder_layers")  # fmt: skip
_SETTERS = (Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_)


class _SkipInit(TorchFunctionMode):
    """Mode in which initializers do nothing, for models on meta.

    Otherwise the first random number on meta makes torch import its compiler, for seconds.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init" or function in _SETTERS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def build_meta_model(config: Any, model_class: Any = None) -> nn.Module:
    """Build the model of a transformers config in fp32 on meta, without allocating memory.

    `model_class` as in `from_pretrained`. Raises `ConfigError` if the config is invalid.
    """
    resolved_class = class_for(config, model_class)
    # Auto classes have the first one, model classes the second.
    build = getattr(resolved_class, "from_config", None) or resolved_class._from_config
    what = f"transformers cannot build the {config.model_type!r} model"
    with explained(what, f"correct its {CONFIG_NAME}"):
        try:
            with torch.device("meta"), _SkipInit():
                model = build(config, dtype=torch.float32)
        except RuntimeError:  # the constructor reads values of its tensors
            model = build_model(config, model_class=resolved_class)
    assert isinstance(model, nn.Module)
    declare_experts(model)
    if next(model.parameters(), None) is None:
        raise ConfigError(
            f"{resolved_class.__name__} is a model without parameters: nothing is trained"
        )
    return model


def find_target(text: str, model_class: str | None = None, lora: int | None = None) -> Target:
    """Return the target for a config.json, its directory or a Hub id, with LoRA of rank `lora`.

    Raises `ConfigError` if the config is not a model's or is invalid, `MachineError` if a Hub id is
    not cached and cannot be downloaded.
    """
    path = Path(text).expanduser()
    from_hub = not path.exists()
    if from_hub:
        path = find_directory(text, wanted=[CONFIG_NAME])
    file = path / CONFIG_NAME if path.is_dir() else path
    raw = read_model_config(file)
    for section in (raw, *raw.values()):
        for key in _LAYER_KEYS if isinstance(section, Mapping) else ():
            if isinstance(section.get(key), int) and section[key] > MAX_LAYERS:
                raise ConfigError(
                    f"the model's config has {key}={section[key]}",
                    because=f"more than {MAX_LAYERS} layers take minutes",
                    remedy="look for an extra digit in its numbers",
                )
    config = read_config(file, model_class)
    target = target_of(text, build_meta_model(config, model_class), config.to_dict(), lora)
    return replace(target, from_files=from_hub or holds_weights(file.parent))


def published_target(name: str, lora: int | None = None) -> Target:
    """Return the target for a model of `PUBLISHED`, as `find_target` does for its config."""
    from transformers import AutoConfig

    with explained(f"transformers has no config for {name}", "install a newer transformers"):
        config = AutoConfig.for_model(**PUBLISHED[name.lower()])
    target = target_of(name, build_meta_model(config), config.to_dict(), lora)
    return replace(target, from_files=True)
