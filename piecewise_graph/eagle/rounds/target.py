"""TargetModel: any causal LM of transformers, which also returns the hidden states that a draft reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpeculatorError


class TargetModel(nn.Module):
    """A causal LM whose forward returns logits and the features that a draft reads.

    A tap in front of a layer keeps the hidden state that passes. Taps are modules and no hooks, so a compiled
    forward returns features as plain outputs. The caller's model is not changed; it shares all parameters.

    Args:
        model: on our attention (`attn_implementation="piecewise"`).
        feature_layers: decoder layers whose inputs are concatenated to the features (EAGLE-3); None = the
            input of the output projection, that is the last hidden state after the final norm (EAGLE-1, 2).

    Raises:
        SpeculatorError: the model has no such layer.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.model, self.taps = _tapped(model, feature_layers)
        self.config = model.config.get_text_config()
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.feature_size = self.config.hidden_size * len(self.taps)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One forward over the rows of a batch.

        Args:
            input_ids, position_ids: `[1, rows]` integers.

        Returns:
            (logits `[rows, vocabulary]`, features `[rows, feature_size]`).
        """
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        seen = [tap.seen for tap in self.taps]
        features = torch.cat(seen, -1)  # type: ignore[arg-type]  # every tap was passed
        for tap in self.taps:
            tap.seen = None
        return logits[0], features[0]


class _Tap(nn.Module):
    """Wraps a module and keeps the first argument of its latest call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        # Models read plain attributes of their layers, such as the kind of attention. A forward among them
        # (tensor parallel puts one around a module's own) is for `inner`.
        attributes = {k: v for k, v in vars(inner).items() if not k.startswith("_") and k != "forward"}
        self.__dict__.update(attributes)
        self.inner = inner
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = hidden
        return self.inner(hidden, *args, **kwargs)


def _tapped(model: Any, layers: Sequence[int] | None) -> tuple[Any, list[_Tap]]:
    """(`model` with taps, the taps in order); every module that does not hold a tap is shared."""
    if layers is None:
        head = _path_to(model, model.get_output_embeddings())
        return _replaced(model, {head: (tap := _Tap(model.get_output_embeddings()))}), [tap]
    stack = _decoder_layers(model)
    for index in layers:
        if not 0 <= index < len(stack):
            raise SpeculatorError.no_layer(index, len(stack) - 1)
    taps = {index: _Tap(stack[index]) for index in dict.fromkeys(layers)}
    path = _path_to(model, stack)
    found = _replaced(model, {f"{path}.{index}": tap for index, tap in taps.items()})
    return found, [taps[index] for index in layers]


def _decoder_layers(model: Any) -> nn.ModuleList:
    config = model.config.get_text_config()
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise SpeculatorError.no_layers(type(model).__name__, config.num_hidden_layers)


def _path_to(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _replaced(model: nn.Module, taps: dict[str, _Tap]) -> Any:
    """`model` with taps at some paths; modules above a tap are shallow copies."""
    made = copy.copy(model)
    made._modules = dict(model._modules)
    below: dict[str, dict[str, _Tap]] = {}
    for path, tap in taps.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = tap
        else:
            made._modules[name] = tap
    for name, inner in below.items():
        child = model._modules[name]
        assert child is not None
        made._modules[name] = _replaced(child, inner)
    return made
