"""A model's parameters without the model: its outline, made from a config.

`infinity plan` cuts and lays out what is built here exactly as it would the real model, so names
and shapes are those of the Hugging Face implementations. Nothing is allocated and nothing can be
run. Known families are built by hand, so that no package is needed, torch included; for any other
`model_type` transformers is asked, if it is installed, and makes modules on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError
from infinity.model.outline import Lookup, Outline, OutlineList, Shape, layer_norm, linear

if TYPE_CHECKING:
    from torch import nn

# Shapes people ask for by size; published configs (Llama 2, Llama 3 for 8b, GPT-3 for 1.3b).
NAMED: dict[str, dict[str, Any]] = {
    "1.3b": {
        "model_type": "gpt2",
        "n_embd": 2048,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 2048,
        "vocab_size": 50257,
    },
    "7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "13b": {
        "model_type": "llama",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "vocab_size": 32000,
    },
    "70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}
MAX_CONFIG_BYTES = 16 << 20  # a config.json is a few KiB; anything else is a mistake


@dataclass(frozen=True)
class _Decoder:
    """What tells the Llama-like families apart."""

    qkv_bias: bool = False
    output_bias: bool = False
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
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size} bytes: not a model's config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}",
            remedy=f"give one of {', '.join(NAMED)}, a config.json, or a directory that holds one",
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{file} has no model_type", because="a Hugging Face config.json names its family"
        )
    return config


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
    from infinity.model.foreign import from_transformers  # it imports torch

    return from_transformers(config, FAMILIES)


def _scale(width: int) -> Outline:
    """One weight vector: an RMS norm."""
    return Outline(weight=Shape((width,)))


def _matrix(inputs: int, outputs: int) -> Outline:
    """GPT-2's Conv1D: a linear layer stored the other way round."""
    return Outline(weight=Shape((inputs, outputs)), bias=Shape((outputs,)))


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


def _head(table: Lookup, hidden: int, vocabulary: int, *, tied: bool) -> Outline:
    """The head, which may share the table of the embedding."""
    return Outline(weight=table.own["weight"] if tied else Shape((vocabulary, hidden)))


def _decoder(config: Mapping[str, Any], kind: _Decoder) -> Outline:
    hidden = _count(config, "hidden_size")
    vocabulary = _count(config, "vocab_size")
    layers = [_decoder_layer(config, kind) for _ in range(_count(config, "num_hidden_layers"))]
    table = Lookup(vocabulary, hidden)
    body = Outline(embed_tokens=table, layers=OutlineList(layers), norm=_scale(hidden))
    tied = _flag(config, "tie_word_embeddings", kind.tied)
    return Outline(model=body, lm_head=_head(table, hidden, vocabulary, tied=tied))


def _decoder_layer(config: Mapping[str, Any], kind: _Decoder) -> Outline:
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
        attention = Outline(qkv_proj=linear(hidden, queries + 2 * keys, bias=False))
    else:
        attention = Outline(
            q_proj=linear(hidden, queries, bias=bias),
            k_proj=linear(hidden, keys, bias=bias),
            v_proj=linear(hidden, keys, bias=bias),
        )
    output_bias = _flag(config, "attention_bias", kind.output_bias) and not kind.qkv_bias
    attention.add("o_proj", linear(queries, hidden, bias=output_bias))
    if kind.qk_norm:
        attention.add("q_norm", _scale(width))
        attention.add("k_norm", _scale(width))
    layer = Outline(self_attn=attention)
    if config.get("model_type") == "mixtral":
        layer.add("block_sparse_moe", _experts(config))
    else:
        layer.add("mlp", _gated(config, kind))
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind.extra_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        layer.add(name, _scale(hidden))
    return layer


def _gated(config: Mapping[str, Any], kind: _Decoder) -> Outline:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    bias = _flag(config, "mlp_bias", False)
    down = linear(inner, hidden, bias=bias)
    if kind.fused:
        return Outline(gate_up_proj=linear(hidden, 2 * inner, bias=False), down_proj=down)
    return Outline(
        gate_proj=linear(hidden, inner, bias=bias),
        up_proj=linear(hidden, inner, bias=bias),
        down_proj=down,
    )


def _experts(config: Mapping[str, Any]) -> Outline:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    num_experts = _count(config, "num_local_experts")
    experts = [
        Outline(
            w1=linear(hidden, inner, bias=False),
            w2=linear(inner, hidden, bias=False),
            w3=linear(hidden, inner, bias=False),
        )
        for _ in range(num_experts)
    ]
    return Outline(gate=linear(hidden, num_experts, bias=False), experts=OutlineList(experts))


def _gpt2(config: Mapping[str, Any]) -> Outline:
    hidden, vocabulary = _count(config, "n_embd"), _count(config, "vocab_size")
    inner = _count(config, "n_inner", 4 * hidden)
    layers = [
        Outline(
            ln_1=layer_norm(hidden),
            attn=Outline(c_attn=_matrix(hidden, 3 * hidden), c_proj=_matrix(hidden, hidden)),
            ln_2=layer_norm(hidden),
            mlp=Outline(c_fc=_matrix(hidden, inner), c_proj=_matrix(inner, hidden)),
        )
        for _ in range(_count(config, "n_layer"))
    ]
    table = Lookup(vocabulary, hidden)
    body = Outline(
        wte=table,
        wpe=Lookup(_count(config, "n_positions", 1024), hidden),
        h=OutlineList(layers),
        ln_f=layer_norm(hidden),
    )
    tied = _flag(config, "tie_word_embeddings", True)
    return Outline(transformer=body, lm_head=_head(table, hidden, vocabulary, tied=tied))


def _gpt_neox(config: Mapping[str, Any]) -> Outline:
    hidden, vocabulary = _count(config, "hidden_size"), _count(config, "vocab_size")
    inner = _count(config, "intermediate_size", 4 * hidden)
    layers = [
        Outline(
            input_layernorm=layer_norm(hidden),
            post_attention_layernorm=layer_norm(hidden),
            attention=Outline(
                query_key_value=linear(hidden, 3 * hidden), dense=linear(hidden, hidden)
            ),
            mlp=Outline(dense_h_to_4h=linear(hidden, inner), dense_4h_to_h=linear(inner, hidden)),
        )
        for _ in range(_count(config, "num_hidden_layers"))
    ]
    table = Lookup(vocabulary, hidden)
    body = Outline(embed_in=table, layers=OutlineList(layers), final_layer_norm=layer_norm(hidden))
    tied = _flag(config, "tie_word_embeddings", False)
    return Outline(gpt_neox=body, embed_out=_head(table, hidden, vocabulary, tied=tied))
