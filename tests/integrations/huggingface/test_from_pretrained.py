"""Tests of loading transformers models to their tiers, building from a config, and saving."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support import forked, pretrained_alone
from support.families import DECODER, FAMILIES, VOCABULARY, Family
from support.live_bytes import LiveBytes
from support.process_memory import SMALL_BYTES, needs_peak
from support.small import ON_DISK, settings
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, MachineError
from infinity.integrations.huggingface.build import load_model
from infinity.integrations.huggingface.meta import find_target
from infinity.model import meta_init, targets

pytestmark = pytest.mark.filterwarnings("ignore")


def saved(family: Family, path: Path, **more: Any) -> Path:
    family.build().save_pretrained(path, max_shard_size="20KB", **more)
    return path


def config(path: Path, **more: Any) -> dict[str, Any]:
    return settings(path, ON_DISK, **({"prefetch_units": 1} | more))


def tensors_in(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_load_and_save_match_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    source = saved(family, tmp_path / "theirs")
    plain = getattr(hf, family.model).from_pretrained(source, dtype=torch.float32)
    engine, *_ = infinity.from_pretrained(source, config(tmp_path))
    with engine:
        assert type(engine.module) is type(plain)
        assert not engine.module.training
        assert_same(engine.module.state_dict(), plain.state_dict())
        files = infinity.save_pretrained(engine, tmp_path / "ours", max_shard="20KiB")
        assert_same(dict(engine.module.named_buffers()), dict(plain.named_buffers()))
        assert len(engine.module.state_dict()) - len(list(engine.module.parameters())) == len(
            plain.state_dict()
        ) - len(list(plain.parameters()))
        batch = family.batches(1)[0]
        with torch.no_grad():
            assert torch.equal(family.loss(engine(**batch)), family.loss(plain(**batch)))
    assert len(files) == 1 or files[-1].name == "model.safetensors.index.json"
    assert_same(tensors_in(tmp_path / "ours"), tensors_in(source))
    again, loading_info = type(plain).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading_info.values())
    assert_same(again.state_dict(), plain.state_dict())
    saved_config, source_config = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")
    )
    assert saved_config == source_config
    assert (tmp_path / "ours" / "generation_config.json").exists() == plain.can_generate()


def test_model_class_adds_or_drops_head(tmp_path: Path) -> None:
    source = saved(FAMILIES["bert"], tmp_path / "model")
    engine, *_ = infinity.from_pretrained(
        source, config(tmp_path, seed=3), model_class=hf.AutoModelForSequenceClassification
    )
    plain = hf.BertForMaskedLM.from_pretrained(source).state_dict()
    with engine:
        found = engine.module.state_dict()
        assert found["classifier.weight"].std() > 0.01
        same = [name for name in found if name in plain]
        assert len(same) > 20
        assert [n for n in same if not torch.equal(found[n], plain[n])] == []
    engine, *_ = infinity.from_pretrained(source, config(tmp_path), model_class="BertModel")
    with engine:
        assert type(engine.module) is hf.BertModel
        for name, value in engine.module.state_dict().items():
            if f"bert.{name}" in plain:
                assert torch.equal(value, plain[f"bert.{name}"])


def test_old_weight_names_and_duplicate_tied_weights(tmp_path: Path) -> None:
    """As in GPT-2's first files: no prefix, an unused buffer; and a copy of the tied head."""
    source = saved(FAMILIES["gpt2"], tmp_path / "model", save_original_format=False)
    state = tensors_in(source)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    old = {name.removeprefix("transformer."): value for name, value in state.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, source / "model.safetensors", metadata={"format": "pt"})
    plain = hf.GPT2LMHeadModel.from_pretrained(source)
    engine, *_ = infinity.from_pretrained(source, config(tmp_path))
    with engine:
        assert engine.module.lm_head.weight is engine.module.transformer.wte.weight
        assert_same(engine.module.state_dict(), plain.state_dict())


def test_masters_equal_files_in_bf16_run(tmp_path: Path) -> None:
    source = saved(FAMILIES["llama"], tmp_path / "model")
    engine, *_ = infinity.from_pretrained(source, config(tmp_path, precision="bf16"))
    with engine:
        masters = dict(engine.state_dict(master=True))
        assert engine.module.dtype is torch.bfloat16
        infinity.save_pretrained(engine, tmp_path / "fp32", dtype="fp32")
        infinity.save_pretrained(engine, tmp_path / "bf16", tokenizer=_Tokenizer())
    plain = FAMILIES["llama"].build().state_dict()
    assert_same(masters, plain)
    assert_same(tensors_in(tmp_path / "fp32"), plain)
    assert hf.AutoConfig.from_pretrained(tmp_path / "bf16").dtype is torch.bfloat16
    assert (tmp_path / "bf16" / "words.txt").exists()


class _Tokenizer:
    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "words.txt").write_text("a\n")


def test_file_precedence_and_save_lock_match_transformers(
    tmp_path: Path,
) -> None:
    """A save killed between its last two renames leaves both a single file and an index."""
    source = saved(FAMILIES["llama"], tmp_path / "model")
    assert (source / "model.safetensors.index.json").exists()
    save_file(
        {name: torch.zeros_like(value) for name, value in tensors_in(source).items()},
        source / "model.safetensors",
        metadata={"format": "pt"},
    )
    engine, *_ = infinity.from_pretrained(source, config(tmp_path))
    with engine:
        plain = hf.LlamaForCausalLM.from_pretrained(source)
        assert not any(value.any() for value in plain.parameters())
        assert_same(engine.module.state_dict(), plain.state_dict())
        with torch.no_grad(), engine.materialized(engine.module.lm_head):
            engine.module.lm_head.weight.fill_(1)

        class Rival:
            def save_pretrained(self, folder: str) -> None:
                with pytest.raises(MachineError, match="being saved there already"):
                    infinity.save_pretrained(engine, source)
                _Tokenizer().save_pretrained(folder)

        files = infinity.save_pretrained(engine, source, max_shard="20KiB", tokenizer=Rival())
    expected_files = {
        "config.json",
        "generation_config.json",
        "words.txt",
        *(f.name for f in files),
    }
    assert {path.name for path in source.iterdir()} == expected_files
    assert hf.LlamaForCausalLM.from_pretrained(source).lm_head.weight.all()


def test_saved_model_loads_trained_weights(tmp_path: Path) -> None:
    family = FAMILIES["mixtral"]
    engine, *_ = infinity.from_config(family.config(), config(tmp_path, seed=1))
    with engine:
        for batch in family.batches(2):
            engine.backward(engine(**batch).loss)
            engine.step()
        infinity.save_pretrained(engine, tmp_path / "saved")
        expected = dict(engine.state_dict())
        names = set(tensors_in(tmp_path / "saved"))
    assert (
        "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    )  # not fused, as on the Hub
    engine, *_ = infinity.from_pretrained(tmp_path / "saved", config(tmp_path))
    with engine:
        assert_same(dict(engine.state_dict()), expected)


@pytest.mark.parametrize("given", ["object", "dict", "directory"])
def test_from_config_equals_plain_build(given: str, tmp_path: Path) -> None:
    facts = hf.LlamaConfig(**DECODER)
    facts.save_pretrained(tmp_path / "facts")
    sources = {"object": facts, "dict": {"model_type": "llama", **DECODER},
               "directory": tmp_path / "facts"}  # fmt: skip
    seen: list[Any] = []
    engine, *_ = infinity.from_config(
        sources[given], config(tmp_path, seed=5), prepare=seen.append,
        model_class=hf.AutoModelForCausalLM,
    )  # fmt: skip
    with engine:
        assert seen == [engine.module]
        torch.manual_seed(5)
        assert_same(engine.module.state_dict(), hf.LlamaForCausalLM(facts).state_dict())


@pytest.mark.parametrize("way", ["config", "config_params", "args"])
def test_config_arguments_as_in_initialize(way: str, tmp_path: Path) -> None:
    raw = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "infinity": {"seed": 5},
    }
    (tmp_path / "ds.json").write_text(json.dumps(raw))
    given: Any = raw
    if way == "args":
        given = SimpleNamespace(deepspeed_config=str(tmp_path / "ds.json"))
    facts = hf.LlamaConfig(**DECODER)
    engine, *_ = infinity.from_config(facts, **{way: given})
    with engine:
        assert engine.module.lm_head.weight.dtype is torch.float32
        assert engine.train_micro_batch_size_per_gpu() == 3
        torch.manual_seed(5)
        plain = hf.LlamaForCausalLM(facts).state_dict()
        assert_same(dict(Engine.state_dict(engine, master=True)), plain)
    seen: list[Any] = []
    source = saved(FAMILIES["llama"], tmp_path / "model")
    engine, *_ = infinity.from_pretrained(
        source, prepare=lambda model: seen.append(model.dtype), **{way: given}
    )
    with engine:
        assert seen == [torch.float32]
        assert engine.translation is not None
    with pytest.raises(ConfigError, match="got no configuration"):
        infinity.from_pretrained(source)


class _OwnConfig(hf.LlamaConfig):
    model_type = "own"


class _OwnModel(hf.LlamaForCausalLM):
    config_class = _OwnConfig


def test_remote_code_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(FAMILIES["llama"], tmp_path / "model")
    facts = json.loads((source / "config.json").read_text())
    names = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    facts |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": names}
    (source / "config.json").write_text(json.dumps(facts))
    (source / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for make in (infinity.from_pretrained, infinity.from_config):
        with pytest.raises(ConfigError, match="import the model's class"):
            make(source, config(tmp_path))
        with pytest.raises(ConfigError, match="contains custom code"):
            make(
                source, config(tmp_path), model_class="AutoModelForCausalLM",
                **({} if make is infinity.from_config else {"model_config": _OwnConfig(**facts)}),
            )  # fmt: skip
    engine, *_ = infinity.from_pretrained(source, config(tmp_path), model_class=_OwnModel)
    with engine:
        assert type(engine.module) is _OwnModel
        assert type(engine.module.config) is _OwnConfig
        assert_same(engine.module.state_dict(), FAMILIES["llama"].build().state_dict())
    assert not (tmp_path / "ran").exists()


def test_load_model_errors_name_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(FAMILIES["llama"], tmp_path / "model")
    with pytest.raises(ConfigError, match="no directory"):
        load_model("/missing/folder")
    with pytest.raises(ConfigError, match="is a file"):
        load_model(source / "config.json")
    other = hf.LlamaConfig(**{**DECODER, "vocab_size": VOCABULARY + 1})
    with pytest.raises(ConfigError, match=r"does not fit LlamaForCausalLM(.|\n)*mismatch"):
        load_model(source, model_config=other)
    with pytest.raises(ConfigError, match=r"holds no weight of ViTModel"):
        load_model(source, model_class="ViTModel", model_config=FAMILIES["vit"].config())
    with pytest.raises(ConfigError, match="has no model 'LlamaForEverything'"):
        load_model(source, model_class="LlamaForEverything")
    facts = json.loads((source / "config.json").read_text())
    del facts["architectures"], facts["model_type"]
    (source / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="has no config that transformers takes"):
        load_model(source)
    (source / "config.json").unlink()
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter"):
        load_model(source)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install .torch-infinity\[hf\]"):
        load_model(source)


def test_hub_id_loaded_from_cache_or_raises(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--some--llama"
    saved(FAMILIES["llama"], cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    script = tmp_path / "script.py"
    script.write_text(
        "from infinity.huggingface.models import load_model\n"
        "print(type(load_model('some/llama')).__name__)\n"
        "load_model('some/other')"
    )
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    with forked.Program(script, **hub) as program:
        _, out, error = program.end()
    assert out.split() == ["LlamaForCausalLM"], error
    assert MachineError.__name__ in error
    assert "hf download some/other" in error


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_live_tensors_bounded_while_loading_and_saving(kind: str, tmp_path: Path) -> None:
    """Count live bytes while the model is loaded and saved; Mixtral's experts are fused."""
    family = FAMILIES[kind]
    settings_on_disk = config(tmp_path, prefetch_units=0, chunk_size=1 << 16)
    peaks, sizes = [], []
    for num_layers in (2, 2, 6):  # the first one fills caches
        facts = family.config()
        facts.num_hidden_layers = num_layers
        facts.hidden_size, facts.intermediate_size = 256, 256
        plain = getattr(hf, family.model)(facts)
        source = tmp_path / str(len(peaks))
        plain.save_pretrained(source)
        sizes.append(sum(p.nbytes for p in plain.parameters()))
        tracemalloc.start()
        try:
            with LiveBytes() as live:
                engine, *_ = infinity.from_pretrained(source, settings_on_disk)
                with engine:
                    infinity.save_pretrained(engine, tmp_path / "again")
            peaks.append(live.peak + tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert_same(tensors_in(tmp_path / "again"), tensors_in(source))
        shutil.rmtree(tmp_path / "again")
    assert peaks[2] - peaks[1] < 0.5 * (sizes[2] - sizes[1]), (peaks, sizes)


def test_initial_values_buffer_bytes_equal_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused experts are read from several tensors; a quantized parameter is built in full.

    The plan, which reads only the directory, counts the same bytes.
    """
    monkeypatch.setattr(targets, "PIECE_ELEMENTS", 1000)
    facts = FAMILIES["mixtral"].config()
    facts.hidden_size, facts.intermediate_size = 64, 128
    hf.MixtralForCausalLM(facts).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    origins = meta_init.InitialValues(model)
    parameters, planned = list(model.parameters()), find_target(str(tmp_path))
    assert planned.max_initial_bytes(quantizes=True) == 4000
    assert origins.largest_value_bytes(parameters, quantizes=True) == 4000
    stack = model.model.layers[0].mlp.experts.gate_up_proj.requires_grad_(False)
    assert origins.largest_value_bytes(parameters, quantizes=False) == 4000
    expert = stack.nbytes // stack.shape[0]  # joined from two matrices of the file
    assert origins.largest_value_bytes(parameters, quantizes=True) == 2 * expert
    planned.module.requires_grad_(False)
    assert (
        planned.max_initial_bytes(quantizes=True) >= 2 * expert
    )  # the head is larger, and not a stack
    assert planned.max_initial_bytes(quantizes=False) == 4000
    origins.free()  # also closes the files
    with torch.device("meta"):
        made = hf.MixtralForCausalLM(facts)
    largest = max(p.nbytes for p in made.parameters())
    assert (
        meta_init.InitialValues(made).largest_value_bytes(made.parameters(), quantizes=False)
        == largest
    )
    (tmp_path / "model.safetensors").unlink()
    assert find_target(str(tmp_path)).max_initial_bytes(quantizes=False) == largest


@needs_peak
@pytest.mark.big
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_process_memory_bounded_while_loading_and_saving(kind: str, tmp_path: Path) -> None:
    """Peak memory of a process that loads and saves the model; Mixtral's experts are fused."""
    measured = forked.call(pretrained_alone.main, tmp_path, kind)
    assert [one["different"] for one in measured] == [[], [], []]
    _, small, large = measured
    assert large["slot_bytes"] == small["slot_bytes"]
    assert large["model_bytes"] - small["model_bytes"] > 100 << 20
    # The number of buffers in use depends on timing.
    assert large["grown_bytes"] - small["grown_bytes"] < large["buffer_bytes"] + SMALL_BYTES, (
        measured
    )


@pytest.mark.parametrize("source", [5, None, ["a"]], ids=str)
def test_invalid_source_raises(source: Any) -> None:
    with pytest.raises(ConfigError, match="names no model"):
        infinity.from_pretrained(source, {})


def test_prepare_not_callable_raises_before_build() -> None:
    prepare: Any = 5
    for make in (infinity.from_pretrained, infinity.from_config):
        with pytest.raises(ConfigError, match="prepare is 5"):
            make("nosuch", {}, prepare=prepare)


def test_config_with_zero_heads_raises() -> None:
    config = {"model_type": "llama", "num_attention_heads": 0}
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        infinity.from_config(config, {})


def test_model_kwargs_set_config_or_raise(tmp_path: Path) -> None:
    hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)).save_pretrained(tmp_path)
    model_kwargs = {"num_labels": 5, "attention_dropout": 0.25}
    kind = hf.LlamaForSequenceClassification
    model = load_model(tmp_path, model_class=kind, model_kwargs=model_kwargs)
    assert (model.num_labels, model.score.out_features) == (5, 5)
    assert model.config.attention_dropout == 0.25
    meta_init.InitialValues(model).free()
    with pytest.raises(ConfigError, match="model_kwargs has subfolder, dtype") as caught:
        load_model(tmp_path, model_kwargs={"subfolder": "a", "dtype": torch.float32})
    assert "precision in the configuration" in str(caught.value)


def test_parameter_without_storage_raises(tmp_path: Path) -> None:
    """Reading it would crash the process."""
    hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)).save_pretrained(tmp_path)

    def prepare(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(torch.zeros(1))
        model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()

    with pytest.raises(ConfigError, match=r"'lm_head\.weight' has no memory"):
        infinity.from_pretrained(tmp_path, config(tmp_path), prepare=prepare)
    gc.collect()
