"""Steps on a static KV cache are not cut at torch's attention: one segment, one graph, eager's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from toys import WIDTH, ops

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
HEADS, LENGTH = 4, 16


class Layer(nn.Module):
    """Attention over a static cache of `kv_heads` heads, as transformers traces it."""

    def __init__(self, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.kv_heads, self.dropout, self.size = kv_heads, dropout, WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * self.size)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, HEADS, self.size).transpose(1, 2)
        kv = self.kv(x).view(batch, tokens, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        cache.index_copy_(3, position, kv)
        shape = (batch, self.kv_heads, HEADS // self.kv_heads, LENGTH, self.size)
        k, v = (part[:, :, None].expand(shape).reshape(batch, HEADS, LENGTH, -1) for part in cache.unbind())
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return x + self.o(out.transpose(1, 2).reshape(x.shape))


class Decoder(nn.Module):
    """Layers, between which another splitting op may stand."""

    def __init__(self, kv_heads: int = HEADS, dropout: float = 0.0, *, other_op: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kv_heads, dropout) for _ in range(2))
        self.other_op = other_op

    def forward(self, x: Tensor, caches: list[Tensor], position: Tensor) -> Tensor:
        mask = (torch.arange(LENGTH, device=x.device) <= position[:, None])[None, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, position, mask)
            if self.other_op:
                x = ops.mix(x.flatten(0, 1)).view(x.shape)
        return x


def caches_of(model: Decoder, batch: int, device: torch.device, *, static: bool = True) -> list[Tensor]:
    shape = (2, batch, model.layers[0].kv_heads, LENGTH, WIDTH // HEADS)
    made = [torch.zeros(shape, device=device) for _ in model.layers]
    for cache in made if static else ():
        torch._dynamo.mark_static_address(cache)
    return made


def check(fast: Any, model: Decoder, device: torch.device, *, batch: int = 2, tokens: int = 1) -> None:
    mine, theirs = (caches_of(model, batch, device) for _ in range(2))
    for start in range(0, 4 * tokens, tokens):
        x = torch.randn(batch, tokens, WIDTH, device=device)
        position = torch.arange(start, start + tokens, device=device)
        torch.testing.assert_close(fast(x, mine, position), model(x, theirs, position), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def fast_of(model: Decoder, compiler: str = "eager") -> Any:
    return torch.compile(model, backend="piecewise", dynamic=False, options={"compiler": compiler})


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])  # one head is expanded, not copied
def test_a_step_is_one_segment_and_one_graph(compiler: str, kv_heads: int, device: torch.device) -> None:
    model = Decoder(kv_heads).to(device)
    with pg.counters.expect(segments=1, op_steps=0, tapes=1, captures=1, replays=3, fallbacks=0):
        check(fast_of(model, compiler), model, device)


@settings(max_examples=5, deadline=None)
@given(batch=st.integers(1, 3), tokens=st.integers(1, 3), kv_heads=st.sampled_from([1, 2, 4]))
def test_any_sizes(batch: int, tokens: int, kv_heads: int) -> None:
    model = Decoder(kv_heads)
    with torch.no_grad(), pg.counters.expect(segments=1, tapes=1, replays=3, fallbacks=0):
        check(fast_of(model), model, torch.device("cpu"), batch=batch, tokens=tokens)


def test_another_splitting_op_keeps_the_cuts(device: torch.device) -> None:
    model = Decoder(other_op=True).to(device)
    with pg.counters.expect(op_steps=4, tapes=1, replays=3):
        check(fast_of(model), model, device)


def test_a_mask_of_vmap_may_stand_in_a_step(device: torch.device) -> None:
    # transformers makes its masks so where their sizes vary.
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(HEADS, 0.0)])

        def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
            places = torch.arange(LENGTH, device=x.device)
            mask = torch.vmap(lambda row: (places <= row) & (places >= row - 3))(position)
            return self.layers[0](x, cache, position, mask[None, None])

    model = Masked().to(device)
    mine, theirs = (caches_of(model, 2, device)[0] for _ in range(2))
    fast = fast_of(model)
    with pg.counters.expect(op_steps=0, tapes=1, replays=2, fallbacks=0):
        for place in range(3):
            x, position = torch.randn(2, 1, WIDTH, device=device), torch.tensor([place], device=device)
            torch.testing.assert_close(fast(x, mine, position), model(x, theirs, position))


def test_sizes_that_vary_keep_the_cuts(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=True, options={"compiler": "eager"})
    with pg.counters.expect(op_steps=2):
        check(fast, model, device, batch=3, tokens=2)


def test_a_cache_that_nobody_marked_keeps_the_cuts(device: torch.device) -> None:
    model = Decoder().to(device)
    x, position = torch.randn(2, 1, WIDTH, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    mine, theirs = (caches_of(model, 2, device, static=False) for _ in range(2))
    with pg.counters.expect(op_steps=2, **{"fallbacks:writes_an_input": 1}):
        found = fast_of(model)(x, mine, position)
    torch.testing.assert_close(found, model(x, theirs, position), rtol=1e-4, atol=1e-4)


def test_a_cache_in_buffers_counts_as_one(device: torch.device) -> None:
    model = Decoder().to(device)
    for layer in model.layers:
        layer.register_buffer("cache", caches_of(model, 2, device, static=False)[0])

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return self.model(x, [layer.cache for layer in self.model.layers], position)

    fast, theirs = fast_of(Own()), caches_of(model, 2, device, static=False)
    with pg.counters.expect(op_steps=0, tapes=1, replays=3, fallbacks=0):
        for place in range(4):
            x, position = torch.randn(2, 1, WIDTH, device=device), torch.tensor([place], device=device)
            torch.testing.assert_close(fast(x, position), model(x, theirs, position), rtol=1e-4, atol=1e-4)


_library = torch.library.Library("toy_decode_steps", "FRAGMENT")
_library.define("noisy(Tensor x, float dropout_p=0.5) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.impl("noisy", lambda x, p=0.5: nn.functional.dropout(x, p), "CompositeExplicitAutograd")
torch.library.register_fake("toy_decode_steps::noisy", lambda x, p=0.5: torch.empty_like(x), lib=_library)


@pytest.mark.parametrize(("dropout", "drawn"), [((), 3), ((0.5,), 3), ((0.0,), 0)])
def test_an_op_is_random_unless_its_dropout_is_none(
    dropout: tuple[float, ...], drawn: int, device: torch.device
) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.toy_decode_steps.noisy(ops.mix(x) * 2, *dropout)

    fast = fast_of(Noisy())
    with pg.counters.expect(**{"fallbacks:random_numbers": drawn}):
        for _ in range(3):
            fast(torch.ones(4, WIDTH, device=device))


def test_dropout_keeps_the_cuts(device: torch.device) -> None:
    """Of a segment with random numbers there would be no graph."""
    model = Decoder(dropout=0.5).to(device)
    fast, caches = fast_of(model), caches_of(model, 2, device)
    x, position = torch.randn(2, 1, WIDTH, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pg.counters.expect(op_steps=2, tapes=1, replays=1, **{"fallbacks:random_numbers": 0}):
        assert not torch.equal(fast(x, caches, position), fast(x, caches, position))
