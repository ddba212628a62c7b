"""Tests of experts that are stacks of matrices: stored in 4 and 8 bits, and adapted by peft."""

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
from support.families import FAMILIES, SPARSE, VOCABULARY, Family, moe_family
from support.live_bytes import LiveBytes
from support.quantized import packed, round_frozen
from support.small import ON_DEVICE, ON_DISK, settings
from torch import Tensor

import infinity
from infinity.config.schema import load_config
from infinity.model.partition import groups_of, partition_model
from infinity.model.quantized import pack_parts
from infinity.model.targets import target_of
from infinity.plan.activations import ActivationModel
from infinity.train.saved_model import describe
from infinity.types import FrozenFormat

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZER = {"lr": 1e-2, "eps": 1e-4}
STEPS = 3
GPT_OSS = moe_family(
    "GptOssForCausalLM", "GptOssConfig", num_local_experts=4, num_experts_per_tok=2,
    sliding_window=4, hidden_size=32, intermediate_size=64,
)  # fmt: skip
DEEPSEEK = moe_family("DeepseekV3ForCausalLM", "DeepseekV3Config",
                **{**FAMILIES["deepseek_v3"].config().to_dict(), "moe_intermediate_size": 128,
                   "hidden_size": 256})  # fmt: skip


def attention(model: Any, **more: Any) -> Any:
    torch.manual_seed(11)
    options = {"target_modules": ["o_proj"], **more}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))


def run(source: Path, path: Path, family: Family, prepare: Any = attention, **more: Any) -> Any:
    """Train a few steps, check moved against predicted bytes; return losses, state and plan."""
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
    """Return the stored bytes of a parameter of the base."""
    tensors = load_file(path / "saved" / "a" / "frozen.safetensors")
    (stored_bytes,) = (value for key, value in tensors.items() if key.endswith(name))
    return stored_bytes


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_frozen_expert_stacks_stored_in_nf4(family: str, tmp_path: Path) -> None:
    """Losses equal those of a base rounded to 4 bits; stored and moved bytes are predicted."""
    one, base = FAMILIES[family], tmp_path / "base"
    one.build().save_pretrained(base)
    plain = one.build().requires_grad_(False)
    stacks = {n: p for n, p in plain.named_parameters() if p.dim() == 3}
    assert len(stacks) == 2 * 3
    packed_bytes = {n: packed(p.bfloat16(), FrozenFormat.NF4) for n, p in stacks.items()}
    round_frozen(plain, "nf4", torch.bfloat16)
    plain.save_pretrained(tmp_path / "rounded")
    common: dict[str, Any] = {"precision": "bf16"}
    expected = run(tmp_path / "rounded", tmp_path, one, **common)[:2]
    for placement in (ON_DISK, ON_DEVICE):
        options = {**common, "placement": placement, "frozen": {"format": "nf4"}}
        losses, state, plan = run(base, tmp_path, one, **options)
        assert losses == expected[0]
        assert [n for n in state if not torch.equal(state[n], expected[1][n])] == []
    segments = {s.name: s for unit in plan.units for s in unit.segments if s.form}
    for name, parameter in stacks.items():
        assert segments[f"base_model.model.{name}"].nbytes == packed_bytes[name].numel()
        assert packed_bytes[name].numel() < 0.6 * parameter.numel()
        assert torch.equal(stored(tmp_path, name), packed_bytes[name])


def as_mxfp4(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return random MXFP4 codes and scales for a stack of matrices, in gpt-oss's layout."""
    count, columns, rows = value.shape
    draw = torch.Generator().manual_seed(rows)
    grid = (count, rows, columns // 32)
    blocks = torch.randint(0, 256, (*grid, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(117, 121, grid, generator=draw, dtype=torch.uint8)


def gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Save a model with MXFP4 experts; return the stored bytes of each."""
    GPT_OSS.build().save_pretrained(folder)
    tensors, stored_bytes = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, value in list(tensors.items()):
        if value.dim() == 3:
            blocks, scales = as_mxfp4(value)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            stored_bytes[name] = pack_parts(FrozenFormat.MXFP4, value.shape, [blocks, scales])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantized(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return stored_bytes


def deepseek(folder: Path) -> dict[str, Tensor]:
    """Save a model with FP8 matrices, as in DeepSeek-V3; return the bytes of fused experts."""
    DEEPSEEK.build().save_pretrained(folder)
    tensors, stored_bytes = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    codes, scales = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in list(tensors.items()):
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name or "_a_proj" in name:
            codes_and_scales = packed(value * 1.1, FrozenFormat.FP8)
            codes[name] = (
                codes_and_scales[: value.numel()].view(torch.float8_e4m3fn).view(value.shape)
            )
            scale = codes_and_scales[value.numel() :].view(torch.float32)
            scales[name] = scale.view(-(-value.shape[0] // 128), -1)
    for name in codes:
        tensors |= {name: codes[name], f"{name}_scale_inv": scales[name]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantized(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    for layer in (1, 2):
        path = f"model.layers.{layer}.mlp.experts"
        for kind, matrices in {"gate_up": ("gate", "up"), "down": ("down",)}.items():
            each = [[f"{path}.{e}.{matrix}_proj.weight" for matrix in matrices] for e in range(4)]
            codes_and_scales = torch.stack([torch.cat([codes[n] for n in names]) for names in each])
            scale = torch.stack([torch.cat([scales[n] for n in names]) for names in each])
            name = f"{path}.{kind}_proj"
            stored_bytes[name] = pack_parts(
                FrozenFormat.FP8, codes_and_scales.shape, [codes_and_scales, scale]
            )
    return stored_bytes


def quantized(folder: Path, section: dict[str, Any]) -> None:
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": section}))


@pytest.mark.parametrize(
    ("save", "family", "form"), [(gpt_oss, GPT_OSS, "mxfp4"), (deepseek, DEEPSEEK, "fp8")]
)
def test_quantized_experts_stored_as_in_file(
    save: Callable[[Path], dict[str, Tensor]], family: Family, form: str, tmp_path: Path
) -> None:
    """Stored bytes equal the file's; values and losses equal transformers' dequantized base."""
    expected_bytes = save(tmp_path / "native")
    assert not hasattr(describe(tmp_path / "native").base.config, "quantization_config")
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
    for source, frozen_format, placement in (
        ("wide", "as_is", ON_DISK),
        ("native", "as_is", ON_DISK),
        ("native", form, ON_DEVICE),
        ("native", form, ON_DISK),
    ):
        more: dict[str, Any] = {"precision": "bf16", "frozen": {"format": frozen_format}}
        options = {**more, "placement": placement}
        found[source, frozen_format] = run(tmp_path / source, tmp_path, family, **options)
        if frozen_format == form:
            for name, value in expected_bytes.items():
                assert torch.equal(stored(tmp_path, name), value), name
    losses = [one[0] for one in found.values()]
    assert losses[0] == losses[1] == losses[2]
    state = found["native", form][1]
    for name, value in expected.items():
        key = f"base_model.model.{name}"
        key = key if key in state else ".base_layer.".join(key.rsplit(".", 1))
        assert torch.equal(state[key].bfloat16(), value.bfloat16()), name


def test_fp8_experts_with_partial_blocks_raise(tmp_path: Path) -> None:
    """16 rows of gate and 16 of up would share a scale."""
    one = FAMILIES["qwen3_moe"]
    one.build().save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    for name in [name for name in tensors if "experts" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    config = settings(tmp_path, frozen={"format": "fp8"})
    with pytest.raises(infinity.errors.ConfigError, match=r"gate_up_proj' cannot be stored in fp8"):
        infinity.from_pretrained(tmp_path / "base", config, prepare=attention)


# --- adapters of experts --------------------------------------------------------------------------

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def on_experts(model: Any) -> Any:
    return attention(model, target_parameters=STACKS)


def logits(model: Any, family: Family) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=family.batches(1)[0]["input_ids"]).logits
    return found


@pytest.mark.parametrize(
    ("family", "rest"),
    [("qwen3_moe", "as_is"), ("gpt_oss", "as_is"), ("mixtral", "nf4"), ("qwen3_moe", "fp8")],
)
def test_expert_adapters_match_peft(family: str, rest: str, tmp_path: Path) -> None:
    """The reference is fully resident; placement, format and recompute change no bit."""
    one = FAMILIES[family]
    plain = one.build().requires_grad_(False)
    plain.save_pretrained(tmp_path / "base")
    if rest != "as_is":
        round_frozen(plain, rest, torch.float32)
    plain = on_experts(plain).train()
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    assert sum("experts" in name for name in trained) == 3 * 4
    optimizer = torch.optim.AdamW(trained.values(), weight_decay=0.01, **OPTIMIZER)
    expected = []
    for batch in one.batches(STEPS):
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = []
    for placement, more in (
        (ON_DEVICE, {}),
        (ON_DISK, {}),
        (ON_DISK, {"activations": {"checkpoint": "units"}}),
        (ON_DISK, {"activations": {"checkpoint": "units", "slices": 2}}),
    ):
        options = {"placement": placement, "frozen": {"format": rest}, **more}
        found.append(run(tmp_path / "base", tmp_path, one, on_experts, **options)[:2])
        assert found[-1][0] == pytest.approx(expected, rel=1e-5)
        state = found[-1][1]
        if "slices" not in more.get("activations", {}):  # which sum gradients in another order
            assert found[-1][0] == found[0][0]
            assert [n for n in state if not torch.equal(state[n], found[0][1][n])] == []
        for name, parameter in trained.items():
            torch.testing.assert_close(state[name], parameter.data, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_activation_estimate_counts_adapted_stacks(recompute: bool) -> None:
    """Compare with the live storages under peft alone, half of which are such stacks."""
    sizes = {**SPARSE, "num_experts": 16, "moe_intermediate_size": 64, "hidden_size": 128}
    one = moe_family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **sizes)
    model = on_experts(one.build())
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    config = load_config({"precision": "fp32"})
    units = partition_model(model, config, groups_of(model, config), None).layouts
    target = target_of("", model, one.config().to_dict())
    shape = ActivationModel(units, lookups=target.lookups, heads=target.heads, shares=target.shares)
    given = torch.arange(256).remainder(VOCABULARY)[None]
    batch = {"input_ids": given, "labels": given, "use_cache": False}
    model(**batch).loss.backward()  # creates constants
    model.zero_grad()
    with LiveBytes([given, *model.parameters(), *model.buffers()]) as live:
        model(**batch).loss.backward()
    found = shape.of(given.numel(), recompute="all" if recompute else 0).total
    assert 0.92 * live.peak < found < 1.25 * live.peak


def test_expert_adapters_merged_and_saved_as_by_peft(tmp_path: Path) -> None:
    one = FAMILIES["qwen3_moe"]
    one.build().save_pretrained(tmp_path / "base")
    config = settings(tmp_path, ON_DISK, optimizer=OPTIMIZER)
    engine, *_ = infinity.from_pretrained(tmp_path / "base", config, prepare=on_experts)
    for batch in one.batches(STEPS):
        engine.backward(engine(**batch).loss)
        engine.step()
    module: Any = engine.eval().module
    before = logits(engine, one)
    infinity.save_pretrained(engine, tmp_path / "adapter")
    with module.disable_adapter():
        without = logits(engine, one)
    assert not torch.equal(without, before)
    for edit, expected in (("merge_adapter", before), ("unmerge_adapter", before)):
        with pytest.raises(infinity.errors.ResidencyError, match="not materialized"):
            getattr(module, edit)()
        with engine.materialized(module):
            getattr(module, edit)()
        torch.testing.assert_close(logits(engine, one), expected, rtol=1e-4, atol=1e-5)
    engine.close(restore=True)
    layers = [m for m in module.modules() if hasattr(m, "merged_adapters")]
    assert not any({"_activate_lora", "get_base_layer"} & set(vars(m)) for m in layers)
    torch.testing.assert_close(logits(module, one), before, rtol=1e-4, atol=1e-5)

    plain = hf.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again, one), before, rtol=1e-5, atol=1e-6)

    def load(model: Any) -> Any:
        return peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)

    engine, *_ = infinity.from_pretrained(tmp_path / "base", config, prepare=load)
    with engine:
        assert torch.equal(logits(engine.eval(), one), before)
    torch.testing.assert_close(logits(module.merge_and_unload(), one), before, rtol=1e-4, atol=1e-5)
