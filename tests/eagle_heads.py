"""Draft heads as their papers define them, in plain torch, and their checkpoints as three stacks do."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

HIDDEN, VOCABULARY, LAYERS = 32, 48, 8
TARGETS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_target(family: str = "llama", **changes: Any) -> torch.nn.Module:
    """A causal LM with random weights; its rope_theta is not the heads'."""
    fields = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(TARGETS[family](**(fields | changes))).eval()


@dataclass(frozen=True)
class Head:
    """What a head is, in the words of its definition; names of tensors are the original ones."""

    eagle3: bool
    hidden: int = HIDDEN
    target_hidden: int = HIDDEN
    intermediate: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    draft_vocabulary: int = VOCABULARY
    layers: int = 1
    features: int = 3
    theta: float = 10000.0
    window: int | None = None
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layernorms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = True

    @property
    def first(self) -> str:
        return "midlayer" if self.eagle3 else "layers.0"

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        """Random tensors, norms near one."""
        torch.manual_seed(seed)
        shapes = dict(self._shapes())
        made = {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
        for name in made:
            if "norm" in name:
                made[name] = 1 + 0.3 * torch.randn(shapes[name])
        if self.eagle3 and self.draft_vocabulary < VOCABULARY:
            ids = torch.randperm(VOCABULARY)[: self.draft_vocabulary].sort().values
            made["d2t"] = ids - torch.arange(self.draft_vocabulary)
            made["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
        return made

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        wide = self.features * self.target_hidden if self.eagle3 else 2 * self.hidden
        shapes: list[tuple[str, tuple[int, ...]]] = [("fc.weight", (self.hidden, wide))]
        shapes += [("fc.bias", (self.hidden,))] * self.fc_bias
        shapes += [("embed_tokens.weight", (VOCABULARY, self.hidden))] * self.own_embedding
        if self.eagle3:
            shapes += [
                ("norm.weight", (self.hidden,)),
                ("lm_head.weight", (self.draft_vocabulary, self.hidden)),
            ]
        shapes += [("input_norm.weight", (wide,))] * self.norm_before_fc
        if self.fc_norm:
            shapes += [(f"fc_norm.{i}.weight", (self.target_hidden,)) for i in range(self.features)]
        if self.layernorms:
            shapes += [("embedding_layernorm.weight", (self.hidden,)), ("norm.weight", (self.hidden,))]
        for index in range(self.layers):
            shapes += self._layer_shapes(index)
        return shapes

    def _layer_shapes(self, index: int) -> list[tuple[str, tuple[int, ...]]]:
        name = self.first if index == 0 else f"layers.{index}"
        width = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        read = 2 * self.hidden if self.eagle3 and index == 0 else self.hidden
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for part, count in width.items():
            shapes += [(f"{name}.self_attn.{part}_proj.weight", (count * self.head_dim, read))]
            shapes += [(f"{name}.self_attn.{part}_proj.bias", (count * self.head_dim,))] * self.qkv_bias
        shapes += [(f"{name}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim))]
        shapes += [(f"{name}.self_attn.o_proj.bias", (self.hidden,))] * self.o_bias
        if self.qk_norm:
            shapes += [(f"{name}.self_attn.{part}_norm.weight", (self.head_dim,)) for part in "qk"]
        for part, rows, columns in (
            ("gate", self.intermediate, self.hidden),
            ("up", self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        ):
            shapes += [(f"{name}.mlp.{part}_proj.weight", (rows, columns))]
            shapes += [(f"{name}.mlp.{part}_proj.bias", (rows,))] * self.mlp_bias
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] * (self.eagle3 or index > 0 or self.layernorms)
        norms += ["hidden_norm"] * (self.eagle3 and index == 0)
        return shapes + [(f"{name}.{norm}.weight", (self.hidden,)) for norm in norms]


class Reference:
    """A head's forward on one sequence, as EAGLE's `cnets1.py` and `cnets.py` define it."""

    def __init__(self, head: Head, weights: dict[str, Tensor], target: torch.nn.Module) -> None:
        self.head, self.w = head, weights
        embedding = target.get_input_embeddings().weight
        self.embedding = weights["embed_tokens.weight"] if head.own_embedding else embedding
        self.lm_head = weights.get("lm_head.weight", target.get_output_embeddings().weight)

    def project(self, features: Tensor) -> Tensor:
        if not self.head.eagle3:
            return features
        if self.head.norm_before_fc:
            features = self.norm("input_norm", features)
        if self.head.fc_norm:
            parts = features.split(self.head.target_hidden, -1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self.linear("fc", features)

    def forward(self, ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        head, embeds = self.head, self.embedding[ids]
        if head.eagle3:
            normed = self.norm("midlayer.hidden_norm", hidden)
            x = torch.cat([self.norm("midlayer.input_layernorm", embeds), normed], -1)
            hidden = self.layer(head.first, normed if head.norm_before_residual else hidden, x, positions)
        else:
            if head.layernorms:
                embeds = self.norm("embedding_layernorm", embeds)
            hidden = self.linear("fc", torch.cat([embeds, hidden], -1))
            x = self.norm("layers.0.input_layernorm", hidden) if head.layernorms else hidden
            hidden = self.layer("layers.0", hidden, x, positions)
        for index in range(1, head.layers):
            x = self.norm(f"layers.{index}.input_layernorm", hidden)
            hidden = self.layer(f"layers.{index}", hidden, x, positions)
        return self.norm("norm", hidden) if head.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        if "norm.weight" in self.w and not self.head.norm_output:
            hidden = self.norm("norm", hidden)
        return hidden @ self.lm_head.T

    def layer(self, name: str, residual: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        residual = residual + self.attention(f"{name}.self_attn", x, positions)
        x = self.norm(f"{name}.post_attention_layernorm", residual)
        gate, up = (self.linear(f"{name}.mlp.{part}_proj", x) for part in ("gate", "up"))
        return residual + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)

    def attention(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        head, rows = self.head, len(x)
        q, k, v = (
            self.linear(f"{name}.{part}_proj", x).view(rows, -1, head.head_dim).transpose(0, 1)
            for part in "qkv"
        )
        if head.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (part.repeat_interleave(head.heads // head.kv_heads, 0) for part in (k, v))
        distance = torch.arange(rows)[:, None] - torch.arange(rows)[None]
        seen = (distance >= 0) & (distance < (head.window or rows))
        scores = (q @ k.transpose(1, 2) / math.sqrt(head.head_dim)).masked_fill(~seen, -math.inf)
        return self.linear(f"{name}.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head.head_dim // 2
        angle = positions[:, None] * self.head.theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))


def llama_config(head: Head, family: str = "llama") -> dict[str, Any]:
    """The config of the head's layer, as transformers before version 5 wrote it."""
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": head.hidden,
        "intermediate_size": head.intermediate,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "num_hidden_layers": head.layers,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": head.theta,
        "rope_scaling": None,
        "torch_dtype": "float16",
    }
    if head.window is not None:
        config |= {"sliding_window": head.window, "layer_types": ["sliding_attention"] * head.layers}
    return config


def original(head: Head, weights: dict[str, Tensor], family: str = "llama") -> tuple[dict, dict]:
    """(config.json, tensors) as SafeAILab's EAGLE has them."""
    config = llama_config(head, family)
    if head.eagle3:
        config["draft_vocab_size"] = head.draft_vocabulary
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if getattr(head, flag):
                config[flag] = True
    elif not head.fc_bias:
        config["bias"] = False
    if head.target_hidden != head.hidden:
        config["target_hidden_size"] = head.target_hidden
    return config, dict(weights)


def sglang(head: Head, weights: dict[str, Tensor], family: str = "llama") -> tuple[dict, dict]:
    """As SpecForge and lmsys have them: other architecture names, options in `eagle_config`."""
    config, tensors = original(head, weights, family)
    config["architectures"] = ["LlamaForCausalLMEagle3" if head.eagle3 else "LlamaForCausalLMEagle"]
    if head.eagle3:
        flags = {flag: config.pop(flag) for flag in ("norm_before_fc", "fc_norm") if flag in config}
        ids = [1, LAYERS // 2 - 1, LAYERS - 4]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, **flags}
    return config, tensors


def speculators(head: Head, weights: dict[str, Tensor], family: str = "llama") -> tuple[dict, dict]:
    """As vLLM's speculators has them."""
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3" if head.eagle3 else "eagle",
        "transformer_layer_config": llama_config(head, family),
        "speculators_config": {"algorithm": "eagle3" if head.eagle3 else "eagle"},
    }
    layer = config["transformer_layer_config"]
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    del layer["rope_scaling"]
    if head.eagle3:
        config |= {
            "draft_vocab_size": head.draft_vocabulary,
            "target_hidden_size": None if head.target_hidden == head.hidden else head.target_hidden,
            "norm_before_fc": head.norm_before_fc,
            "fc_norm": head.fc_norm,
            "norm_output": head.norm_output,
            "eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3],
        }
        if not head.norm_before_residual:
            config["norm_before_residual"] = False
        renames = {"midlayer.": "layers.0."}
    else:
        config |= {"fusion_bias": head.fc_bias, "layernorms": head.layernorms}
        renames = {"fc.": "fusion_fc.", "layers.0.": "transformer.", "norm.": "pre_lm_head_layernorm."}
    return config, {renamed(name, renames): tensor for name, tensor in weights.items()}


def renamed(name: str, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


LAYOUTS = {"original": original, "sglang": sglang, "speculators": speculators}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


EAGLE1 = Head(eagle3=False, fc_bias=True)
EAGLE3 = Head(eagle3=True, draft_vocabulary=30)
LEAN = replace(EAGLE3, own_embedding=False)
