"""Tiny random models of eight architectures of transformers, unmodified, with sdpa."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

NAMES = ("llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "mixtral", "bert")
VOCABULARY = 128
# Smaller than most sizes in the tests, so that sliding windows cut something off.
SLIDING_WINDOW = 16


def build(name: str, layers: int = 3, device: torch.device | str = "cpu") -> torch.nn.Module:
    """A model of `layers` layers in eval mode, with the same random weights at every call."""
    model_class, config = _architecture(name, layers)
    config._attn_implementation = "sdpa"
    if name == "mixtral" and torch.device(device).type == "cuda":
        # In float32 the default, grouped_mm, falls back to an op that reads the group sizes on the host,
        # which no capture allows.
        config._experts_implementation = "batched_mm"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    return model.eval().to(device)


def call(name: str, ids: Tensor) -> dict[str, Any]:
    """Keyword arguments of one forward over `ids`, without a KV cache."""
    return {"input_ids": ids} if name == "bert" else {"input_ids": ids, "use_cache": False}


def rows(output: Any) -> Tensor:
    """The rows of an output, one per token: logits, or the hidden states of an encoder."""
    return output.logits if "logits" in output else output.last_hidden_state


def random_ids(tokens: int, batch: int = 1, device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, tokens)).to(device)


def _architecture(name: str, layers: int) -> tuple[Any, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    grouped = common | {"num_key_value_heads": 2}
    tf = transformers
    if name == "llama":
        return tf.LlamaForCausalLM, tf.LlamaConfig(**grouped)
    if name == "qwen3":
        return tf.Qwen3ForCausalLM, tf.Qwen3Config(**grouped, head_dim=16)
    if name == "mistral":
        return tf.MistralForCausalLM, tf.MistralConfig(**grouped, sliding_window=SLIDING_WINDOW)
    if name == "gemma3":
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        config = tf.Gemma3TextConfig(**grouped, head_dim=16, sliding_window=SLIDING_WINDOW, layer_types=kinds)
        return tf.Gemma3ForCausalLM, config
    if name == "phi3":
        return tf.Phi3ForCausalLM, tf.Phi3Config(**grouped, pad_token_id=0)
    if name == "gpt2":
        config = tf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=layers, n_head=4, n_positions=1024)
        return tf.GPT2LMHeadModel, config
    if name == "mixtral":
        config = tf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2)
        return tf.MixtralForCausalLM, config
    if name == "bert":
        return tf.BertModel, tf.BertConfig(**common)
    raise ValueError(f"no model named {name!r}; there are {', '.join(NAMES)}")
