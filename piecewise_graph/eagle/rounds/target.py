"""TargetModel: any causal LM of transformers in two parts, its decoder and its head.

Prompts need logits of their last rows only, and a draft reads hidden states of all rows. So the head is
called apart from the decoder, on the rows that are asked for.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from piecewise_graph.custom_ops.attention.served_models import is_sharded, trial, whole_forward

from ..errors import SpeculatorError


@dataclass(frozen=True)
class _Copied:
    """A module that was copied, with its children then, and the plain attributes that are to be followed."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    attributes: dict[str, Any] | None
    size: int

    @classmethod
    def of(cls, module: nn.Module, *, attributes: bool) -> _Copied:
        held = _plain_attributes(module) if attributes else None
        return cls(module, dict(module._modules), held, len(vars(module)))

    @property
    def is_current(self) -> bool:
        """The module holds the same. Quick: it is asked in each step."""
        now, held = vars(self.module), self.attributes
        same_children = self.module._modules == self.children
        if held is None or not same_children:
            return same_children
        same_names = len(now) == self.size or _plain_attributes(self.module).keys() == held.keys()
        return same_names and all(map(operator.is_, map(now.get, held), held.values()))


class TargetModel(nn.Module):
    """The decoder of a causal LM, which also returns the features that a draft reads.

    A tap in front of a layer keeps the hidden state that passes. Taps are modules and no hooks, so a compiled
    forward returns features as plain outputs. The caller's model is not changed; it shares all parameters.
    The modules that hold a tap or the head are copies with children of their own: see `follow`.

    Args:
        model: on our attention (`attn_implementation="piecewise"`).
        feature_layers: decoder layers whose inputs are concatenated to the features (EAGLE-3); None = the
            hidden state that the head reads (EAGLE-1, 2).

    Attributes:
        head: the module from hidden states to logits.

    Raises:
        SpeculatorError: the model has no such layer, or no decoder of its own.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self._source = (model,)  # in a tuple, because it is no submodule
        self._feature_layers = tuple(feature_layers or ())
        self._copied: list[_Copied] = []
        self.decoder, self.taps = _tapped(model, self._feature_layers, self._copied)
        self.head = TargetHead(model, self._copied)
        self.config = model.config.get_text_config()
        head = model.get_output_embeddings()
        self.vocab_size = head.weight.shape[0]
        hidden = self.config.hidden_size
        self.feature_size = hidden * len(self.taps) if self.taps else getattr(head, "in_features", hidden)

    def follow(self) -> bool:
        """Copy anew where the caller's model has other modules now, such as another lm_head, or attributes.

        Attributes of the modules that were copied count, unless they begin with an underscore.

        Quick where it has not: it is done per step.

        Returns:
            whether it had.

        Raises:
            SpeculatorError: the model has no such layer any more, or no decoder of its own.
        """
        if all(copied.is_current for copied in self._copied):
            return False
        model, copied = self._source[0], list[_Copied]()
        decoder, taps = _tapped(model, self._feature_layers, copied)
        self.head.take(model, copied)
        self.decoder, self.taps, self._copied = decoder, taps, copied
        return True

    def check_vocabulary(self) -> None:
        """Refuse a model whose vocabulary was resized: buffers have the old one.

        Raises:
            SpeculatorError: it has another size now.
        """
        weight = getattr(self._source[0].get_output_embeddings(), "weight", None)  # an adapter has none
        if weight is not None and weight.shape[0] != self.vocab_size:
            raise SpeculatorError.resized(weight.shape[0], self.vocab_size)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One forward over the rows of a batch.

        Args:
            input_ids, position_ids: `[1, rows]` integers.

        Returns:
            (hidden states for `head` `[rows, H]`, features `[rows, feature_size]`).
        """
        hidden = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0][0]
        if not self.taps:
            return hidden, hidden
        seen = [tap.seen for tap in self.taps]
        features = torch.cat(seen, -1)  # type: ignore[arg-type]  # every tap was passed
        for tap in self.taps:
            tap.seen = None
        return hidden, features[0]


def check_parts(model: Any) -> None:
    """Refuse a causal LM that computes something else than its decoder and its head, one after the other.

    Both are run eagerly over three tokens, see `custom_ops.attention.served_models.trial`; a tensor-parallel
    model is not run.

    Raises:
        SpeculatorError: it does, or its head does not run alone.
    """
    if is_sharded(model):
        return
    target = TargetModel(model)
    calls, whole = trial(whole_forward(model), model.device)
    try:
        found, logits = trial(lambda ids, places: target.head(target(ids, places)[0]), model.device)
    except Exception as error:  # whatever the forward of a model raises
        raise SpeculatorError.no_parts(type(model).__name__, f"{type(error).__name__}: {error}") from error
    wanted = [whole.logits[0], *(x for call in calls for x in (call.q, call.k, call.v))]
    parts = [logits, *(x for call in found for x in (call.q, call.k, call.v))]
    if len(parts) != len(wanted) or not all(map(_equal, parts, wanted)):
        why = "it is in training mode: call eval()" if model.training else "they compute something else"
        raise SpeculatorError.no_parts(type(model).__name__, why)


def _equal(one: Tensor, other: Tensor) -> bool:
    """In norm: sums whose order is left to chance (experts, on a GPU) change single elements by more."""
    if one.shape != other.shape:
        return False
    one, other = (tensor.float().nan_to_num(posinf=0.0, neginf=0.0) for tensor in (one, other))
    return bool((one - other).norm() <= 0.02 * other.norm())


class TargetHead(nn.Module):
    """A causal LM from its decoder's output on: the head, and whatever the model does to logits.

    Scales and caps of logits stand in the model's own forward. So that runs as it is, with the hidden states
    in place of a decoder. What stands around the decoder, such as a multimodal body, would embed ids: it is
    left out, see `check_parts`.
    """

    def __init__(self, model: Any, copied: list[_Copied]) -> None:
        super().__init__()
        self.take(model, copied)

    def take(self, model: Any, copied: list[_Copied]) -> None:
        """Take the model as it is now."""
        decoder = _decoder_of(model)
        path, around = _path_to(model, decoder), _around(model, decoder)
        self.given = _Given(decoder)
        found: nn.Module = self.given
        for body in reversed(around):
            path, _, name = path.rpartition(".")
            found = _Around(body, name, found)
            copied.append(_Copied.of(body, attributes=False))  # nothing of it runs
        self.model = _replaced(model, {path: found}, copied)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states `[n, H]` to logits `[n, vocabulary]`."""
        self.given.hidden = hidden[None]
        ids = hidden.new_zeros((1, len(hidden)), dtype=torch.int64)  # nobody reads them
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        self.given.hidden = None
        return logits[0]


class _Given(nn.Module):
    """In a decoder's place: its last hidden state is given."""

    SCRATCH = ("hidden",)  # of one call: no graph takes it for granted

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_plain_attributes(decoder))
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _Decoded:
        return _Decoded(last_hidden_state=self.hidden)


class _Around(nn.Module):
    """In the place of what holds a decoder: adds nothing to what is given."""

    def __init__(self, body: nn.Module, name: str, given: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_plain_attributes(body))
        self.name_of_given = name
        self.add_module(name, given)

    def forward(self, *_: Any, **__: Any) -> Any:
        return getattr(self, self.name_of_given)()


@dataclass
class _Decoded(ModelOutput):
    """With the fields that causal LMs on attention hand on from their decoders."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None
    shared_kv_states: None = None
    image_hidden_states: None = None
    audio_hidden_states: None = None
    video_hidden_states: None = None
    rope_deltas: None = None


class _Tap(nn.Module):
    """Wraps a module and keeps the first argument of its latest call."""

    SCRATCH = ("seen",)

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_plain_attributes(inner))
        self.inner = inner
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = hidden
        return self.inner(hidden, *args, **kwargs)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What models read of their parts, such as a layer's kind of attention.

    A forward among the attributes (tensor parallel puts one around a module's own) is for the module itself.
    """
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "forward"}


def _tapped(model: Any, layers: Sequence[int], copied: list[_Copied]) -> tuple[Any, list[_Tap]]:
    """(the decoder with taps, the taps in order); every module that does not hold a tap is shared."""
    decoder = _decoder_of(model)
    if not layers:
        return decoder, []
    stack = _layers_of(decoder, model)
    for index in layers:
        if not 0 <= index < len(stack):
            raise SpeculatorError.no_layer(index, len(stack) - 1)
    taps = {index: _Tap(stack[index]) for index in dict.fromkeys(layers)}
    path = _path_to(decoder, stack)
    found = _replaced(decoder, {f"{path}.{index}": tap for index, tap in taps.items()}, copied)
    return found, [taps[index] for index in layers]


def _decoder_of(model: Any) -> Any:
    found = model.get_decoder()
    if found not in (model, model.get_output_embeddings()):
        return found
    # Some models answer with themselves, or call their output projection `decoder`.
    embeddings = model.get_input_embeddings()
    for part in model.children():
        if embeddings in part.modules():
            return part
    raise SpeculatorError.no_decoder(type(model).__name__)


def _around(model: Any, decoder: nn.Module) -> list[nn.Module]:
    """What holds the decoder and not the head, the outermost first: of most models nothing."""
    names = _path_to(model, decoder).split(".")
    above = [model.get_submodule(".".join(names[:count])) for count in range(1, len(names))]
    head = model.get_output_embeddings()
    return [body for body in above if all(module is not head for module in body.modules())]


def _layers_of(decoder: nn.Module, model: Any) -> nn.ModuleList:
    config = model.config.get_text_config()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise SpeculatorError.no_layers(type(model).__name__, config.num_hidden_layers)


def _path_to(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _replaced(model: nn.Module, others: dict[str, Any], copied: list[_Copied]) -> Any:
    """`model` with other modules at some paths; those above are shallow copies, and added to `copied`."""
    copied.append(_Copied.of(model, attributes=True))
    made = copy.copy(model)
    made._modules = dict(model._modules)
    vars(made).pop("forward", None)  # one of its own would run the original with the original's parts
    below: dict[str, dict[str, Any]] = {}
    for path, other in others.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = other
        else:
            made._modules[name] = other
    for name, inner in below.items():
        child = model._modules[name]
        assert child is not None
        made._modules[name] = _replaced(child, inner, copied)
    return made
