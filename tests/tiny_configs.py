"""Small configurations of transformers' models, derived from the defaults of their classes."""

from __future__ import annotations

from typing import Any

VOCABULARY = 128
LAYERS = 2
MOST_LAYERS = 4
HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 64, 4, 2, 16, 96

_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "num_self_attends_per_block"),
)
_GROUPS: tuple[tuple[Any, str], ...] = (
    (LAYERS, " ".join(_DEPTHS)),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
        " num_encoder_attention_heads num_decoder_attention_heads attention_heads linear_num_heads"
        " num_self_attention_heads num_cross_attention_heads swa_num_attention_heads index_n_heads"
        " linear_num_key_heads linear_num_value_heads num_query_groups",
    ),
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim dim embedding_size embedding_dim word_embed_proj_dim"
        " d_latents lru_width attention_hidden_size true_hidden_size kv_lora_rank q_lora_rank o_lora_rank"
        " intra_bottleneck_size",
    ),
    (
        HEAD,
        "head_dim attention_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim index_head_dim"
        " swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim kv_channels d_head"
        " attention_head_size dim_head mamba_d_head mamba_d_state state_size ssm_state_size global_head_dim",
    ),
    (
        INNER,
        "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_inner"
        " hidden_dim ffn_hidden_size dense_intermediate_size feed_forward_size dff dim_ff"
        " shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"
        " intermediate_size_mlp moe_shared_expert_intermediate_size shared_experts_intermediate_size",
    ),
    (1024, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (8, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (
        1,
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"
        " first_k_dense_replace num_dense_layers",
    ),
    (0, "num_nextn_predict_layers hidden_size_per_layer_input"),
    (
        16,
        "sliding_window sliding_window_size attention_window_size local_attention index_topk"
        " attention_chunk_size",
    ),
    (0.1, "initializer_range init_std"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input entity_vocab_size pronunciation_vocab_size"),
    (VOCABULARY, "shape_vocab_size encoder_hash_byte_group_vocab"),
)
SIZES: dict[str, Any] = {name: value for value, names in _GROUPS for name in names.split()}
# These are often None by default, and then as many as the heads of a large model.
_ALWAYS = ("num_key_value_heads", "head_dim")

# What a family needs beside: sizes that follow from others.
_KINDS = ("sliding_attention", "full_attention")
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": HEAD}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 4,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": 2 * HIDDEN // HEADS,
    "num_key_value_heads": HEADS,
}
OWN: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "codegen": {"rotary_dim": 8},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _KINDS},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": HEAD},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": (32, 32), "is_decoder": True},
    "reformer-masked": {"axial_pos_embds_dim": (32, 32), "is_decoder": False},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"mamba_headdim": HEAD, "n_mamba_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
UNBUILDABLE: dict[str, str] = {
    "blt": "four configurations whose sizes depend on one another",
    "dbrx": "the model reads rope_theta, which its configuration does not have",
    "dots3_note": "sizes of its other parts depend on those of the text; dots3_note_text is the same",
    "gemma3n": "needs pillow and timm; gemma3n_text is the same",
    "gemma4_assistant": "the configuration's defaults are refused; reads another model's cache",
    "gemma4_unified_assistant": "reads another model's cache",
    "musicgen": "takes codes of several codebooks, which are no token ids",
    "musicgen_melody": "takes codes of several codebooks, which are no token ids",
    "qwen4_exp": "qwen4_exp_text is the same",
}


def small_config(name: str, family: str, config_class: Any, overrides: dict[str, Any]) -> Any:
    """A configuration of `config_class` in which every known size is small."""
    given = _small(config_class()) | OWN.get(name, OWN.get(family, {}))
    text = next((key for key in ("text_config", "decoder") if isinstance(given.get(key), dict)), None)
    (given if text is None else given[text]).update(overrides)
    return config_class(**given)


def _small(default: Any) -> dict[str, Any]:
    """Small values of the fields that `default` has."""
    fields = default.to_dict()
    named = {name for name, old in fields.items() if old is not None or name in _ALWAYS}
    found = {name: SIZES[name] for name in fields if name in named & SIZES.keys()}
    ids = [name for name in fields if name.endswith(("_token_id", "_token_index"))]
    found |= {
        name: min(number, 7) for number, name in enumerate(ids) if isinstance(fields[name], (int, list))
    }
    if "qk_rope_head_dim" in fields:  # latent attention shares no keys
        found["num_key_value_heads"] = HEADS
    found |= _layers(fields, next((fields[name] for name in _DEPTHS if fields.get(name)), 0))
    for name in fields:
        part = vars(default).get(name)
        if hasattr(part, "to_dict"):
            found[name] = _small(part)
    return found


def _layers(fields: dict[str, Any], depth: int) -> dict[str, Any]:
    """One layer of each kind, where lists say of which kind each layer is."""
    lists = {k: v for k, v in fields.items() if isinstance(v, (list, tuple)) and depth and len(v) == depth}
    if not lists:
        return {}
    kinds = dict.fromkeys(zip(*(map(str, value) for value in lists.values()), strict=True))
    rows = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    chosen = [rows.index(kind) for kind in kinds][:MOST_LAYERS]
    chosen += [i for i in range(depth) if i not in chosen][: max(LAYERS - len(chosen), 0)]
    count = {name: len(chosen) for name in _DEPTHS if fields.get(name) == depth}
    return count | {name: [value[i] for i in sorted(chosen)] for name, value in lists.items()}
