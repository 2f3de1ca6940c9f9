"""Our attention op without a cache: packed sequences, padding, and a model with the op."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch
from internals import replace_compile
from torch import Tensor, nn
from toys import assert_same, check, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import attention
from piecewise_graph.custom_ops.errors import AttentionError

pytestmark = pytest.mark.usefixtures("no_grad")


def naive(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], scale: float) -> Tensor:
    """Attention row by row, in float64."""
    q64, k64, v64 = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q64)
    for begin, end in pairwise(cu_seqlens):
        for row in range(begin, end):
            for head in range(q.shape[1]):
                keys = k64[begin : row + 1, head // group]
                weights = (keys @ q64[row, head] * scale).softmax(0)
                out[row, head] = weights @ v64[begin : row + 1, head // group]
    return out


def packed(cu_seqlens: list[int], device: torch.device) -> AbstractContextManager[object]:
    return pg.forward_context(cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32, device=device))


def qkv(tokens: int, heads: int, kv_heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(tokens, h, 8, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("cu_seqlens", [[0, 7], [0, 3, 4, 7], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_attention_equals_the_naive_one(
    dtype: torch.dtype, tolerance: float, kv_heads: int, cu_seqlens: list[int], device: torch.device
) -> None:
    q, k, v = qkv(7, 4, kv_heads, device, dtype)
    with packed(cu_seqlens, device):
        found = attention(q, k, v)
    assert found.dtype == dtype
    wanted = naive(q, k, v, cu_seqlens, 8**-0.5)
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_attention_takes_a_scale(device: torch.device) -> None:
    q, k, v = qkv(5, 2, 2, device, torch.float32)
    wanted = naive(q, k, v, [0, 5], 0.3)
    with packed([0, 5], device):
        found = attention(q, k, v, scale=0.3)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_attention_without_its_batch_is_refused(device: torch.device) -> None:
    """Otherwise every token would attend to every other one, without an error."""
    with pytest.raises(AttentionError, match=r"(?s)no field 'attention'.*AttentionBatch"):
        attention(*qkv(5, 2, 2, device, torch.float32))


@pytest.mark.parametrize("starts", [[0, 3], [0, 9], [3, 5], [0, 4, 3, 5], []])
def test_sequences_that_are_not_the_rows_are_refused(starts: list[int], device: torch.device) -> None:
    q, k, v = qkv(5, 2, 2, device, torch.float32)
    if device.type == "cpu":
        with packed(starts, device), pytest.raises(AttentionError, match="called with 5 tokens"):
            attention(q, k, v)
    elif starts in ([0, 3], [3, 5]):  # the host does not know; it has to show
        with packed(starts, device):
            found = attention(q, k, v).isnan().flatten(1)
        assert found.all(1).tolist() == [not starts[0] <= row < starts[1] for row in range(5)]
        assert torch.equal(found.all(1), found.any(1))


@pytest.mark.parametrize(("name", "what"), [("bogus", "named 'bogus'"), ("flash_attn", "the reference only")])
def test_sequences_without_a_cache_are_served_by_the_reference(
    name: str, what: str, device: torch.device
) -> None:
    q, k, v = qkv(5, 2, 2, device, torch.float32)
    with packed([0, 5], device), pytest.raises(AttentionError, match=what):
        attention(q, k, v, implementation=name)
    with packed([0, 5], device):
        assert torch.equal(attention(q, k, v, implementation="torch"), attention(q, k, v))


def test_a_nan_of_the_model_shows(device: torch.device) -> None:
    q, k, v = qkv(5, 2, 2, device, torch.float32)
    q[1] = float("nan")
    with packed([0, 5], device):
        found = attention(q, k, v).isnan().flatten(1)
    assert found.all(1).tolist() == found.any(1).tolist() == [False, True, False, False, False]


def test_attention_takes_strided_queries(device: torch.device) -> None:
    """q, k and v are slices of one merged projection."""
    merged = torch.randn(6, 3, 2, 8, device=device)
    q, k, v = merged.unbind(1)
    with packed([0, 6], device):
        found = attention(q, k, v)
    torch.testing.assert_close(found.double(), naive(q, k, v, [0, 6], 8**-0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_passes_opcheck(kv_heads: int, device: torch.device) -> None:
    q, k, v = qkv(5, 4, kv_heads, device, torch.float32)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    args = (q, k, v, torch.empty_like(q), 0, 0.5)
    with packed([0, 5], device):
        torch.library.opcheck(torch.ops.piecewise.attention.default, args, test_utils=tests)


class Attending(nn.Module):
    """Two layers of grouped-query attention around our op."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.q = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.kv = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for q, kv in zip(self.q, self.kv, strict=True):
            k, v = kv(x).view(-1, 2, 16).chunk(2, dim=2)
            x = x + attention(q(x).view(-1, 4, 8), k, v).flatten(1)
        return x


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_model_with_attention_is_captured_and_padded(compiler: str, device: torch.device) -> None:
    layers = 2
    model = Attending(layers).to(device)
    fast = compiled(model, compiler=compiler)
    with pg.counters.expect(
        traces=1, segments=layers + 1, tapes=2, captures=2 * (layers + 1), replays=5, fallbacks=1
    ):
        for count in (3, 3, 1, 2, 7, 8, 5, 9):
            x = rows(count, device, 32)
            cu_seqlens = torch.tensor([0, (count + 1) // 2, count], dtype=torch.int32, device=device)
            with pg.forward_context(cu_seqlens=cu_seqlens):
                assert_same(fast(x), model(x))
    assert pg.explain(fast).traces[0].splitting_ops == {"piecewise::attention": layers}


def test_out_style_op_needs_no_bridge_buffer(device: torch.device) -> None:
    """The segment before the op allocates `out`, so only the input (8 x 32 floats) needs a buffer."""
    fast = compiled(Attending().to(device))
    with packed([0, 8], device):
        fast(rows(8, device, 32))
    assert pg.explain(fast).buffer_bytes == 8 * 32 * 4


class Garbage(torch.overrides.TorchFunctionMode):
    """Uninitialised memory as in a process that has run for a while: other values at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 1e3

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.empty_like:
            self.value *= -1.1
            made.fill_(self.value)
        return made


@pytest.mark.parametrize("scratch", [False, True])
def test_uninitialised_out_is_no_evidence_against_padding(
    scratch: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`out` leaves its segment uninitialised: old values in its memory must not count as mixing."""
    garbage = Garbage()

    def compile_segment(original: Any, gm: Any, inputs: Any, compiler: str) -> Any:
        def run(*args: Any) -> Any:
            with garbage:
                return gm.forward(*args)

        return run

    replace_compile(monkeypatch, compile_segment)

    def model(x: Tensor) -> Tensor:
        y = x * 2
        if scratch:  # tensors are written and freed before `out`, which may get the storage number of one
            for _ in range(8):
                y = torch.zeros_like(y).add_(y) + 1
        out = torch.empty_like(y)
        ops.mix_out(y, out)
        return out + 1

    check(model, device, expect={"tapes": 2, "replays": 7, "fallbacks": 1, "unpadded_segments": 0})
