"""Tests of model outlines: named sizes against transformers, published models, any config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.config.schema import load_config
from infinity.errors import ConfigError, MachineError, explained
from infinity.integrations.huggingface.meta import find_target, published_target
from infinity.model.named_models import PUBLISHED, SIZES
from infinity.model.partition import groups_of, partition_model
from infinity.model.targets import named_target, read_model_config
from infinity.plan.machine import may_have_gpu

# From the model card or the page on the Hub.
NUMEL = {"7b": 6_738_415_616, "8b": 8_030_261_248, "13b": 13_015_864_320,
         "70b": 68_976_648_192}  # fmt: skip
# Total and active parameters in billions according to model cards and reports, and the tables
# (embeddings or logits) that these leave out of the active parameters.
TOTALS: dict[str, tuple[float, float, tuple[str, ...]]] = {
    "qwen3-8b": (8.19, 8.19, ()), "qwen3-32b": (32.8, 32.8, ()), "qwen3-30b-a3b": (30.5, 3.3, ()),
    "gpt-oss-20b": (20.91, 3.61, ("lookups",)), "gpt-oss-120b": (116.83, 5.13, ("lookups",)),
    "glm-4.5-air": (106.85, 12.2, ("lookups", "heads")), "deepseek-v3": (671.0, 37.0, ()),
}  # fmt: skip


def write_config(path: Path, config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", SIZES)
def test_named_size_matches_transformers_model(name: str, tmp_path: Path) -> None:
    named, reference = named_target(name), find_target(write_config(tmp_path, SIZES[name]))
    numel = sum(p.numel() for p in named.module.parameters())
    assert numel == NUMEL.get(name, numel)
    assert all(p.is_meta for p in reference.module.parameters())
    for walk in ("named_parameters", "named_children"):
        names = [name for name, _ in getattr(reference.module, walk)()]
        assert [name for name, _ in getattr(named.module, walk)()] == names
    settings = load_config({})
    cuts = [partition_model(t.module, settings, groups_of(t.module, settings), None)
            for t in (named, reference)]  # fmt: skip
    assert cuts[0].layouts == cuts[1].layouts
    assert cuts[0].dtype_names == cuts[1].dtype_names
    for fact in ("heads", "lookups", "shares", "family"):
        assert getattr(named, fact) == getattr(reference, fact), fact


def test_published_models_match_parameter_counts_of_cards() -> None:
    """Active parameters follow from the share of tokens routed to an expert."""
    assert TOTALS.keys() == PUBLISHED.keys()
    for name, (total, active, without) in TOTALS.items():
        target = published_target(name)
        sizes = [p.numel() for p in target.module.parameters()]
        assert sum(sizes) / 1e9 == pytest.approx(total, rel=2e-3), name
        for table in without:
            for index in getattr(target, table):
                sizes[index] = 0
        used = sum(size * target.shares.get(i, 1.0) for i, size in enumerate(sizes))
        assert used / 1e9 == pytest.approx(active, rel=2e-2), name


WHISPER = {"model_type": "whisper", "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip


def test_config_without_class_builds_full_model(tmp_path: Path) -> None:
    """The default is not the decoder as a causal language model; a requested class is used."""
    target = write_config(tmp_path, WHISPER)
    assert type(find_target(target).module).__name__ == "WhisperForConditionalGeneration"
    kind = "AutoModelForAudioClassification"
    assert type(find_target(target, kind).module).__name__ == "WhisperForAudioClassification"
    for kind, message in {
        "AutoModelForTea": "transformers has no model 'AutoModelForTea'",
        "WhisperConfig": "transformers has no model 'WhisperConfig'",
        "PreTrainedModel": "PreTrainedModel is a model without parameters",
    }.items():
        with pytest.raises(ConfigError, match=message):
            find_target(target, kind)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "no model_type"), ('{"a": 1}', "no model_type")]
)
def test_invalid_model_config_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bloom", "n_head": 0}, "ZeroDivisionError"),
        ({"model_type": "opt", "hidden_size": "abc"}, "'hidden_size' expected int, got str"),
        ({"model_type": "gptj", "n_embd": 1e30}, "n_embd"),
        ({"model_type": "olmo", "rope_scaling": 5}, "rope_parameters"),
        ({"model_type": "nonesuch", "hidden_size": 8}, "nonesuch"),
        ({**SIZES["7b"], "num_hidden_layers": 4097}, "num_hidden_layers=4097"),
        ({"model_type": "llava", "text_config": {"num_hidden_layers": 10**9}}, "an extra digit"),
        ({"model_type": "vit"}, "which class is meant?"),
    ],
    ids=str,
)
def test_transformers_failure_reported_as_config_error(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_target(write_config(tmp_path, config))
    assert message in str(caught.value)


def test_hub_id_read_from_cache_or_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache contains only the config; weights are not requested."""
    snapshot = tmp_path / "models--who--what" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--who--what" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    write_config(snapshot, WHISPER)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    target = find_target("who/what")
    assert (target.name, target.family) == ("who/what", "whisper")
    with pytest.raises(MachineError, match="the Hugging Face Hub did not provide it") as caught:
        find_target("who/else")
    assert "hf download who/else" in str(caught.value)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), MachineError("full")])
def test_explained_passes_other_errors_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explained("no"):
        raise error
    assert caught.value is error


@pytest.mark.skipif(may_have_gpu(), reason="torch must be asked what GPU there is")
def test_named_size_plan_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Importing them would take longer than planning."""
    (tmp_path / "ours.json").write_text(json.dumps({"precision": "bf16", "prefetch_units": 1}))
    config_path = f"{tmp_path}/ours.json"
    code = (
        "import sys\n"
        "from infinity.cli.main import app\n"
        "sizes = ['--device', '24GiB', '--host', '64GiB', '--disk', '2TiB']\n"
        "for words in (['7b', '--tokens', '2048'], ['70b', '--tokens', '2048', '--json'],\n"
        f"              ['{config_path}', '--model', '1.3b', '--tokens', '2048']):\n"
        "    app(['plan', *words, *sizes], standalone_mode=False)\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), words\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("bottleneck") >= 2
