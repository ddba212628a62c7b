"""Models known by name: fields of their published configs, in the form that transformers reads.

Fields that equal the defaults of the family's config class are left out.
"""

from __future__ import annotations

from typing import Any

_LLAMA = {"model_type": "llama", "vocab_size": 32000}
_QWEN3 = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip

# Models named by their size, from published configs (Llama 2, Llama 3 for 8b, GPT-3 for 1.3b). They
# have outlines (`targets.named_target`), which need no package.
SIZES: dict[str, dict[str, Any]] = {
    "1.3b": {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16,
             "n_positions": 2048, "vocab_size": 50257},
    "7b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32},
    "8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "13b": {**_LLAMA, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
            "num_attention_heads": 40},
    "70b": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8},
}  # fmt: skip
# Models on the Hugging Face Hub, by their names there; transformers builds them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-8b": {**_QWEN3, "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
                 "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-32b": {**_QWEN3, "model_type": "qwen3", "hidden_size": 5120,
                  "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "qwen3-30b-a3b": {**_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048,
                      "intermediate_size": 6144, "num_hidden_layers": 48,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "decoder_sparse_step": 1, "norm_topk_prob": True},
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "glm-4.5-air": {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096,
                    "intermediate_size": 10944, "num_hidden_layers": 46,
                    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
                    "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": False,
                    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
                    "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
                    "norm_topk_prob": True, "tie_word_embeddings": False},
    "deepseek-v3": {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
                    "intermediate_size": 18432, "num_hidden_layers": 61,
                    "num_attention_heads": 128, "num_key_value_heads": 128,
                    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
                    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
                    "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
                    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
                    "tie_word_embeddings": False},
}  # fmt: skip
NAMED = {**SIZES, **PUBLISHED}
