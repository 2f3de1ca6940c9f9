"""Segments get the strides that they were compiled for, however they are called.

Inductor's code asserts the strides of its inputs; code of the eager compiler takes any. So most tests here
let every segment check what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from internals import require_layouts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from toys import ABOVE, COUNTS, REPLAYS, WIDTH, assert_same, check, compiled, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

HEADS = 2
ToHeads = Callable[[Tensor], Tensor]  # from [tokens, heads, width]
TO_HEADS: dict[str, ToHeads] = {
    "heads, tokens, width": lambda h: h.transpose(0, 1).contiguous(),
    "with a leading one": lambda h: h.transpose(0, 1).contiguous()[None],
    "tokens last": lambda h: h.permute(1, 2, 0).contiguous(),
    "tokens first in memory": lambda h: h.transpose(0, 1),
    "half of a wider tensor": lambda h: torch.cat([h, h + 1], -1).transpose(0, 1).contiguous()[..., 4:],
    "expanded": lambda h: h[:, :1].transpose(0, 1).contiguous().expand(HEADS, -1, -1),
    "tokens by tokens": lambda h: torch.einsum("shd,thd->hst", h, h),
}


def exact(to_heads: ToHeads) -> Callable[[Tensor], Tensor]:
    """A model whose second segment runs at the exact size, on what the first one returns."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        h = to_heads((x * 2).view(-1, HEADS, WIDTH // HEADS))
        return ops.mix(x) * 2, h / x.shape[0]

    return model


@pytest.mark.parametrize("to_heads", TO_HEADS.values(), ids=TO_HEADS)
def test_segment_between_graphs(
    to_heads: ToHeads, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_layouts(monkeypatch)
    expect = {"replays": REPLAYS, "fallbacks": ABOVE, "unpadded_segments:no_padding_proof": REPLAYS}
    check(exact(to_heads), device, expect=expect)


def test_code_that_asserts_its_strides(device: torch.device) -> None:
    expect = {"replays": REPLAYS, "unpadded_segments:no_padding_proof": REPLAYS}
    check(exact(TO_HEADS["with a leading one"]), device, compiler="inductor", expect=expect)


def test_what_a_segment_between_graphs_writes_reaches_the_next_reader(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_layouts(monkeypatch)

    def model(x: Tensor) -> Tensor:
        h = TO_HEADS["with a leading one"]((x * 2).view(-1, HEADS, WIDTH // HEADS))
        mixed = ops.mix(x)
        h.mul_(x.shape[0])
        mixed = mixed * 3
        return scaled_dot_product_attention(h, h, h)[0].transpose(0, 1).flatten(1) + mixed

    expect = {"replays": REPLAYS, "unpadded_segments:no_padding_proof": REPLAYS}
    check(model, device, expect=expect)


def test_buffer_is_shared_by_the_segments_of_a_forward(device: torch.device) -> None:
    """Five segments at the exact size: each needs its buffer until its results have theirs."""
    relaid, plain = (TO_HEADS[name] for name in ("heads, tokens, width", "tokens first in memory"))

    def model(to_heads: ToHeads, x: Tensor) -> Tensor:
        for _ in range(5):
            h = to_heads((x * 2).view(-1, HEADS, WIDTH // HEADS))
            x = ops.mix(x) + (h / x.shape[0]).sum((-1, 0))[:, None]
        return x

    found = [
        pg.explain(check(lambda x, f=f: model(f, x), device, counts=COUNTS)).buffer_bytes
        for f in (plain, relaid)
    ]
    assert found[1] - found[0] <= 2 * 8 * WIDTH * 4  # bytes of 8 tokens, twice


# --- torch's own attention ----------------------------------------------------------------------------


def one_kv_head(x: Tensor, *, mask: bool) -> Tensor:
    """Multi-query attention as transformers traces it: one head of keys and values, expanded."""
    q = (x * 2).view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
    kv = q[:, :1].expand(-1, HEADS, -1, -1)
    tril = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).tril() if mask else None
    return scaled_dot_product_attention(q, kv, kv, attn_mask=tril)[0].transpose(0, 1).flatten(1) + x


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("mask", [True, False])
def test_torch_attention_gets_dense_keys(
    mask: bool, graphs: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's memory-efficient kernel reads expanded ones wrongly at some sizes."""
    model = partial(one_kv_head, mask=mask)
    call = compiled(model, cuda_graphs=graphs)
    original, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.extend([*k.stride(), *v.stride()])
        return original(q, k, v, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for count in (3, 3, 4):
        x = rows(count, device)
        assert_same(call(x), model(x))
    assert seen and 0 not in seen


@pytest.mark.gpu
def test_multi_query_attention_under_a_mask_at_every_size_up_to_130() -> None:
    device = torch.device("cuda")
    model = partial(one_kv_head, mask=True)
    fast = compiled(model, capture_sizes=[64], max_tokens=64)
    for count in range(1, 131):
        x = rows(count, device)
        assert_same(fast(x).cpu().double(), model(x.cpu().double()))
