"""Models of transformers: built from a configuration, and filled from files."""

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

# Without it transformers asks at the terminal whether code of a repository may run.
_NO_CODE = {"trust_remote_code": False}


def load_model(
    source: str | os.PathLike[str],
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_config: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> nn.Module:
    """A pretrained model whose weights are still in their safetensors files, in eval mode.

    For what must happen before `infinity.initialize(model, config)`: adapters, freezing, new
    heads. Names are converted, tensors fused and split, and weights tied by transformers' own
    rules. The arguments are those of `from_pretrained`. The files must stay until `initialize`.

    Parameters that the files do not have (a new head) are initialised and have memory, with
    transformers' report of them; the others are promises on the CPU (`model/lazy_tensor.py`), of
    values as in the files: fp32 files give fp32 masters, also where `precision` is bf16.

    Raises `ConfigError` where files and model do not fit, `MachineError` for an id the Hub does
    not give.
    """
    transformers()  # a package that is missing is named before all else
    directory = find_directory(source, revision)
    settings = read_settings({} if config is None else config).config
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    facts = read_config(directory, model_class) if model_config is None else model_config
    kind, facts = _chosen(class_for(facts, model_class), facts)
    facts, options = _split_kwargs(facts, dict(model_kwargs or {}))
    files = WeightFiles(directory)
    if files.quantised:
        facts = without_quantisation(facts)  # values are promised: transformers must not unpack
    promised = {
        name: LazyTensor(facts.shape, facts.dtype, StoredTensor(files, name))
        for name, facts in files.facts.items()
    }
    model = fill_model(kind, facts, promised, settings.precision, options, str(source))
    model.config.name_or_path = str(source)
    take_generation_config(model, directory)
    assert isinstance(model, nn.Module)
    return model


def fill_model(
    kind: Any,
    config: Any,
    promised: Mapping[str, Tensor],
    precision: str,
    options: Mapping[str, Any],
    source: str,
) -> Any:
    """Build a transformers model over lazy tensors, by the rules of its own `from_pretrained`.

    Args:
        kind: Class of transformers, or an `AutoModel...`.
        config: Its config.
        promised: Lazy tensors (`model/lazy_tensor.py`) by their names in published files.
        precision: bf16, fp16 or fp32: dtype of what `promised` lacks.
        options: Other arguments of `from_pretrained`.
        source: Where the tensors come from, for errors.

    Raises:
        ConfigError: No tensor is one of the model's, or they do not fit.
    """
    with explained(f"{source} does not fit {kind.__name__}"):
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(promised),
            dtype=COMPUTE_DTYPES[precision],
            output_loading_info=True,
            **options,
        )
    if not _num_promised(model):
        raise ConfigError(
            f"{source} holds no weight of {type(model).__name__}",
            because=f"unexpected: {', '.join(map(repr, sorted(info['unexpected_keys'])[:4]))}",
            remedy="model_class=... names another class",
        )
    declare_experts(model)
    return model


def without_quantisation(config: Any) -> Any:
    """Return a transformers config as of a model whose weights are not quantised."""
    if hasattr(config, "quantization_config"):
        config = copy.deepcopy(config)
        del config.quantization_config
    return config


def take_generation_config(model: Any, directory: Path) -> None:
    """Give a model the generation config of a directory, if it generates and there is one."""
    if (directory / GENERATION_CONFIG_NAME).exists() and model.can_generate():
        kind = transformers().GenerationConfig
        model.generation_config = kind.from_pretrained(directory)


def build_model(
    source: Any,
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A new model, built under `infinity.Init`: the values of an ordinary build with the same seed.

    `source` is a transformers config, a directory or Hub id with a config.json, or a dict as in
    one; the other arguments are those of `from_config`. In train mode, as transformers leaves it.
    """
    library = transformers()
    if isinstance(source, Mapping):
        with explained("transformers does not take this config", "correct it"):
            facts = library.AutoConfig.for_model(**source)
    elif isinstance(source, str | os.PathLike):
        facts = read_config(find_directory(source), model_class)
    else:
        facts = source
    kind = class_for(facts, model_class)
    settings = read_settings({} if config is None else config).config
    is_auto = hasattr(kind, "from_config")  # an AutoModel...
    make = kind.from_config if is_auto else kind._from_config
    options = {**(_NO_CODE if is_auto else {}), **(model_kwargs or {})}
    with explained(f"{kind.__name__} cannot be built"), Init(settings):
        model = make(facts, dtype=torch.float32, **options)
    assert isinstance(model, nn.Module)
    declare_experts(model)
    return model


def read_config(directory: Path, wanted: Any = None) -> Any:
    """The config.json, as the config of the class that is asked for, or of its own model_type.

    `directory` may be the file itself.
    """
    library = transformers()
    kind = getattr(library, wanted, None) if isinstance(wanted, str) else wanted
    config_class = getattr(kind, "config_class", None)
    remedy = (
        "is its code in its directory? that is not run: import the model's class, and pass it to "
        "from_pretrained(model_class=...)"
    )
    with explained(f"{directory} has no config that transformers takes", remedy):
        if config_class is not None:
            return config_class.from_pretrained(directory)
        return library.AutoConfig.from_pretrained(directory, **_NO_CODE)


def class_for(config: Any, wanted: Any) -> Any:
    """The class to build: the one asked for, by name or as it is, else the one that was saved.

    Of a config that names none it is the first of what trains such a model whole: with an encoder
    (not its decoder alone), with what reads pictures, else a causal language model.
    """
    library = transformers()
    if wanted is not None and not isinstance(wanted, str):
        return wanted
    names = [wanted] if wanted else list(getattr(config, "architectures", None) or ())
    if wanted is None and not names:
        kinds = ["ImageTextToText", "CausalLM"]
        if getattr(config, "is_encoder_decoder", False):
            kinds = ["SpeechSeq2Seq", "Seq2SeqLM"]
        autos = [getattr(library, f"AutoModelFor{kind}") for kind in kinds]
        names = [auto.__name__ for auto in autos if type(config) in auto._model_mapping]
    found = getattr(library, names[0], None) if names else None
    if not (hasattr(found, "from_config") or hasattr(found, "_from_config")):
        what = f"transformers has no model {names[0]!r}" if names else "which class is meant?"
        unknown = f"the model's class is not known from {type(config).__name__}: "
        raise ConfigError(
            what if wanted else unknown + what,
            because=None if wanted else "a config.json names it under architectures",
            remedy="model_class=transformers.AutoModelFor..., or a class of your own",
        )
    return found


def _chosen(kind: Any, config: Any) -> tuple[Any, Any]:
    """Return the class that an `AutoModel...` chooses for a config, and its config."""
    if not hasattr(kind, "from_config"):
        return kind, config
    with explained(f"{kind.__name__} does not find the class"), torch.device("meta"):
        made = kind.from_config(config, **_NO_CODE)
    return type(made), made.config


# What of transformers' `from_pretrained` chooses files, or is said otherwise here: and how.
_NOT_HERE = {
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


def _split_kwargs(facts: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Split `model_kwargs` into a config with its keys and the rest, as transformers does."""
    if refused := [name for name in options if name in _NOT_HERE]:
        raise ConfigError(
            f"model_kwargs has {', '.join(refused)}",
            because="it would have no effect on the files that are read, or another one",
            remedy="; ".join(dict.fromkeys(_NOT_HERE[name] for name in refused)),
        )
    ours = [name for name in options if hasattr(facts, name)]
    if ours:
        facts = copy.deepcopy(facts)
    for name in ours:
        setattr(facts, name, options.pop(name))
    return facts, options


def _num_promised(model: nn.Module) -> int:
    """How many parameters come from the files; buffers get their values now."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.value().to(buffer.dtype)
    return sum(isinstance(parameter, LazyTensor) for parameter in model.parameters())
