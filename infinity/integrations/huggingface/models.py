"""transformers models without their memory: `initialize` reads or makes each value in place."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.common.sizes import parse_size
from infinity.config.schema import Config
from infinity.distributed.launch import find_ranks
from infinity.engine import Engine
from infinity.errors import ConfigError, MachineError, explained, first_lines
from infinity.integrations.deepspeed.arguments import initialize
from infinity.integrations.deepspeed.settings import read_settings
from infinity.integrations.huggingface.experts import declare_experts
from infinity.model.lazy_tensor import LazyTensor
from infinity.model.meta_init import Init
from infinity.model.weight_directory import saving
from infinity.model.weight_files import Outgoing, StoredTensor, WeightFiles, write_shards
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.optim.offloaded import OffloadedOptimizer
from infinity.training.state_dict import read_by_first, written_by_first

# Packages, asked for when they are used.


def transformers() -> Any:
    """The module; raises as `package`."""
    return package("transformers")


def package(name: str) -> Any:
    """The module; raises `ConfigError` saying what to install where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the package {name} cannot be imported: {error}",
            remedy=f"pip install {name}",
        ) from error


# Where a pretrained model comes from: a directory, or a repository of the Hugging Face Hub.


CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
_WANTED = [
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "model.safetensors.index.json",
    "model*.safetensors",
]


def find_directory(
    source: str | os.PathLike[str], revision: str | None = None, wanted: Sequence[str] = _WANTED
) -> Path:
    """The directory with the model's files; a Hub id is downloaded, or found in the Hub's cache.

    Of a Hub id only the files `wanted`, patterns of names, are there for sure.

    Raises `ConfigError` for what is neither, `MachineError` where the Hub cannot be asked.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"{source!r} names no model", remedy="give a directory, or the id of a model on the Hub"
        )
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").exists() and not (path / CONFIG_NAME).exists():
            raise ConfigError(
                f"{path} holds an adapter, not a model",
                remedy="load its base: from_pretrained(base, prepare=lambda model: "
                f"peft.PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True))",
            )
        return path
    if path.exists():
        raise ConfigError(f"{path} is a file", remedy="give the directory with its config.json")
    name = os.fspath(source)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"there is no directory {name}")
    library = package("huggingface_hub")
    try:
        return Path(library.snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except (OSError, ValueError, library.errors.HfHubHTTPError) as error:
        raise MachineError(
            f"{name!r} is no directory here, and the Hugging Face Hub did not give it",
            because=first_lines(error),
            remedy=f"where there is a network: hf download {name} --local-dir DIR; then give "
            "that directory",
        ) from error


# `save_pretrained`: an engine's model as a directory that transformers loads.


def save_pretrained(
    engine: Engine,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard: int | str = "5GiB",
    original_format: bool = True,
) -> list[Path]:
    """Write a model that transformers' `from_pretrained` loads: configs, safetensors and tokenizer.

    One tensor at a time is in RAM, two if tensors are split. Tied weights are written once. All
    files appear at once when they are complete. If the model has adapters of peft, only these are
    written, as by peft.

    Args:
        engine: Engine over a model of transformers or peft.
        directory: Where to write; created if missing.
        tokenizer: Any object with a `save_pretrained`.
        dtype: As in `Engine.save_weights`.
        max_shard: Largest weight file, except for larger tensors: bytes or a text such as
            ``"5GiB"``.
        original_format: Write the names and shapes of published files: experts one by one, for
            example, if the model fuses them.

    Returns:
        Paths of the weight files.

    Raises:
        ConfigError: The model is not of transformers or peft.
        DoesNotFitError: The disk is full.
        MachineError: The directory cannot be written. Training may continue after any error, and
            older files are unchanged.
    """
    module: Any = engine.module
    target = Path(directory).expanduser()
    state = Engine.state_dict(engine)
    ranks = engine.ranks
    if hasattr(module, "peft_config"):
        read_by_first(ranks, state, lambda values: save_adapters(module, target, values, tokenizer))
        return sorted(target.glob("*.safetensors"))
    _check(module)
    outgoing = as_saved(
        module, state.outgoing(dtype, partial(name_of_tied, module)), original_format
    )
    write = partial(write_model, module, outgoing, target, tokenizer, parse_size(max_shard))
    try:
        return written_by_first(ranks, outgoing, write)
    finally:
        state.flush()  # nothing was edited: only forgets what is cached


def save_adapters(
    module: Any, target: Path, values: Mapping[str, Tensor], tokenizer: Any = None
) -> None:
    """Write the adapters of a peft model as its own `save_pretrained` does.

    Args:
        module: The peft model; its own tensors are not read.
        target: Directory to write to; files appear when all are complete.
        values: Values by the names of `module.state_dict()`, of which the adapters' are read.
        tokenizer: Anything with a `save_pretrained`.
    """
    with saving(target) as folder:
        with suppress(FileNotFoundError):  # peft writes into the one that is there
            shutil.copyfile(target / "README.md", folder / "README.md")
        module.save_pretrained(os.fspath(folder), state_dict=values)
        _save_tokenizer(tokenizer, folder)


def write_model(
    module: Any,
    tensors: Sequence[Outgoing],
    target: Path,
    tokenizer: Any,
    max_shard_bytes: int,
) -> list[Path]:
    """Write a transformers model as its own `save_pretrained` does, and return the weight files.

    Args:
        module: The model, of which only the configurations are used.
        tensors: What `as_saved` returns.
        target: Directory to write to; files appear when all are complete.
        tokenizer: Anything with a `save_pretrained`, or None.
        max_shard_bytes: Largest weight file, except for larger tensors.
    """

    def save_others(folder: Path) -> None:
        _save_configs(module, folder, next((t.dtype for t in tensors), torch.float32))
        _save_tokenizer(tokenizer, folder)

    return write_shards(target, tensors, max_shard_bytes, beside=save_others)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(os.fspath(folder))


def _check(module: Any) -> None:
    if not isinstance(module, transformers().PreTrainedModel):
        raise ConfigError(
            f"save_pretrained takes models of transformers and peft, not {type(module).__name__}",
            remedy="engine.save_weights(directory)",
        )
    if getattr(module, "hf_quantizer", None) is not None:
        raise ConfigError(
            "a quantised model cannot be saved by save_pretrained",
            remedy="engine.save_weights(directory), or save its adapters",
        )


def name_of_tied(module: Any, names: tuple[str, ...]) -> str:
    """Return the name, of several of one tensor, under which transformers saves it."""
    tied = set(module.all_tied_weights_keys)
    return next((name for name in names if name not in tied), names[0])


def as_saved(
    module: Any, tensors: Iterable[Outgoing], original_format: bool = True
) -> list[Outgoing]:
    """Return the tensors that transformers saves of a model.

    Args:
        module: The model, of which only rules for names are used.
        tensors: Its tensors, those of one memory once, by `name_of_tied`.
        original_format: Undo what transformers renames, fuses and splits when it loads.
    """
    ignored = set(module._keys_to_ignore_on_save or ())
    last = _LastRead()
    given: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name not in ignored:
            read = partial(last.read, tensor.name, tensor.read)
            given[tensor.name] = LazyTensor(tensor.shape, tensor.dtype, read)
    if original_format:
        conversions = importlib.import_module("transformers.core_model_loading")
        given = conversions.revert_weight_conversion(module, given)
    outgoing = []
    for name, value in given.items():
        assert isinstance(value, LazyTensor)
        outgoing.append(Outgoing(name, tuple(value.shape), value.dtype, value.value))
    return outgoing


def _save_configs(module: Any, target: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(module.config)
    config.dtype = dtype
    config.architectures = [type(module).__name__]
    config.save_pretrained(os.fspath(target))
    if module.can_generate():
        module.generation_config.save_pretrained(os.fspath(target))


class _LastRead:
    """Keeps the tensor read last: of one that is split, the parts are written one by one."""

    def __init__(self) -> None:
        self._name = ""
        self._value = torch.empty(0)

    def read(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return the values; those of another name are released first."""
        if name != self._name:
            self._name, self._value = "", torch.empty(0)
            self._value = read()
            self._name = name
        return self._value


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


# `from_pretrained` and `from_config`: from a Hugging Face model to an engine.


Prepare = Callable[[Any], nn.Module | None]


def from_pretrained(
    source: str | os.PathLike[str],
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_config: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    revision: str | None = None,
    prepare: Prepare | None = None,
    **arguments: Any,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Load a pretrained transformers model and make an engine for it.

    Weights are read from the files one tensor at a time, directly to their tiers. RAM holds one
    tensor; of fused ones (experts) also the tensors that they are made of. The module is in eval
    mode, as in transformers: call `engine.train()`.

    Args:
        source: A directory with a config.json and safetensors, or a Hub id.
        config: Configuration of the engine, as for `initialize`.
        model_class: A class of transformers or its name, such as
            ``"AutoModelForSequenceClassification"``. Default: the class that was saved.
        model_config: A transformers config that replaces the config.json.
        model_kwargs: Arguments of the model's own `from_pretrained`, such as `attn_implementation`.
        revision: Revision of a Hub repository.
        prepare: Called with the model before the engine is made, for freezing or adapters: ``lambda
            model: peft.get_peft_model(model, peft_config)``. May return another module.
        **arguments: Other arguments of `initialize`.

    Returns:
        ``(engine, optimizer, loader, scheduler)``, as `initialize`.

    Raises:
        ConfigError: Files, model or configuration do not fit together.
        MachineError: The Hub does not provide the files.
    """
    more = {"model_config": model_config, "revision": revision}
    build = partial(load_model, source, model_class=model_class, model_kwargs=model_kwargs, **more)
    return _initialize(build, config, prepare, arguments)


def from_config(
    source: Any,
    config: AnyConfig = None,
    *,
    model_class: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    prepare: Prepare | None = None,
    **arguments: Any,
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    """Make an engine for a transformers model with random weights, which are never all in RAM.

    The values are those of an ordinary build with the seed of the configuration, bit for bit.

    Args:
        source: A transformers config, a mapping like a config.json, or a directory or Hub id with
            one.
        config: Configuration of the engine, as for `initialize`.
        model_class: A class of transformers or its name. Default: that of the config.
        model_kwargs: Arguments of the model's own `from_config`.
        prepare: Called with the model before the engine is made; may return another module.
        **arguments: Other arguments of `initialize`.

    Returns:
        ``(engine, optimizer, loader, scheduler)``, as `initialize`.
    """
    build = partial(build_model, source, model_class=model_class, model_kwargs=model_kwargs)
    return _initialize(build, config, prepare, arguments)


def _initialize(
    build: Callable[..., nn.Module],
    config: AnyConfig,
    prepare: Prepare | None,
    arguments: dict[str, Any],
) -> tuple[Engine, OffloadedOptimizer, Any, Any]:
    if prepare is not None and not callable(prepare):  # before anything is read or built
        raise ConfigError(
            f"prepare is {prepare!r}, which cannot be called",
            remedy="prepare=lambda model: peft.get_peft_model(model, peft_config), say",
        )
    # What `initialize` would be told; the arguments that told it are not passed on.
    ways = [arguments.pop(name, None) for name in ("config_params", "args")]
    names = ("batch_size", "optimizer", "lr_scheduler", "model_parameters")
    given: dict[str, Any] = {name: arguments.get(name) for name in names}
    arguments["ranks"] = ranks = arguments.get("ranks") or find_ranks()
    with ExitStack() as undo:
        undo.callback(ranks.close)
        with ranks.collective_section("builds the model"):
            settings = read_settings(config, *ways, **given | {"ranks": ranks.count})
            model = build(config=settings.config)
            made = prepare(model) if prepare is not None else None
            settings = replace(settings, config=choose_logits(model, settings.config))
        undo.pop_all()
    return initialize(model if made is None else made, settings, **arguments)


def choose_logits(model: nn.Module, config: Config) -> Config:
    """The configuration of an engine over a model, with logits sliced in causal language models."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    causal = set(names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    kinds = (kind for module in model.modules() for kind in type(module).__mro__)  # or around one
    return config.with_chunked_logits() if any(k.__name__ in causal for k in kinds) else config
