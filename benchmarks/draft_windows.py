"""How a draft's rows are trained and measured: whole windows at once, attending to what inference sees.

Row i of a draft takes token i+1 and the target's features at position i, and predicts token i+2.  A chain
starts at a row with the target's features; each further row takes the draft's own hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Draft = Any  # a piecewise_graph.eagle.head.draft.DraftModel, or what a test puts in its place
Target = Any  # a transformers.LlamaForCausalLM


class ChainAttention:
    """Dense attention of many chains side by side, in the place of a draft's `attend`.

    The first call is the target's text: `sequences` of rows, causal.  Every later call is one row of every
    chain: chain c sees the text's keys where `visible[c]`, and the keys of its own rows, the present one
    included, but nothing of other chains.
    """

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.visible: Tensor | None = None  # [chains, rows of text]
        self.text: tuple[Tensor, Tensor] | None = None  # keys and values, [sequences, heads, rows, dim]
        self.own: list[tuple[Tensor, Tensor]] = []  # of one row per chain, [sequences, heads, chains, dim]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, (self.sequences, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
        if self.text is None:
            self.text = (k, v)
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            self.own.append((k, v))
            out = self._chains(q * scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _chains(self, q: Tensor) -> Tensor:
        assert self.text is not None and self.visible is not None
        keys, values = self.text
        scores = (q @ keys.transpose(-1, -2)).masked_fill(~self.visible, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key, _ in self.own]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        text, *rest = weights.to(values.dtype).split([keys.shape[2]] + [1] * len(own), -1)
        mixed = text @ values
        for weight, (_, value) in zip(rest, self.own, strict=True):
            mixed = mixed + weight * value
        return mixed

    def advance(self) -> None:
        """Chain c of the next row starts where chain c - 1 of this one did, so that both end at row c."""
        self.own = [(later(key, 2), later(value, 2)) for key, value in self.own]


def later(rows: Tensor, dim: int) -> Tensor:
    """Every row one place later; zeros come first."""
    first = torch.zeros_like(rows.narrow(dim, 0, 1))
    return torch.cat([first, rows.narrow(dim, 0, rows.shape[dim] - 1)], dim)


def install(draft: Draft, sequences: int) -> list[ChainAttention]:
    """Fresh attention for each of the draft's layers; a draft has it until the next call."""
    attentions = []
    for module in draft.modules():
        if hasattr(module, "attend"):
            module.attend = ChainAttention(sequences)
            attentions.append(module.attend)
    return attentions


def unroll(draft: Draft, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
    """EAGLE-3's training-time test: hidden states [sequences, rows, H] of each step, the text as the chain.

    Args:
        tokens: [sequences, rows], row i with token i+1
        features: [sequences, rows, features], the target's

    At step s, row i is the s-th row of the chain that started at row i - s: it takes the hidden state that
    step s-1 gave row i-1, sees the text's keys up to row i - s, and step j's key of row i - s + j for each j
    from 1 to s.  Rows below s belong to no chain and mean nothing.
    """
    sequences, rows = tokens.shape
    attentions = install(draft, sequences)
    order = torch.arange(rows, device=tokens.device)
    hidden = draft.project(features.flatten(0, 1))
    for step in range(steps):
        if step:
            hidden = later(hidden.unflatten(0, (sequences, rows)), 1).flatten(0, 1)
            for attention in attentions:
                attention.advance()
                attention.visible = order <= order[:, None] - step
        hidden = draft(tokens.flatten(), order.repeat(sequences), hidden)
        yield hidden.unflatten(0, (sequences, rows))


@torch.no_grad()
def observe(target: Target, ids: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """The target's features of every token, as the draft takes them, and its logits."""
    output = target(input_ids=ids, use_cache=False, output_hidden_states=True)
    states = output.hidden_states  # the layers' inputs, and then the last output after the final norm
    layers = (-1,) if config.feature_layers is None else config.feature_layers
    return torch.cat([states[layer] for layer in layers], -1), output.logits


def draft_loss(
    draft: Draft, target: Target, ids: Tensor, settings: Any, generator: torch.Generator
) -> Tensor:
    """The weighted mean over unrolled steps of each step's loss."""
    features, logits = observe(target, ids, draft.config)
    if draft.d2t is not None:
        logits = logits[..., draft.to_target(torch.arange(len(draft.d2t), device=ids.device))]
    wanted = logits[:, 1:].float().softmax(-1)
    given, total = features[:, :-1], torch.zeros((), device=ids.device)
    if settings.noise:
        given = given + torch.empty_like(given).uniform_(-settings.noise, settings.noise, generator=generator)
    for step, hidden in enumerate(unroll(draft, ids[:, 1:], given, settings.unroll)):
        hidden = hidden[:, step:]  # rows before belong to no chain
        predicted = draft.logits(hidden).float().log_softmax(-1)
        loss = settings.token_weight * -(wanted[:, step:] * predicted).sum(-1).mean()
        if settings.feature_weight:
            distance = nn.functional.smooth_l1_loss(hidden.float(), features[:, step + 1 :].float())
            loss = loss + settings.feature_weight * distance
        total = total + settings.decay**step * loss
    return total / sum(settings.decay**step for step in range(settings.unroll))


@torch.no_grad()
def draft_chains(draft: Draft, tokens: Tensor, features: Tensor, starts: Tensor, length: int) -> Tensor:
    """Greedy chains [sequences, starts, length] of target ids, one from each row of `starts`."""
    sequences, rows = tokens.shape
    attentions = install(draft, sequences)
    order = torch.arange(rows, device=tokens.device)
    text = draft(tokens.flatten(), order.repeat(sequences), draft.project(features.flatten(0, 1)))
    hidden = text.unflatten(0, (sequences, rows))[:, starts].flatten(0, 1)
    for attention in attentions:
        attention.visible = order <= starts[:, None]
    drafted: list[Tensor] = []
    while True:
        drafted.append(draft.to_target(draft.logits(hidden).argmax(-1)))
        if len(drafted) == length:
            return torch.stack(drafted, -1).unflatten(0, (sequences, -1))
        hidden = draft(drafted[-1], (starts + len(drafted)).repeat(sequences), hidden)


@torch.no_grad()
def survivals(target: Target, windows: Tensor, starts: Tensor, drafted: Tensor) -> Tensor:
    """Which drafted tokens a greedy target keeps: bool like `drafted`, true up to the first mismatch.

    Args:
        windows: [sequences, rows + 1] tokens; the chain of row i continues windows[:, : i + 2]
        starts: ascending rows
        drafted: [sequences, starts, length]
    """
    cache = transformers.DynamicCache()
    target(input_ids=windows, past_key_values=cache, use_cache=True, logits_to_keep=1)
    kept = []
    for chain, start in reversed(list(enumerate(starts.tolist()))):
        cache.crop(start + 1 - cache.get_seq_length())  # the text before; what later starts added is cut off
        ids = torch.cat([windows[:, start + 1, None], drafted[:, chain]], 1)
        logits = target(input_ids=ids, past_key_values=cache, use_cache=True).logits
        kept.append((logits[:, :-1].argmax(-1) == drafted[:, chain]).cumprod(1).bool())
    return torch.stack(kept[::-1], 1)


def heldout_survival(draft: Draft, target: Target, heldout: Tensor, starts: int, length: int) -> list[float]:
    """The share of greedy chains, of the first `starts` rows evenly spread, that survive to each depth."""
    rows = heldout.shape[1] - 1
    places = (torch.arange(1, starts + 1, device=heldout.device) * rows // starts) - 1
    kept = []
    for windows in heldout.split(32):
        features, _ = observe(target, windows, draft.config)
        drafted = draft_chains(draft, windows[:, 1:], features[:, :-1], places, length)
        kept.append(survivals(target, windows, places, drafted))
    return torch.cat(kept).flatten(0, 1).double().mean(0).tolist()


def accept_lengths(rates: list[float]) -> list[float]:
    """Mean accept length, bonus included, of chains of 1, 2, ... by the shares that survive to each depth."""
    return [1 + sum(rates[: depth + 1]) for depth in range(len(rates))]
