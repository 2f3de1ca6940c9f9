"""A Llama on a paged KV cache and its batches: the forward that the benchmarks of whole models time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import piecewise_graph as pg
from benchmarks.llama import Shape, model_of_rank
from piecewise_graph.custom_ops.attention import BatchBuffers
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

CONTEXT, MAX_SEQ_LEN, PAGE = 128, 256, 16  # tokens: of a request now, at most, and of a page
DECODE_UP_TO = 64


def layout(tokens: int) -> tuple[int, int]:
    """(requests, rows of each): decode up to 64 tokens, above it prompts of 64 tokens."""
    if tokens <= DECODE_UP_TO:
        return tokens, 1
    if tokens % DECODE_UP_TO:
        raise ValueError(f"{tokens} tokens: above {DECODE_UP_TO}, pass a multiple of it")
    return tokens // DECODE_UP_TO, DECODE_UP_TO


class PagedModel:
    """Random weights, a KV cache, and one batch per token count. Requests have 128 tokens, new ones included.

    Attributes:
        model: transformers' module, unmodified but for its attention, which is our op.
        weight_bytes: what a forward of few tokens reads: all weights but the embedding, which is a lookup.
    """

    def __init__(self, shape: Shape, counts: Sequence[int], implementation: str | None = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.implementation = implementation or default_implementation(self.device)
        pg.register_attention("piecewise", self.implementation)
        self.model = model_of_rank(shape, self.device)
        self.weight_bytes = read_bytes(self.model)
        self.counts = tuple(counts)
        requests = max(layout(count)[0] for count in counts)
        self.cache = PagedKVCache.for_model(
            self.model,
            num_pages=1 + requests * MAX_SEQ_LEN // PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device=self.device,
        )
        self._table = RequestTable.for_cache(self.cache, max_requests=requests, max_seq_len=MAX_SEQ_LEN)
        self._slots = [self._table.open() for _ in range(requests)]
        self._table.reserve(dict.fromkeys(self._slots, CONTEXT))
        self._buffers = {count: self._batch(count) for count in counts}

    def _batch(self, tokens: int) -> BatchBuffers:
        requests, rows = layout(tokens)
        made = BatchBuffers(
            self.cache,
            self._table,
            num_requests=requests,
            num_tokens=tokens,
            max_query_len=rows,
            uniform=True,
        )
        made.fill(self._slots[:requests], [rows] * requests, [CONTEXT] * requests)
        return made

    def fields(self, tokens: int, full: bool) -> dict[str, Any]:
        """What the forward context holds around a call."""
        return {"attention": self._buffers[tokens].batch, "full_graph": full}

    def context(self, tokens: int, full: bool) -> Any:
        return pg.forward_context(**self.fields(tokens, full))

    def inputs(self, tokens: int) -> dict[str, Any]:
        """A call's arguments, new tensors with the same content each time."""
        generator = torch.Generator(self.device).manual_seed(tokens)
        vocabulary = self.model.config.vocab_size
        ids = torch.randint(1, vocabulary, (1, tokens), device=self.device, generator=generator)
        positions = self._buffers[tokens].positions[None].long()
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}

    def touch(self) -> None:
        """Compile and prepare the attention kernels of every batch, which all sides share."""
        for tokens in self.counts:
            for full in (False, True):
                with self.context(tokens, full):
                    self.attend(tokens)

    def attend(self, tokens: int) -> None:
        """One call of the attention op, for the first layer. Call inside of the forward context."""
        rows = self._rows(tokens)
        torch.ops.piecewise.attention(*rows, 0, 1.0, implementation=self.implementation)

    def _rows(self, tokens: int) -> list[Tensor]:
        config = self.model.config
        dim, kv_heads = head_dim(config), self.cache.kv_heads
        heads = config.num_attention_heads // config.num_key_value_heads * kv_heads
        return [
            torch.zeros(tokens, count, dim, dtype=torch.bfloat16, device=self.device)
            for count in (heads, kv_heads, kv_heads, heads)
        ]


def default_implementation(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "torch"


def head_dim(config: Any) -> int:
    """Elements of a head, of a model's configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_bytes(model: torch.nn.Module) -> int:
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    read = (p for p in model.parameters() if tied or p is not embedding)
    return sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in read)
