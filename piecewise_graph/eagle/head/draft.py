"""DraftModel: an EAGLE head as one module, with attention on the draft's own paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from piecewise_graph.custom_ops.attention import attention

from ..errors import EagleError
from .draft_config import DraftConfig

Rotation = tuple[Tensor, Tensor]  # cos and sin, [rows, head_dim] each


class DraftAttention(nn.Module):
    """Self-attention of one draft layer.

    Attributes:
        attend: `attend(q, k, v, layer=, scale=, window=)` with q `[rows, heads, head_dim]`, k and v
            `[rows, kv_heads, head_dim]`; the result has q's shape. By default the paged op, which takes its
            batch from the forward context. Training replaces it by dense causal attention.
    """

    def __init__(self, config: DraftConfig, layer: int, input_size: int) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = attention
        self.head_dim = config.head_dim
        self.options = {"layer": layer, "scale": config.head_dim**-0.5, "window": config.sliding_window}
        width, kv_width = config.num_attention_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """`[rows, input_size]` to `[rows, hidden_size]`."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        return self.o_proj(self.attend(q, k, v, **self.options).flatten(1))


class DraftLayer(nn.Module):
    """A Llama layer; without `norm` it does not normalise its input, like EAGLE-1's first layer."""

    def __init__(self, config: DraftConfig, layer: int, *, norm: bool = True, input_size: int = 0) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer, input_size or config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = _norm(config) if norm else nn.Identity()
        self.post_attention_layernorm = _norm(config)

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """`[rows, hidden_size]` to the same."""
        return self.finish(hidden, self.input_layernorm(hidden), rotation)

    def finish(self, residual: Tensor, x: Tensor, rotation: Rotation) -> Tensor:
        """Attention of `x`, then the MLP, each added to `residual`."""
        residual = residual + self.self_attn(x, rotation)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class FusingLayer(DraftLayer):
    """EAGLE-3's first layer: attention reads the token's embedding and the hidden state side by side."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, 0, input_size=2 * config.hidden_size)
        self.hidden_norm = _norm(config)
        self.norm_before_residual = config.norm_before_residual

    def fuse(self, embeds: Tensor, hidden: Tensor, rotation: Rotation) -> Tensor:
        """`[rows, hidden_size]` twice, to the same once."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.finish(normed if self.norm_before_residual else hidden, x, rotation)


class DraftModel(nn.Module):
    """A draft head, by its config.

    Args:
        config: its shape.
        embed_tokens, lm_head: modules to share, usually the target's; None = new ones of the draft's own.
        d2t: int64 `[draft_vocab_size]`, `target id - draft id` of every draft token; None = the same ids.
        dtype, device: of the new weights. Pass them here: a later `.to(dtype)` would also round the
            frequencies of RoPE.

    Attributes:
        d2t: as given, a buffer.
        shared: names of the modules that were passed in; `save_draft` does not store them.

    Modules are named as in speculators' checkpoints; `layers.0` is what EAGLE and SGLang call `midlayer`.

    Raises:
        EagleError: a shared module, or `d2t`, of another shape than the config's.
    """

    d2t: Tensor | None

    def __init__(
        self,
        config: DraftConfig,
        *,
        embed_tokens: nn.Module | None = None,
        lm_head: nn.Module | None = None,
        d2t: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        given = {"embed_tokens": embed_tokens, "lm_head": lm_head}
        self.shared = frozenset(name for name, module in given.items() if module is not None)
        _check_shared(config, given)
        _check_d2t(config, d2t)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        eagle3 = config.kind == "eagle3"
        self.fc = nn.Linear(config.feature_size if eagle3 else 2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(_layer(config, index) for index in range(config.num_layers))
        self.norm = _norm(config) if eagle3 or config.layernorms else None
        self.embedding_layernorm = _norm(config) if config.layernorms else None
        self.input_norm = LlamaRMSNorm(config.feature_size, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps) for _ in config.feature_layers or ())
            if config.fc_norm
            else None
        )
        if embed_tokens is None:
            self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, hidden)
        if lm_head is None:
            self.lm_head: nn.Module = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.to(device=device, dtype=dtype)
        with torch.device("cpu"):  # not loaded but computed, which the meta device cannot do
            self.rotary = LlamaRotaryEmbedding(_rotary_config(config)).to(device=device)
        self.register_buffer("d2t", None if d2t is None else d2t.to(device=device))
        for name, module in given.items():
            if module is not None:
                setattr(self, name, module)

    @property
    def feature_size(self) -> int:
        """Columns of what `project` takes."""
        return self.config.feature_size

    def project(self, features: Tensor) -> Tensor:
        """Features `[rows, feature_size]` to the hidden state of the first step, `[rows, hidden_size]`.

        Features of several target layers are concatenated in the order of `config.feature_layers`.
        """
        if self.config.kind == "eagle1":
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """One draft step of every row.

        Args:
            input_ids: int `[rows]`, ids of the target's vocabulary.
            positions: int `[rows]`.
            hidden: `[rows, hidden_size]`, from `project` or from the step before.

        Returns:
            `[rows, hidden_size]`, for the next step and for `logits`.
        """
        embeds = self.embed_tokens(input_ids)
        cos, sin = self.rotary(hidden, positions[None])
        rotation = cos[0], sin[0]
        if self.config.kind == "eagle1":
            if self.embedding_layernorm is not None:
                embeds = self.embedding_layernorm(embeds)
            hidden = self.fc(torch.cat([embeds, hidden], dim=-1))
        for layer in self.layers:
            if isinstance(layer, FusingLayer):
                hidden = layer.fuse(embeds, hidden, rotation)
            else:
                hidden = layer(hidden, rotation)
        if self.norm is not None and self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden_size]` of `forward` to `[rows, draft_vocab_size]`."""
        if self.norm is not None and not self.config.norm_output:
            hidden = self.norm(hidden)
        return self.lm_head(hidden)

    def to_target(self, ids: Tensor) -> Tensor:
        """Ids of the draft's vocabulary as ids of the target's, in the shape and dtype (int) of `ids`."""
        return ids if self.d2t is None else (ids + self.d2t[ids]).to(ids.dtype)


def _layer(config: DraftConfig, index: int) -> DraftLayer:
    if config.kind == "eagle3" and index == 0:
        return FusingLayer(config)
    return DraftLayer(config, index, norm=index > 0 or config.layernorms)


def _norm(config: DraftConfig) -> LlamaRMSNorm:
    return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


def _rotary_config(config: DraftConfig) -> LlamaConfig:
    """The config that LlamaRotaryEmbedding reads; transformers checks what its kind of RoPE needs."""
    return LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )


def _check_shared(config: DraftConfig, given: dict[str, nn.Module | None]) -> None:
    rows = {"embed_tokens": config.vocab_size, "lm_head": config.draft_vocab_size}
    for name, module in given.items():
        expected = (rows[name], config.hidden_size)
        if module is not None and tuple(module.weight.shape) != expected:  # type: ignore[arg-type]
            raise EagleError.wrong_module(name, module.weight.shape, expected)


def _check_d2t(config: DraftConfig, d2t: Tensor | None) -> None:
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise EagleError.no_mapping(config.draft_vocab_size, config.vocab_size)
        return
    if d2t.dtype != torch.int64 or d2t.shape != (config.draft_vocab_size,):
        raise EagleError.wrong_d2t_tensor(d2t.dtype, d2t.shape, config.draft_vocab_size)
    ids = torch.arange(config.draft_vocab_size, device=d2t.device) + d2t
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise EagleError.wrong_d2t_offset(row, int(ids[row]), config.vocab_size)
    order = ids.sort(stable=True)
    again = (order.values[1:] == order.values[:-1]).nonzero()
    if len(again):  # a tree would try one token twice, and accept it too often
        one, other = order.indices[int(again[0]) :][:2].tolist()
        raise EagleError.repeated_d2t(one, other, int(ids[one]))
