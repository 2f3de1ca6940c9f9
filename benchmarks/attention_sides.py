"""The ways to run one attention call that bench_attention times: ours and those of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch
from piecewise_graph.custom_ops.attention.call import AttentionCall
from piecewise_graph.custom_ops.attention.implementations import load, serve
from piecewise_graph.custom_ops.kv_cache import PagedKVCache

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
OURS = ("triton", "flash_attn", "flashinfer")
LIBRARIES = ("flashinfer xqa", "flashinfer planned", "flash_attn 4")
_ROTATED = 192 << 20  # bytes of K and V that a graph walks over, several times the L2

Side = Callable[[int], Any]  # one attention call of a layer


@dataclass(frozen=True)
class Point:
    """A batch to be timed: `requests` of `rows` new tokens each, `context` tokens long with them.

    Attributes:
        bound: what the host knows about the lengths, as where a graph serves all of them.
    """

    kind: str
    requests: int
    rows: int
    context: int
    page_size: int = 16
    bound: int = 0

    @property
    def bytes_read(self) -> int:
        return 2 * self.requests * self.context * KV_HEADS * HEAD_DIM * DTYPE.itemsize


@dataclass(frozen=True)
class Setup:
    """Tensors of a point, the same for every side."""

    point: Point
    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    layers: int


def make_setup(point: Point) -> Setup:
    torch.manual_seed(0)
    device, page_size = torch.device("cuda"), point.page_size
    pages = -(-point.context // page_size)
    layers = min(max(_ROTATED // point.bytes_read + 1, 4), 400)
    cache = PagedKVCache(
        num_layers=layers, num_pages=1 + pages * point.requests, page_size=page_size, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, dtype=DTYPE, device=device,
    )  # fmt: skip
    for cached in (*cache.k, *cache.v):
        cached.normal_()
    shuffled = torch.randperm(pages * point.requests, device=device) + 1
    block_table = shuffled.view(point.requests, pages).to(torch.int32)
    new = torch.arange(point.context - point.rows, point.context, device=device)
    slots = block_table[:, new // page_size] * page_size + new % page_size
    batch = AttentionBatch(
        cache,
        block_table=block_table,
        seq_lens=torch.full((point.requests,), point.context, dtype=torch.int32, device=device),
        qo_indptr=torch.arange(point.requests + 1, dtype=torch.int32, device=device) * point.rows,
        slot_mapping=slots.flatten().to(torch.int32),
        max_query_len=point.rows,
        max_seq_len=max(point.context, point.bound),
        query_len=point.rows,
        host_query_lens=(point.rows,) * point.requests,
        host_seq_lens=(point.context,) * point.requests,
    )
    total = point.requests * point.rows
    q = torch.randn(total, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    k, v = (torch.randn(total, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device) for _ in "kv")
    return Setup(point, batch, q, k, v, torch.empty_like(q), layers)


def _ours(name: str, setup: Setup) -> Side:
    missing = load(name).missing
    if missing is not None:
        raise RuntimeError(missing)
    scale = HEAD_DIM**-0.5
    calls = [
        AttentionCall(setup.q, setup.k, setup.v, setup.out, layer, scale, implementation=name)
        for layer in range(setup.layers)
    ]
    return lambda layer: serve(setup.batch, calls[layer], captured=True)


def _flashinfer_xqa(setup: Setup) -> Side:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    point, cache, batch = setup.point, setup.batch.kv_cache, setup.batch
    if point.rows > 64:
        raise RuntimeError("decode and verify only")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    mask = None
    if point.rows > 1:
        bits = [(1 << (row + 1)) - 1 for row in range(point.rows)]
        words = torch.tensor(bits, dtype=torch.int64, device="cuda").to(torch.uint16).view(1, point.rows, 1)
        mask = torch.nn.functional.pad(words.to(torch.int32), (0, 1)).to(torch.uint16)
        mask = mask.expand(point.requests, -1, -1).contiguous()

    def call(layer: int) -> None:
        trtllm_batch_decode_with_kv_cache(
            setup.q, (cache.k[layer], cache.v[layer]), workspace, batch.block_table, batch.seq_lens,
            batch.max_seq_len, bmm1_scale=HEAD_DIM**-0.5, out=setup.out, kv_layout="NHD",
            q_len_per_req=point.rows, mask=mask, enable_pdl=False,
        )  # fmt: skip

    return call


def _flashinfer_planned(setup: Setup) -> Side:
    import flashinfer

    point, cache = setup.point, setup.batch.kv_cache
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    pages = setup.batch.block_table.shape[1]
    indptr = torch.arange(point.requests + 1, dtype=torch.int32) * pages
    last = torch.full((point.requests,), (point.context - 1) % point.page_size + 1, dtype=torch.int32)
    indices = setup.batch.block_table.flatten()
    if point.rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last.cuda(),
        )  # fmt: skip
        wrapper.plan(
            indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, point.page_size, q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )  # fmt: skip
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            setup.batch.qo_indptr.cpu(), indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, point.page_size,
            causal=True, q_data_type=DTYPE, kv_data_type=DTYPE,
        )  # fmt: skip
    return lambda layer: wrapper.run(setup.q, (cache.k[layer], cache.v[layer]), out=setup.out)


def _flash_attn(setup: Setup) -> Side:
    from flash_attn.cute import flash_attn_varlen_func

    point, cache, batch = setup.point, setup.batch.kv_cache, setup.batch

    def call(layer: int) -> Tensor:
        found = flash_attn_varlen_func(
            setup.q, cache.k[layer], cache.v[layer], cu_seqlens_q=batch.qo_indptr, seqused_k=batch.seq_lens,
            max_seqlen_q=point.rows, max_seqlen_k=point.context, page_table=batch.block_table,
            softmax_scale=HEAD_DIM**-0.5, causal=True,
        )  # fmt: skip
        return found[0] if isinstance(found, tuple) else found

    return call


def _vllm_flash_attn(setup: Setup) -> Side:
    """flash-attn 3 as vLLM captures it: K and V into the cache first, then attention in up to 32 parts."""
    from vllm import _custom_ops as ops
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    point, cache, batch = setup.point, setup.batch.kv_cache, setup.batch
    slots, unscaled = batch.slot_mapping.long(), torch.ones(1, device="cuda")
    lengths = {"max_seqlen_q": point.rows, "max_seqlen_k": batch.max_seq_len, "num_splits": 32}
    schedule = get_scheduler_metadata(
        batch_size=point.requests, num_heads_q=HEADS, num_heads_kv=KV_HEADS, headdim=HEAD_DIM,
        qkv_dtype=DTYPE, cache_seqlens=batch.seq_lens, cu_seqlens_q=batch.qo_indptr,
        page_size=point.page_size, causal=True, **lengths,
    )  # fmt: skip

    def call(layer: int) -> None:
        k, v = cache.k[layer], cache.v[layer]
        ops.reshape_and_cache_flash(setup.k, setup.v, k, v, slots, "auto", unscaled, unscaled)
        flash_attn_varlen_func(
            setup.q, k, v, out=setup.out, cu_seqlens_q=batch.qo_indptr, seqused_k=batch.seq_lens,
            block_table=batch.block_table, softmax_scale=HEAD_DIM**-0.5, causal=True, fa_version=3,
            scheduler_metadata=schedule, **lengths,
        )  # fmt: skip

    return call


def _sdpa(setup: Setup) -> Side:
    """Over K and V in one piece per request; which tokens they are does not matter to its time."""
    point, cache = setup.point, setup.batch.kv_cache
    if 1 < point.rows < point.context:
        raise RuntimeError("it would need a mask")
    q = setup.q.view(point.requests, point.rows, HEADS, HEAD_DIM).transpose(1, 2)

    def dense(cached: Tensor) -> Tensor:
        tokens = cached.view(-1, KV_HEADS, HEAD_DIM)[: point.requests * point.context]
        return tokens.view(point.requests, point.context, KV_HEADS, HEAD_DIM).transpose(1, 2)

    def call(layer: int) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, dense(cache.k[layer]), dense(cache.v[layer]), is_causal=point.rows > 1, enable_gqa=True
        )

    return call


SIDES: dict[str, Callable[[Setup], Side]] = {
    **{f"piecewise {name}": partial(_ours, name) for name in OURS},
    "flashinfer xqa": _flashinfer_xqa,
    "flashinfer planned": _flashinfer_planned,
    "flash_attn 4": _flash_attn,
    "vllm flash_attn 3": _vllm_flash_attn,
    "torch sdpa": _sdpa,
}
