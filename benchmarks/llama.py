"""The models of the benchmarks: Llamas of known shapes with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """A model's dimensions and what is promised for it."""

    name: str
    config: dict[str, Any]
    cut_limit: float


SHAPES = {
    "8b": Shape(
        "Llama-3-8B",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        1.03,
    ),
    "1b": Shape(
        "Llama-3.2-1B",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        1.08,
    ),
    "tiny": Shape(
        "tiny",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        1.08,
    ),
    # As many layers as the 8B shape, each so small that the device never makes the host wait.
    "deep": Shape(
        "32 small layers",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        1.08,
    ),
}


def random_model(shape: Shape, device: torch.device | str, attention: str) -> Any:
    """A Llama of this shape with random bf16 weights."""
    config = LlamaConfig(
        **{"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192} | shape.config
    )
    config._attn_implementation = attention
    # Weights made in inference mode could not be moved, which merge_linears does.
    with torch.device(device), torch.inference_mode(False):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
