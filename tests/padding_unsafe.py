"""Functions of rows that padding may change; the letters of their arguments are in test_padding_proof.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from padding_functions import Case, grouped, mixture
from torch import Tensor


def _overwritten(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:] = y[:-1].clone()
    return y


def _written_by_size(table: Tensor, x: Tensor) -> Tensor:
    cache = table.clone()
    cache[: x.shape[0]] = x
    return x + cache.sum(0)


def _base_read_later(x: Tensor) -> Tensor:
    y = x.clone()
    y[-1:].mul_(2)
    return y * 1


def _bincount(ids: Tensor) -> Tensor:
    return torch.zeros(6, dtype=torch.int64).index_add_(0, ids, torch.ones_like(ids))


def _descending_groups(x: Tensor, ids: Tensor, experts: Tensor) -> Tensor:
    return mixture(x, ids, experts, descending=True)


def _groups_of_another_sort(x: Tensor, ids: Tensor, experts: Tensor) -> Tensor:
    return mixture(x, ids, experts, resort=True)


def _groups_of_unbounded_keys(x: Tensor, ids: Tensor, experts: Tensor) -> Tensor:
    order = ids.argsort()
    counts = torch.histc(ids[order].float(), bins=4, min=0, max=3)
    return grouped(x[order], experts, counts.cumsum(0, dtype=torch.int32))


UNSAFE: dict[str, Case] = {
    "int8 weights are rows": (
        "square x w",
        lambda square, x, w: torch.ops.aten._weight_int8pack_mm(
            w.bfloat16(), (x * 9).to(torch.int8), square[0].bfloat16()
        ),
    ),
    "int8 weights over tokens": (
        "square h",
        lambda square, h: torch.ops.aten._weight_int8pack_mm(
            square.bfloat16(), (h[0].T * 9).to(torch.int8), h[0, 0].bfloat16()
        ),
    ),
    # named in reviews
    "zero rows counted": ("x", lambda x: x * (1 + (x == 0).all(-1).sum())),
    "all": ("x", lambda x: x * x.all()),
    "any": ("x", lambda x: x * x.any()),
    "any over tokens": ("x", lambda x: x * (x > 0).any(0)),
    "fft along tokens": ("x", lambda x: torch.fft.fft(x, dim=0).real),
    "ifft along tokens": ("x", lambda x: torch.fft.ifft(x, dim=0).real),
    "ihfft along tokens": ("x", lambda x: torch.fft.ihfft(x, dim=0).real),
    "quantised by the maximum": ("x", lambda x: (x / x.abs().amax() * 127).round().long()),
    "quantised per column": ("x", lambda x: (x / x.abs().amax(0)).long()),
    "index of a mean": ("x table", lambda x, t: t[((x - x.mean(0)) * 2).long().clamp(0, 5)[:, 0]]),
    "mode": ("x", lambda x: x + x.round().mode(0).values),
    "as_strided": ("x", lambda x: x.as_strided((4,), (2,))),
    "as_strided of a view": ("x", lambda x: x[0].as_strided((16,), (1,))),
    "as_strided of a row": ("x", lambda x: x[:1].as_strided((2, 8), (8, 1))),
    # views and slices
    "roll over all": ("x", lambda x: x.roll(1)),
    "roll of tokens": ("x", lambda x: x.roll(1, 0)),
    "flip": ("x", lambda x: x.flip(0)),
    "last row": ("x", lambda x: x[-1]),
    "last rows": ("x", lambda x: x[-2:]),
    "all but the last": ("x", lambda x: x[:-1]),
    "second row": ("x", lambda x: x[1]),
    "first two rows": ("x", lambda x: x[:2]),
    "every second": ("x", lambda x: x[::2]),
    "from the middle": ("x", lambda x: x[x.shape[0] // 2 :]),
    "slice of a table from a size": ("x table", lambda x, t: t[x.shape[0] :][:8]),
    "slice of a table from the end": ("x table", lambda x, t: t[-x.shape[0] :] + x),
    "uniform flattened": ("x", lambda x: x[None].expand(2, -1, -1).reshape(-1, 8)[:8]),
    "batch and tokens flattened": ("h", lambda h: h.reshape(-1, 8)),
    "flattened then cut": ("h", lambda h: h.reshape(-1, 8)[:8].sum(0)),
    "transposed and flattened": ("x", lambda x: x.t().reshape(-1, 8)),
    "tokens into columns": ("x", lambda x: x.reshape(8, -1)),
    "all flattened": ("x", lambda x: x.flatten().roll(1)),
    "diagonal": ("x", lambda x: x.diagonal()),
    "windows": ("x", lambda x: x.unfold(0, 2, 1)),
    "chunks": ("x", lambda x: x.chunk(2, 0)[1]),
    "split": ("x", lambda x: x.split([1, x.shape[0] - 1], 0)[1]),
    "triangle from the end": ("x", lambda x: x.tril(x.shape[0] - 3)),
    "triangle of reordered rows": ("x", lambda x: x.repeat(2, 1).tril()),
    # reductions and rows that meet
    "sum": ("x", lambda x: x.sum()),
    "mean": ("x", lambda x: x - x.mean(0)),
    "mean of batch and tokens": ("h", lambda h: h - h.mean((0, 1))),
    "maximum": ("x", lambda x: x - x.amax(0)),
    "argmax": ("x", lambda x: x.argmax(0)),
    "variance": ("x", lambda x: x / x.var(0)),
    "norm": ("x", lambda x: x / x.norm()),
    "norm along tokens": ("x", lambda x: F.normalize(x, dim=0)),
    "batch norm in training": ("x v", lambda x, v: F.batch_norm(x, None, None, v, v, training=True)),
    "group norm over tokens": ("h", lambda h: F.group_norm(h.transpose(1, 2), 2)),
    "layer norm over tokens": ("square", lambda s: F.layer_norm(s, s.shape[1:])),
    "softmax": ("x", lambda x: x.softmax(0)),
    "log_softmax": ("x", lambda x: x.log_softmax(0)),
    "logsumexp": ("x", lambda x: x.logsumexp(0)),
    "attention": ("x", lambda x: (x @ x.t()).softmax(-1) @ x),
    "masked sum": ("x mask", lambda x, m: (x * m[:, None]).sum(0)),
    "pooling by a mask": ("x mask", lambda x, m: x.t() @ m.float()),
    "product along tokens": ("x y", lambda x, y: x.t() @ y),
    "einsum along tokens": ("x y", lambda x, y: torch.einsum("td,te->de", x, y)),
    "outer along tokens": ("x", lambda x: torch.einsum("td,tk->dk", x, x)),
    "convolution over tokens": ("x k", lambda x, k: F.conv1d(x.t()[None], k[..., :3], padding=1, groups=8)),
    "pooled over tokens": ("h", lambda h: F.max_pool2d(h[:, None], 2)),
    "patches over tokens": ("x", lambda x: F.unfold(x.t()[None, None], (2, 2))),
    "images of tokens in one": ("x", lambda x: F.pixel_unshuffle(x.view(1, -1, 2, 4), 2)),
    "reflected tokens": ("x", lambda x: F.pad(x.t()[None], (1, 1), "reflect")),
    "sampled over tokens": (
        "x y",
        lambda x, y: F.grid_sample(x[None, None], y.tanh().view(1, 1, -1, 2), align_corners=False),
    ),
    "constants around tokens": ("x", lambda x: x.expand(3, -1, -1).reshape(4, x.shape[0], 6)),
    "constants beside tokens": ("x", lambda x: x.t().reshape(2, -1, 4)),
    "rows told anew": ("x", lambda x: (x * 2).as_strided_(x.shape, (1, x.shape[0]))),
    "resized over tokens": ("x", lambda x: F.interpolate(x.t()[None], scale_factor=2)),
    "cumulative from the end": ("x", lambda x: x.flip(0).cumsum(0).flip(0)),
    "cumulative of columns first": ("x", lambda x: x.t().reshape(-1).cumsum(0)),
    "cumulative product": ("x", lambda x: x.cumprod(0)[-1] * x),
    "median": ("x", lambda x: x.median(0).values),
    "sorted": ("x", lambda x: x.sort(0).values),
    "sorted ids": ("ids", lambda i: i.sort().values),
    "ranks": ("ids", lambda i: i.argsort().argsort()),
    "top rows": ("x", lambda x: x.topk(1, dim=0).values),
    "distances": ("x", lambda x: torch.cdist(x, x).sum(-1)),
    # indices
    "index from outside": ("x point", lambda x, p: x[p]),
    "last by index": ("x", lambda x: x[torch.arange(x.shape[0]) - 1]),
    "negative index": ("x", lambda x: x.index_select(0, torch.tensor([-1]))),
    "reversed by index": ("x", lambda x: x[x.shape[0] - 1 - torch.arange(x.shape[0])]),
    "boolean index": ("x mask", lambda x, m: x[m]),
    "nonzero": ("mask", lambda m: m.nonzero()),
    "unbounded index": ("x table", lambda x, t: t[x[:, 0].long()]),
    "index past the table": ("x table", lambda x, t: t[:4][torch.arange(x.shape[0])]),
    "unbounded offset": ("ids one table", lambda i, o, t: F.embedding(i + o, t)),
    "products as indices": ("ids table", lambda i, t: F.embedding((i + 9) * 8, t)),
    "counts times numbers": ("ids table", lambda i, t: t[torch.arange(i.shape[0]) * (i % 64)]),
    "counts times signs": ("ids table", lambda i, t: t[torch.arange(i.shape[0]) * -(i % 2)]),
    "gather along tokens": ("x ids", lambda x, i: x.gather(0, i[:, None].expand(-1, 8))),
    "take": ("x ids", lambda x, i: x.take(i)),
    "bincount": ("ids", _bincount),
    "histogram": ("x", lambda x: torch.histc(x, 4, -1, 1)),
    "bucketize among rows": ("x", lambda x: torch.bucketize(x, x[:, 0])),
    "searchsorted among rows": ("x", lambda x: torch.searchsorted(x[:, 0], x)),
    "scatter of rows": ("x ids", lambda x, i: torch.zeros(6, 8).index_put((i,), x, accumulate=True)),
    "write of rows": ("x ids", lambda x, i: torch.zeros(6, 8).index_put((i,), x)),
    "index_add": ("x ids", lambda x, i: torch.zeros(6, 8).index_add(0, i, x)),
    "masked_scatter": ("x mask y", lambda x, m, y: x.masked_scatter(m[:, None], y)),
    # sizes as numbers
    "divided by the size": ("x", lambda x: x / x.shape[0]),
    "mean written out": ("x", lambda x: x + 1.0 / x.shape[0]),
    "filled with the size": ("x", lambda x: x + torch.full((8,), x.shape[0])),
    "a size that the trace fixes": ("x", lambda x: x + x.new_ones(int(x.shape[0]), 8)),
    "linspace": ("x", lambda x: x * torch.linspace(0, 1, x.shape[0])[:, None]),
    "arange from a size": ("x", lambda x: torch.arange(x.shape[0], 2 * x.shape[0])),
    "clamped to the size": ("ids", lambda i: i.clamp(max=x) if (x := i.shape[0] - 1) else i),
    "distance to the end": ("x", lambda x: x * (x.shape[0] - torch.arange(x.shape[0]))[:, None]),
    "padded to a multiple": ("x", lambda x: F.pad(x, (0, 0, 0, 3)).sum(0)),
    "rows after tokens": ("x", lambda x: torch.cat([x, torch.ones(1, 8)])),
    "tokens after tokens": ("x y", lambda x, y: torch.cat([x, y])[: x.shape[0] + 1].sum(0)),
    # writes
    "rows shifted in place": ("x", _overwritten),
    "table written by size": ("table x", _written_by_size),
    "last row written, base read": ("x", _base_read_later),
    "sum in place": ("x", lambda x: x.clone().add_(x.sum(0))),
    "out argument": ("x", lambda x: torch.sum(x, 0, out=torch.empty(8))),
    # random numbers, mixtures
    "random": ("x", lambda x: x + torch.rand_like(x)),
    "dropout": ("x", lambda x: F.dropout(x, 0.5, training=True)),
    "groups in descending order": ("x ids experts", _descending_groups),
    "groups of another sort": ("x ids experts", _groups_of_another_sort),
    "groups of keys without bounds": ("x ids experts", _groups_of_unbounded_keys),
    "sums inside of vmap": ("x", torch.vmap(lambda column: column - column.sum(), 1, 1)),
    "trace": ("square", lambda s: s.trace()),
    "inverse": ("square", lambda s: s.inverse()),
}
