"""What is served: target, draft and speculator, from the options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph.eagle.generate_command import load_target
from piecewise_graph.eagle.head.random_models import MODEL_SHAPES, random_draft, random_model
from piecewise_graph.eagle.speculator import Speculator

from .settings import Setting


@dataclass(frozen=True)
class Served:
    """Attributes:
    encode: text to tokens; None without a tokenizer.
    """

    speculator: Speculator
    vocab_size: int
    encode: Callable[[str], Sequence[int]] | None


def make_served(options: argparse.Namespace, settings: Sequence[Setting]) -> Served:
    """One speculator for all `settings`."""
    target, encode = _target(options)
    speculator = Speculator(
        target,
        _draft(options, target),
        shapes=[shape for setting in settings for shape in setting.shapes(options.page_size)],
        max_requests=max(options.concurrency),
        max_seq_len=options.input_len + options.output_len,
        page_size=options.page_size,
        num_pages=options.num_pages,
        batch_sizes=options.batch_sizes,
        graphs={"prefill": options.prefill} if options.prefill else {},
        prefill_rows=options.prefill_rows,
        options=_compile_options(options) | {"merge_linears": options.merge_linears},
        draft_options=_compile_options(options),
    )
    return Served(speculator, target.get_input_embeddings().weight.shape[0], encode)


def _target(options: argparse.Namespace) -> tuple[Any, Callable[[str], Sequence[int]] | None]:
    if options.model:
        tokenizer, target = load_target(options.model, options.dtype, options.device)
        return target, lambda text: tokenizer(text, add_special_tokens=False).input_ids
    pg.register_attention()
    dtype = getattr(torch, options.dtype or "bfloat16")
    torch.manual_seed(options.seed)
    return random_model(MODEL_SHAPES[options.random_weights], options.device, "piecewise", dtype), None


def _draft(options: argparse.Namespace, target: Any) -> Any:
    if options.draft:
        from piecewise_graph.eagle.head.checkpoints import load_draft

        return load_draft(options.draft, target)
    return random_draft(target, options.random_draft) if options.random_draft else None


def _compile_options(options: argparse.Namespace) -> dict[str, Any]:
    return {"compiler": options.compiler, "specialize": list(options.specialize)}
