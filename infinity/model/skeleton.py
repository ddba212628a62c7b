"""A model's parameters without the model: modules on the meta device, made from a config.

`infinity plan` cuts and lays out what is built here exactly as it would the real model, so names
and shapes are those of the Hugging Face implementations. Nothing is allocated and nothing can be
run. Known families are built by hand, so that no package is needed; for any other `model_type`
transformers is asked, if it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError

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
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{file} has no model_type", because="a Hugging Face config.json names its family"
        )
    return config


def build_skeleton(config: Mapping[str, Any]) -> nn.Module:
    """Modules on meta with the parameters of `config`'s model.

    Raises `ConfigError` for a family nobody here knows and for missing or senseless numbers.
    """
    family = config.get("model_type")
    with torch.device("meta"):
        if family == "gpt2":
            return _gpt2(config)
        if family == "gpt_neox":
            return _gpt_neox(config)
        if family in _DECODERS:
            return _decoder(config, _DECODERS[family])
        return _from_transformers(config)


class _Bag(nn.Module):
    """Children and parameters by name, nothing else."""

    def __init__(self, **members: nn.Module) -> None:
        super().__init__()
        for name, member in members.items():
            self.add_module(name, member)


class _Scale(nn.Module):
    """One weight vector: an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class _Matrix(nn.Module):
    """GPT-2's Conv1D: a linear layer stored the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ConfigError(f"the model's config has {name}={value!r}", remedy="a positive integer")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    return default if value is None else bool(value)


def _tie(head: nn.Linear, embedding: nn.Module) -> None:
    assert isinstance(embedding, nn.Embedding)
    head.weight = embedding.weight


def _decoder(config: Mapping[str, Any], kind: _Decoder) -> nn.Module:
    hidden = _count(config, "hidden_size")
    vocabulary = _count(config, "vocab_size")
    layers = [_decoder_layer(config, kind) for _ in range(_count(config, "num_hidden_layers"))]
    body = _Bag(
        embed_tokens=nn.Embedding(vocabulary, hidden),
        layers=nn.ModuleList(layers),
        norm=_Scale(hidden),
    )
    head = nn.Linear(hidden, vocabulary, bias=False)
    if _flag(config, "tie_word_embeddings", kind.tied):
        _tie(head, body.get_submodule("embed_tokens"))
    return _Bag(model=body, lm_head=head)


def _decoder_layer(config: Mapping[str, Any], kind: _Decoder) -> nn.Module:
    hidden = _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    groups = _count(config, "num_key_value_heads", heads)
    width = _count(config, "head_dim", hidden // heads)
    queries, keys = heads * width, groups * width
    bias = _flag(config, "attention_bias", kind.qkv_bias)
    if kind.fused:
        attention = _Bag(qkv_proj=nn.Linear(hidden, queries + 2 * keys, bias=False))
    else:
        attention = _Bag(
            q_proj=nn.Linear(hidden, queries, bias=bias),
            k_proj=nn.Linear(hidden, keys, bias=bias),
            v_proj=nn.Linear(hidden, keys, bias=bias),
        )
    output_bias = _flag(config, "attention_bias", kind.output_bias) and not kind.qkv_bias
    attention.add_module("o_proj", nn.Linear(queries, hidden, bias=output_bias))
    if kind.qk_norm:
        attention.add_module("q_norm", _Scale(width))
        attention.add_module("k_norm", _Scale(width))
    layer = _Bag(self_attn=attention)
    if config.get("model_type") == "mixtral":
        layer.add_module("block_sparse_moe", _experts(config))
    else:
        layer.add_module("mlp", _gated(config, kind))
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind.extra_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        layer.add_module(name, _Scale(hidden))
    return layer


def _gated(config: Mapping[str, Any], kind: _Decoder) -> nn.Module:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    bias = _flag(config, "mlp_bias", False)
    down = nn.Linear(inner, hidden, bias=bias)
    if kind.fused:
        return _Bag(gate_up_proj=nn.Linear(hidden, 2 * inner, bias=False), down_proj=down)
    return _Bag(
        gate_proj=nn.Linear(hidden, inner, bias=bias),
        up_proj=nn.Linear(hidden, inner, bias=bias),
        down_proj=down,
    )


def _experts(config: Mapping[str, Any]) -> nn.Module:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    num_experts = _count(config, "num_local_experts")
    experts = [
        _Bag(
            w1=nn.Linear(hidden, inner, bias=False),
            w2=nn.Linear(inner, hidden, bias=False),
            w3=nn.Linear(hidden, inner, bias=False),
        )
        for _ in range(num_experts)
    ]
    return _Bag(gate=nn.Linear(hidden, num_experts, bias=False), experts=nn.ModuleList(experts))


def _gpt2(config: Mapping[str, Any]) -> nn.Module:
    hidden, vocabulary = _count(config, "n_embd"), _count(config, "vocab_size")
    inner = _count(config, "n_inner", 4 * hidden)
    layers = [
        _Bag(
            ln_1=nn.LayerNorm(hidden),
            attn=_Bag(c_attn=_Matrix(hidden, 3 * hidden), c_proj=_Matrix(hidden, hidden)),
            ln_2=nn.LayerNorm(hidden),
            mlp=_Bag(c_fc=_Matrix(hidden, inner), c_proj=_Matrix(inner, hidden)),
        )
        for _ in range(_count(config, "n_layer"))
    ]
    body = _Bag(
        wte=nn.Embedding(vocabulary, hidden),
        wpe=nn.Embedding(_count(config, "n_positions", 1024), hidden),
        h=nn.ModuleList(layers),
        ln_f=nn.LayerNorm(hidden),
    )
    head = nn.Linear(hidden, vocabulary, bias=False)
    if _flag(config, "tie_word_embeddings", True):
        _tie(head, body.get_submodule("wte"))
    return _Bag(transformer=body, lm_head=head)


def _gpt_neox(config: Mapping[str, Any]) -> nn.Module:
    hidden, vocabulary = _count(config, "hidden_size"), _count(config, "vocab_size")
    inner = _count(config, "intermediate_size", 4 * hidden)
    layers = [
        _Bag(
            input_layernorm=nn.LayerNorm(hidden),
            post_attention_layernorm=nn.LayerNorm(hidden),
            attention=_Bag(
                query_key_value=nn.Linear(hidden, 3 * hidden), dense=nn.Linear(hidden, hidden)
            ),
            mlp=_Bag(
                dense_h_to_4h=nn.Linear(hidden, inner), dense_4h_to_h=nn.Linear(inner, hidden)
            ),
        )
        for _ in range(_count(config, "num_hidden_layers"))
    ]
    body = _Bag(
        embed_in=nn.Embedding(vocabulary, hidden),
        layers=nn.ModuleList(layers),
        final_layer_norm=nn.LayerNorm(hidden),
    )
    head = nn.Linear(hidden, vocabulary, bias=False)
    if _flag(config, "tie_word_embeddings", False):
        _tie(head, body.get_submodule("embed_in"))
    return _Bag(gpt_neox=body, embed_out=head)


def _from_transformers(config: Mapping[str, Any]) -> nn.Module:
    """Any causal language model that transformers knows; called under the meta device."""
    family = config.get("model_type")
    try:
        from transformers import (  # type: ignore[import-not-found, unused-ignore]
            AutoConfig,
            AutoModelForCausalLM,
        )
    except ImportError as error:
        raise ConfigError(
            f"model_type {family!r} is not known here",
            because=f"known without transformers: {', '.join(FAMILIES)}",
            remedy="pip install transformers, and it is asked instead",
        ) from error
    settings = {name: value for name, value in config.items() if name != "model_type"}
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"transformers cannot build model_type {family!r}: {error}") from error
    assert isinstance(model, nn.Module)
    return model
