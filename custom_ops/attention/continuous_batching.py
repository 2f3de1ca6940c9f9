"""transformers' continuous batching (`generate_batch`, `transformers serve`) on our attention and graphs.

transformers schedules requests and owns the pages of their KV cache. Each step it calls the model with the
tokens of all requests in one row, and with keywords that say where K and V lie. Here those keywords become an
`AttentionBatch` on the same memory, and the body of the model, compiled, sees tokens and positions alone.

Note [What is compiled]
The body (`model.base_model`), not the head. The head reads the last row of each request, so its size is the
number of requests; in one trace with the body that would be a second dynamic dimension. It runs eagerly, in
the model's own forward, with whatever the model does to its logits.

Note [Threads]
transformers runs the steps in a thread of its own, a new one per `generate_batch`. Torch 2.11 crashes in a
trace where the first trace of the process ran in a thread that has ended. So there is a trace in the caller's
thread before.

Note [Page numbers]
A slot of a layer's cache is a row of its pages laid end to end, and the first token of a page stands at a
multiple of the page size. So the page of any token that `read_index` lists is its slot divided by the page
size, whatever else of the cache (other layers, V) lies between two pages of one layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from piecewise_graph.context import forward_context
from piecewise_graph.frontend.compile import compile

from ..errors import AttentionError, CacheError
from ..kv_cache import PagedKVCache
from ..rope_limit import rope_limit
from .batch import AttentionBatch
from .served_models import check_kind, check_layers, check_model, check_positions
from .transformers_registry import is_ours

# What continuous batching passes to a model beside tokens and positions.
_PAGED = frozenset(
    {
        "attention_mask", "block_table", "cache", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal",
        "logits_indices", "logits_processor_args", "max_length_k", "max_length_q", "max_seqlen_k",
        "max_seqlen_q", "read_index", "write_index",
    }
)  # fmt: skip


def continuous_batching(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A model whose `generate_batch` and `init_continuous_batching` run on graphs.

    It shares its weights with `model`, which stays as it is. Eager forwards over three tokens show whether it
    can be served.

    Args:
        model: a causal LM of transformers, loaded with the name that `register_attention` registered.
        options: of `pg.compile`. `max_tokens` should be at least `max_batch_tokens` of continuous batching.

    Raises:
        AttentionError: it is no such model, or has another attention, layers with a sliding window, layers
            that do not call our attention exactly once, keys of other heads than its configuration says, or
            no body apart from its head that its forward calls.
        CacheError: the configuration names no sizes of heads.
    """
    check_kind(model)
    if model.get_output_embeddings() is None:  # a classifier, or a decoder alone
        raise AttentionError.no_causal_lm(type(model).__name__)
    name = model.config._attn_implementation
    if not is_ours(name):
        raise AttentionError.not_ours(name)
    if model.base_model is model:
        raise AttentionError.no_body(type(model).__name__)
    check_layers(model.config.get_text_config())  # before windows: a hybrid has other kinds, too
    if any(kind != "full_attention" for kind in _kinds(model.config.get_text_config())):
        raise AttentionError.windowed_cache()
    served, body = copy.copy(model), copy.copy(model.base_model)
    vars(served)["_modules"] = model._modules | {model.base_model_prefix: body}
    if not _calls(served, body):
        raise AttentionError.body_not_called(type(model).__name__, f"model.{model.base_model_prefix}")
    check_model(model)
    torch.compile(torch.neg, backend="eager")(torch.ones(2))  # see Note [Threads]
    compiled = compile(model.base_model, **options)
    vars(body)["forward"] = partial(_forward, compiled, rope_limit(model.config.get_text_config()))
    vars(served).update(
        init_continuous_batching=partial(_manager, served),
        generate_batch=partial(_generate_batch, served),
        compiled_body=compiled,  # for pg.explain and pg.capture
    )
    return served


class _Called(Exception):
    """Says that a body was called, and ends the call."""


@torch.no_grad()
def _calls(model: PreTrainedModel, body: torch.nn.Module) -> bool:
    """Whether a forward of `model` reaches the forward of `body`. Nothing of the body runs if it does."""

    def reached(*_: Any, **__: Any) -> None:
        raise _Called

    vars(body)["forward"] = reached
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        model(input_ids=ids, position_ids=ids, use_cache=False)
    except _Called:
        return True
    except AttentionError:  # a part of the body was called, and its attention has no batch
        return False
    finally:
        del vars(body)["forward"]
    return False


class _Manager(ContinuousBatchingManager):
    """transformers' own, which would refuse an attention that it does not know, or replace it by flash."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.continuous_batching_config
        if any(config.cuda_graph_booleans) or config.varlen_compile_config or config.decode_compile_config:
            raise AttentionError.compiled_twice()
        if config.use_async_batching:
            raise AttentionError.two_batches()

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Refuse here, and not in a step of all requests, one that would change the RoPE of the others.

        Also one that outgrows the cache: the step in which it does ends transformers' thread, and with it all
        requests, those to come too.
        """
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        new = _new_tokens(self.model, len(input_ids), new, self.continuous_batching_config)
        return super().add_request(input_ids, request_id, new, *args, **kwargs)

    def switch_to_cb_friendly_attn(self, model: Any, *_: Any) -> None:
        """Our attention is one that it may keep."""


def _manager(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """`init_continuous_batching`, with our manager."""
    cached = getattr(model, "_cached_continuous_batching_manager", None)
    if cached is not None:
        return cached
    settings = generation_config or model.generation_config
    if settings.eos_token_id is None:
        settings.eos_token_id = -1  # as transformers does: no token ends a request
    config = continuous_batching_config or ContinuousBatchingConfig()
    return _Manager(model, settings, config, workload_hints=workload_hints)


def _generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`generate_batch`, which would log the refusal of a request, and return nothing."""
    settings, new = generation_config or model.generation_config, kwargs.get("max_new_tokens")
    cached = getattr(model, "_cached_continuous_batching_manager", None)  # a call before has left it
    config = continuous_batching_config if cached is None else cached.continuous_batching_config
    longest = max(map(len, inputs), default=0)
    _new_tokens(model, longest, settings.max_new_tokens if new is None else new, config)
    given = generation_config, continuous_batching_config
    return type(model).generate_batch(model, inputs, *given, *args, **kwargs)


def _new_tokens(model: Any, prompt: int, new: int | None, config: Any) -> int | None:
    """How many tokens a request makes at most after a prompt of so many; None = until its end token.

    Args:
        new: what is asked for; None = as many as `model`'s RoPE and the cache leave.
        config: says how many pages the cache has; where it does not, memory decides, and nothing is checked.

    Raises:
        AttentionError, CacheError: it is more than the RoPE or the cache allows.
    """
    limit = rope_limit(model.config.get_text_config())
    pages = getattr(config, "num_blocks", None) or 0
    page_size: int = getattr(config, "page_size", 0) or getattr(config, "block_size", 0)  # its older name
    held = pages * page_size or None
    room = min((each for each in (limit, held) if each is not None), default=None)
    if new is None and room is not None:
        new = max(room - prompt, 0) + 1
    tokens = prompt + (new or 1) - 1  # nothing attends to the last one
    check_positions(limit, tokens)
    if held is not None and tokens > held:
        raise CacheError.never_fits(tokens, -(-tokens // page_size), pages, page_size)
    return new


def _forward(compiled: Callable[..., Any], limit: int | None, *args: Any, **kwargs: Any) -> Any:
    """The body's forward: its keywords about pages become the batch of the forward context."""
    if kwargs.get("cache") is None:
        raise AttentionError.no_pages()
    rest = {name: value for name, value in kwargs.items() if name not in _PAGED and value is not None}
    batch = batch_of(kwargs)
    check_positions(limit, batch.max_seq_len)
    with forward_context(attention=batch):
        return compiled(*args, **rest)


def batch_of(kwargs: Mapping[str, Any]) -> AttentionBatch:
    """The requests of one step, from the keywords of continuous batching. Waits for nothing."""
    cache = _pages_of(kwargs["cache"])
    starts_q, starts_k = kwargs["cu_seq_lens_q"], _only(kwargs["cu_seq_lens_k"])
    written, read = kwargs["write_index"][0], kwargs["read_index"][0]
    longest_q, longest_k = (_longest(kwargs, side) for side in "qk")
    # Nothing is read where all requests are new: then their tokens are what is written.
    slots = read if read.numel() else written
    return AttentionBatch(
        cache,
        block_table=_block_table(slots, starts_k, cache.page_size, longest_k),
        seq_lens=starts_k.diff(),
        qo_indptr=starts_q,
        slot_mapping=written.to(torch.int32),
        max_query_len=longest_q,
        max_seq_len=longest_k,
    )


def _block_table(slots: Tensor, starts: Tensor, page_size: int, longest: int) -> Tensor:
    """int32 `[requests, pages of the longest]`; 0 past the pages of a request.

    Args:
        slots: of all tokens of all requests, one request after another.
        starts: where each request begins in `slots`, then their number.
    """
    offsets = torch.arange(0, longest, page_size, device=slots.device, dtype=starts.dtype)
    first = starts[:-1, None] + offsets  # of each page its first token
    pages = slots[first.clamp(max=slots.numel() - 1)] // page_size
    return torch.where(first < starts[1:, None], pages, 0).to(torch.int32)


def _pages_of(cache: Any) -> PagedKVCache:
    """transformers' cache as ours, on the same memory; made once per cache."""
    pages = cache.__dict__.get("_piecewise_pages")
    if pages is None:
        pages = cache._piecewise_pages = PagedKVCache.of_pages(*zip(*_layers(cache), strict=True))
    return pages


def _kinds(config: Any) -> list[str]:
    """The kind of attention of each layer, as transformers' cache tells them apart."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if windowed else "full_attention"]
    return list(kinds)


def _layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """K and V of each layer, `[pages, page_size, kv_heads, head_dim]`."""
    if hasattr(cache, "cache_allocators"):  # transformers newer than 5.17
        allocators = sorted(cache.layer_to_allocator.items())
        return [allocator.get_cache_for_block_table(layer) for layer, allocator in allocators]
    shape = (-1, cache.block_size, *cache.cache_shape[1:])
    order = [index for _, (_, index) in sorted(cache.layer_index_to_group_indices.items())]
    return [(cache.key_cache[index].view(shape), cache.value_cache[index].view(shape)) for index in order]


def _only(value: Any) -> Any:
    """Newer transformers have a dict by the kind of layer, of which there is one here."""
    return next(iter(value.values())) if isinstance(value, dict) else value


def _longest(kwargs: Mapping[str, Any], side: str) -> int:
    name = f"max_length_{side}"
    return int(_only(kwargs[name if name in kwargs else f"max_seqlen_{side}"]))
