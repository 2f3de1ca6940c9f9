"""A tiny random model of every causal and masked language model of the installed transformers, unmodified.

`NAMES` are the model types of the two registries: `llama`, and `bert-masked` for the masked one. Nothing is
downloaded: a configuration is the default of its class, with every size that `SIZES` names made small, and
one layer of each kind that the default has. `UNBUILDABLE` says which cannot be built so, and why.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_configs import UNBUILDABLE, VOCABULARY, small_config
from torch import Tensor
from transformers.models.auto import configuration_auto, modeling_auto

_CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
_MASKED = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
_MASK = "-masked"
ALL_NAMES = (*_CAUSAL, *(name + _MASK for name in _MASKED))
NAMES = tuple(name for name in ALL_NAMES if name not in UNBUILDABLE)
ENCODERS = frozenset(name for name in NAMES if name.endswith(_MASK))


def build(name: str, attention: str = "sdpa", **overrides: Any) -> torch.nn.Module:
    """The model in eval mode, in float32, with the same random weights at every call.

    Args:
        attention: "sdpa" or "eager"; a model that does not support it is built with eager attention.
        overrides: fields of the (text) configuration.
    """
    family = name.removesuffix(_MASK)
    config = small_config(name, family, configuration_auto.CONFIG_MAPPING[family], overrides)
    model_class = _model_class(name)
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    for implementation in (attention, "eager"):
        config._attn_implementation = implementation
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                return model_class._from_config(config, dtype=torch.float32).eval()
            except ValueError as error:
                if implementation == "eager" or "does not support" not in str(error):
                    raise
    raise AssertionError("the loop returns or raises")


def call(name: str, ids: Tensor) -> dict[str, Any]:
    """Keyword arguments of one forward over `ids`, without a KV cache."""
    return {"input_ids": ids} if name.endswith(_MASK) else {"input_ids": ids, "use_cache": False}


def rows(output: Any) -> Tensor:
    """The rows of an output, one per token: logits, or whatever stands first."""
    found = output["logits"] if "logits" in output else output[0]
    assert isinstance(found, Tensor)
    return found


def random_ids(tokens: int, batch: int = 1) -> Tensor:
    """Ids that no configuration uses as a special token."""
    return torch.randint(8, VOCABULARY, (batch, tokens))


def _model_class(name: str) -> Any:
    import transformers

    family = name.removesuffix(_MASK)
    found = _MASKED[family] if name.endswith(_MASK) else _CAUSAL[family]
    return getattr(transformers, found[0] if isinstance(found, (tuple, list)) else found)
