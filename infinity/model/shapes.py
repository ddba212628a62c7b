"""A model's parameters without the model: its outline, made from a config.

`infinity plan` cuts and lays out what is built here exactly as it would the real model, so names
and shapes are those of the Hugging Face implementations. Nothing is allocated and nothing can be
run. Known families are built by hand, so that no package is needed, torch included; for any other
`model_type` transformers is asked, if it is installed, and makes modules on the meta device.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from infinity.errors import ConfigError, first_lines

if TYPE_CHECKING:
    from torch import nn


# The outline of a model: modules and parameters by name and shape, without torch.
#
# Whoever looks at a module to plan for it (`cut.Cutter`, `target.target_of`) asks no more than
# what stands here, and gets it from a `torch.nn.Module` in the same words. Importing torch takes
# longer than most plans.


_MOST_BYTES = 2**63 - 1  # torch counts bytes in 64 bits


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """A parameter that is only known by its sizes, in fp32 and trained."""

    shape: tuple[int, ...]

    dtype = "float32"
    is_meta = True
    requires_grad = True

    def __post_init__(self) -> None:
        if self.nbytes > _MOST_BYTES:
            raise OverflowError(f"a parameter of {' x '.join(map(str, self.shape))} values")

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """How many sizes it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return 4 * self.numel()


class Outline:
    """A module: children and parameters by name.

    Walks in the order of `torch.nn.Module`, and like it names everything once, where it is first.
    """

    is_table = False  # as `torch.nn.Embedding`

    def __init__(self) -> None:
        self.own: dict[str, Shape] = {}
        self.below: dict[str, Outline] = {}

    def at(self, path: str) -> Outline:
        """The module of a dotted name; it is made, with those that it is in, if it is not there."""
        name, _, rest = path.partition(".")
        child = self.below.setdefault(name, Outline())
        return child.at(rest) if rest else child

    def named_children(self) -> Iterator[tuple[str, Outline]]:
        """Direct children."""
        seen: set[int] = set()
        for name, child in self.below.items():
            if id(child) not in seen:
                seen.add(id(child))
                yield name, child

    def children(self) -> Iterator[Outline]:
        """Direct children."""
        return (child for _, child in self.named_children())

    def named_modules(self) -> Iterator[tuple[str, Outline]]:
        """The module itself and all below it, each before what is in it."""
        seen: set[int] = set()
        waiting = [("", self)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            below = [(f"{name}.{key}" if name else key, m) for key, m in module.below.items()]
            waiting.extend(reversed(below))

    def modules(self) -> Iterator[Outline]:
        """The module itself and all below it."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Shape]]:
        """Parameters, of children too unless told otherwise."""
        seen: set[int] = set()
        for prefix, module in self.named_modules() if recurse else [("", self)]:
            for name, parameter in module.own.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def parameters(self, *, recurse: bool = True) -> Iterator[Shape]:
        """Parameters, of children too unless told otherwise."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))


def is_lookup(module: nn.Module | Outline) -> bool:
    """Whether a module is an embedding."""
    if isinstance(module, Outline):
        return module.is_table
    from torch import nn  # whoever has a module has imported torch already

    return isinstance(module, nn.Embedding)


def is_list(module: nn.Module | Outline) -> bool:
    """Whether a module is a list or a dict of others."""
    if isinstance(module, Outline):
        return bool(module.below) and all(name.isdigit() for name in module.below)
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict)


# Shapes people ask for by size; published configs (Llama 2, Llama 3 for 8b, GPT-3 for 1.3b).
_LLAMA = {"model_type": "llama", "vocab_size": 32000}
NAMED: dict[str, dict[str, Any]] = {
    "1.3b": {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16,
             "n_positions": 2048, "vocab_size": 50257},
    "7b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32},
    "8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "13b": {**_LLAMA, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
            "num_attention_heads": 40},
    "70b": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8},
}  # fmt: skip
_GIVE = f"give one of {', '.join(NAMED)}, a config.json, or a directory that holds one"
MAX_CONFIG_BYTES = 16 << 20  # a config.json is a few KiB; anything else is a mistake


@dataclass(frozen=True)
class _Decoder:
    """What tells the Llama-like families apart."""

    qkv_bias: bool = False
    qk_norm: bool = False
    fused: bool = False  # one matrix for q, k, v and one for gate and up (Phi-3)
    extra_norms: bool = False  # norms around the MLP too (Gemma 2)
    tied: bool = False  # the head shares the embedding unless the config says otherwise


_DECODERS = {
    "llama": _Decoder(),
    "mistral": _Decoder(),
    "mixtral": _Decoder(),
    "qwen2": _Decoder(qkv_bias=True),
    "qwen3": _Decoder(qk_norm=True),
    "phi3": _Decoder(fused=True),
    "gemma": _Decoder(tied=True),
    "gemma2": _Decoder(extra_norms=True, tied=True),
}
FAMILIES = tuple(sorted([*_DECODERS, "gpt2", "gpt_neox"]))


def read_model_config(path: Path) -> dict[str, Any]:
    """The Hugging Face config in `path`, a JSON file or a directory with a config.json.

    Raises `ConfigError` for what cannot be read or is no such config.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _json_of(file)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{file} has no model_type", because="a Hugging Face config.json names its family"
        )
    return config


def _json_of(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size} bytes: not a model's config.json")
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", remedy=_GIVE) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} is not JSON: it is nested too deeply") from error


def build_skeleton(config: Mapping[str, Any]) -> Outline | nn.Module:
    """The outline of `config`'s model, or modules on meta where transformers had to be asked.

    Raises `ConfigError` for a family nobody here knows and for missing or senseless numbers, and
    `OverflowError` or `RuntimeError` for sizes that no machine can count.
    """
    family = config.get("model_type")
    if family == "gpt2":
        return _gpt2(config)
    if family == "gpt_neox":
        return _gpt_neox(config)
    if family in _DECODERS:
        return _decoder(config, _DECODERS[family])
    from infinity.model.config_shapes import from_transformers  # it imports torch

    return from_transformers(config, FAMILIES)


_Sizes: TypeAlias = tuple[int, ...]
_Parameters: TypeAlias = Iterator[tuple[str, _Sizes]]


def _outline(
    tables: Mapping[str, _Sizes], parameters: Iterable[tuple[str, _Sizes]], head: str, *, tied: bool
) -> Outline:
    """A model of embeddings, what stands behind them, and the head, which may share the first."""
    root = Outline()
    for name, sizes in tables.items():
        table = root.at(name)
        table.own["weight"], table.is_table = Shape(sizes), True
    for name, sizes in parameters:
        module, _, key = name.rpartition(".")
        root.at(module).own[key] = Shape(sizes)
    first = root.at(next(iter(tables))).own["weight"]
    root.at(head).own["weight"] = first if tied else Shape(first.shape)
    return root


def _with_bias(name: str, *sizes: int, outputs: int, bias: bool = True) -> _Parameters:
    """A weight, and a bias for its outputs."""
    yield f"{name}.weight", sizes
    if bias:
        yield f"{name}.bias", (outputs,)


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> _Parameters:
    """As `torch.nn.Linear`."""
    return _with_bias(name, outputs, inputs, outputs=outputs, bias=bias)


def _matrix(name: str, inputs: int, outputs: int) -> _Parameters:
    """GPT-2's Conv1D: a linear layer stored the other way round."""
    return _with_bias(name, inputs, outputs, outputs=outputs)


def _norm(name: str, width: int) -> _Parameters:
    """As `torch.nn.LayerNorm`."""
    return _with_bias(name, width, outputs=width)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ConfigError(
            f"the model's config has {name}={value!r}", remedy="a positive integer below 2^31"
        )
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    return default if value is None else bool(value)


def _decoder(config: Mapping[str, Any], kind: _Decoder) -> Outline:
    hidden, vocabulary = _count(config, "hidden_size"), _count(config, "vocab_size")

    def parameters() -> _Parameters:
        for index in range(_count(config, "num_hidden_layers")):
            yield from _decoder_layer(f"model.layers.{index}", config, kind)
        yield "model.norm.weight", (hidden,)

    tied = _flag(config, "tie_word_embeddings", kind.tied)
    tables = {"model.embed_tokens": (vocabulary, hidden)}
    return _outline(tables, parameters(), "lm_head", tied=tied)


def _decoder_layer(at: str, config: Mapping[str, Any], kind: _Decoder) -> _Parameters:
    hidden = _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    groups = _count(config, "num_key_value_heads", heads)
    if heads > hidden and config.get("head_dim") is None:
        raise ConfigError(
            f"the model's config has num_attention_heads={heads} and hidden_size={hidden}",
            because="each head has a part of hidden_size, unless head_dim is given",
        )
    width = _count(config, "head_dim", hidden // heads)
    queries, keys = heads * width, groups * width
    bias = _flag(config, "attention_bias", kind.qkv_bias)
    if kind.fused:
        yield from _linear(f"{at}.self_attn.qkv_proj", hidden, queries + 2 * keys, bias=False)
    else:
        for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(f"{at}.self_attn.{name}", hidden, outputs, bias=bias)
    output_bias = _flag(config, "attention_bias", False) and not kind.qkv_bias
    yield from _linear(f"{at}.self_attn.o_proj", queries, hidden, bias=output_bias)
    if kind.qk_norm:
        yield f"{at}.self_attn.q_norm.weight", (width,)
        yield f"{at}.self_attn.k_norm.weight", (width,)
    if config.get("model_type") == "mixtral":
        yield from _experts(f"{at}.block_sparse_moe", config)
    else:
        yield from _gated(f"{at}.mlp", config, kind)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind.extra_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        yield f"{at}.{name}.weight", (hidden,)


def _gated(at: str, config: Mapping[str, Any], kind: _Decoder) -> _Parameters:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    bias = _flag(config, "mlp_bias", False)
    if kind.fused:
        yield from _linear(f"{at}.gate_up_proj", hidden, 2 * inner, bias=False)
    else:
        yield from _linear(f"{at}.gate_proj", hidden, inner, bias=bias)
        yield from _linear(f"{at}.up_proj", hidden, inner, bias=bias)
    yield from _linear(f"{at}.down_proj", inner, hidden, bias=bias)


def _experts(at: str, config: Mapping[str, Any]) -> _Parameters:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    num_experts = _count(config, "num_local_experts")
    yield f"{at}.gate.weight", (num_experts, hidden)
    for index in range(num_experts):
        yield f"{at}.experts.{index}.w1.weight", (inner, hidden)
        yield f"{at}.experts.{index}.w2.weight", (hidden, inner)
        yield f"{at}.experts.{index}.w3.weight", (inner, hidden)


def _gpt2(config: Mapping[str, Any]) -> Outline:
    hidden, vocabulary = _count(config, "n_embd"), _count(config, "vocab_size")
    inner = _count(config, "n_inner", 4 * hidden)
    positions = _count(config, "n_positions", 1024)

    def parameters() -> _Parameters:
        for index in range(_count(config, "n_layer")):
            at = f"transformer.h.{index}"
            yield from _norm(f"{at}.ln_1", hidden)
            yield from _matrix(f"{at}.attn.c_attn", hidden, 3 * hidden)
            yield from _matrix(f"{at}.attn.c_proj", hidden, hidden)
            yield from _norm(f"{at}.ln_2", hidden)
            yield from _matrix(f"{at}.mlp.c_fc", hidden, inner)
            yield from _matrix(f"{at}.mlp.c_proj", inner, hidden)
        yield from _norm("transformer.ln_f", hidden)

    tied = _flag(config, "tie_word_embeddings", True)
    tables = {"transformer.wte": (vocabulary, hidden), "transformer.wpe": (positions, hidden)}
    return _outline(tables, parameters(), "lm_head", tied=tied)


def _gpt_neox(config: Mapping[str, Any]) -> Outline:
    hidden, vocabulary = _count(config, "hidden_size"), _count(config, "vocab_size")
    inner = _count(config, "intermediate_size", 4 * hidden)

    def parameters() -> _Parameters:
        for index in range(_count(config, "num_hidden_layers")):
            at = f"gpt_neox.layers.{index}"
            yield from _norm(f"{at}.input_layernorm", hidden)
            yield from _norm(f"{at}.post_attention_layernorm", hidden)
            yield from _linear(f"{at}.attention.query_key_value", hidden, 3 * hidden)
            yield from _linear(f"{at}.attention.dense", hidden, hidden)
            yield from _linear(f"{at}.mlp.dense_h_to_4h", hidden, inner)
            yield from _linear(f"{at}.mlp.dense_4h_to_h", inner, hidden)
        yield from _norm("gpt_neox.final_layer_norm", hidden)

    tied = _flag(config, "tie_word_embeddings", False)
    tables = {"gpt_neox.embed_in": (vocabulary, hidden)}
    return _outline(tables, parameters(), "embed_out", tied=tied)


# Which model is meant: a size people know, a Hugging Face config.json, or a directory with one.
#
# What comes back is an outline, or a module on meta, and what only modules know of it: which
# parameters are looked up, which one makes the logits, and which see only some of the tokens.


# Far above every published model; more is a slip of the pen, and takes minutes to build.
MAX_LAYERS = 4096
MAX_MODULES = 65536
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
# A file with one of these is a model's, even if it does not say of which family.
_MODEL_KEYS = ("model_type", "architectures", "hidden_size", "n_embd", "num_hidden_layers")


@dataclass(frozen=True)
class Target:
    """A model to plan for. Parameters are known by their indices in module order.

    `lookups` are only indexed into (embeddings that are not tied to a head), `heads` make the
    logits, `shares` hold the part of all tokens that an expert's parameters see, where not all.
    """

    name: str
    family: str
    module: nn.Module | Outline
    lookups: frozenset[int]
    heads: frozenset[int]
    shares: Mapping[int, float]


def names_a_model(text: str) -> bool:
    """Whether `text` means a model, rather than a configuration of a run; looks into files.

    Raises `ConfigError` if it is neither a name nor a file.
    """
    path = Path(text).expanduser()
    if text.lower() in NAMED or path.is_dir():
        return True
    if not path.is_file():
        raise _nowhere(text, path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return False
    raw = _json_of(path) if path.stat().st_size <= MAX_CONFIG_BYTES else {}
    return not isinstance(raw, dict) or any(key in raw for key in _MODEL_KEYS)


def find_model(text: str) -> Target:
    """The model that `text` names, without values.

    Raises `ConfigError` for what is not there, is no model's config, or has senseless numbers.
    """
    config = NAMED.get(text.lower())
    if config is None:
        path = Path(text).expanduser()
        if not path.is_dir() and not path.is_file():
            raise _nowhere(text, path)
        config = read_model_config(path)
    _check_counts(config)
    try:
        module = build_skeleton(config)
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 64 bits
        raise ConfigError(
            f"{text} describes a model that cannot be: {first_lines(error)}",
            remedy="look for a zero too many among its sizes",
        ) from error
    return target_of(text, module, config)


def target_of(name: str, module: nn.Module | Outline, config: Mapping[str, Any]) -> Target:
    """What the plan must know of a module and of the config it was built from."""
    names = [n for n, _ in module.named_parameters()]
    index = {id(p): i for i, p in enumerate(module.parameters())}
    owners: dict[int, list[nn.Module | Outline]] = {i: [] for i in index.values()}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[index[id(parameter)]].append(owner)
    embedded = {i for i, o in owners.items() if any(map(is_lookup, o))}
    lookups = {i for i in embedded if all(map(is_lookup, owners[i]))}
    heads = embedded - lookups
    if not heads and lookups:  # the last matrix with a row for each token
        parameters: list[Any] = list(module.parameters())
        rows = max(parameters[i].shape[0] for i in lookups)
        same = [
            i
            for i, p in enumerate(parameters)
            if i not in lookups and p.dim() == 2 and p.shape[0] == rows
        ]
        heads = set(same[-1:])
    return Target(
        name=name,
        family=str(config.get("model_type")),
        module=module,
        lookups=frozenset(lookups),
        heads=frozenset(heads),
        shares=_shares(names, config),
    )


def _shares(names: list[str], config: Mapping[str, Any]) -> dict[int, float]:
    """Experts see the tokens that are sent to them; those that all see are called otherwise."""
    total = next((config[key] for key in _EXPERT_KEYS if _is_count(config.get(key))), 0)
    chosen = config.get("num_experts_per_tok") or 2  # Mixtral's default
    if not total or not _is_count(chosen):
        return {}
    share = min(chosen / total, 1.0)
    return {i: share for i, name in enumerate(names) if ".experts." in name}


def _check_counts(config: Mapping[str, Any]) -> None:
    """Refuse more layers, or layers times experts, than are built in seconds."""
    modules = 1
    for keys, most, what in (
        (_LAYER_KEYS, MAX_LAYERS, "layers"),
        (_EXPERT_KEYS, MAX_MODULES, "layers times experts"),
    ):
        given = {key: config[key] for key in keys if _is_count(config.get(key))}
        if not given:
            continue
        key = max(given, key=lambda name: given[name])  # others are names of the same number
        modules *= given[key]
        if modules > most:
            raise ConfigError(
                f"the model's config has {key}={given[key]}",
                because=f"more than {most} {what} take minutes",
                remedy="look for a digit too many among its numbers",
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _nowhere(text: str, path: Path) -> ConfigError:
    """Neither a name nor a place: say which it may have meant to be."""
    if path.exists():
        return ConfigError(f"{path} is neither a file nor a directory", remedy=_GIVE)
    if "/" in text or path.suffix.lower() in (".json", ".yaml", ".yml"):
        return ConfigError(f"{path} does not exist", remedy=_GIVE)
    near = difflib.get_close_matches(text.lower(), NAMED, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{text!r} is no model known by name, and no file{hint}", remedy=_GIVE)
