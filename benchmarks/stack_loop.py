"""The loop part of bench_stacks: greedy decode loops for one request, ours and those on a static cache.

All sides read each token on the host, as a loop that has to see an end of text does. A call decodes the same
tokens again behind one prompt, whose K and V stay: the loops are timed, the prompt is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.common import on_own_stream
from benchmarks.llama import SHAPES, random_model
from benchmarks.paged import PAGE, default_implementation
from benchmarks.stack_setting import Measure, Row, Setting, first_difference, in_turns, rows_of
from piecewise_graph.custom_ops.attention import BatchBuffers, make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

PROMPT = 32  # tokens

Loop = Callable[[], Tensor]  # returns the new tokens, `[1, new tokens]`


def prepared(setting: Setting, shape: str, new_tokens: int) -> Measure:
    """All sides compiled and captured, on the same weights."""
    pg.register_attention("piecewise", default_implementation(setting.device))
    model = random_model(SHAPES[shape], setting.device, "sdpa", setting.dtype)
    ids = torch.randint(1, model.config.vocab_size, (1, PROMPT), device=setting.device)
    with on_own_stream(torch.no_grad):
        loops: dict[str, Loop] = {
            "eager": StaticLoop(model, ids, new_tokens),
            "full": PagedLoop(_with_our_attention(model), ids, new_tokens, setting.compiler),
        }
        if setting.device.type == "cuda":  # it is about CUDA graphs
            loops["reduce-overhead"] = StaticLoop(model, ids, new_tokens, mode="reduce-overhead")
        for loop in loops.values():
            loop()
    common = {"part": "loop", "shape": shape, "requests": 1, "new_tokens": new_tokens}
    return partial(_measured, setting, common, loops)


def _with_our_attention(model: Any) -> Any:
    """A second model around the same weights."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    ours = copy.deepcopy(model, weights)
    ours.config._attn_implementation = "piecewise"
    return ours


class StaticLoop:
    """On transformers' static cache; a step chooses its token inside of what is compiled, as gpt-fast does.

    Args:
        mode: of torch.compile; None = the step is not compiled.
    """

    def __init__(self, model: Any, ids: Tensor, new_tokens: int, mode: str | None = None) -> None:
        from transformers import StaticCache

        self.model, self.new_tokens = model, new_tokens
        self.cache = StaticCache(config=model.config, max_cache_len=PROMPT + new_tokens)
        self.start = torch.arange(PROMPT, device=ids.device)[None]
        self.first = self._token(ids, self.start)[:, -1:].clone()
        self.step = torch.compile(self._token, mode=mode, fullgraph=True) if mode else self._token

    def _token(self, ids: Tensor, positions: Tensor) -> Tensor:
        given = {"input_ids": ids, "position_ids": positions, "past_key_values": self.cache}
        logits: Tensor = self.model(**given, use_cache=True).logits
        return logits.argmax(-1)

    def __call__(self) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)  # what lies behind is overwritten
        token, positions, tokens = self.first, self.start[:, -1:] + 1, []
        for _ in range(self.new_tokens):
            token = self.step(token, positions).clone()  # the next replay overwrites it
            positions += 1
            tokens.append(int(token))
        return torch.tensor([tokens])


class PagedLoop:
    """The loop of RECIPES.md: our paged attention, the step frozen, one graph with its attention inside."""

    def __init__(self, model: Any, ids: Tensor, new_tokens: int, compiler: str) -> None:
        self.lengths = range(PROMPT + 1, PROMPT + 1 + new_tokens)  # with the token that a step is given
        sizes = {"capture_sizes": [1, PROMPT], "max_tokens": PROMPT}
        compiled = pg.compile(model, outputs="static", compiler=compiler, **sizes)
        longest = PROMPT + new_tokens
        kept = {"num_pages": 1 + -(-longest // PAGE), "page_size": PAGE}  # the null page and the request's
        cache = PagedKVCache.for_model(model, **kept, dtype=model.dtype, device=model.device)
        table = RequestTable.for_cache(cache, max_requests=1, max_seq_len=longest)
        self.slot = table.open()
        table.reserve({self.slot: longest})
        batch, positions = make_batch(cache, table, [self.slot], [PROMPT], [PROMPT])
        with pg.forward_context(attention=batch):
            given = {"input_ids": ids, "position_ids": positions[None].long()}
            self.first = compiled(**given, use_cache=False).logits[:, -1:].argmax(-1)
        shape = {"num_requests": 1, "num_tokens": 1, "max_query_len": 1}
        self.decode = BatchBuffers(cache, table, **shape, uniform=True)
        freeze = partial(pg.freeze, compiled)  # which runs its example: the first step
        self.step: Callable[..., Any] = self._called(freeze, self.first, PROMPT + 1)

    def _called(self, call: Callable[..., Any], token: Tensor, length: int) -> Any:
        """What the call returns for this token, the last one of `length`."""
        positions = self.decode.fill([self.slot], query_lens=[1], seq_lens=[length])
        given = {"input_ids": token, "position_ids": positions[None].long()}
        with pg.forward_context(attention=self.decode.batch, full_graph=True, graph_key="decode"):
            return call(**given, use_cache=False)

    def __call__(self) -> Tensor:
        token, tokens = self.first, []
        for length in self.lengths:
            token = self._called(self.step, token, length).logits.argmax(-1)
            tokens.append(int(token))
        return torch.tensor([tokens])


@on_own_stream(torch.no_grad)
def _measured(setting: Setting, common: Row, loops: dict[str, Loop]) -> list[Row]:
    turns = in_turns(loops, rounds=setting.rounds, warmups=0)
    new_tokens = common["new_tokens"]
    return [
        row | {"first_other_token": first_difference(turns[row["side"]].result, turns["eager"].result)}
        for row in rows_of(common, turns, new_tokens, new_tokens)
    ]
