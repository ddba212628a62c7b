"""The model of a run: its transformers config, what that says of it, building and planning it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.config.schema import Config
from infinity.errors import ConfigError, did_you_mean
from infinity.huggingface.models import (
    build_model,
    find_directory,
    load_model,
    read_config,
    transformers,
)
from infinity.model.config_shapes import explained
from infinity.model.shapes import Target, target_of
from infinity.runs.settings import BYTES, ModelSection, RunConfig

CAUSAL = "AutoModelForCausalLM"
BYTES_SIZE, BYTES_END = 257, 256  # of the tokenizer of bytes
_REFUSED = "{} is no config that transformers takes"
_VARIES = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache")


@dataclass(frozen=True)
class ModelFacts:
    """What a config says of a model; `name` is shown to people.

    `vocabulary` is how many tokens it knows, `context` how many it can see (None: no limit is
    known), `end` the token that ends a text.
    """

    name: str
    config: Any
    vocabulary: int
    context: int | None
    end: int | None

    def identity(self) -> dict[str, Any]:
        """What decides the computation, JSON-able."""
        found: dict[str, Any] = self.config.to_dict()
        return {key: value for key, value in found.items() if key not in _VARIES}


def read_facts(section: ModelSection, tokenizer_size: int | None, end: int | None) -> ModelFacts:
    """Read the config of a model; `tokenizer_size` and `end` fill what keys do not say.

    Raises `ConfigError` for what is no config of transformers', or of no causal language model.
    """
    source = section.config if section.config is not None else section.path
    assert source is not None
    if isinstance(source, dict):
        config, name = _from_keys(source, tokenizer_size, end), str(source.get("model_type"))
    else:
        config, name = _from_directory(source), source
    if type(config) not in transformers().MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{name} is a {config.model_type} model, which transformers has no causal language "
            "model for",
            remedy="model_type: llama, gpt2, mistral, qwen2, ... is one",
        )
    with explained(_REFUSED.format(name)):
        text = config.get_text_config()
        context = getattr(text, "max_position_embeddings", None)
        found = getattr(text, "eos_token_id", None)
        return ModelFacts(
            name=name,
            config=config,
            vocabulary=int(text.vocab_size),
            context=context if isinstance(context, int) and context > 0 else None,
            end=found if isinstance(found, int) else None,
        )


def _from_directory(source: str) -> Any:
    path = Path(source).expanduser()
    return read_config(find_directory(path.parent if path.name == "config.json" else source))


def _from_keys(keys: Mapping[str, Any], tokenizer_size: int | None, end: int | None) -> Any:
    library, kind = transformers(), keys.get("model_type")
    if not isinstance(kind, str) or kind not in library.CONFIG_MAPPING:
        hint = _near(str(kind), library.CONFIG_MAPPING)
        what = "must be given" if kind is None else f"transformers knows no {kind!r}{hint}"
        raise ConfigError(f"model.config.model_type: {what}", remedy="model_type: gpt2, llama, ...")
    with explained(_REFUSED.format("model.config")):
        plain = library.CONFIG_MAPPING[kind]()
        known = sorted({*plain.to_dict(), *plain.attribute_map, *dir(plain)})
        unknown = [
            f"model.config.{key}: {kind} has no such key{_near(key, known)}"
            for key in keys
            if key not in known
        ]
        if unknown:
            raise ConfigError("; ".join(unknown))
        filled = dict(keys)
        if tokenizer_size is not None:
            filled.setdefault("vocab_size", tokenizer_size)
        size = filled.get("vocab_size", plain.vocab_size)
        if end is not None and isinstance(size, int) and end < size:
            filled.setdefault("eos_token_id", end)
            filled.setdefault("bos_token_id", end)
        return library.AutoConfig.for_model(**filled)


def _near(name: str, known: Any) -> str:
    names = [one for one in known if not one.startswith("_")]
    return f"; {did_you_mean(name, names)}".rstrip("; ")


def build(section: ModelSection, facts: ModelFacts, engine: Config) -> nn.Module:
    """The model without its memory, for `initialize`; in train mode."""
    more = {} if section.attention is None else {"attn_implementation": section.attention}
    given: dict[str, Any] = {"model_class": CAUSAL, "model_kwargs": more}
    if section.path is not None:
        path = os.path.expanduser(section.path)
        model = load_model(path, engine, model_config=facts.config, **given)
    else:
        model = build_model(facts.config, engine, **given)
    model.train()
    if section.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.23
        again: Any = model
        try:
            (enable or again.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(
                f"model.gradient_checkpointing: {facts.name} cannot do that",
                because=str(error),
                remedy="model.gradient_checkpointing=false, and a smaller training.micro_batch",
            ) from error
    return model


def model_on_meta(section: ModelSection, facts: ModelFacts) -> nn.Module:
    """The model without values: nothing is computed, nothing allocated.

    Raises `ConfigError` for numbers in its config that make no model.
    """
    with explained(f"transformers cannot build the model {facts.name}", "correct its config"):
        try:
            with torch.device("meta"):
                made = transformers().AutoModelForCausalLM.from_config(facts.config)
        except RuntimeError:  # it looks at values while it is built
            return build(section, facts, Config())
    assert isinstance(made, nn.Module)
    return made


def target_on_meta(run: RunConfig) -> Target:
    """The model of a configuration as the plan sees it."""
    size, end = (BYTES_SIZE, BYTES_END) if run.tokenizer == BYTES else (None, None)
    facts = read_facts(run.model, size, end)
    return target_of(facts.name, model_on_meta(run.model, facts), facts.config.to_dict())


def loss_of(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """How to get the mean loss of a batch of tokens out of an engine, or out of the model itself.

    The model shifts labels by itself: the loss of a window of n tokens is over n - 1 of them.
    """
    takes = inspect.signature(model.forward).parameters
    more = {"use_cache": False} if "use_cache" in takes else {}

    def loss(engine: Any, tokens: Tensor) -> Tensor:
        found: Tensor = engine(input_ids=tokens, labels=tokens, **more).loss
        return found

    return loss
