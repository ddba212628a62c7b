"""transformers models without their memory: `initialize` reads or makes each value at its home."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.huggingface.library import transformers
from infinity.huggingface.sources import find_directory
from infinity.model.foreign import explained
from infinity.model.materialize import Init
from infinity.model.promised import Promised
from infinity.model.weight_files import WeightFiles
from infinity.read_settings import read_settings
from infinity.training.state_dict import COMPUTE_DTYPES

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
    transformers' report of them; the others are promises on the CPU (`model/promised.py`), of
    values as in the files: fp32 files give fp32 masters, also where `precision` is bf16.

    Raises `ConfigError` where files and model do not fit, `MachineError` for an id the Hub does
    not give.
    """
    library = transformers()
    directory = find_directory(source, revision)
    settings = read_settings({} if config is None else config).config
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    facts = _read_config(directory, model_class) if model_config is None else model_config
    kind, facts = _chosen(_class_for(facts, model_class), facts)
    files = WeightFiles(directory)
    promised = {name: _promise(files, name) for name in files.facts}
    with explained(f"{source} does not fit {kind.__name__}"):
        model, info = kind.from_pretrained(
            None,
            config=facts,
            state_dict=promised,
            dtype=COMPUTE_DTYPES[settings.precision],
            output_loading_info=True,
            **(model_kwargs or {}),
        )
    if not _num_promised(model):
        raise ConfigError(
            f"{source} holds no weight of {type(model).__name__}",
            because=f"unexpected: {', '.join(map(repr, sorted(info['unexpected_keys'])[:4]))}",
            remedy="model_class=... names another class",
        )
    model.config.name_or_path = str(source)
    if (directory / "generation_config.json").exists() and model.can_generate():
        model.generation_config = library.GenerationConfig.from_pretrained(directory)
    assert isinstance(model, nn.Module)
    return model


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
        facts = _read_config(find_directory(source), model_class)
    else:
        facts = source
    kind = _class_for(facts, model_class)
    settings = read_settings({} if config is None else config).config
    is_auto = hasattr(kind, "from_config")  # an AutoModel...
    make = kind.from_config if is_auto else kind._from_config
    options = {**(_NO_CODE if is_auto else {}), **(model_kwargs or {})}
    with explained(f"{kind.__name__} cannot be built"), Init(settings):
        model = make(facts, dtype=torch.float32, **options)
    assert isinstance(model, nn.Module)
    return model


def _read_config(directory: Path, wanted: Any) -> Any:
    """The config.json, as the config of the class that is asked for, or of its own model_type."""
    library = transformers()
    kind = getattr(library, wanted, None) if isinstance(wanted, str) else wanted
    config_class = getattr(kind, "config_class", None)
    remedy = "is its code in its directory? import the model's class, and pass model_class=it"
    with explained(f"{directory} has no config that transformers takes", remedy):
        if config_class is not None:
            return config_class.from_pretrained(directory)
        return library.AutoConfig.from_pretrained(directory, **_NO_CODE)


def _class_for(config: Any, wanted: Any) -> Any:
    """The class to build: the one asked for, by name or as it is, else the one that was saved."""
    library = transformers()
    if wanted is not None and not isinstance(wanted, str):
        return wanted
    names = [wanted] if wanted else list(getattr(config, "architectures", None) or ())
    if wanted is None and not names:
        mapping = library.AutoModelForCausalLM
        names = [mapping.__name__] if type(config) in mapping._model_mapping else []
    found = getattr(library, names[0], None) if names else None
    if found is None:
        what = f"transformers has no class {names[0]!r}" if names else "which class is meant?"
        raise ConfigError(
            f"the model's class cannot be told from {type(config).__name__}: {what}",
            because="a config.json names it under architectures",
            remedy="model_class=transformers.AutoModelFor..., or a class of your own",
        )
    return found


def _chosen(kind: Any, config: Any) -> tuple[Any, Any]:
    """What an `AutoModel...` makes of a config: the class, and the config that class takes."""
    if not hasattr(kind, "from_config"):
        return kind, config
    with explained(f"{kind.__name__} cannot tell which class is meant"), torch.device("meta"):
        made = kind.from_config(config, **_NO_CODE)
    return type(made), made.config


def _promise(files: WeightFiles, name: str) -> Tensor:
    facts = files.facts[name]
    return Promised(facts.shape, facts.dtype, partial(files.read, name))


def _num_promised(model: nn.Module) -> int:
    """How many parameters come from the files; buffers get their values now."""
    count = 0
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Promised):
                module._buffers[name] = buffer.value().to(buffer.dtype)
    for parameter in model.parameters():
        count += isinstance(parameter, Promised)
    return count
