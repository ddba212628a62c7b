"""Models of saved state: their architecture, tokenizer, and values, read one at a time.

A checkpoint holds tensors by name. The transformers model and the tokenizer that they belong to are
described by the configuration of the run that saved it, or by the config.json of a directory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.manifest import MANIFEST_NAME
from infinity.checkpoint.reader import StateReader
from infinity.config.schema import Config
from infinity.errors import ConfigError, InfinityError, listed
from infinity.integrations.huggingface.build import (
    fill_model,
    load_model,
    read_config,
    set_generation_config,
    without_quantization,
)
from infinity.integrations.huggingface.hub import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    find_directory,
)
from infinity.integrations.huggingface.meta import build_meta_model
from infinity.integrations.huggingface.packages import package
from infinity.integrations.huggingface.save import (
    save_adapters,
    tensors_to_save,
    tied_weight_name,
    write_model,
)
from infinity.model.lazy_tensor import LazyTensor
from infinity.model.weight_directory import holds_weights
from infinity.model.weight_files import TensorToWrite
from infinity.optim.moments import COMPUTE_DTYPES
from infinity.train.adapters import adapted
from infinity.train.directory import run_record
from infinity.train.preparation import CAUSAL, read_facts, source_of, tokenizer_of
from infinity.train.settings import AdapterSection, RunConfig, load_run_config
from infinity.train.texts import TOKENIZER_FILES, Tokenizer, find_tokenizer

CONFIGURATION = "config.yaml"  # in the run directory
_ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_BASE_LAYER = "base_layer"


@dataclass(frozen=True)
class SavedModel:
    """A transformers model without values.

    Attributes:
        name: Path or repository id, for messages.
        base: The model on the meta device, without adapters.
        tokenizer: None if there is none.
        run: Configuration of the run that trained it, if one did.
        is_chat: Whether it was trained on conversations; None if that is not known.
    """

    name: str
    base: Any
    tokenizer: Tokenizer | None
    run: RunConfig | None = None
    is_chat: bool | None = None

    @property
    def adapter(self) -> AdapterSection | None:
        """Adapters that were trained over `base`."""
        return None if self.run is None else self.run.adapter

    @cached_property
    def module(self) -> Any:
        """The model on the meta device as it was trained: with its adapters."""
        if self.adapter is None:
            return self.base
        with torch.device("meta"):
            return adapted(copy.deepcopy(self.base), self.adapter)


def describe(source: str | Path) -> SavedModel:
    """Describe the model of a run, or of a directory or Hub id with a config.json.

    Raises:
        ConfigError: It is neither, or transformers has no such model.
        MachineError: A file cannot be fetched from the Hub.
    """
    path = Path(source).expanduser()
    record = run_record(path)
    if record is not None:
        run = load_run_config(path / CONFIGURATION)
        tokenizer = tokenizer_of(run, required=False)
        config = read_facts(run, tokenizer).config
        base: Any = build_meta_model(without_quantization(config), CAUSAL)
        if (pretrained := source_of(run)) is not None:
            files = (CONFIG_NAME, GENERATION_CONFIG_NAME)
            set_generation_config(base, find_directory(pretrained, wanted=files))
            base.config.name_or_path = pretrained
        is_chat = "data.packing" in record.get("decides", {})
        return SavedModel(str(path), base, tokenizer, run, is_chat)
    if (adapted_base := _base_of_adapters(path)) is not None:
        base_model = describe(adapted_base)
        tokenizer = _tokenizer_in(path) or base_model.tokenizer
        return replace(base_model, name=str(source), tokenizer=tokenizer)
    directory = find_directory(
        source, wanted=(CONFIG_NAME, GENERATION_CONFIG_NAME, *TOKENIZER_FILES)
    )
    if not (directory / CONFIG_NAME).exists():
        raise ConfigError(
            f"{source} is no model: it has neither the {CONFIG_NAME} of transformers nor the "
            f"{CONFIGURATION} of a run",
            remedy="--model DIR names one that has",
        )
    # Saved state is not quantized, even if the config is that of a quantized model.
    base = build_meta_model(without_quantization(read_config(directory)))
    set_generation_config(base, directory)
    return SavedModel(str(source), base, _tokenizer_in(directory))


def holds_model(directory: Path) -> bool:
    """Return True for a directory of weights or adapters as `save_pretrained` writes it.

    A checkpoint also has files of weights, but is not one.
    """
    is_saved = holds_weights(directory) or (directory / _ADAPTER_CONFIG).is_file()
    return is_saved and not (directory / MANIFEST_NAME).exists()


def load_directory(directory: Path, config: Config) -> nn.Module:
    """Return the frozen model of a directory of weights or adapters, in eval mode.

    Raises as `infinity.huggingface.load_model`.
    """
    base = _base_of_adapters(directory)
    model = load_model(directory if base is None else base, config)
    if base is not None:
        model = package("peft").PeftModel.from_pretrained(model, directory)
    return model.requires_grad_(False).eval()


def _base_of_adapters(directory: Path) -> str | None:
    """Return path or Hub id of the base of adapters in a directory; None without adapters."""
    file = directory / _ADAPTER_CONFIG
    if not file.is_file() or (directory / CONFIG_NAME).exists():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} names no base model: {error!r}") from error
    return str(base)


def _tokenizer_in(directory: Path) -> Tokenizer | None:
    try:
        return find_tokenizer(str(directory))
    except InfinityError:
        return None


def find_description(directory: Path, state: Path) -> Path | None:
    """Return the directory to pass to `describe` for saved state, or None.

    Args:
        directory: Directory given by the user.
        state: Checkpoint or durable run found in it. Both are searched, and the two parents of
            each: the directories of checkpoints and of the run.
    """
    for start in (directory.expanduser().absolute(), state):
        for path in (start, *start.parents[:2]):
            if run_record(path) is not None or _is_transformers_config(path / CONFIG_NAME):
                return path
    return None


def _is_transformers_config(file: Path) -> bool:
    """Return True if a config.json is that of a transformers model."""
    try:
        return "model_type" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


# --- values --------------------------------------------------------------------------------------


def export_model(
    model: SavedModel,
    reader: StateReader,
    target: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    merge: bool,
) -> list[Path]:
    """Write saved state as transformers' or peft's `save_pretrained` does.

    One tensor at a time is in memory; when merging adapters, one layer.

    Args:
        model: Model of the state.
        reader: The state.
        target: Directory to write to; files appear when all are complete.
        dtype: Dtype of the weights; None for that of training, float32 for the exact masters.
        max_shard_bytes: Maximum size of a weight file; a larger tensor gets a separate file.
        merge: Add the adapters to the weights of the base and write these.

    Returns:
        The weight files.

    Raises:
        ConfigError: The state belongs to another model; there are no adapters to merge, or merging
            them would change a weight that is used elsewhere.
        CheckpointError: The state is damaged.
        DoesNotFitError, MachineError: The files cannot be written.
    """
    _check_names(model, reader)
    if merge and model.adapter is None:
        raise ConfigError(f"the model of {model.name} has no adapters", remedy="leave out --merge")
    if model.adapter is not None and not merge:
        save_adapters(model.module, target, _Values(reader, dtype), model.tokenizer)
        return sorted(target.glob("*.safetensors"))
    tensors = tensors_to_save(model.base, _base_tensors(model, reader, dtype, merge=merge))
    return write_model(model.base, tensors, target, model.tokenizer, max_shard_bytes)


def load_values(model: SavedModel, reader: StateReader, precision: str) -> nn.Module:
    """Return the model in eval mode, frozen, with lazy tensors for `infinity.initialize`.

    Args:
        model: Model of the state.
        reader: The state; must stay open until `initialize` has returned.
        precision: Precision of the engine: bf16, fp16 or fp32.
    """
    _check_names(model, reader)
    config, run = model.base.config, model.run
    attention = None if run is None else run.model.attention
    tensors = tensors_to_save(model.base, _base_tensors(model, reader, None, merge=False))
    loaded = fill_model(
        type(model.base),
        config,
        {t.name: LazyTensor(t.shape, t.dtype, t.read) for t in tensors},
        precision,
        {} if attention is None else {"attn_implementation": attention},
        str(reader.directory),
    )
    loaded.generation_config = model.base.generation_config
    if model.adapter is not None:
        loaded = adapted(loaded, model.adapter)
        with torch.no_grad():
            for name, parameter in loaded.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(reader.master(name))
    frozen: nn.Module = loaded.requires_grad_(False).eval()
    return frozen


def engine_config(model: SavedModel, **changes: Any) -> Config:
    """Return the configuration of an engine that uses the model without training it.

    Args:
        model: Model whose run, if any, determines placement and format of the weights.
        **changes: Keys of the configuration and values that take precedence.
    """
    keys: dict[str, Any]
    stored = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}.get(model.base.config.dtype)
    if model.run is None:
        keys = {"precision": stored or "bf16"}
    else:
        engine = model.run.engine_for("auto")
        included = {"nvme_path", "precision", "frozen", "budget", "io", "cpu", "prefetch_units"}
        keys = engine.model_dump(exclude_unset=True, include=included)
        keys["placement"] = {"weights": engine.placement.weights}
    return Config.model_validate(keys | changes)


def _tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return a mapping of each parameter name to all names of that parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


def _check_names(model: SavedModel, reader: StateReader) -> None:
    """Raise `ConfigError` if the state belongs to another model."""
    stored_shapes = {record.name: record.shape for record in reader.manifest.parameters}
    tied = _tied_names(model.module)
    problems = [f"{name} is not one of the model's" for name in stored_shapes if name not in tied]
    for name, parameter in model.module.named_parameters():
        shape = tuple(parameter.shape)
        stored_names = [alias for alias in tied[name] if alias in stored_shapes]
        if not stored_names:
            problems.append(f"it has no {name}")
        elif len(stored_names) > 1:
            problems.append(f"{' and '.join(stored_names)} are one tensor in the model")
        elif stored_shapes[stored_names[0]] != shape:
            problems.append(
                f"{stored_names[0]} has shape {stored_shapes[stored_names[0]]}, the model's {shape}"
            )
    if problems:
        raise ConfigError(
            f"{reader.directory} holds another model than {model.name} describes: "
            + listed(problems, 4, "; "),
            remedy="--model DIR with the config.json of the model that was trained, or "
            "--model none: weights alone, under the names of training",
        )


class _Values(Mapping[str, Tensor]):
    """Parameters of saved state by name, each read on access."""

    def __init__(self, reader: StateReader, dtype: torch.dtype | None) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.outgoing(dtype)}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].read()

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _base_tensors(
    model: SavedModel, reader: StateReader, dtype: torch.dtype | None, *, merge: bool
) -> list[TensorToWrite]:
    """Return the tensors of the base under its names; with `merge`, add the adapters."""
    tied = _tied_names(model.module)
    layers: dict[str, Any] = {}  # of peft by path; those that adapt parameters may be nested
    if model.adapter is not None:
        layer_type = package("peft.tuners.tuners_utils").BaseTunerLayer
        modules = model.module.get_base_model().named_modules()
        layers = {path: module for path, module in modules if isinstance(module, layer_type)}
    adapted_by = {}  # paths of layers by the base's name of the parameter that they adapt
    for path, layer in layers.items():
        parameter_name = getattr(layer, "parameter_name", "weight")
        adapted_by[f"{_without_base_layers(path.split('.'))}.{parameter_name}"] = path
    tensors = []
    for tensor in reader.outgoing(dtype):
        names = tied.get(tensor.name, (tensor.name,))  # a buffer has one name
        base_names = [n for name in names if (n := _base_name(name, layers)) is not None]
        if not base_names:
            continue
        read, changed = tensor.read, [n for n in base_names if n in adapted_by]
        if merge and changed:
            if len(base_names) > 1:
                raise ConfigError(
                    f"the adapters of {changed[0].removesuffix('.weight')} cannot be merged",
                    because=f"{' and '.join(base_names)} are one tensor, and all would change",
                    remedy="leave out --merge: adapters are then written separately",
                )
            path = adapted_by[changed[0]]
            read = partial(_merged_weight, layers[path], path, tensor.dtype, reader)
        tensors.append(
            replace(tensor, name=tied_weight_name(model.base, tuple(base_names)), read=read)
        )
    return tensors


def _base_name(name: str, layers: Mapping[str, Any]) -> str | None:
    """Return the base's name of a tensor of peft's model; None for a tensor of adapters."""
    if not layers:
        return name
    parts = name.removeprefix(_PEFT_PREFIX).split(".")
    for count in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:count]) in layers:  # the innermost peft layer around the tensor
            return _without_base_layers(parts) if parts[count] == _BASE_LAYER else None
    return ".".join(parts)


def _without_base_layers(parts: Sequence[str]) -> str:
    """Return a name without peft's `base_layer` components."""
    return ".".join(part for part in parts if part != _BASE_LAYER)


def _merged_weight(layer: Any, path: str, dtype: torch.dtype, reader: StateReader) -> Tensor:
    """Return the weight of a layer with its adapters, merged in fp32 by peft."""
    materialized = copy.deepcopy(layer).to_empty(device="cpu").float()
    parameter_name = getattr(materialized, "parameter_name", "weight")
    with torch.no_grad():
        for name, parameter in materialized.named_parameters():
            *parents, last = name.split(".")
            is_adapter = _BASE_LAYER not in parents
            if is_adapter or (last == parameter_name and {*parents} == {_BASE_LAYER}):
                parameter.copy_(reader.master(f"{_PEFT_PREFIX}{path}.{name}"))
        materialized.merge()
    weight: Tensor = getattr(materialized.get_base_layer(), parameter_name).detach().to(dtype)
    return weight
