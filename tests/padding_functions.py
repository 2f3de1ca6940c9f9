"""Functions of rows that padding cannot change; test_padding_proof.py has the letters of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Case = tuple[str, Callable[..., Any]]


def mixture(
    x: Tensor, ids: Tensor, experts: Tensor, descending: bool = False, resort: bool = False
) -> Tensor:
    """Tokens sorted by expert, multiplied in groups, put back, summed; with faults on request."""
    chosen = x[:, :4].topk(2, -1).indices.reshape(-1)
    keys, order = torch.sort(chosen, descending=descending)
    rows = x[order // 2]
    if resort:
        keys, order = torch.sort(chosen.flip(0))[0], torch.sort(x[:, 4:].topk(2, -1).indices.reshape(-1))[1]
    counts = torch.histc(keys.float(), bins=4, min=0, max=3)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    out = grouped(rows, experts, ends)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return out[inverse].view(x.shape[0], 2, 8).sum(1)


def grouped(rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows.bfloat16(), experts.bfloat16(), offs=ends).float()


def rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[0])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def complex_rotary(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[0]).float(), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    turned = torch.view_as_complex(x.view(-1, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(1)


def rms_norm(x: Tensor, v: Tensor) -> Tensor:
    return v * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def repeat_kv(q: Tensor) -> Tensor:
    batch, heads, tokens, size = q.shape
    wide = q[:, :, None].expand(batch, heads, 3, tokens, size)
    return wide.reshape(batch, heads * 3, tokens, size)


def causal_mask(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0])
    allowed = places[None] <= places[:, None]
    return torch.where(allowed, 0.0, torch.finfo(x.dtype).min)[None, None]


def filled_mask(x: Tensor) -> Tensor:
    tokens = x.shape[0]
    mask = torch.full((tokens, tokens), -1e9)
    return torch.triu(mask, diagonal=1)[None, None].expand(1, 1, tokens, tokens)


def padded_mask(mask: Tensor) -> Tensor:
    places = torch.arange(mask.shape[0])
    return (places[None] <= places[:, None]) & mask[None]


def window_mask(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0])
    near = places[:, None] - places[None] < 3
    return near & (places[None] <= places[:, None])


def in_place(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 8)
    y[:, :4] = x[:, 4:]
    y[:, 4:].add_(x[:, :4])
    y.view(-1, 2, 4)[:, 0].mul_(2)
    return y


def filled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., ::2] = x[..., 1::2]
    out[..., 1::2] = -x[..., ::2]
    return out


def alibi(x: Tensor) -> Tensor:
    slopes = torch.tensor([0.5, 0.25])
    return (slopes[:, None] * torch.arange(x.shape[0])[None])[None, :, None]


def relative_buckets(x: Tensor, table: Tensor) -> Tensor:
    places = torch.arange(x.shape[0])
    apart = (places[None] - places[:, None]).abs().clamp(max=31)
    return F.embedding(apart, table).permute(2, 0, 1)


def router(x: Tensor, w: Tensor) -> Tensor:
    scores = (x @ w).softmax(-1)
    weights, chosen = scores.topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, chosen, weights)


def dense_mixture(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    gates = (x @ w[:, :4]).softmax(-1)
    every = torch.einsum("td,edf->tef", x, experts)
    return (gates[:, :, None] * every).sum(1)


def looked_up_mixture(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    chosen = (x @ w[:, :4]).topk(2, -1).indices
    rows = x.repeat_interleave(2, dim=0)
    out = torch.bmm(experts[chosen.reshape(-1)], rows[:, :, None]).squeeze(-1)
    return out.view(x.shape[0], 2, 8).sum(1)


def causal_convolution(x: Tensor, k: Tensor) -> Tensor:
    return F.silu(F.conv1d(x.t()[None], k, padding=3, groups=8)[..., : x.shape[0]]).transpose(1, 2)


def left_padded_convolution(x: Tensor, k: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.t()[None], (3, 0)), k, groups=8)


def with_state(x: Tensor, k: Tensor) -> Tensor:
    """A convolution's stored inputs before the tokens."""
    return F.conv1d(torch.cat([torch.ones(1, 8, 3), x.t()[None]], -1), k, groups=8)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, 8), x], 0)[: x.shape[0]] + x


def positions_of_mask(mask: Tensor, table: Tensor) -> Tensor:
    counts = mask.long()
    places = counts.cumsum(0) * counts - 1 + 2
    return F.embedding(places, table)


def positions_of_words(ids: Tensor, table: Tensor) -> Tensor:
    """As RoBERTa numbers tokens, whose id of padding is not 0: a replay's tail is counted as words."""
    words = ids.ne(1).int()
    places = words.cumsum(0).type_as(words) * words
    return F.embedding(places.long() + 1, torch.cat([table, table]))


def ones_of(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], dtype=torch.int64)


def relative_shift(x: Tensor) -> Tensor:
    """Of relative positions in Conformers: constant dimensions of 2 and 5 become 5 and 2."""
    shifted = F.pad(x.view(-1, 1, 2, 4), (1, 0)).view(-1, 1, 5, 2)[:, :, 1:]
    return shifted.view(-1, 1, 2, 4)


def resized_images(x: Tensor) -> list[Tensor]:
    images = x.view(-1, 2, 2, 2)
    sizes = [F.interpolate(images, size=3, mode=mode) for mode in ("nearest", "nearest-exact", "bicubic")]
    smooth = [F.interpolate(images, size=5, mode=mode, antialias=True) for mode in ("bilinear", "bicubic")]
    edges = [F.pad(images, (1, 1, 1, 1), mode) for mode in ("reflect", "replicate")]
    best, places = F.adaptive_max_pool2d(images, 1, return_indices=True)
    return [*sizes, *smooth, *edges, F.pad(x[:, None], (1, 2), "reflect"), best, places]


def patches_of_images(x: Tensor) -> list[Tensor]:
    images = x.view(-1, 4, 2, 1)
    patches = F.unfold(images, (2, 1), padding=(1, 0))
    return [F.fold(patches, (2, 1), (2, 1), padding=(1, 0)), F.pixel_unshuffle(F.pixel_shuffle(images, 2), 2)]


def sampled_images(x: Tensor, y: Tensor) -> Tensor:
    return F.grid_sample(x.view(-1, 2, 2, 2), y.view(-1, 2, 2, 2).tanh(), align_corners=False)


def channels_last(x: Tensor) -> Tensor:
    return x.view(-1, 2, 2, 2).permute(0, 3, 1, 2)


def vmapped_mask(x: Tensor) -> Tensor:
    """As transformers builds masks: a function of two places, for all of them."""
    places, ok = torch.arange(x.shape[0]), x[:, 0] > 0

    def allowed(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ok[key]

    return torch.vmap(torch.vmap(allowed, (None, 0)), (0, None))(places + 0, places + 0)


_INT4, _INT8 = torch.ops.aten._weight_int4pack_mm_for_cpu, torch.ops.aten._weight_int8pack_mm

SAFE: dict[str, Case] = {
    "zeros after a mask": ("mask", lambda m: m.long().sum() + m.any() + m.sum(0, keepdim=True)),
    "rms norm": ("x v", rms_norm),
    "torch's rms norm": ("x v", lambda x, v: F.rms_norm(x, (8,), v)),
    # On a CPU, torch reads beyond rows of 8 columns.
    "int8 weights": (
        "x w v",
        lambda x, w, v: _INT8(
            torch.cat([x, x], 1).bfloat16(), (torch.cat([w, w], 1) * 9).to(torch.int8), v.bfloat16()
        ),
    ),
    "int4 weights": ("wide packed zeros", lambda x, packed, zeros: _INT4(x, packed, 32, zeros) * 2),
    "layer norm": ("x v", lambda x, v: F.layer_norm(x, (8,), v, v)),
    "batch norm of evaluation": ("x v", lambda x, v: F.batch_norm(x, v, v.abs(), v, v)),
    "group norm of rows": ("x", lambda x: F.group_norm(x, 2)),
    "mlp": ("x w v", lambda x, w, v: F.linear(F.silu(x @ w) * F.gelu(F.linear(x, w, v)), w)),
    "batched mlp": ("h w v", lambda h, w, v: F.linear(h, w, v).relu() @ w),
    "rotary": ("x", rotary),
    "complex rotary": ("x", complex_rotary),
    "rope table by slice": ("x table", lambda x, t: x * t[: x.shape[0]]),
    "repeat_kv": ("q", repeat_kv),
    "heads": ("h", lambda h: h.view(2, -1, 2, 4).transpose(1, 2).transpose(1, 2).reshape(2, -1, 8)),
    "heads by size": ("h", lambda h: h.view(2, h.shape[1], 2, 4).permute(0, 2, 1, 3)),
    "split qkv": ("x w", lambda x, w: (x @ w).split([4, 2, 2], -1)),
    "unbind": ("x", lambda x: x.view(-1, 2, 4).unbind(1)),
    "scores": ("q", lambda q: q @ q.transpose(2, 3) * 0.5),
    "embedding": ("ids table", F.embedding),
    "positions": ("x table", lambda x, t: F.embedding(torch.arange(x.shape[0]), t) + x),
    "offset positions": ("x table", lambda x, t: F.embedding(torch.arange(x.shape[0])[None] % 60 + 2, t)),
    "positions of a mask": ("mask table", positions_of_mask),
    "clamped index": ("x table", lambda x, t: t[(x[:, 0] * 3).round().clamp(0, 5).long().clamp(0, 5)]),
    "token types": ("ids table", lambda i, t: F.embedding(torch.zeros_like(i), t)),
    "constant index": ("x point", lambda x, p: x[:, p]),
    "own row by index": ("x", lambda x: x[torch.arange(x.shape[0])]),
    "first row": ("x", lambda x: x[0]),
    "causal mask": ("x", causal_mask),
    "filled mask": ("x", filled_mask),
    "padded mask": ("mask", padded_mask),
    "window mask": ("x", window_mask),
    "alibi": ("x", alibi),
    "relative buckets": ("x table", relative_buckets),
    "cumulative": ("x", lambda x: x.cumsum(0)),
    "cumulative per batch": ("h", lambda h: h.cumsum(1).logcumsumexp(1)),
    "router": ("x w", router),
    "grouped mixture": ("x ids experts", mixture),
    "dense mixture": ("x w experts", dense_mixture),
    "looked up mixture": ("x w experts", looked_up_mixture),
    "one_hot": ("ids", lambda i: F.one_hot(i.clamp(0, 5), 6)),
    "argmax": ("x table", lambda x, t: t[x.argmax(-1)]),
    "top two": ("x table", lambda x, t: t[x.topk(2, -1).indices].sum(1)),
    "gather": ("x", lambda x: x.gather(-1, x.argsort(-1))),
    "causal convolution": ("x k", causal_convolution),
    "left padded convolution": ("x k", left_padded_convolution),
    "convolution with state": ("x k", with_state),
    "shifted": ("x", shifted),
    "in place": ("x", in_place),
    "filled": ("x", filled),
    "masked_fill": ("x mask", lambda x, m: x.masked_fill(~m[:, None], -1.0)),
    "masked in place": ("x mask", lambda x, m: x.clone().masked_fill_(m[:, None], 0.0)),
    "number by mask": ("x", lambda x: torch.where(x > 0, x, 0.0)),
    "write by mask": ("x", lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.0))),
    "dtypes": ("x", lambda x: x.to(torch.bfloat16).float().double().to(x.dtype)),
    "bits": ("x", lambda x: x.view(torch.int32).view(torch.float32)),
    "interleaved": ("x", lambda x: torch.stack([x[..., ::2], -x[..., 1::2]], -1).flatten(-2)),
    "repeat": ("x", lambda x: x.repeat(1, 3)),
    "repeated columns": ("x", lambda x: x.repeat_interleave(2, -1)),
    "triangle": ("square", lambda s: s.tril(-1) + s.triu()),
    "norm of rows": ("x", lambda x: F.normalize(x, dim=-1)),
    "cosine": ("x y", lambda x, y: F.cosine_similarity(x, y, dim=-1)),
    "einsum": ("x w", lambda x, w: torch.einsum("td,de->te", x, w)),
    "flattened heads": ("x", lambda x: x.view(-1, 2, 4).reshape(-1, 4).view(x.shape[0], 8)),
    "dropout of evaluation": ("x", lambda x: F.dropout(x, 0.5, training=False)),
    "glu": ("x", F.glu),
    "padded columns": ("x", lambda x: F.pad(x, (1, 2))),
    "rolled columns": ("x", lambda x: x.roll(2, -1).flip(-1)),
    "images of a batch": ("x", lambda x: F.avg_pool2d(x.view(-1, 1, 2, 4), 2)),
    "relative shift": ("x", relative_shift),
    "resized images": ("x", resized_images),
    "patches of images": ("x", patches_of_images),
    "sampled images": ("x y", sampled_images),
    "channels last in one place": ("x", lambda x: F.adaptive_avg_pool2d(channels_last(x), 1).flatten(1)),
    "hardswish": ("x", lambda x: F.hardswish(x) + F.hardswish(x.clone(), inplace=True)),
    "tail without consequence": ("x", lambda x: (x, torch.zeros(x.shape[0], dtype=torch.int64))),
    "softcap": ("x", lambda x: 30.0 * torch.tanh(x / 30.0)),
    "sum of first rows": ("x point", lambda x, p: torch.zeros(9, 8).index_add_(0, p, x[:1].expand(2, 8))[0]),
    "mask inside of vmap": ("x", vmapped_mask),
    "positions of words": ("ids table", positions_of_words),
    "positions of ones": ("x table", lambda x, t: t[ones_of(x).cumsum(0) - 1]),
    "written input": ("x", lambda x: x.mul_(2).add_(1)),
}
