"""The models that commands run: loaded, or made with random weights."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph.bench.setting import Setting
from piecewise_graph.eagle.head.checkpoints import load_draft
from piecewise_graph.eagle.head.random_models import MODEL_SHAPES, random_draft, random_model, sharded
from piecewise_graph.eagle.speculator import Speculator

from .errors import CommandError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_SMALL = 100_000_000  # parameters up to which float32 costs nothing and makes agreement exact


@dataclass(frozen=True)
class Served:
    """What `bench serving` serves.

    Attributes:
        encode: text to tokens; None without a tokenizer.
    """

    speculator: Speculator
    vocab_size: int
    encode: Callable[[str], Sequence[int]] | None


def load_model(
    path: str, attention: str, dtype: str | None, device: str, *, in_parts: bool = False
) -> tuple[Any, Any]:
    """(tokenizer, causal LM); without a dtype the model's own, or float32 if the model is small.

    Args:
        attention: transformers' name of the implementation, such as "sdpa" or "piecewise".
        in_parts: each process of the job has a part of the weights, on a device of its own.

    Raises:
        CommandError: no such folder, model, dtype or device, or a model without some of its weights.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pg.register_attention()
    wanted, where = "auto" if dtype is None else named_dtype(dtype), named_device(device)
    check_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, dtype=wanted, output_loading_info=True, **_sharding(in_parts)
        )
    except Exception as error:  # of transformers, safetensors, tokenizers or the hub: each has its own
        raise CommandError.no_model(path, error) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers warns, and makes them up
        raise CommandError.incomplete_model(path, missing)
    model = in_dtype(model, dtype).eval()
    return tokenizer, model if in_parts else model.to(where)


def _sharding(in_parts: bool) -> dict[str, Any]:
    if not in_parts:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def check_model(path: str) -> None:
    """Raise before a model is loaded.

    Raises:
        CommandError: neither a model's folder nor a hub id.
    """
    is_local = Path(path).exists() or not _HUB_ID.fullmatch(path)
    if is_local and not Path(path, "config.json").is_file():
        raise CommandError.no_model_folder(path)


def in_dtype(model: Any, dtype: str | None) -> Any:
    """A loaded model; one that is small in float32, unless a dtype was asked for."""
    small = dtype is None and sum(p.numel() for p in model.parameters()) <= _SMALL
    return model.float() if small else model


def default_model() -> str:
    """The trained model of a source checkout.

    Raises:
        CommandError: it is not there.
    """
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        path = root / "benchmarks" / "models" / "byte-llama"
        if path.is_dir():
            return str(path)
    raise CommandError.no_default_model()


def make_served(options: argparse.Namespace, settings: Sequence[Setting]) -> Served:
    """One speculator for all `settings` of `bench serving`."""
    encode, several = None, options.tp > 1
    if options.model:
        tokenizer, target = load_model(
            options.model, "piecewise", options.dtype, options.device, in_parts=several
        )
        encode = _encoder(tokenizer)
    else:
        pg.register_attention()
        torch.manual_seed(options.seed)
        shape, dtype = MODEL_SHAPES[options.random_weights], named_dtype(options.dtype or "bfloat16")
        target = random_model(shape, named_device(options.device), "piecewise", dtype)
        target = sharded(target) if several else target
    draft: Any = load_draft(options.draft, target) if options.draft else None
    if options.random_draft:
        torch.manual_seed(options.seed)  # the same head on all ranks
        draft = random_draft(target, options.random_draft)
    compiled = {"compiler": options.compiler, "specialize": list(options.specialize)}
    speculator = Speculator(
        target,
        draft,
        shapes=[shape for setting in settings for shape in setting.shapes(options.page_size)],
        max_requests=max(options.concurrency),
        max_seq_len=options.input_len + options.output_len,
        page_size=options.page_size,
        num_pages=options.num_pages,
        batch_sizes=options.batch_sizes,
        graphs={"prefill": options.prefill} if options.prefill else {},
        prefill_rows=options.prefill_rows,
        options=compiled | {"merge_linears": options.merge_linears},
        draft_options=compiled,
    )
    return Served(speculator, target.get_input_embeddings().weight.shape[0], encode)


def _encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


def named_dtype(name: str) -> torch.dtype:
    """torch's floating-point type of that name.

    Raises:
        CommandError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise CommandError.no_dtype(name)
    return found


def named_device(name: str) -> torch.device:
    """The device of that name, tried.

    Raises:
        CommandError: it cannot be used.
    """
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # the meta device has no values
    except (RuntimeError, AssertionError, ImportError) as error:  # the last: it needs a package
        raise CommandError.no_device(name, error) from error
    return device
