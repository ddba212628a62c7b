"""Tests of `infinity checkpoint export` and `infinity generate` for runs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file
from support.families import FAMILIES
from support.quantized import round_frozen
from support.runs import settings, train, write_chat
from typer.testing import CliRunner

import infinity
from infinity.cli.main import app
from infinity.errors import ConfigError
from infinity.integrations.huggingface.meta import build_meta_model
from infinity.train.adapters import adapted
from infinity.train.settings import AdapterSection
from infinity.train.texts import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def export(*arguments: object) -> str:
    code, out, err = run("checkpoint", "export", *arguments)
    assert code == 0, err
    return out + err


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def values_of(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on plain text from random weights; return the run directory."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(folder))
    return folder / "run"


def adapter_run(folder: Path, kind: str, **more: Any) -> Path:
    """Train adapters on conversations; return the run directory."""
    base = FAMILIES["qwen3_moe" if kind == "experts" else "llama"].config()
    base.vocab_size, base.max_position_embeddings = 257, 64
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(base)
    adapter: dict[str, Any] = {"type": kind, "r": 4, "targets": ["q_proj", "v_proj"]}
    if kind == "experts":
        adapter |= {"type": "qlora", "target_parameters": STACKS}
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder / "base")
    raw = settings(
        folder,
        model={"path": str(folder / "base")},
        adapter=adapter,
        data__sequence_length=64,
        engine__optimizer__lr=3e-2,
        **write_chat(folder),
        **more,
    )
    train(raw)
    return folder / "run"


# --- export --------------------------------------------------------------------------------------


def test_export_checkpoint_equals_model_of_run(trained: Path, tmp_path: Path) -> None:
    """The files are byte for byte those that the run wrote at its end."""
    output = export(trained, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(trained / "model")
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert "28 tensors, " in output
    assert "note" not in output
    older = trained / "checkpoints" / "step4"
    export(older, tmp_path / "older", "--dtype", "bf16")
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "older")
    assert found.dtype is torch.bfloat16
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight


def test_export_durable_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    train(
        settings(
            tmp_path,
            engine__nvme_path=str(tmp_path / "nvme"),
            engine__durable=True,
            training__checkpoint_every=None,
        )
    )
    directory = tmp_path / "run"
    assert not (directory / "checkpoints").exists()
    export(directory, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(directory / "model")


def test_export_experts_in_published_format(tmp_path: Path) -> None:
    config = FAMILIES["mixtral"].config()
    engine, *_ = infinity.from_config(config, {"precision": "fp32"})
    with engine:
        engine.save_checkpoint(tmp_path / "saved")
        infinity.save_pretrained(engine, tmp_path / "expected")
    config.save_pretrained(tmp_path / "expected")
    output = export(tmp_path / "saved", tmp_path / "out", "--model", tmp_path / "expected")
    assert "no tokenizer was found" in output
    expected, found = values_of(tmp_path / "expected"), values_of(tmp_path / "out")
    assert any("experts.0." in name for name in expected)
    assert expected.keys() == found.keys()
    assert [n for n in expected if not torch.equal(expected[n], found[n])] == []


@pytest.mark.parametrize("kind", ["lora", "qlora", "experts"])
def test_export_adapters_separately_or_merged(kind: str, tmp_path: Path) -> None:
    directory = adapter_run(tmp_path, kind)
    export(directory, tmp_path / "adapters")
    expected, found = values_of(directory / "model"), values_of(tmp_path / "adapters")
    assert expected.keys() == found.keys()
    assert [n for n in expected if not torch.equal(expected[n], found[n])] == []
    assert files_of(tmp_path / "adapters").keys() == files_of(directory / "model").keys()

    export(directory, tmp_path / "merged", "--merge")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if kind != "lora":
        round_frozen(base.requires_grad_(False), "nf4", torch.float32)
    with_adapters: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    merged = with_adapters.merge_and_unload().state_dict()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    state = loaded.state_dict()
    assert merged.keys() == state.keys()
    assert [n for n in merged if not torch.equal(merged[n], state[n])] == []
    assert loaded.generation_config.max_new_tokens == 7
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == (tmp_path / "chat.jinja").read_text()


def test_export_unsupported_requests_are_refused(trained: Path, tmp_path: Path) -> None:
    code, _, err = run("checkpoint", "export", trained, tmp_path / "a", "--merge")
    assert (code, "has no adapters" in err) == (2, True)
    other = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=257)
    other.save_pretrained(tmp_path / "other")
    code, _, err = run(
        "checkpoint", "export", trained, tmp_path / "a", "--model", tmp_path / "other"
    )
    assert code == 2
    assert "it has no transformer.h.2.ln_1.bias" in err
    assert "transformer.wpe.weight has shape (64, 16), the model's (1024, 16)" in err
    assert "try: --model DIR" in err
    assert not (tmp_path / "a").exists()

    export(trained, tmp_path / "alone", "--model", "none")
    assert files_of(tmp_path / "alone").keys() == {"model.safetensors"}

    engine, *_ = infinity.initialize(torch.nn.Linear(4, 4), {"precision": "fp32"})
    with engine:
        (tmp_path / "mine").mkdir()
        engine.save_checkpoint(tmp_path / "mine" / "saved")
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"precision": "bf16"}))
    output = export(tmp_path / "mine" / "saved", tmp_path / "linear")
    assert "only weights are written" in output
    code, _, err = run(
        "checkpoint", "export", tmp_path / "mine" / "saved", tmp_path / "b", "--merge"
    )
    assert (code, "--model RUN_DIR" in err) == (2, True)


def test_adapter_target_parameters_are_validated(tmp_path: Path) -> None:
    for name, expected in {
        "qwen3_moe": r"experts\.up: .*\n.*are mlp\.experts\.gate_up_proj, mlp\.experts\.down_proj",
        "llama": r"no parameters of three dimensions",
    }.items():
        model = build_meta_model(FAMILIES[name].config())
        section = AdapterSection(targets=(), target_parameters=("experts.up", "q_proj.weight"))
        with pytest.raises(ConfigError, match=expected):
            adapted(model, section)
    for wrong in ({"targets": []}, {"target_parameters": ["a"], "dropout": 0.1}):
        with pytest.raises(ValidationError, match=r"target_parameters"):
            AdapterSection.model_validate(wrong)


def test_merge_adapters_of_tied_weights_is_refused(tmp_path: Path) -> None:
    base = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=257, n_positions=64)
    transformers.GPT2LMHeadModel(base).save_pretrained(tmp_path / "base")
    raw = settings(
        tmp_path,
        model={"path": str(tmp_path / "base")},
        adapter={"type": "lora", "r": 4, "targets": ["lm_head"]},
        training__steps=1,
    )
    train(raw)
    code, _, err = run("checkpoint", "export", tmp_path / "run", tmp_path / "a", "--merge")
    assert code == 2
    assert "lm_head cannot be merged" in err
    assert "transformer.wte.weight" in err


# --- generate ------------------------------------------------------------------------------------


def continuation(model: Any, tokens: Any, **options: Any) -> str:
    """Return the continuation that transformers generates."""
    arguments = {"max_new_tokens": 12, "pad_token_id": 256, **options}
    torch.manual_seed(3)
    found = model.eval().generate(torch.tensor([list(tokens)]), **arguments)
    text: str = ByteTokenizer().wrapped.decode(found[0, len(tokens) :], skip_special_tokens=True)
    return text + "\n"


def generate(directory: Path, *options: object) -> str:
    code, out, err = run("generate", directory, "ab", "--max-tokens", 12, "--seed", 3, *options)
    assert code == 0, err
    return out


def test_generate_from_run_matches_exported_model(trained: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "model")
    expected = continuation(model, b"ab")
    assert len(expected) > 5
    assert generate(trained) == expected
    assert generate(trained / "checkpoints") == expected
    assert generate(trained / "checkpoints" / "step6") == expected
    assert generate(trained / "model") == expected
    sampled = continuation(model, b"ab", do_sample=True, temperature=1.5)
    assert sampled != expected
    assert generate(trained, "--temperature", 1.5) == sampled
    assert generate(trained, "--temperature", 0) == expected


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_generate_with_adapters_applies_chat_template(kind: str, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    directory = adapter_run(
        tmp_path,
        kind,
        engine__nvme_path=str(tmp_path / "nvme"),
        engine__placement={"weights": "disk"},
    )
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if kind == "qlora":
        round_frozen(base.requires_grad_(False), "nf4", torch.float32)
    model = peft.PeftModel.from_pretrained(base, directory / "model")
    expected = continuation(model, b"[u]ab;[a]")
    assert generate(directory) == expected
    assert generate(directory, "--raw") == continuation(model, b"ab")
    if kind == "lora":  # an adapter directory does not record the format of its base
        assert generate(directory / "model") == expected
    assert list((tmp_path / "nvme").iterdir()) == []


def test_generate_invalid_arguments_are_refused(trained: Path, tmp_path: Path) -> None:
    for arguments, text in (
        ((tmp_path / "none", "ab"), "none is not a directory"),
        ((tmp_path, "ab"), "has no file `latest`"),
        ((trained, ""), "the prompt is empty"),
        ((trained, "ab", "--temperature", "0", "--top-p", "0.5"), "--top-p samples"),
        ((trained, "ab", "--tag", "step9"), "there is no checkpoint 'step9'"),
    ):
        code, out, err = run("generate", *arguments)
        assert (code != 0, out) == (True, "")
        assert text in err
