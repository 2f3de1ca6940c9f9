"""DraftConfig: the shape of a draft head, independent of checkpoint layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import EagleError

Kind = Literal["eagle1", "eagle3"]
# transformers' other types read the largest position on the host.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Fields that transformers' config of a Llama has under the same names.
LLAMA_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "rms_norm_eps", "hidden_act",
)  # fmt: skip
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of a draft head: one or more Llama layers on top of a target model's features.

    EAGLE-1 and EAGLE-2 heads (Li et al., arXiv 2401.15077 and 2406.16858) have the same shape, "eagle1".
    EAGLE-3 (arXiv 2503.01840) and vLLM's EAGLE 3.1 are "eagle3".

    Attributes:
        kind: "eagle1": `fc` joins the token's embedding with the hidden state, and plain layers follow;
            "eagle3": `fc` joins features of several target layers, and the first layer's q, k and v read
            `[embedding, hidden]`.
        vocab_size: the target's; rows of the embedding.
        draft_vocab_size: columns of the draft's logits; if fewer than `vocab_size`, `d2t` maps them.
        target_hidden_size: columns of one feature of the target.
        feature_layers: "eagle3" takes the input of target decoder layer i for each i here, ascending; layer
            0's input is the embedding. None for "eagle1", whose feature is the target's last hidden state
            after its final norm.
        rope_parameters: the draft's own, as transformers 5 keeps them: `rope_type`, `rope_theta` and so on.
        sliding_window: a token sees itself and `sliding_window - 1` tokens before it; None = all.
        attention_bias, output_bias: bias of q, k and v, and of the output projection.
        qk_norm: q and k are normalised per head before RoPE, as in Qwen3.
        layernorms: "eagle1" only: norms of the embedding, before the first layer and before `lm_head`.
        norm_before_residual: "eagle3": the first layer's residual is the normalised hidden state.
        norm_before_fc: "eagle3": one norm over all features together, before `fc`.
        fc_norm: "eagle3": a norm of each feature, before `fc` (EAGLE 3.1).
        norm_output: "eagle3": the final norm belongs to the hidden state that is fed back (EAGLE 3.1).

    Raises:
        EagleError: fields that contradict each other.
    """

    kind: Kind
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None
    num_layers: int = 1
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    fc_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layernorms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("eagle1", "eagle3"):
            raise EagleError.bad_config("kind", self.kind, "'eagle1' or 'eagle3'")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            expected = f"a divisor of num_attention_heads={self.num_attention_heads}"
            raise EagleError.bad_config("num_key_value_heads", self.num_key_value_heads, expected)
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            expected = f"1 to vocab_size={self.vocab_size}"
            raise EagleError.bad_config("draft_vocab_size", self.draft_vocab_size, expected)
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in ROPE_TYPES or self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            expected = f"rope_type {', '.join(ROPE_TYPES)}, applied to whole heads"
            raise EagleError.bad_config("rope_parameters", self.rope_parameters, expected)
        if self.kind == "eagle1":
            self._check_eagle1()
        elif not self.feature_layers or list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise EagleError.bad_config("feature_layers", self.feature_layers, "target layers, ascending")

    def _check_eagle1(self) -> None:
        expected = dict.fromkeys(EAGLE3_FLAGS, False) | {
            "hidden_size": self.target_hidden_size,  # its features and lm_head are the target's
            "draft_vocab_size": self.vocab_size,
            "feature_layers": None,
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise EagleError.bad_config(name, getattr(self, name), f"{value!r} for kind='eagle1'")

    @property
    def kv_heads(self) -> int:
        """Heads of the draft's KV cache."""
        return self.num_key_value_heads

    @property
    def num_hidden_layers(self) -> int:
        """`num_layers`, as configs of transformers name it."""
        return self.num_layers

    @property
    def feature_size(self) -> int:
        """Columns of the target features that `DraftModel.project` takes."""
        return self.target_hidden_size * (1 if self.feature_layers is None else len(self.feature_layers))

    @classmethod
    def for_target(cls, config: Any, kind: Kind = "eagle3", **changes: Any) -> DraftConfig:
        """The config of a new head with the shape of one of the target's layers.

        Args:
            config: the target's, from transformers.
            changes: fields that differ, such as `draft_vocab_size` or `rope_parameters`.

        Raises:
            EagleError: the target's config has no such field as a head needs, and `changes` has none.
        """
        config = config.get_text_config()
        fields = llama_fields(config, changes) | changes
        if kind == "eagle3" and "feature_layers" not in changes:
            fields["feature_layers"] = default_feature_layers(config.num_hidden_layers)
        return cls(kind=kind, **fields)


def llama_fields(config: Any, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fields of a `DraftConfig`, from transformers' config of a Llama-like model.

    Args:
        changes: has what the config lacks.

    Raises:
        EagleError: neither has a field that a head needs.
    """
    found: dict[str, Any] = {n: getattr(config, n, (changes or {}).get(n)) for n in LLAMA_FIELDS}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise EagleError.missing_fields(type(config).__name__, ", ".join(missing))
    heads, hidden = found["num_attention_heads"], found["hidden_size"]
    return found | {
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "draft_vocab_size": found["vocab_size"],
        "target_hidden_size": hidden,
    }


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Target layers whose inputs EAGLE-3 heads read by default: 2, n // 2, n - 3.

    EAGLE's `modeling_llama_kv.py`, vLLM's and SGLang's `llama.py` use the same ones. They collect features on
    the way up, each layer once, so a target of fewer than 7 layers gives fewer than three.
    """
    return tuple(layer for layer in range(num_layers) if layer in (2, num_layers // 2, num_layers - 3))
