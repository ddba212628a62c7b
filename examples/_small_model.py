"""A small language model of bytes in transformers' format, for examples without a network."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

FACTS = {
    "vocab_size": 256,  # one byte a token
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_small_model(directory: Path, seed: int = 0) -> Path:
    """Save a Llama of a million parameters with random weights; return the directory."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**FACTS)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory
