"""Skeletons have the published number of parameters, the right names, and no memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError, MachineError
from infinity.model.config_shapes import explained
from infinity.model.cut import Cutter
from infinity.model.shapes import FAMILIES, NAMED, build_skeleton, read_model_config

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
# Numbers of the published config.json; parameters as the model card or hub page says.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-2-7b": (NAMED["7b"], 6_738_415_616),
    "llama-3-8b": (NAMED["8b"], 8_030_261_248),
    "llama-2-13b": (NAMED["13b"], 13_015_864_320),
    "llama-2-70b": (NAMED["70b"], 68_976_648_192),
    "mistral-7b": (
        {**_LLAMA, "model_type": "mistral", "intermediate_size": 14336, "vocab_size": 32000,
         "num_key_value_heads": 8},
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        {**_LLAMA, "model_type": "mixtral", "intermediate_size": 14336, "vocab_size": 32000,
         "num_key_value_heads": 8, "num_local_experts": 8},
        46_702_792_704,
    ),
    "qwen2-7b": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "vocab_size": 152064},
        7_615_616_512,
    ),
    "qwen3-8b": (
        {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 151936},
        8_190_735_360,
    ),
    "phi-3-mini": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32064},
        3_821_079_552,
    ),
    "gemma-7b": (
        {"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "head_dim": 256,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
         "vocab_size": 256000},
        8_537_680_896,
    ),
    "gemma-2-9b": (
        {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
         "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
         "vocab_size": 256000},
        9_241_705_984,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024,
         "vocab_size": 50257},
        124_439_808,
    ),
    "gpt-neox-20b": (
        {"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
         "num_hidden_layers": 44, "vocab_size": 50432},
        20_554_567_680,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_skeleton_has_the_published_number_of_parameters(name: str) -> None:
    config, expected = PUBLISHED[name]
    model = build_skeleton(config)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert all(p.is_meta for p in model.parameters())


def test_every_family_has_a_published_model() -> None:
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(FAMILIES)


def test_a_skeleton_is_cut_into_blocks_and_experts() -> None:
    assert len([u for u in Cutter(build_skeleton(NAMED["70b"])).cut() if "layers" in u.name]) == 80
    units = [u.name for u in Cutter(build_skeleton(PUBLISHED["mixtral-8x7b"][0])).cut()]
    assert sum("experts" in name for name in units) == 32 * 8


def test_names_are_those_of_the_real_models() -> None:
    names = {name for name, _ in build_skeleton(NAMED["8b"]).named_parameters()}
    assert "model.layers.31.self_attn.k_proj.weight" in names
    assert "lm_head.weight" in names
    tied = {name for name, _ in build_skeleton({**NAMED["8b"], "tie_word_embeddings": True})
            .named_parameters()}  # fmt: skip
    assert names - tied == {"lm_head.weight"}


def test_a_config_is_read_from_a_file_or_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NAMED["7b"]))
    assert read_model_config(tmp_path) == read_model_config(tmp_path / "config.json") == NAMED["7b"]


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("[]", "no model_type"), ('{"a": 1}', "no model_type")]
)
def test_what_is_no_config_is_said(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_config(tmp_path / "missing.json")


@pytest.mark.parametrize("value", [None, 0, -1, "64", 2.5, True, 2**40])
def test_senseless_numbers_are_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        build_skeleton({**NAMED["7b"], "hidden_size": value})


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"nonesuch"):
        build_skeleton({"model_type": "nonesuch", "hidden_size": 8})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 9999999999}, "a positive integer below 2^31"),
        ({"num_attention_heads": 8192}, "num_attention_heads=8192 and hidden_size=4096"),
    ],
    ids=str,
)
def test_numbers_that_make_no_model(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_skeleton(NAMED["7b"] | changes)
    assert words in str(caught.value)
    assert "head_dim=" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bloom", "n_head": 0}, "ZeroDivisionError"),
        ({"model_type": "opt", "hidden_size": "abc"}, "'hidden_size' expected int, got str"),
        ({"model_type": "gptj", "n_embd": 1e30}, "n_embd"),
        ({"model_type": "olmo", "rope_scaling": 5}, "rope_parameters"),
    ],
    ids=str,
)
def test_what_transformers_trips_over_is_a_mistake_in_the_config(
    config: dict[str, Any], words: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="transformers cannot build") as caught:
        build_skeleton(config)
    assert words in str(caught.value)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), MachineError("full")])
def test_what_is_no_mistake_passes_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explained("no"):
        raise error
    assert caught.value is error
