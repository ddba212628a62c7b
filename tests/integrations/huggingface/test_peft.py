"""Tests of peft adapters over a frozen base, on any tier and in any dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from support.families import DECODER, FAMILIES
from support.quantized import as_bitsandbytes, packed, round_frozen
from support.small import ON_DEVICE, ON_DISK, settings
from torch import Tensor, nn

import infinity
from infinity.config.schema import load_config
from infinity.errors import ResidencyError
from infinity.integrations.huggingface.build import load_model
from infinity.integrations.huggingface.meta import find_target
from infinity.model.partition import groups_of, partition_model
from infinity.types import FrozenFormat

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILY = FAMILIES["llama"]
OPTIMIZER = {"lr": 1e-2, "eps": 1e-4}
STEPS = 4


def adapted(model: Any) -> Any:
    torch.manual_seed(11)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                             task_type="CAUSAL_LM")  # fmt: skip
    return peft.get_peft_model(model, lora)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    FAMILY.build().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    return tmp_path / "base"


def config(path: Path, placement: dict[str, str] = ON_DISK, **more: Any) -> dict[str, Any]:
    return settings(path, placement, prefetch_units=1, optimizer=OPTIMIZER, **more)


def train(engine: infinity.Engine) -> list[float]:
    losses = []
    engine.train()
    for batch in FAMILY.batches(STEPS):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    return losses


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=FAMILY.batches(1)[0]["input_ids"]).logits
    return found


@pytest.mark.parametrize("rest", ["as_is", "nf4"])
def test_adapters_over_streamed_base_match_peft(rest: str, base: Path, tmp_path: Path) -> None:
    """Equal to peft over a plain base, rounded to the quantized values if the base is quantized."""

    def plain_base() -> Any:
        found = hf.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        if rest != "as_is":
            round_frozen(found.requires_grad_(False), rest, torch.float32)
        return found

    plain = adapted(plain_base()).train()
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.01, **OPTIMIZER)
    expected = []
    for batch in FAMILY.batches(STEPS):
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    found = {}
    for name, placement in {"disk": ON_DISK, "device": ON_DEVICE}.items():
        raw = config(tmp_path, placement, frozen={"format": rest})
        engine, *_ = infinity.from_pretrained(base, raw, prepare=adapted)
        with engine:
            num_trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
            assert num_trained == sum(p.numel() for p in trained)
            losses = train(engine)
            assert losses == pytest.approx(expected, rel=1e-5)
            engine.module.save_pretrained(tmp_path / name)
            (tmp_path / f"{name}-ours").mkdir()
            (tmp_path / f"{name}-ours" / "README.md").write_text("Mine.")
            infinity.save_pretrained(engine, tmp_path / f"{name}-ours")
            found[name] = (losses, dict(engine.state_dict(master=True)), logits(engine))
    assert found["disk"][0] == found["device"][0]
    state, same = found["disk"][1], found["device"][1]
    assert [n for n in state if not torch.equal(state[n], same[n])] == []

    assert "Mine." in (tmp_path / "disk-ours" / "README.md").read_text()
    for saved in ("disk", "disk-ours"):
        again = peft.PeftModel.from_pretrained(plain_base(), tmp_path / saved).eval()
        assert torch.equal(logits(again), found["disk"][2])


def test_bitsandbytes_base_read_without_bitsandbytes(base: Path, tmp_path: Path) -> None:
    """Losses equal those of a plain base with the dequantized values."""
    folder, form = tmp_path / "quantized", FrozenFormat.NF4
    plain = hf.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.save_pretrained(folder)
    round_frozen(plain.requires_grad_(False), form, torch.float32)
    plain.save_pretrained(tmp_path / "rounded")
    tensors = dict[str, Tensor]()
    for name, value in plain.state_dict().items():
        is_quantized = "proj" in name
        quantized_tensors = (
            as_bitsandbytes(name, packed(value, form), form, value.shape) if is_quantized else {}
        )
        tensors |= quantized_tensors or {name: value}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(facts))
    losses = []
    for source, frozen_format in (
        (tmp_path / "rounded", "as_is"),
        (folder, "as_is"),
        (folder, "nf4"),
    ):
        raw = config(tmp_path, precision="bf16", frozen={"format": frozen_format})
        engine, *_ = infinity.from_pretrained(source, raw, prepare=adapted)
        with engine:
            losses.append(train(engine))
    assert losses[0] == losses[1] == losses[2]


def test_lora_plan_equals_units_of_run(base: Path, tmp_path: Path) -> None:
    """Compare `infinity plan DIR --lora 4 --rest nf4` with an engine under peft's "all-linear"."""

    def everywhere(model: Any) -> Any:
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora)

    raw = config(tmp_path, frozen={"format": "nf4"})
    engine, *_ = infinity.from_pretrained(base, raw, prepare=everywhere)
    with engine:
        found = engine.plan.units
    target, settings = find_target(str(base), lora=4), load_config(raw)
    planned = partition_model(
        target.module, settings, groups_of(target.module, settings), None
    ).layouts
    assert [(u.numel, u.frozen_bytes, u.slot_bytes) for u in planned] == [
        (u.numel, u.frozen_bytes, u.slot_bytes) for u in found
    ]


def test_saved_adapter_loaded_over_offloaded_base(base: Path, tmp_path: Path) -> None:
    engine, *_ = infinity.from_pretrained(base, config(tmp_path), prepare=adapted)
    with engine:
        train(engine)
        engine.module.save_pretrained(tmp_path / "adapter")
        expected = logits(engine)

    def load(model: nn.Module) -> Any:
        return peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)

    engine, *_ = infinity.from_pretrained(base, config(tmp_path), prepare=load)
    with engine:
        assert torch.equal(logits(engine.eval()), expected)
        train(engine)
        assert not torch.equal(logits(engine), expected)


def test_merge_adapter_under_materialized_and_after_close(base: Path, tmp_path: Path) -> None:
    engine, *_ = infinity.from_pretrained(base, config(tmp_path), prepare=adapted)
    train(engine)
    before = logits(engine)
    with engine.materialized(engine.module):
        engine.module.merge_adapter()
    merged = logits(engine)
    torch.testing.assert_close(merged, before, rtol=1e-4, atol=1e-5)
    with engine.materialized(engine.module):
        engine.module.unmerge_adapter()
    torch.testing.assert_close(logits(engine), before, rtol=1e-4, atol=1e-5)
    engine.close(restore=True)
    unloaded = engine.module.merge_and_unload()
    torch.testing.assert_close(logits(unloaded), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", [ON_DISK, ON_DEVICE], ids=["disk", "device"])
def test_merge_adapter_not_materialized_raises(
    placement: dict[str, str], base: Path, tmp_path: Path
) -> None:
    engine, *_ = infinity.from_pretrained(base, config(tmp_path, placement), prepare=adapted)
    train(engine)
    before = logits(engine)
    module: Any = engine.module
    layers = [m for m in module.modules() if hasattr(m, "merged_adapters")]
    for edit in (module.merge_adapter, module.merge_and_unload):
        with pytest.raises(ResidencyError, match="with engine"):
            edit()
        assert [m for m in layers if m.merged] == []
        assert torch.equal(logits(engine), before)
    with (
        engine.materialized([m.base_layer for m in layers]),  # without their adapters
        pytest.raises(ResidencyError, match="2 of its 3 parameters"),
    ):
        module.merge_adapter()
    with engine.materialized(module):
        module.merge_adapter()
    merged = logits(engine)
    with pytest.raises(ResidencyError), module.disable_adapter():  # peft unmerges in the forward
        logits(engine)
    with pytest.raises(ResidencyError):
        module.unmerge_adapter()
    assert all(m.merged for m in layers)
    assert torch.equal(logits(engine), merged)
    engine.close(restore=True)
    assert not any({"merge", "unmerge"} & set(vars(m)) for m in layers)
    assert not {"unload", "merge_and_unload"} & set(vars(module.base_model))
    module.unmerge_adapter()
    torch.testing.assert_close(logits(module), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["merge_and_unload", "unload"])
def test_unload_adapters_of_open_engine_raises(name: str, base: Path, tmp_path: Path) -> None:
    engine, *_ = infinity.from_pretrained(base, config(tmp_path), prepare=adapted)
    train(engine)
    before = logits(engine)
    module: Any = engine.module
    with (
        engine.materialized(module),
        pytest.raises(ResidencyError, match=rf"close\(restore=True\), and then {name}\(\)"),
    ):
        getattr(module, name)()
    assert torch.equal(logits(engine), before)
    train(engine)
    after = logits(engine)
    engine.close(restore=True)
    unloaded = getattr(module, name)()
    assert not any("lora" in key for key in unloaded.state_dict())
    if name == "merge_and_unload":
        torch.testing.assert_close(logits(unloaded), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", [ON_DISK, ON_DEVICE], ids=["disk", "device"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_base_keeps_bits(
    dtype: torch.dtype, placement: dict[str, str], base: Path, tmp_path: Path
) -> None:
    """In bf16 a bf16 base keeps its bits; an fp16 base is rounded, as by `.bfloat16()`."""
    model = hf.LlamaForCausalLM.from_pretrained(base, dtype=dtype)
    expected = {n: v.clone().bfloat16() for n, v in model.state_dict().items()}
    engine, *_ = infinity.initialize(adapted(model), config(tmp_path, placement, precision="bf16"))
    with engine:
        train(engine)
        state = engine.module.state_dict()
        for name, value in expected.items():
            key = "base_model.model." + name
            if key not in state:
                key = key.replace(".weight", ".base_layer.weight")
            assert torch.equal(state[key].view(torch.int16), value.view(torch.int16)), key


class Quantized(nn.Module):
    """A linear layer with 8-bit codes and one scale per row, as in a quantized checkpoint."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        codes = (linear.weight / scale).round().to(torch.int8)
        self.codes = nn.Parameter(codes.detach(), requires_grad=False)
        self.scale = nn.Parameter(scale.detach(), requires_grad=False)
        self.register_buffer("absmax", (codes.int() + 128).to(torch.uint8))
        self.up = nn.Parameter(torch.zeros(linear.out_features, 2))
        self.down = nn.Parameter(torch.randn(2, linear.in_features) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scale
        return nn.functional.linear(x, weight + self.up @ self.down)


def test_integer_codes_of_base_unchanged(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(2)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)).requires_grad_(False)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "proj" in name:
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], Quantized(module))
        return model.train()

    before = {n: v.clone() for n, v in build().state_dict().items()}
    results = []
    for placement in (ON_DISK, ON_DEVICE):
        engine, *_ = infinity.initialize(build(), config(tmp_path, placement))
        with engine:
            results.append((train(engine), engine.module.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, results[1][1][name])
        is_trained = name.endswith((".up", ".down"))
        assert torch.equal(value, before[name]) is not is_trained, name


def test_adapters_of_lazy_base_keep_initial_values(base: Path, tmp_path: Path) -> None:
    """peft creates adapters on the base's device: on meta they would lose their values."""
    model = adapted(load_model(base, {"precision": "fp32"}))
    plain = adapted(hf.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32))
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-3}]
    engine, *_ = infinity.initialize(model, config(tmp_path), model_parameters=groups)
    with engine:
        found = engine.module.state_dict()
        expected = plain.state_dict()
        assert sorted(found) == sorted(expected)
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def test_lazy_model_edited_before_initialize(base: Path, tmp_path: Path) -> None:
    models = []
    for model in (load_model(base, {"precision": "fp32"}),
                  hf.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)):  # fmt: skip
        torch.manual_seed(1)
        model.resize_token_embeddings(50, mean_resizing=False)
        norm = model.get_submodule("model.norm")
        norm.weight.data = norm.weight.data * 2
        models.append(model)
    engine, *_ = infinity.initialize(models[0], config(tmp_path))
    with engine:
        found, expected = engine.module.state_dict(), models[1].state_dict()
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def test_adapters_added_after_initialize_raise(tmp_path: Path, base: Path) -> None:
    engine = infinity.from_pretrained(base, config(tmp_path), device="cpu")[0]
    late = pytest.raises(ResidencyError, match=r"q_proj' becomes .*lora_A[\s\S]*before initialize")
    with late:
        adapted(engine.module)
    engine.close()
    engine = infinity.from_pretrained(base, config(tmp_path), prepare=adapted, device="cpu")[0]
    with pytest.raises(ResidencyError, match=r"lora_A\.second' becomes"):
        engine.module.add_adapter("second", engine.module.peft_config["default"])
    engine.close()
