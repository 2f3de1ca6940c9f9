"""Whatever random chains of ops the proof shows clean, numbers agree at every size and tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from padding_cases import disagreement, is_proved, judge
from padding_functions import complex_rotary, filled, in_place, mixture, rotary, shifted
from torch import Tensor

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
KERNEL = W[:, None, :4]


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


# From [tokens, 8] to [tokens, 8]; about half of them read across rows, or do so after another.
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W).tanh(),
    "norm": lambda x: F.layer_norm(x, (8,)),
    "rotary": rotary,
    "complex rotary": lambda x: complex_rotary(x.contiguous()),
    "in place": in_place,
    "filled": filled,
    "shifted": shifted,
    "mixture": lambda x: mixture(x, places(x), W[:4, None] * W),
    "running": lambda x: x.cumsum(0) / (places(x)[:, None] + 1),
    "running columns": lambda x: x.t().cumsum(-1).t(),
    "scores": lambda x: ((x @ x.t()).tril() > 0)[:, :1] * x,
    "masked scores": lambda x: torch.where((places(x)[None] <= places(x)[:, None])[:, :1], x, x * 2),
    "embedding": lambda x: x + F.embedding(places(x) % 8, W),
    "looked up": lambda x: W[x.argmax(-1)] + x,
    "own rows": lambda x: x[places(x)],
    "convolution": lambda x: F.conv1d(F.pad(x.t()[None], (3, 0)), KERNEL, groups=8)[0].t(),
    "same convolution": lambda x: F.conv1d(x.t()[None], KERNEL[..., :3], padding=1, groups=8)[0].t(),
    "interleaved": lambda x: torch.stack([x[:, ::2], x[:, 1::2]], -1).flatten(-2),
    "transposed view": lambda x: x.t().reshape(-1, 8),
    "repeated": lambda x: x.repeat_interleave(2, 0).view(-1, 2, 8).sum(1),
    "doubled": lambda x: torch.cat([x, -x], -1).view(-1, 8)[: x.shape[0]],
    "tiled": lambda x: x.repeat(2, 1)[: x.shape[0]],
    "sum": lambda x: x + x.sum(0),
    "softmax": lambda x: x.softmax(0),
    "flip": lambda x: x.flip(0),
    "last": lambda x: x - x[-1],
    "first": lambda x: x - x[0],
    "count": lambda x: x + (x == 0).sum(),
    "size": lambda x: x / x.shape[0],
    "row written": lambda x: x.clone().index_fill_(0, torch.tensor([0]), 1.0),
    "shifted in place": lambda x: torch.cat([x[1:], x[:1]]),
    "clamped": lambda x: x.nan_to_num(0, 1, -1).clamp(-9, 9),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(LINKS)), min_size=1, max_size=4))
def test_what_is_proved_agrees_by_numbers(names: Sequence[str]) -> None:
    def function(x: Tensor) -> Tensor:
        for name in names:
            x = LINKS[name](x)
        return x

    inputs = [torch.randn(7, 8, generator=torch.Generator().manual_seed(1))]
    proof = judge(function, inputs, [0], largest=64)
    if is_proved(proof):
        assert disagreement(function, inputs, [0], proof, ((5, 8), (1, 4))) is None
