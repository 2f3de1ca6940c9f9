"""What a speculator is made of, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from piecewise_graph.custom_ops.attention.served_models import check_kind, check_model
from piecewise_graph.custom_ops.attention.transformers_registry import is_ours
from piecewise_graph.custom_ops.rope_limit import rope_limit

from ..errors import SpeculatorError
from ..head.draft_config import DraftConfig
from ..options import FULL, GRAPH_MODES, DraftShape, Limits, is_whole
from ..rounds.target import check_parts

PHASES = ("draft", "verify", "extend")
MAX_SEQ_LEN = 1024  # where nothing is asked for


def graph_modes(graphs: str | Mapping[str, str], prefill: str) -> dict[str, str]:
    """The graph mode of each phase and of prefill.

    Args:
        graphs: one mode for all, or modes by phase; the others are full.
        prefill: mode of prefill where nothing is asked for, or "full".
    """
    names = (*PHASES, "prefill")
    if isinstance(graphs, str):
        graphs = dict.fromkeys(PHASES, graphs) | ({} if graphs == FULL else {"prefill": graphs})
    if not isinstance(graphs, Mapping):
        raise SpeculatorError.no_graphs(graphs)
    given = dict.fromkeys(PHASES, FULL) | {"prefill": prefill} | dict(graphs)
    for phase, mode in given.items():
        if phase not in names or mode not in GRAPH_MODES or (phase == "prefill" and mode == FULL):
            raise SpeculatorError.bad_graphs(phase, mode, ", ".join(names), ", ".join(GRAPH_MODES))
    return given


def make_limits(
    model: Any,
    shapes: Sequence[DraftShape],
    *,
    max_requests: int,
    max_seq_len: int | None,
    page_size: int,
    num_pages: int | None,
    batch_sizes: Sequence[int] | None,
    prefill_rows: int,
) -> Limits:
    """Fill in what was not asked for; see `Speculator` for the arguments.

    Raises:
        SpeculatorError: a number is too small, or the target has fewer positions.
    """
    given = () if batch_sizes is None else batch_sizes
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    asked = tuple(given) if is_list else ()
    if not is_list or not all(map(_is_positive, (max_requests, *asked))):
        raise SpeculatorError.bad_batch_sizes(max_requests, batch_sizes)
    powers = [2**i for i in range(int(max_requests).bit_length())]
    sizes = {size for size in asked or powers if size < max_requests}
    config = model.config.get_text_config()
    positions, limit = getattr(config, "max_position_embeddings", None), rope_limit(config)
    if max_seq_len is None:
        max_seq_len = min(MAX_SEQ_LEN, positions or MAX_SEQ_LEN, limit or MAX_SEQ_LEN)
    for name, value, minimum in (
        ("max_seq_len", max_seq_len, 2), ("page_size", page_size, 1), ("num_pages", num_pages, 2),
        ("prefill_rows", prefill_rows, 1),
    ):  # fmt: skip
        if not is_whole(value, minimum, inf) and not (name == "num_pages" and value is None):
            raise SpeculatorError.too_small(name, value, minimum)
    if positions is not None and max_seq_len > positions:
        raise SpeculatorError.too_few_positions(max_seq_len, positions)
    if limit is not None and max_seq_len > limit:
        raise SpeculatorError.rope_of_the_longest(max_seq_len, limit)
    if num_pages is None:
        longest = max_seq_len + max(shape.lookahead for shape in shapes)
        num_pages = 1 + max_requests * -(-longest // page_size)
    batches = tuple(map(int, (*sorted(sizes), max_requests)))  # NumPy's numbers are no sizes of pg.compile
    return Limits(tuple(shapes), batches, *map(int, (max_seq_len, page_size, num_pages, prefill_rows)))


def check_kinds(model: Any, draft: Any) -> None:
    """Refuse what is no causal LM, and what is no draft head, before anything is read of them.

    Raises:
        AttentionError: the target is something else.
        SpeculatorError: it has no head, or the draft is something else.
    """
    check_kind(model)
    if model.get_output_embeddings() is None:
        raise SpeculatorError.no_output(type(model).__name__)
    if draft is not None and not isinstance(getattr(draft, "config", None), DraftConfig):
        raise SpeculatorError.not_a_draft(type(draft).__name__)


def check_models(model: Any, draft: Any, shapes: Sequence[DraftShape], page_size: int) -> None:
    """Refuse a target without our attention, a draft of another target, and shapes that need another one.

    Eager forwards of the target over three tokens show whether its attention can be served, and whether it
    can be run in two parts.

    Raises:
        SpeculatorError: see the catalogue.
        AttentionError: the target's tokens meet outside of our attention.
    """
    attention = model.config.get_text_config()._attn_implementation
    if not is_ours(attention):
        raise SpeculatorError.wrong_attention(attention)
    if draft is not None:
        _check_draft(model, draft, shapes)
    for shape in shapes:
        if shape.steps and draft is None:
            raise SpeculatorError.no_draft(shape)
        if shape.is_tree and page_size != 1:
            raise SpeculatorError.tree_on_pages(shape, page_size)
    check_model(model)
    check_parts(model)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is no dict of options, and options of pg.compile that the speculator sets itself."""
    if not isinstance(options, Mapping):
        raise SpeculatorError.no_options(options)
    own = {"pool", "outputs", "capture", "capture_sizes", "max_tokens", "token_dim"} & options.keys()
    if own:
        raise SpeculatorError.fixed_option(min(own))


def _is_positive(value: Any) -> bool:
    return is_whole(value, 1, inf)


def _check_draft(model: Any, draft: Any, shapes: Sequence[DraftShape]) -> None:
    config, ours, theirs = draft.config, next(draft.parameters()), next(model.parameters())
    for what, own, wanted in (
        ("dtype", ours.dtype, theirs.dtype),
        ("device", ours.device, theirs.device),
        ("hidden size of features", config.target_hidden_size, model.config.get_text_config().hidden_size),
        ("vocabulary", config.vocab_size, model.get_input_embeddings().weight.shape[0]),
    ):
        if own != wanted:
            raise SpeculatorError.unlike(what, own, wanted)
    widest = max(shape.topk for shape in shapes)
    if widest > config.draft_vocab_size:
        raise SpeculatorError.too_many_branches(widest, config.draft_vocab_size)
