"""Tests of the example Llama against that of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import llama
import presets

MODEL_NAMES = {
    "tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def transformers_name(name: str) -> str:
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    _, index, part, _ = name.split(".")
    return f"model.layers.{index}.{LAYER_NAMES[part]}.weight"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_match_transformers(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(llama, "_LOGITS", 4 * 256 * 24)  # slices of 24 positions
    shape = presets.shape_of("llama-tiny", checkpointing=checkpointing)
    model = presets.build(shape, torch.float32, seed=3)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
    )
    reference = transformers.LlamaForCausalLM(config)
    reference.load_state_dict({transformers_name(n): v for n, v in model.state_dict().items()})
    tokens = torch.randint(0, shape.vocab_size, (2, 41), generator=torch.Generator().manual_seed(1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    expected = reference(tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    expected_parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, expected_parameters[transformers_name(name)].grad, rtol=1e-3, atol=1e-6
        )


def test_preset_sizes_match_names() -> None:
    sizes = {name: presets.count_parameters(presets.shape_of(name)) / 1e9 for name in llama.PRESETS}
    assert sizes["llama-8b"] == pytest.approx(8.03, rel=1e-3)
    assert sizes["llama-1.5b"] == pytest.approx(1.5, rel=0.01)
    assert sizes["llama-14b"] == pytest.approx(14.77, rel=1e-3)
