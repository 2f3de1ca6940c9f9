"""Functions of [batch, tokens, WIDTH] that mix requests or tokens, count them, or reorder them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from toys import WIDTH, ops


def _flattened(x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH) * 2
    return flat.softmax(-1).view(x.shape)


def _two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    made = x * 2
    return made, made[:, :1]


def _up_to(x: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=x.device)


# Each is visibly wrong when rows of a padded batch reach live ones, or the result.
MODELS: dict[str, Callable[[Tensor], Any]] = {
    "mean of the batch": lambda x: x - x.mean(0, keepdim=True),
    "sum of all": lambda x: x.sum() + x,
    "batch reversed": lambda x: x.flip(0) * 2,
    "batch added up": lambda x: x.cumsum(0),
    "last request": lambda x: x[-1] + x,
    "op mixes requests": lambda x: ops.mix(x * 2) + 1,
    "op mixes requests of transposed": lambda x: ops.mix((x * 2).transpose(0, 1)) + 1,
    "batch is a number of the result": lambda x: (x * 2, x.shape[0], x.shape[0] * x.shape[1]),
    "argument returned": lambda x: (x, x * 2),
    "batch behind tokens": lambda x: (x * 2).transpose(0, 1),
    "flattened": _flattened,
    "flat result": lambda x: (x * 2).reshape(-1, WIDTH),
    "numbered requests": lambda x: x * torch.arange(x.shape[0], device=x.device)[:, None, None],
    "scaled by the batch": lambda x: x / x.shape[0],
    "requests compared": lambda x: x.flatten(1) @ x.flatten(1).T,
    "normalized over the batch": lambda x: (
        nn.functional.batch_norm(x, None, None, training=True, weight=None, bias=None)
        if x.shape[1] == 1
        else (x - x.mean((0, 1))) / x.std((0, 1))
    ),
    "views of one result": _two_views,
    "at most 16 rows": lambda x: (x * 2).reshape(-1, WIDTH)[:16],
    "rows dealt out anew": lambda x: (x * 2).reshape(x.shape[1], x.shape[0], WIDTH) + 1,
    "groups of five rows": lambda x: (x * 2).flatten(0, 1).split(5)[0],
    "four rows of batches": lambda x: (x * 2).flatten(0, 1)[:4].reshape(4, WIDTH),
    "max of the batch": lambda x: x * max(x.shape[0], 3),
    "min of the batch": lambda x: x * min(x.shape[0], 3),
    "max of both": lambda x: x * torch.sym_max(x.shape[1], x.shape[0]),
    "mean of the tokens": lambda x: x - x.mean(1, keepdim=True),
    "numbered rows": lambda x: (x.flatten(0, 1) * _up_to(x, x.shape[0] * x.shape[1])[:, None]).view(x.shape),
    "numbered by both": lambda x: (
        x * _up_to(x, x.shape[0])[:, None, None] + _up_to(x, x.shape[1])[:, None] * x.shape[1]
    ),
    "rows added up": lambda x: x.flatten(0, 1).cumsum(0).view(x.shape),
    "last tokens": lambda x: x.flatten(0, 1)[(_up_to(x, x.shape[0]) + 1) * x.shape[1] - 1],
    "first tokens": lambda x: x.flatten(0, 1)[_up_to(x, x.shape[0]) * x.shape[1]] + x[:, 0],
    "first rows, as many as tokens": lambda x: x.flatten(0, 1)[: x.shape[1]] * 2,
    "first rows, as many as requests": lambda x: x.transpose(0, 1).flatten(0, 1)[: x.shape[0]] * 2,
    "tokens before requests": lambda x: (x.transpose(0, 1).flatten(0, 1) * 2).view(x.shape) + x,
    "tokens of other requests": lambda x: x.roll(1, 0) + x.roll(1, 1),
    "twice the tokens": lambda x: torch.cat([x, x * 2], 1),
    "twice the requests": lambda x: torch.cat([x, x * 2], 0),
    "requests beside tokens": lambda x: torch.einsum("btw,sw->bts", x, x[:, 0]) @ x[:, 0],
}


# Of [batch, tokens, WIDTH] and ids of [batch, tokens], which are not zero.
WITH_IDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum of ids": lambda x, ids: x * ids.sum(),
    "sum over requests": lambda x, ids: x * ids.sum(0)[None, :, None],
    "ids counted": lambda x, ids: x / ids.count_nonzero(),
    "mask counted": lambda x, ids: x / (ids > 2).sum(),
    "any request": lambda x, ids: x * (ids > 2).any(0)[:, None],
    "ids less the request": lambda x, ids: (
        x
        + nn.functional.embedding(
            ids + 5 - _up_to(x, x.shape[0])[:, None], torch.ones(64, WIDTH, device=x.device).cumsum(0)
        )
    ),
}
