"""Experts that are stacks of matrices, stored in 4 and 8 bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, Family, _moe
from support.quantised import packed, round_frozen
from support.small import ON_DEVICE, ON_DISK, settings
from torch import Tensor

import infinity
from infinity.formats import FrozenFormat
from infinity.model.quantised import from_parts

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZER = {"lr": 1e-2, "eps": 1e-4}
STEPS = 3
GPT_OSS = _moe("GptOssForCausalLM", "GptOssConfig", num_local_experts=4, num_experts_per_tok=2,
               sliding_window=4, hidden_size=32, intermediate_size=64)  # fmt: skip
DEEPSEEK = _moe("DeepseekV3ForCausalLM", "DeepseekV3Config",
                **{**FAMILIES["deepseek_v3"].config().to_dict(), "moe_intermediate_size": 128,
                   "hidden_size": 256})  # fmt: skip


def attention(model: Any, **more: Any) -> Any:
    torch.manual_seed(11)
    wanted = {"target_modules": ["o_proj"], **more}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **wanted))


def run(source: Path, path: Path, family: Family, prepare: Any = attention, **more: Any) -> Any:
    """Losses, state and plan of a few steps; and that bytes moved are those of the plan."""
    placement = more.pop("placement", ON_DISK)
    config = settings(path, placement, prefetch_units=0, optimizer=OPTIMIZER, **more)
    engine, *_ = infinity.from_pretrained(source, config, prepare=prepare)
    with engine:
        losses = []
        for batch in family.batches(STEPS):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.settle()
        assert engine.last_report.moved == engine.plan.predicted_bytes
        shutil.rmtree(path / "saved", ignore_errors=True)
        engine.save_checkpoint(path / "saved", tag="a")
        return losses, dict(engine.state_dict(master=True)), engine.plan


def stored(path: Path, name: str) -> Tensor:
    """The bytes at rest of a parameter of the base."""
    found = load_file(path / "saved" / "a" / "frozen.safetensors")
    (held,) = (value for key, value in found.items() if key.endswith(name))
    return held


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_frozen_experts_rest_as_each_expert_alone(family: str, tmp_path: Path) -> None:
    """The losses of a base that has the values of 4 bits; bytes at rest and moved are forecast."""
    one, base = FAMILIES[family], tmp_path / "base"
    one.build().save_pretrained(base)
    plain = one.build().requires_grad_(False)
    stacks = {n: p for n, p in plain.named_parameters() if p.dim() == 3}
    assert len(stacks) == 2 * 3
    held = {n: packed(p.bfloat16(), FrozenFormat.NF4) for n, p in stacks.items()}
    round_frozen(plain, "nf4", torch.bfloat16)
    plain.save_pretrained(tmp_path / "rounded")
    common: dict[str, Any] = {"precision": "bf16"}
    expected = run(tmp_path / "rounded", tmp_path, one, **common)[:2]
    for placement in (ON_DISK, ON_DEVICE):
        told = {**common, "placement": placement, "frozen": {"rest": "nf4"}}
        losses, state, plan = run(base, tmp_path, one, **told)
        assert losses == expected[0]
        assert [n for n in state if not torch.equal(state[n], expected[1][n])] == []
    segments = {s.name: s for unit in plan.units for s in unit.segments if s.form}
    for name, parameter in stacks.items():
        assert segments[f"base_model.model.{name}"].nbytes == held[name].numel()
        assert held[name].numel() < 0.6 * parameter.numel()
        assert torch.equal(stored(tmp_path, name), held[name])


def as_mxfp4(value: Tensor) -> tuple[Tensor, Tensor]:
    """Random codes of a stack of matrices, of about its size, as gpt-oss stores them."""
    count, columns, rows = value.shape
    draw = torch.Generator().manual_seed(rows)
    grid = (count, rows, columns // 32)
    blocks = torch.randint(0, 256, (*grid, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(117, 121, grid, generator=draw, dtype=torch.uint8)


def gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Save a model whose experts are MXFP4; returns the bytes at rest of each."""
    GPT_OSS.build().save_pretrained(folder)
    tensors, held = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, value in list(tensors.items()):
        if value.dim() == 3:
            blocks, scales = as_mxfp4(value)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            held[name] = from_parts(FrozenFormat.MXFP4, value.shape, [blocks, scales])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantised(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return held


def deepseek(folder: Path) -> dict[str, Tensor]:
    """Save a model whose matrices are FP8, as DeepSeek-V3 is; returns those of fused experts."""
    DEEPSEEK.build().save_pretrained(folder)
    tensors, held = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    codes, scales = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in list(tensors.items()):
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name or "_a_proj" in name:
            one = packed(value * 1.1, FrozenFormat.FP8)
            codes[name] = one[: value.numel()].view(torch.float8_e4m3fn).view(value.shape)
            by = one[value.numel() :].view(torch.float32)
            scales[name] = by.view(-(-value.shape[0] // 128), -1)
    for name in codes:
        tensors |= {name: codes[name], f"{name}_scale_inv": scales[name]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantised(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    for layer in (1, 2):
        path = f"model.layers.{layer}.mlp.experts"
        for kind, parts in {"gate_up": ("gate", "up"), "down": ("down",)}.items():
            each = [[f"{path}.{e}.{part}_proj.weight" for part in parts] for e in range(4)]
            one = torch.stack([torch.cat([codes[n] for n in names]) for names in each])
            by = torch.stack([torch.cat([scales[n] for n in names]) for names in each])
            name = f"{path}.{kind}_proj"
            held[name] = from_parts(FrozenFormat.FP8, one.shape, [one, by])
    return held


def quantised(folder: Path, section: dict[str, Any]) -> None:
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": section}))


@pytest.mark.parametrize(
    ("save", "family", "form"), [(gpt_oss, GPT_OSS, "mxfp4"), (deepseek, DEEPSEEK, "fp8")]
)
def test_experts_rest_as_the_file_has_them(
    save: Callable[[Path], dict[str, Tensor]], family: Family, form: str, tmp_path: Path
) -> None:
    """Byte for byte; values and losses are those of the base that transformers dequantises."""
    held = save(tmp_path / "native")
    section = {"mxfp4": hf.Mxfp4Config, "fp8": hf.FineGrainedFP8Config}[form](dequantize=True)
    kind = getattr(hf, family.model)
    plain = kind.from_pretrained(
        tmp_path / "native", dtype=torch.bfloat16, quantization_config=section
    )
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    wide = kind(family.config())
    wide.load_state_dict({n: p.float() for n, p in plain.state_dict().items()})
    wide.save_pretrained(tmp_path / "wide")
    found = {}
    for source, rest, placement in (
        ("wide", "as_is", ON_DISK),
        ("native", "as_is", ON_DISK),
        ("native", form, ON_DEVICE),
        ("native", form, ON_DISK),
    ):
        more: dict[str, Any] = {"precision": "bf16", "frozen": {"rest": rest}}
        told = {**more, "placement": placement}
        found[source, rest] = run(tmp_path / source, tmp_path, family, **told)
        if rest == form:
            for name, value in held.items():
                assert torch.equal(stored(tmp_path, name), value), name
    losses = [one[0] for one in found.values()]
    assert losses[0] == losses[1] == losses[2]
    state = found["native", form][1]
    for name, value in expected.items():
        key = f"base_model.model.{name}"
        key = key if key in state else ".base_layer.".join(key.rsplit(".", 1))
        assert torch.equal(state[key].bfloat16(), value.bfloat16()), name


def test_fp8_experts_that_do_not_fill_squares_are_refused(tmp_path: Path) -> None:
    """16 rows of gate and 16 of up would share a scale."""
    one = FAMILIES["qwen3_moe"]
    one.build().save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    for name in [name for name in tensors if "experts" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    config = settings(tmp_path, frozen={"rest": "fp8"})
    with pytest.raises(infinity.errors.ConfigError, match=r"gate_up_proj' cannot rest in fp8"):
        infinity.from_pretrained(tmp_path / "base", config, prepare=attention)
