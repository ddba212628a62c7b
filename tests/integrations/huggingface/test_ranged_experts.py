"""Tests of experts of transformers models in ranges: results equal plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.internals import components
from support.ranges import force_largest_range
from support.runs import metrics_of, settings, train
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

import infinity
from infinity.config.schema import load_config
from infinity.errors import ConfigError, ResidencyError
from infinity.integrations.huggingface import experts
from infinity.integrations.huggingface.batches import with_schedule

EXPERTS = 8
# An expert's matrices are multiples of blocks of 4096 elements.
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
SMALL = {"moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
          "v_head_dim": 16}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=64, num_experts=EXPERTS, head_dim=16
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=EXPERTS),
    "gpt-oss": lambda: GptOssConfig(**COMMON, num_local_experts=EXPERTS, head_dim=16),
    "glm-4-moe": lambda: Glm4MoeConfig(**COMMON, **SMALL, head_dim=16),
    "deepseek-v3": lambda: DeepseekV3Config(**COMMON, **SMALL, **LATENT, n_group=4, topk_group=2),
}
STEPS = 10


def build(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).train()


def tokens(step: int) -> Tensor:
    return torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int) -> Tensor:
    found: Tensor = model(input_ids=tokens(step), labels=tokens(step)).loss
    return found


def config_of(path: Path, tier: str = "disk", **more: Any) -> dict[str, Any]:
    everything = dict.fromkeys(("weights", "optimizer_state", "gradients"), tier)
    common = {"precision": "fp32", "gradient_clipping": 0.0, "placement": everything}
    return {"nvme_path": path, **common, **more}


@pytest.mark.parametrize("recompute", ["no", "units", "own"])
@pytest.mark.parametrize("count", [1, 3])
def test_predicted_bytes_equal_moved_bytes(recompute: str, count: int, tmp_path: Path) -> None:
    """Includes ranges read again where the engine or the model recomputes blocks, and the head,
    which shares a unit with the embeddings and slots with blocks.
    """
    model = build("qwen3-moe")
    if recompute == "own":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    activations = {"checkpoint": "units"} if recompute == "units" else {}
    config = config_of(tmp_path, experts_per_unit=count, prefetch_units=0, activations=activations)
    engine, *_ = infinity.initialize(model, config, optimizer=sgd, device="cpu")
    assert len([unit for unit in engine.plan.units if unit.is_range]) == 2 * -(-EXPERTS // count)
    for step in range(3):  # enough tokens for each expert
        ids = torch.randint(0, 97, (16, 32), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    assert engine.last_report is not None
    assert engine.last_report.moved == engine.plan.predicted_bytes
    engine.close()


def test_larger_ranges_reduce_reads_with_recompute(tmp_path: Path) -> None:
    """A backward finds the ranges in slots that the recomputing forward used last."""
    read = []
    for count in (1, 4):
        activations = {"checkpoint": "units"}
        config = config_of(tmp_path, experts_per_unit=count, activations=activations)
        engine, *_ = infinity.initialize(build("qwen3-moe"), config, optimizer=sgd, device="cpu")
        for step in range(2):  # enough tokens for each expert
            ids = torch.randint(0, 97, (16, 32), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
        assert engine.last_report is not None
        read.append(engine.last_report.moved["disk_read"])
        assert read[-1] == engine.plan.predicted_bytes["disk_read"]
        engine.close()
    assert read[1] < 0.8 * read[0]


def test_with_schedule_sets_ranges_unless_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_largest_range(monkeypatch)
    found = {}
    for durable in (False, True):
        given = config_of(tmp_path, activations={"tokens": 16}, durable=durable)
        config, model = load_config(given), build("qwen3-moe")
        config = with_schedule(model, config, torch.device("cpu"), 4, (None, None))
        found[durable] = config.experts_per_unit
    assert found == {False: 4, True: "auto"}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def gradients_of(model: nn.Module, gradient: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    found = {name: gradient(p) for name, p in model.named_parameters()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_ranges_bitwise_equal_to_transformers(family: str, tmp_path: Path) -> None:
    plain = build(family)
    assert plain.config._experts_implementation == experts.REPLACED
    optimizer, losses = sgd(plain.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(plain, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    gradients = gradients_of(plain, lambda p: p.grad)
    norms = set()
    for count in (1, 3, EXPERTS, "auto"):
        model = build(family)
        tier = "disk" if count == 3 else "host"
        engine, *_ = infinity.initialize(
            model, config_of(tmp_path, tier, experts_per_unit=count), optimizer=sgd, device="cpu"
        )
        ranges = [unit.name for unit in engine.plan.units if unit.is_range]
        layers = len([m for m in model.modules() if hasattr(m, "infinity_stacks")])
        assert len(ranges) == (0 if count == "auto" else layers * -(-EXPERTS // int(count)))
        found, last = [], {}
        for step in range(STEPS):
            loss = loss_of(engine, step)
            engine.backward(loss)
            found.append(loss.item())
            if step + 1 == STEPS:
                last = gradients_of(model, engine.gradient)
            engine.step()
        assert found == losses
        assert_equal(last, gradients)
        assert_equal(dict(engine.state_dict()), expected)
        norms.add(engine.grad_norm)
        engine.close(restore=True)
        assert_equal(dict(model.state_dict()), expected)
        assert model.config._experts_implementation == experts.REPLACED
    assert len(norms) == 1


def test_range_without_tokens_not_fetched_but_updated(tmp_path: Path) -> None:
    """Weight decay moves its weights, as in plain torch with a gradient of zeros."""

    def decayed(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, foreach=False)

    def few(model: Any) -> Tensor:
        found: Tensor = model(input_ids=tokens(0)[:1, :1], labels=tokens(0)[:1, :1]).logits.sum()
        return found

    model = build("qwen3-moe")
    engine, *_ = infinity.initialize(
        model, config_of(tmp_path, experts_per_unit=1), optimizer=decayed, device="cpu"
    )
    before = engine.state_dict()["model.layers.0.mlp.experts.down_proj"]
    used: list[int] = []
    prefetcher = components(engine).prefetcher
    use = prefetcher.use
    prefetcher.use = lambda unit, **how: (used.append(unit), use(unit, **how))[1]
    engine.backward(few(engine))
    reached = {engine.plan.units[unit].name for unit in used if engine.plan.units[unit].is_range}
    assert 0 < len([name for name in reached if "layers.0" in name]) <= 2
    stack = model.model.layers[0].mlp.experts.down_proj
    assert [bool(g.any()) for g in engine.gradient(stack)].count(True) <= 2
    engine.step()
    after = engine.state_dict()["model.layers.0.mlp.experts.down_proj"]
    state = engine.optimizer.read_state(stack)
    assert state["step"].item() == 1
    unrouted = [
        e for e in range(EXPERTS) if f"model.layers.0.mlp.experts[{e}:{e + 1}]" not in reached
    ]
    assert len(unrouted) >= EXPERTS - 2
    for expert in unrouted:
        torch.testing.assert_close(after[expert], before[expert] * (1 - 0.1 * 0.5))
    engine.close()


def test_stacks_read_and_edited_by_parameter_name(tmp_path: Path) -> None:
    model = build("gpt-oss")
    engine, *_ = infinity.initialize(
        model, config_of(tmp_path, experts_per_unit=3, precision="bf16"), device="cpu"
    )
    module = model.model.layers[1].mlp.experts
    with engine.materialized(module):
        module.gate_up_proj.data[5] += 1.0
        expected = module.gate_up_proj.detach().clone()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(engine.state_dict()[name], expected)
    assert torch.equal(model.state_dict()[name], expected)
    assert torch.equal(module.gate_up_proj.detach(), expected)
    engine.load_state_dict({name: expected + 1}, strict=False)
    assert torch.equal(module.gate_up_proj.detach(), expected + 1)
    value = torch.rand(expected.shape)
    engine.set_optimizer_state(module.gate_up_proj, "exp_avg_sq", value)
    assert torch.equal(engine.optimizer.read_state(module.gate_up_proj)["exp_avg_sq"], value)
    engine.backward(loss_of(engine, 0))
    engine.set_gradient(module.gate_up_proj, torch.ones_like(value))
    assert engine.gradient(module.gate_up_proj).eq(1).all()
    engine.step()
    model.config._experts_implementation = "batched_mm"
    with pytest.raises(ResidencyError, match="was read in full during a call"):
        loss_of(engine, 0)
    engine.close()


def test_published_model_loaded_and_saved_in_ranges(tmp_path: Path) -> None:
    model = build("mixtral")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "published")
    engine, *_ = infinity.from_pretrained(
        tmp_path / "published", config_of(tmp_path, experts_per_unit=3), device="cpu"
    )
    assert_equal(dict(engine.state_dict()), expected)
    infinity.save_pretrained(engine, tmp_path / "again")
    engine.close()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert_equal(dict(again.state_dict()), expected)


def test_other_experts_implementation_disables_ranges(tmp_path: Path) -> None:
    model = build("qwen3-moe")
    model.set_experts_implementation("eager")
    engine, *_ = infinity.initialize(model, config_of(tmp_path, experts_per_unit=2), device="cpu")
    assert not any(unit.is_range for unit in engine.plan.units)
    assert any(
        "experts are stored with their layer, not in ranges" in note for note in engine.plan.notes
    )
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.close()
    for wrong in (0, -1, True, 1.5, "all"):
        with pytest.raises(ConfigError, match="experts_per_unit: should be"):
            infinity.initialize(model, config_of(tmp_path, experts_per_unit=wrong), device="cpu")


def test_shared_config_between_engines_and_plain_model(tmp_path: Path) -> None:
    """The plain model uses `grouped_mm`; the last engine to close restores the config."""
    config = FAMILIES["qwen3-moe"]()
    plain, *models = (AutoModelForCausalLM.from_config(config).train() for _ in range(3))
    assert len({id(m.config) for m in (plain, *models)}) == 1
    for model in models:
        model.load_state_dict(plain.state_dict())
    expected = loss_of(plain, 0)
    engines = [
        infinity.initialize(
            model, config_of(tmp_path, "host", experts_per_unit=2), optimizer=sgd, device="cpu"
        )[0]
        for model in models
    ]
    for engine in engines:
        assert loss_of(plain, 0).item() == loss_of(engine, 0).item() == expected.item()
        assert loss_of(engines[1], 0).item() == expected.item()
        engine.close(restore=True)
    assert plain.config._experts_implementation == experts.REPLACED


def adapted(**lora_options: Any) -> Any:
    model = build("qwen3-moe")
    torch.manual_seed(11)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **lora_options))


def train_adapters(
    model: Any, config: dict[str, Any], optimizer: Any = None
) -> tuple[list[float], dict[str, Tensor], Any]:
    engine, *_ = infinity.initialize(model, config, optimizer=optimizer, device="cpu")
    with engine:
        losses = []
        for step in range(3):
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, dict(engine.state_dict(master=True)), engine.plan


@pytest.mark.parametrize("form", ["as_is", "nf4", "int8", "mxfp4"])
def test_frozen_experts_of_every_format_in_ranges(form: str, tmp_path: Path) -> None:
    runs = []
    for count in (EXPERTS, 1, 3):
        config = config_of(tmp_path, frozen={"format": form}, experts_per_unit=count)
        losses, state, plan = train_adapters(adapted(target_modules=["q_proj"]), config)
        assert sum(unit.is_range for unit in plan.units) == 2 * -(-EXPERTS // count)
        runs.append((losses, state))
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert_equal(state, runs[0][1])


def test_peft_target_parameters_disable_ranges(tmp_path: Path) -> None:
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora_options = {"target_modules": ["q_proj"], "target_parameters": stacks}
    config = config_of(tmp_path, experts_per_unit=1)
    losses, _, plan = train_adapters(adapted(**lora_options), config)
    assert not any(unit.is_range for unit in plan.units)
    assert any("peft adapts a stack as a whole" in note for note in plan.notes)
    plain = adapted(**lora_options)
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.01)
    for step in range(3):
        loss = loss_of(plain, step)
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_peft_modules_to_save_experts_bitwise_equal(tmp_path: Path) -> None:
    """peft trains a copy of `modules_to_save` in a wrapper that exposes the copy's attributes."""
    lora_options = {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}
    plain, expected = adapted(**lora_options), []
    optimizer = sgd([p for p in plain.parameters() if p.requires_grad])
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(plain, step)
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    for count, ranges in (("auto", 0), (3, 2 * 2 * 3)):
        config = config_of(tmp_path, experts_per_unit=count)
        losses, state, plan = train_adapters(adapted(**lora_options), config, sgd)
        assert sum(unit.is_range for unit in plan.units) == ranges
        assert losses == expected
        assert_equal(state, dict(plain.state_dict()))


def count_fetch(fetcher: Any, fetched: list[int], unit: int, *how: Any) -> None:
    fetched.append(unit)
    type(fetcher).start(fetcher, unit, *how)


@pytest.mark.parametrize(
    ("family", "routed"), [("deepseek-v3", False), ("gpt-oss", False), ("gpt-oss", True)]
)
def test_sliced_ranges_bitwise_equal_to_sliced_layers(
    family: str,
    routed: bool,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks record router logits of a block: its slices cannot share ranges then."""
    runs, reads = [], []
    for count in (EXPERTS, 1):
        activations = {"checkpoint": "units", "slices": 4}
        config = config_of(
            tmp_path, experts_per_unit=count, activations=activations, prefetch_units=0
        )
        model = build(family)
        engine, *_ = infinity.initialize(model, config, optimizer=sgd, device="cpu")
        losses, fetcher = [], components(engine).prefetcher._fetcher
        for step in range(3):
            ids = torch.randint(0, 97, (8, 16), generator=torch.Generator().manual_seed(step))
            fetched: list[int] = []
            monkeypatch.setattr(fetcher, "start", partial(count_fetch, fetcher, fetched))
            loss = engine(input_ids=ids, labels=ids, output_router_logits=routed).loss
            engine.backward(loss)
            losses.append(loss.item())
            if step < 2:
                engine.step()
        runs.append((losses, gradients_of(model, engine.gradient), dict(engine.state_dict())))
        reads.append([fetched.count(u.index) for u in engine.plan.units if u.is_range])
        engine.close()
    assert runs[1][0] == runs[0][0]
    assert_equal(runs[1][1], runs[0][1])
    assert_equal(runs[1][2], runs[0][2])
    assert routed == any("reads all ranges of experts" in str(w.message) for w in recwarn)
    assert (max(reads[1]) > 3) == routed  # else forward, recomputation, backward


@pytest.mark.parametrize("checkpoint", ["none", "units"])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_recorded_outputs_of_slices_concatenated(
    family: str, checkpoint: str, tmp_path: Path
) -> None:
    """An auxiliary loss under an attention mask must count the unmasked tokens."""
    plain, mask = build(family), torch.ones(4, 8, dtype=torch.long)
    for row in range(4):
        mask[row, 8 - 2 * row :] = 0
    ids = torch.randint(0, 97, (4, 8), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"output_router_logits": True, "output_attentions": True}
    inputs |= {"input_ids": ids, "labels": ids, "attention_mask": mask}
    activations = {"checkpoint": checkpoint, "slices": 3}
    config, model = config_of(tmp_path, activations=activations), build(family)
    for one in (plain, model):
        one.set_attn_implementation("eager")
    engine, *_ = infinity.initialize(model, config, optimizer=sgd, device="cpu")
    expected, found = plain(**inputs), engine(**inputs)
    for name in ("router_logits", "attentions"):
        assert_close(tuple(found[name]), tuple(expected[name]))
    assert_close(found.aux_loss, expected.aux_loss)
    expected.loss.backward()
    engine.backward(found.loss)
    for name, parameter in engine.module.named_parameters():
        assert_close(engine.gradient(parameter), plain.get_parameter(name).grad)
    engine.close()


@pytest.mark.parametrize(
    ("count", "activations"),
    [("auto", {}), (3, {"checkpoint": "units"}), (1, {"checkpoint": "units", "slices": 2})],
    ids=["with their layer", "recomputed", "slices that share ranges"],
)
def test_report_expert_tokens_match_routers(
    count: Any, activations: dict[str, Any], tmp_path: Path
) -> None:
    """Equal to the choices of plain transformers' routers in both micro-batches of each step."""
    plain, named = build("mixtral"), list[Tensor]()
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: named.append(out[2]))
    config = config_of(
        tmp_path, experts_per_unit=count, activations=activations, prefetch_units=0,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    engine, *_ = infinity.initialize(
        build("mixtral"), config, optimizer=partial(torch.optim.SGD, lr=0.0), device="cpu"
    )
    for step in range(2):
        named.clear()
        for micro in range(2):
            loss_of(plain, 2 * step + micro)
            engine.backward(loss_of(engine, 2 * step + micro))
            engine.step()
            with torch.no_grad():
                engine.eval()(input_ids=tokens(9))
            engine.train()
        by_hand = {
            f"model.layers.{layer}.mlp.experts": torch.bincount(
                torch.cat([index.flatten() for index in named[layer::2]]), minlength=EXPERTS
            ).tolist()
            for layer in range(2)
        }
        report = engine.last_report
        assert report is not None
        assert report.expert_tokens == by_hand
        assert report.router_loss is None
        layers = by_hand.values()
        assert report.record()["expert_load"] == {
            "max": max(max(counts) * EXPERTS / sum(counts) for counts in layers),
            "unused": sum(counts.count(0) for counts in layers),
        }
    engine.close()


def test_train_metrics_have_expert_load_and_router_loss(tmp_path: Path) -> None:
    mixtral = {**COMMON, "model_type": "mixtral", "num_local_experts": EXPERTS}
    del mixtral["vocab_size"]
    raw = settings(
        tmp_path, model__config=mixtral | {"output_router_logits": True}, training__steps=1,
        engine__experts_per_unit=2,
    )  # fmt: skip
    train(raw)
    (line,) = [one for one in metrics_of(tmp_path) if one["event"] == "step"]
    assert 1 < line["expert_load"]["max"] <= EXPERTS / COMMON["num_experts_per_tok"]
    assert 3.5 < line["router_loss"] < 2 * EXPERTS  # 2 per micro-batch if experts are balanced
