"""Models of known shapes with random weights, to measure serving without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .draft_config import DraftConfig, Kind

if TYPE_CHECKING:
    from .draft import DraftModel

DRAFT_VOCAB = 32000  # of published EAGLE-3 heads


@dataclass(frozen=True)
class ModelShape:
    """A named Llama.

    Attributes:
        config: arguments of LlamaConfig; vocabulary and K/V heads are those of Llama 3 by default.
    """

    name: str
    config: dict[str, Any]


def _llama(name: str, hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> ModelShape:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return ModelShape(name, {**sizes, "num_hidden_layers": layers, "num_attention_heads": heads, **more})


MODEL_SHAPES = {
    "8b": _llama("Llama-3-8B", 4096, 14336, 32, 32),
    "1b": _llama("Llama-3.2-1B", 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "tiny": _llama("tiny", 64, 128, 3, 4, num_key_value_heads=2, vocab_size=512),
    # As many layers as the 8B shape, each so small that the device never makes the host wait.
    "deep": _llama("32 small layers", 256, 512, 32, 4, num_key_value_heads=2, vocab_size=512),
}


def random_model(
    shape: ModelShape, device: torch.device | str, attention: str, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A Llama of this shape with random weights.

    Args:
        attention: transformers' name of the implementation, such as "piecewise" or "sdpa".
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192} | shape.config
    )
    config._attn_implementation = attention
    default = torch.get_default_dtype()
    # merge_linears moves weights, which is not possible for those made in inference mode.
    with torch.device(device), torch.inference_mode(False):
        torch.set_default_dtype(dtype)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(default)


def sharded(model: Any) -> Any:
    """A model of transformers that was made alike on every rank, with this rank's part of its weights.

    As `tp_plan="auto"` cuts them. Collective; all processes of the job take part.
    """
    from transformers.distributed import DistributedConfig

    kind = type(model)
    config, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_plan="auto"))
    return kind.maybe_distribute_model(model, config, mesh)


def random_draft(target: Any, kind: Kind, shard: bool = True) -> DraftModel:
    """A head of the published shape with random weights, on the target's device and of its dtype.

    Args:
        kind: "eagle1", with the target's vocabulary, or "eagle3", with 32,000 tokens at most.
        shard: as of `load_draft`.
    """
    from .draft import DraftModel
    from .sharding import shard_like

    vocabulary = target.config.vocab_size
    weight = target.get_output_embeddings().weight
    changes: dict[str, Any] = {}
    if kind == "eagle3":
        changes["draft_vocab_size"] = min(DRAFT_VOCAB, vocabulary)
    config = DraftConfig.for_target(target.config, kind, **changes)
    d2t = None
    if config.draft_vocab_size != vocabulary:
        d2t = torch.arange(config.draft_vocab_size) * (vocabulary // config.draft_vocab_size - 1)
    draft = DraftModel(
        config,
        embed_tokens=target.get_input_embeddings(),
        lm_head=target.get_output_embeddings() if kind == "eagle1" else None,
        d2t=d2t,
        dtype=weight.dtype,
        device=weight.device,
    ).eval()
    if shard:
        shard_like(target, draft)
    return draft
