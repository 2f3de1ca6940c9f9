"""What a speculator is made of, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecewise_graph.custom_ops.attention.transformers_registry import is_ours

from ..errors import SpeculatorError
from ..options import FULL, WAYS, DraftShape
from ..rounds.phases import RULES

PHASES = ("draft", "verify", "extend")
MAX_SEQ_LEN = 1024  # where nothing is asked for


def ways(graphs: str | Mapping[str, str], prefill: str) -> dict[str, str]:
    """How each phase runs, from one way for all, or from some of them by name; prefill's own default."""
    names = (*PHASES, "prefill")
    if isinstance(graphs, str):
        given = dict.fromkeys(PHASES, graphs) | {"prefill": prefill if graphs == FULL else graphs}
    else:
        given = dict.fromkeys(PHASES, FULL) | {"prefill": prefill} | dict(graphs)
    for phase, way in given.items():
        if phase not in names or way not in WAYS or (phase == "prefill" and way == FULL):
            raise SpeculatorError.bad_graphs(phase, way, names, WAYS)
    return given


def padded_sizes(given: Sequence[int] | None, max_requests: int) -> tuple[int, ...]:
    """Ascending, the last of them enough for every request."""
    if max_requests < 1 or any(size < 1 for size in given or ()):
        what = f"max_requests={max_requests}, batch_sizes={given}"
        raise SpeculatorError.bad_setting(what, "serve at least one request at a time.")
    powers = [2**i for i in range(max_requests.bit_length()) if 2**i < max_requests]
    below = [size for size in given or powers if size < max_requests]
    return (*sorted(set(below)), max_requests)


def longest(model: Any, asked: int | None, page_size: int, num_pages: int | None) -> int:
    """Tokens of a request at most; not more than the target knows positions for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_seq_len = min(MAX_SEQ_LEN, positions or MAX_SEQ_LEN) if asked is None else asked
    for name, value, least in (
        ("max_seq_len", max_seq_len, 2), ("page_size", page_size, 1), ("num_pages", num_pages, 2),
    ):  # fmt: skip
        if value is not None and value < least:
            raise SpeculatorError.bad_setting(f"{name}={value}", f"pass {least} or more.")
    if positions is not None and max_seq_len > positions:
        raise SpeculatorError.bad_setting(
            f"max_seq_len={max_seq_len} and a target of {positions} positions",
            "lower it; a model that reaches further says so in config.max_position_embeddings.",
        )
    return max_seq_len


def check_rules(rules: Sequence[str]) -> None:
    if isinstance(rules, str) or not set(rules) <= set(RULES):
        raise SpeculatorError.bad_setting(f"{rules=}", f"pass a list of some of {', '.join(RULES)}.")


def check_models(model: Any, draft: Any, shapes: Sequence[DraftShape], page_size: int) -> None:
    attention = model.config.get_text_config()._attn_implementation
    if not is_ours(attention):
        raise SpeculatorError.wrong_attention(attention)
    if draft is not None:
        ours, theirs = next(draft.parameters()), next(model.parameters())
        if ours.dtype != theirs.dtype:
            raise SpeculatorError.unlike("dtype", ours.dtype, theirs.dtype)
        if ours.device != theirs.device:
            raise SpeculatorError.unlike("device", ours.device, theirs.device)
        _check_sizes(model, draft, shapes)
    for shape in shapes:
        if shape.steps and draft is None:
            raise SpeculatorError.no_draft(shape)
        if shape.is_tree and page_size != 1:
            what = f"{shape}, with pages of {page_size} tokens"
            raise SpeculatorError.bad_shape(
                what, "pass page_size=1: a tree's commit reorders slots, not pages."
            )


def check_options(options: Mapping[str, Any]) -> None:
    own = {"pool", "outputs", "capture", "capture_sizes", "max_tokens", "token_dim"} & options.keys()
    if own:
        raise SpeculatorError.fixed_option(min(own))


def _check_sizes(model: Any, draft: Any, shapes: Sequence[DraftShape]) -> None:
    config, target = draft.config, model.config.get_text_config()
    if config.target_hidden_size != target.hidden_size:
        raise SpeculatorError.unlike("hidden size of features", config.target_hidden_size, target.hidden_size)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if config.vocab_size != vocabulary:
        raise SpeculatorError.unlike("vocabulary", config.vocab_size, vocabulary)
    widest = max(shape.topk for shape in shapes)
    if widest > config.draft_vocab_size:
        what = f"top-k {widest} of a draft with {config.draft_vocab_size} tokens"
        raise SpeculatorError.bad_shape(what, "choose a smaller topk.")
