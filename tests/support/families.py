"""Tiny random-weight models of many transformers families, with batches that return a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 48
LENGTH = 7
BATCH = 2

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """Model class with a tiny configuration; `batch` maps a generator to forward arguments."""

    kind: str
    model: str
    config: Callable[[], Any]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any], Tensor] = lambda output: output.loss

    def build(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return a model in training mode, with the same values every time and no dropout."""
        torch.manual_seed(0)
        model = getattr(hf, self.model)._from_config(self.config(), dtype=dtype)
        return model.train()

    def batches(self, count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
        """Return batches that depend on their index only; floating-point inputs in `dtype`."""
        batches = [self.batch(torch.Generator().manual_seed(100 + i)) for i in range(count)]
        return [{name: _cast(x, dtype) for name, x in batch.items()} for batch in batches]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def causal(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sequence_pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": tokens(generator)[:, :4].contiguous()}


def audio(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 8, 16, generator=generator)
    labels = tokens(generator)[:, :4].contiguous()
    return {"input_features": features, "labels": labels}


def pixels(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=generator)


def images(generator: torch.Generator) -> Batch:
    return {"pixel_values": pixels(generator), "labels": torch.tensor([0, 1])}


def captions(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    ids[:, -1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": pixels(generator), "return_loss": True}


def vision_text(generator: torch.Generator) -> Batch:
    text = tokens(generator).clamp(min=4)
    ids = torch.cat([torch.full((BATCH, 4), 3), text], dim=1)
    return {"input_ids": ids, "pixel_values": pixels(generator), "labels": ids}


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
         "num_attention_heads": 2, "vocab_size": VOCABULARY}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SMALL, **IDS, "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
           "num_attention_heads": 2}  # fmt: skip
VISION = {**ENCODER, "image_size": 8, "patch_size": 4}
TEXT = {**ENCODER, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 16,
        "eos_token_id": VOCABULARY - 1}  # fmt: skip
ENCODER_DECODER = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24,
                   "decoder_ffn_dim": 24, "encoder_attention_heads": 2,
                   "decoder_attention_heads": 2, "vocab_size": VOCABULARY, "dropout": 0.0,
                   "decoder_start_token_id": 1, **IDS}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _decoder(name: str, config: str, **more: Any) -> Family:
    return Family("decoder", name, lambda: getattr(hf, config)(**{**DECODER, **more}), causal)


def moe_family(name: str, config: str, **more: Any) -> Family:
    return Family("MoE", name, lambda: getattr(hf, config)(**{**DECODER, **more}), causal)


FAMILIES: dict[str, Family] = {
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True),
    "mistral": _decoder("MistralForCausalLM", "MistralConfig", sliding_window=4),
    "gemma2": _decoder("Gemma2ForCausalLM", "Gemma2Config", query_pre_attn_scalar=8),
    "phi3": _decoder("Phi3ForCausalLM", "Phi3Config"),
    "gpt2": Family(
        "decoder", "GPT2LMHeadModel",
        lambda: hf.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=16, n_inner=24,
                              vocab_size=VOCABULARY, embd_pdrop=0.0, attn_pdrop=0.0,
                              resid_pdrop=0.0, **IDS),
        causal,
    ),
    "bert": Family(
        "encoder", "BertForMaskedLM",
        lambda: hf.BertConfig(**SMALL, **NO_DROPOUT, max_position_embeddings=16), masked,
    ),
    "roberta": Family(
        "encoder", "RobertaForMaskedLM",
        lambda: hf.RobertaConfig(**SMALL, **NO_DROPOUT, **IDS, max_position_embeddings=16), masked,
    ),
    "modernbert": Family(
        "encoder", "ModernBertForMaskedLM",
        lambda: hf.ModernBertConfig(**SMALL, **IDS, max_position_embeddings=16, cls_token_id=1,
                                    sep_token_id=2),
        masked,
    ),
    "albert": Family(
        "encoder, shared layers", "AlbertForMaskedLM",
        lambda: hf.AlbertConfig(**SMALL, **IDS, **NO_DROPOUT, embedding_size=8,
                                max_position_embeddings=16),
        masked,
    ),
    "deberta": Family(
        "encoder", "DebertaV2ForMaskedLM",
        lambda: hf.DebertaV2Config(**SMALL, **NO_DROPOUT, max_position_embeddings=16,
                                   pad_token_id=0, relative_attention=True, position_buckets=4,
                                   pos_att_type=["p2c", "c2p"]),
        masked,
    ),
    "t5": Family(
        "encoder-decoder", "T5ForConditionalGeneration",
        lambda: hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                            vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0,
                            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=2),
        sequence_pairs,
    ),
    "bart": Family(
        "encoder-decoder", "BartForConditionalGeneration",
        lambda: hf.BartConfig(**ENCODER_DECODER, max_position_embeddings=16), sequence_pairs,
    ),
    "whisper": Family(
        "audio", "WhisperForConditionalGeneration",
        lambda: hf.WhisperConfig(**ENCODER_DECODER, num_mel_bins=8, max_source_positions=8,
                                 max_target_positions=8),
        audio,
    ),
    "wav2vec2": Family(
        "audio", "Wav2Vec2ForSequenceClassification",
        lambda: hf.Wav2Vec2Config(**SMALL, hidden_dropout=0.0, activation_dropout=0.0,
                                  attention_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
                                  final_dropout=0.0, conv_dim=(8, 8), conv_stride=(2, 2),
                                  conv_kernel=(3, 3), num_feat_extract_layers=2,
                                  num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
                                  apply_spec_augment=False, classifier_proj_size=8),
        lambda g: {"input_values": torch.randn(BATCH, 64, generator=g),
                   "labels": torch.tensor([0, 1])},
    ),
    "mixtral": moe_family("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
    "qwen3_moe": moe_family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **SPARSE,
                      output_router_logits=True),
    "deepseek_v3": moe_family("DeepseekV3ForCausalLM", "DeepseekV3Config", n_routed_experts=4,
                        num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1,
                        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
                        v_head_dim=8, num_key_value_heads=2, head_dim=4,
                        first_k_dense_replace=1),
    "gpt_oss": moe_family("GptOssForCausalLM", "GptOssConfig", num_local_experts=4,
                    num_experts_per_tok=2, sliding_window=4),
    "vit": Family(
        "vision", "ViTForImageClassification",
        lambda: hf.ViTConfig(**VISION, **NO_DROPOUT, num_labels=2), images,
    ),
    "convnext": Family(
        "vision, convolutions", "ConvNextForImageClassification",
        lambda: hf.ConvNextConfig(hidden_sizes=[8, 12], depths=[2, 2], num_stages=2, patch_size=2,
                                  image_size=8, num_labels=2),
        images,
    ),
    "resnet": Family(
        "vision, running statistics", "ResNetForImageClassification",
        lambda: hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2],
                                num_labels=2),
        lambda g: {"pixel_values": torch.randn(4, 3, 32, 32, generator=g),
                   "labels": torch.tensor([0, 1, 1, 0])},
    ),
    "llava": Family(
        "vision and text", "LlavaForConditionalGeneration",
        lambda: hf.LlavaConfig(text_config=hf.LlamaConfig(**DECODER),
                               vision_config=hf.CLIPVisionConfig(**VISION), image_token_id=3,
                               vision_feature_layer=-1),
        vision_text,
    ),
    "clip": Family(
        "vision and text", "CLIPModel",
        lambda: hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8), captions,
    ),
    "siglip": Family(
        "vision and text", "SiglipModel",
        lambda: hf.SiglipConfig(text_config=TEXT, vision_config=VISION), captions,
    ),
    "mamba": Family(
        "state space", "MambaForCausalLM",
        lambda: hf.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=3,
                               vocab_size=VOCABULARY, **IDS),
        causal,
    ),
    "mamba2": Family(
        "state space", "Mamba2ForCausalLM",
        lambda: hf.Mamba2Config(hidden_size=16, state_size=4, num_hidden_layers=3, num_heads=4,
                                head_dim=8, n_groups=1, chunk_size=4, vocab_size=VOCABULARY,
                                **IDS),
        causal,
    ),
    # With rescale_every, eval mode divides the weights in place, which an engine does not support.
    "rwkv": Family(
        "state space", "RwkvForCausalLM",
        lambda: hf.RwkvConfig(hidden_size=16, num_hidden_layers=3, vocab_size=VOCABULARY,
                              context_length=16, attention_hidden_size=16,
                              intermediate_size=24, rescale_every=0, **IDS),
        causal,
    ),
}  # fmt: skip
