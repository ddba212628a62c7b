"""Construction of transformers models from a config, with random or lazily loaded weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.config.schema import Config
from infinity.errors import ConfigError, explained
from infinity.integrations.deepspeed.settings import read_settings
from infinity.integrations.huggingface.experts import declare_experts
from infinity.integrations.huggingface.hub import GENERATION_CONFIG_NAME, find_directory
from infinity.integrations.huggingface.packages import transformers
from infinity.model.lazy_tensor import LazyTensor
from infinity.model.meta_init import Init
from infinity.model.weight_files import StoredTensor, WeightFiles
from infinity.optim.moments import COMPUTE_DTYPES

AnyConfig = Config | Mapping[str, Any] | str | Path | None

# Otherwise transformers asks on the terminal whether to run code of a repository.
_NO_REMOTE_CODE = {"trust_remote_code": False}


def load_model(
    source: str | os.PathLike[str],
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_config: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> nn.Module:
    """Return a pretrained model in eval mode whose weights are read lazily from safetensors files.

    For changes before `infinity.initialize(model, config)`: adapters, freezing, new heads. Names
    are converted, tensors fused and split, and weights tied by the rules of transformers. The
    arguments are those of `from_pretrained`. The files must exist until `initialize` returns.

    Parameters that are missing in the files (a new head) are initialized in memory, and
    transformers reports them. All others are lazy tensors on the CPU (`model/lazy_tensor.py`) with
    the dtype of the files: fp32 files give fp32 masters even if `precision` is bf16.

    Raises `ConfigError` if files and model do not match, `MachineError` if the Hub does not provide
    the files.
    """
    transformers()  # raise for a missing package before any other error
    directory = find_directory(source, revision)
    settings = read_settings({} if config is None else config).config
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    facts = read_config(directory, model_class) if model_config is None else model_config
    resolved_class = class_for(facts, model_class)
    if hasattr(resolved_class, "from_config"):  # an AutoModel...: find the class that it chooses
        with explained(f"{resolved_class.__name__} does not find the class"), torch.device("meta"):
            model = resolved_class.from_config(facts, **_NO_REMOTE_CODE)
        resolved_class, facts = type(model), model.config
    facts, options = _split_kwargs(facts, dict(model_kwargs or {}))
    files = WeightFiles(directory)
    if files.quantized:
        facts = without_quantization(facts)  # lazy tensors return dequantized values
    lazy_tensors = {
        name: LazyTensor(facts.shape, facts.dtype, StoredTensor(files, name))
        for name, facts in files.facts.items()
    }
    model = fill_model(
        resolved_class, facts, lazy_tensors, settings.precision, options, str(source)
    )
    model.config.name_or_path = str(source)
    set_generation_config(model, directory)
    assert isinstance(model, nn.Module)
    return model


def fill_model(
    kind: Any,
    config: Any,
    lazy_tensors: Mapping[str, Tensor],
    precision: str,
    options: Mapping[str, Any],
    source: str,
) -> Any:
    """Build a transformers model over lazy tensors with its `from_pretrained`.

    Args:
        kind: Model class of transformers, or an `AutoModel...`.
        config: Its config.
        lazy_tensors: Lazy tensors (`model/lazy_tensor.py`) by their names in published files.
        precision: bf16, fp16 or fp32: dtype of parameters missing in `lazy_tensors`.
        options: Other arguments of `from_pretrained`.
        source: Source of the tensors, for error messages.

    Raises:
        ConfigError: No tensor belongs to the model, or shapes do not match.
    """
    with explained(f"{source} does not fit {kind.__name__}"):
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(lazy_tensors),
            dtype=COMPUTE_DTYPES[precision],
            output_loading_info=True,
            **options,
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.read().to(buffer.dtype)
    if not any(isinstance(parameter, LazyTensor) for parameter in model.parameters()):
        raise ConfigError(
            f"{source} holds no weight of {type(model).__name__}",
            because=f"unexpected: {', '.join(map(repr, sorted(info['unexpected_keys'])[:4]))}",
            remedy="model_class=... names another class",
        )
    declare_experts(model)
    return model


def without_quantization(config: Any) -> Any:
    """Return a copy of a transformers config without `quantization_config`."""
    if hasattr(config, "quantization_config"):
        config = copy.deepcopy(config)
        del config.quantization_config
    return config


def set_generation_config(model: Any, directory: Path) -> None:
    """Set the generation config of a directory on the model, if both support it."""
    if (directory / GENERATION_CONFIG_NAME).exists() and model.can_generate():
        generation_config_class = transformers().GenerationConfig
        model.generation_config = generation_config_class.from_pretrained(directory)


def build_model(
    source: Any,
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a model with random weights under `infinity.Init`, in train mode.

    The values equal those of an ordinary build with the same seed. `source` is a transformers
    config, a directory or Hub id with a config.json, or a mapping with its content; the other
    arguments are those of `from_config`.
    """
    hf = transformers()
    if isinstance(source, Mapping):
        with explained("transformers does not take this config", "correct it"):
            hf_config = hf.AutoConfig.for_model(**source)
    elif isinstance(source, str | os.PathLike):
        hf_config = read_config(find_directory(source), model_class)
    else:
        hf_config = source
    resolved_class = class_for(hf_config, model_class)
    settings = read_settings({} if config is None else config).config
    is_auto = hasattr(resolved_class, "from_config")  # an AutoModel...
    build = resolved_class.from_config if is_auto else resolved_class._from_config
    options = {**(_NO_REMOTE_CODE if is_auto else {}), **(model_kwargs or {})}
    with explained(f"{resolved_class.__name__} cannot be built"), Init(settings):
        model = build(hf_config, dtype=torch.float32, **options)
    assert isinstance(model, nn.Module)
    declare_experts(model)
    return model


def read_config(directory: Path, wanted: Any = None) -> Any:
    """Read config.json with the config class of `wanted`, or by its `model_type`.

    `directory` may be the file. `wanted` is a model class, its name, or None.
    """
    hf = transformers()
    wanted_class = getattr(hf, wanted, None) if isinstance(wanted, str) else wanted
    config_class = getattr(wanted_class, "config_class", None)
    remedy = (
        "is its code in its directory? that is not run: import the model's class, and pass it to "
        "from_pretrained(model_class=...)"
    )
    with explained(f"{directory} has no config that transformers takes", remedy):
        if config_class is not None:
            return config_class.from_pretrained(directory)
        return hf.AutoConfig.from_pretrained(directory, **_NO_REMOTE_CODE)


def class_for(config: Any, wanted: Any) -> Any:
    """Return the model class to build: `wanted`, a class or its name, else the saved class.

    If the config names no class, return the first auto class that covers the full model: with the
    encoder (not the decoder alone), with the vision tower, else a causal language model.
    """
    hf = transformers()
    if wanted is not None and not isinstance(wanted, str):
        return wanted
    names = [wanted] if wanted else list(getattr(config, "architectures", None) or ())
    if wanted is None and not names:
        heads = ["ImageTextToText", "CausalLM"]
        if getattr(config, "is_encoder_decoder", False):
            heads = ["SpeechSeq2Seq", "Seq2SeqLM"]
        auto_classes = [getattr(hf, f"AutoModelFor{head}") for head in heads]
        names = [
            auto_class.__name__
            for auto_class in auto_classes
            if type(config) in auto_class._model_mapping
        ]
    cls = getattr(hf, names[0], None) if names else None
    if not (hasattr(cls, "from_config") or hasattr(cls, "_from_config")):
        what = f"transformers has no model {names[0]!r}" if names else "which class is meant?"
        unknown = f"the model's class is not known from {type(config).__name__}: "
        raise ConfigError(
            what if wanted else unknown + what,
            because=None if wanted else "a config.json names it under architectures",
            remedy="model_class=transformers.AutoModelFor..., or a class of your own",
        )
    return cls


# Arguments of `from_pretrained` that are refused in `model_kwargs`, with their replacements here.
_REFUSED_KWARGS = {
    **dict.fromkeys(("dtype", "torch_dtype"), "precision in the configuration"),
    **dict.fromkeys(("config", "state_dict"), "model_config=..., and the files"),
    **dict.fromkeys(
        ("subfolder", "variant", "token", "cache_dir", "local_files_only", "force_download"),
        "download with `hf download`, and name the directory that holds the weights",
    ),
    "revision": "from_pretrained(..., revision=...)",
    "device_map": "placement in the configuration",
    "quantization_config": "frozen.format in the configuration",
}


def _split_kwargs(config: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Move `model_kwargs` that are config keys into a copy of the config, as transformers does."""
    if refused := [name for name in options if name in _REFUSED_KWARGS]:
        raise ConfigError(
            f"model_kwargs has {', '.join(refused)}",
            because="it would have no effect, or a different one, since weights are read lazily",
            remedy="; ".join(dict.fromkeys(_REFUSED_KWARGS[name] for name in refused)),
        )
    config_keys = [name for name in options if hasattr(config, name)]
    if config_keys:
        config = copy.deepcopy(config)
    for name in config_keys:
        setattr(config, name, options.pop(name))
    return config, options
