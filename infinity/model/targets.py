"""Models to plan for, by name, config.json or Hub id: shapes without values.

Models known by name are outlines, built without any package, torch included; all other models are
modules on the meta device, built by transformers (`integrations/huggingface/meta.py`). Both have
the names and shapes of transformers, and are partitioned and laid out as the real model is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError, did_you_mean
from infinity.model.named_models import NAMED, SIZES
from infinity.model.outline import Outline, Shape, is_embedding, is_linear

if TYPE_CHECKING:
    from torch import nn


PIECE_ELEMENTS = 4 << 20  # elements read at a time, of values that support partial reads
MAX_CONFIG_BYTES = 16 << 20  # a config.json has a few KiB, or 1 MiB with many labels
# A file with one of these keys describes a model, even without a model_type.
_MODEL_KEYS = ("model_type", "architectures", "hidden_size", "n_embd", "num_hidden_layers")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.json)(?<!\.yaml)(?<!\.yml)")
_REMEDY = (
    f"give one of {', '.join(NAMED)}, a config.json, a directory with one, or owner/name on the "
    "Hugging Face Hub"
)


def is_model_name(text: str) -> bool:
    """Return True if `text` refers to a model, False for the configuration of a run.

    Reads the file, if it is one. Raises `ConfigError` if `text` is neither a known name, a file,
    nor a possible Hub id.
    """
    path = Path(text).expanduser()
    if text.lower() in NAMED or path.is_dir():
        return True
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is neither a file nor a directory", remedy=_REMEDY)
    if not path.exists():
        if _HUB_ID.fullmatch(text):
            return True
        if "/" in text or path.suffix.lower() in (".json", ".yaml", ".yml"):
            raise ConfigError(f"{path} does not exist", remedy=_REMEDY)
        hint = did_you_mean(text.lower(), NAMED, cutoff=0.4)
        message = f"{text!r} is no model known by name, and no file; {hint}".rstrip("; ")
        raise ConfigError(message, remedy=_REMEDY)
    if path.suffix.lower() in (".yaml", ".yml"):
        return False
    raw = _load_json(path)
    return not isinstance(raw, dict) or any(key in raw for key in _MODEL_KEYS)


def read_model_config(file: Path) -> dict[str, Any]:
    """Read a Hugging Face config.json; raises `ConfigError` for other files."""
    config = _load_json(file)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{file} has no model_type", because="a Hugging Face config.json names its family"
        )
    return config


def _load_json(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size} bytes: not a model's config.json")
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", remedy=_REMEDY) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} is not JSON: it is nested too deeply") from error


def named_target(name: str, lora: int | None = None) -> Target:
    """Return a model of `SIZES` as an outline, with LoRA adapters of rank `lora` if given."""
    config = SIZES[name.lower()]
    make = _gpt2 if config["model_type"] == "gpt2" else _llama
    return target_of(name, make(config), config, lora)


def add_adapters(target: Target, rank: int) -> nn.Module | Outline:
    """Add LoRA adapters to the target's module in place, freeze the rest, and return the module.

    Every linear layer except heads gets two matrices of this rank. Sizes equal those of peft's
    "all-linear"; names differ.
    """
    module = target.module
    parameters = list[Any](module.parameters())
    heads = {id(parameters[index]) for index in target.heads}
    frozen = {id(p): replace(p, requires_grad=False) for p in parameters if isinstance(p, Shape)}
    submodules: list[nn.Module | Outline] = list(module.modules())
    for submodule in submodules:
        direct: dict[str, Any] = dict(submodule.named_parameters(recurse=False))
        if isinstance(submodule, Outline):
            submodule.direct = {name: frozen[id(shape)] for name, shape in submodule.direct.items()}
        else:
            submodule.requires_grad_(requires_grad=False)
        if not is_linear(submodule) or id(direct["weight"]) in heads:
            continue
        rows, columns = direct["weight"].shape
        for name, shape in {"lora_A": (rank, columns), "lora_B": (rows, rank)}.items():
            if isinstance(submodule, Outline):
                submodule.at(name).direct["weight"] = Shape(shape)
            else:
                from torch import nn

                submodule.add_module(name, nn.Linear(*shape[::-1], bias=False, device="meta"))
    return module


def _add_parameters(root: Outline, path: str, sizes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in sizes.items():
        module, _, key = f"{path}.{name}".rpartition(".")
        root.at(module).direct[key] = Shape(shape)


def _add_embeddings(root: Outline, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        table = root.at(name)
        table.direct["weight"] = Shape(shape)
        table.is_embedding_table = True


def _llama(config: Mapping[str, Any]) -> Outline:
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    heads = config["num_attention_heads"]
    vocab_shape = (config["vocab_size"], hidden)
    kv_hidden = hidden // heads * config.get("num_key_value_heads", heads)
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden), "self_attn.k_proj.weight": (kv_hidden, hidden),
        "self_attn.v_proj.weight": (kv_hidden, hidden), "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner), "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    root = Outline()
    _add_embeddings(root, {"model.embed_tokens": vocab_shape})
    for index in range(config["num_hidden_layers"]):
        _add_parameters(root, f"model.layers.{index}", layer)
    _add_parameters(root, "model", {"norm.weight": (hidden,)})
    _add_parameters(root, "lm_head", {"weight": vocab_shape})
    return root


def _gpt2(config: Mapping[str, Any]) -> Outline:
    hidden = config["n_embd"]
    sizes = {  # GPT-2's matrices are transposed
        "ln_1": (hidden,), "attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden),
        "ln_2": (hidden,), "mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden),
    }  # fmt: skip
    layer = {f"{name}.weight": shape for name, shape in sizes.items()}
    layer |= {f"{name}.bias": shape[-1:] for name, shape in sizes.items()}
    root = Outline()
    _add_embeddings(root, {"transformer.wte": (config["vocab_size"], hidden),
                   "transformer.wpe": (config["n_positions"], hidden)})  # fmt: skip
    for index in range(config["n_layer"]):
        _add_parameters(root, f"transformer.h.{index}", layer)
    _add_parameters(root, "transformer.ln_f", {"weight": (hidden,), "bias": (hidden,)})
    root.at("lm_head").direct["weight"] = root.at("transformer.wte").direct["weight"]
    return root


def is_expert(name: str) -> bool:
    """Return True for a parameter of experts, stacked or not."""
    return ".experts." in f".{name}"


def is_stack_of_experts(name: str, dim: int) -> bool:
    """Return True for a parameter with more than one dimension and a row for each expert.

    Such a parameter belongs directly to a module named "experts", not to a child of it.
    """
    return dim > 1 and f".{name}".split(".")[-2] == "experts"


@dataclass(frozen=True)
class Target:
    """A model to plan for. Parameters are identified by their indices in module order.

    Attributes:
        name: Name of the model.
        family: `model_type` of the config.
        module: The model, on the meta device, or its outline.
        lookups: Embeddings that are not tied to a head.
        heads: Weights that compute the logits.
        shares: Fraction of all tokens that the parameters of an expert process, if not all.
        config: Content of the model's config.json.
        from_files: The weights are read from files, in chunks.
    """

    name: str
    family: str
    module: nn.Module | Outline
    lookups: frozenset[int]
    heads: frozenset[int]
    shares: Mapping[int, float]
    config: Mapping[str, Any]
    from_files: bool = False

    def with_adapters(self, rank: int) -> Target:
        """Return a copy of the target with LoRA adapters of this rank (see `add_adapters`)."""
        target = target_of(self.name, deepcopy(self.module), self.config, rank)
        return replace(target, from_files=self.from_files)

    def max_initial_bytes(self, *, quantizes: bool) -> int:
        """Return the bytes of the largest value in RAM while the initial state is written.

        Equals `InitialValues.largest_value_bytes`. With `quantizes`, a frozen matrix is read
        completely.
        """

        def nbytes(parameter: Any) -> int:
            if not self.from_files:
                return int(parameter.nbytes)
            return piece_bytes(parameter, is_matrix=quantizes and not parameter.requires_grad)

        return max(map(nbytes, self.module.parameters()), default=0)


def piece_bytes(parameter: Any, *, is_matrix: bool) -> int:
    """Return the bytes of the largest chunk in which a parameter is read.

    With `is_matrix` that is one matrix, counted twice for a stack, where it may be concatenated
    from several tensors.
    """
    if not is_matrix:
        return 4 * min(int(parameter.numel()), PIECE_ELEMENTS)
    matrix_bytes = math.prod(parameter.shape[-2:]) * parameter.element_size()
    return int((1 + (parameter.dim() > 2)) * matrix_bytes)


def target_of(
    name: str, module: nn.Module | Outline, config: Mapping[str, Any], lora: int | None = None
) -> Target:
    """Return the target of a module and its config.

    With `lora`, adapters of that rank are added to the module first (see `add_adapters`).
    """
    if lora is not None:
        module = add_adapters(target_of(name, module, config), lora)
    names = [n for n, _ in module.named_parameters()]
    index = {id(p): i for i, p in enumerate(module.parameters())}
    owners: dict[int, list[nn.Module | Outline]] = {i: [] for i in index.values()}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[index[id(parameter)]].append(owner)
    embedded = {i for i, modules in owners.items() if any(map(is_embedding, modules))}
    lookups = {i for i in embedded if all(map(is_embedding, owners[i]))}
    heads = embedded - lookups
    if not heads and lookups:  # the head is the last matrix with a row for each token
        parameters: list[Any] = list(module.parameters())
        rows = max(parameters[i].shape[0] for i in lookups)
        candidates = [
            i
            for i, p in enumerate(parameters)
            if i not in lookups and p.dim() == 2 and p.shape[0] == rows
        ]
        heads = set(candidates[-1:])
    return Target(
        name=name,
        family=str(config.get("model_type")),
        module=module,
        lookups=frozenset(lookups),
        heads=frozenset(heads),
        shares=_token_shares(names, config),
        config=config,
    )


def _token_shares(names: list[str], config: Mapping[str, Any]) -> dict[int, float]:
    """Return the fraction of tokens for each parameter of routed experts.

    Shared experts, which process all tokens, have other names.
    """
    config = {**config, **(config.get("text_config") or {})}
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((config[key] for key in keys if _is_positive_int(config.get(key))), 0)
    per_token = config.get("num_experts_per_tok") or 2  # Mixtral's default
    if not num_experts or not _is_positive_int(per_token):
        return {}
    share = min(per_token / num_experts, 1.0)
    return {i: share for i, name in enumerate(names) if is_expert(name)}


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
