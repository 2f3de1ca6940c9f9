"""The registry, our attention op, ops of other people, and ops that lie."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch
from internals import replace_compile, replays, unregister_splitting_op
from torch import Tensor, nn
from toys import COUNTS, WIDTH, assert_same, check, compiled, define, ops, rows, watching

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import attention
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.errors import LeakWarning, SplittingOpError
from piecewise_graph.splitter.splitting_ops import registered_names


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


# --- registration -------------------------------------------------------------------------------------

define("returns_nothing(Tensor x) -> ()", lambda x: None, lambda x: None)
define("returns_alias(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lambda x: x[:1])
define("writes_and_returns(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), lambda x: x)
define("half_precision(Tensor x) -> Tensor", lambda x: x.to(torch.float16), torch.empty_like)
define("one_row_less(Tensor x) -> Tensor", lambda x: x[1:].clone(), torch.empty_like)
define(
    "one_of_two_lies(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.double()), lambda x: (x + 0, x + 0)
)


def sneaky(x: Tensor, state: Tensor) -> Tensor:
    state.add_(1)
    return x * 2


define("sneaky(Tensor x, Tensor state) -> Tensor", sneaky, lambda x, state: torch.empty_like(x))
MOOD = [torch.float32]
define("moody(Tensor x) -> Tensor", lambda x: x.to(MOOD[0]) * 2, torch.empty_like)
for _op in ("moody", "half_precision", "one_row_less", "one_of_two_lies", "sneaky"):
    pg.register_splitting_op(f"toy::{_op}")


@pytest.mark.parametrize("name", ["attention", "", "::mix", "toy::", "toy.mix"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(SplittingOpError, match="namespace::name"):
        pg.register_splitting_op(name)


@pytest.mark.parametrize("name", ["toy::no_such_op", "no_such_library::attention"])
def test_unknown_op_is_refused(name: str) -> None:
    with pytest.raises(SplittingOpError, match="import the package that defines it"):
        pg.register_splitting_op(name)
    assert name not in registered_names()


def test_op_without_result_or_declared_write_is_refused() -> None:
    with pytest.raises(SplittingOpError, match="declares no argument that it writes"):
        pg.register_splitting_op("toy::returns_nothing")


@pytest.mark.parametrize("name", ["toy::returns_alias", "toy::writes_and_returns", "aten::view"])
def test_op_that_returns_an_alias_is_refused(name: str) -> None:
    with pytest.raises(SplittingOpError, match="returns an alias"):
        pg.register_splitting_op(name)
    assert name not in registered_names()


def test_capturable_implies_padded() -> None:
    assert pg.register_splitting_op("toy::mix_out", capturable=True).padded
    assert not pg.register_splitting_op("toy::mix_out").padded


def test_sdpa_is_registered_by_default() -> None:
    assert "aten::scaled_dot_product_attention" in registered_names()


def test_op_of_another_domain_with_an_out_overload_is_accepted() -> None:
    """`op.out` returns its out argument: torch's own convention."""
    name = "aten::cumprod"
    try:
        assert pg.register_splitting_op(name).name == name
    finally:
        unregister_splitting_op(name)


# --- our attention op ---------------------------------------------------------------------------------


def naive(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], scale: float) -> Tensor:
    """Row by row, in float64."""
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
    """Every token would see every other: fluent nonsense, and no error."""
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
    """q, k and v as slices of one merged projection."""
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
    """The segment before allocates `out`: only the input (8 x 32 floats) is owned."""
    fast = compiled(Attending().to(device))
    with packed([0, 8], device):
        fast(rows(8, device, 32))
    assert pg.explain(fast).buffer_bytes == 8 * 32 * 4


class Garbage(torch.overrides.TorchFunctionMode):
    """empty_like as a process knows it that has run for a while: every time something else."""

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
    """`out` leaves its segment uninitialised; what its memory happens to hold must not count as mixing."""
    garbage = Garbage()

    def compile_segment(original: Any, gm: Any, inputs: Any, compiler: str) -> Any:
        def run(*args: Any) -> Any:
            with garbage:
                return gm.forward(*args)

        return run

    replace_compile(monkeypatch, compile_segment)

    def model(x: Tensor) -> Tensor:
        y = x * 2
        if scratch:  # written tensors come and go before `out`, whose storage may get the number of theirs
            for _ in range(8):
                y = torch.zeros_like(y).add_(y) + 1
        out = torch.empty_like(y)
        ops.mix_out(y, out)
        return out + 1

    check(model, device, expect={"tapes": 2, "replays": 7, "fallbacks": 1, "unpadded_segments": 0})


# --- once per forward, at the live count --------------------------------------------------------------


def test_cache_is_written_once_per_forward_with_live_rows_only(device: torch.device) -> None:
    """Rehearsal, proof and capture included: a second write of a KV cache would be silent nonsense."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            ops.append(y, self.cache)
            return y + 1

    model = Caching().to(device)
    cache = model.cache
    fast = compiled(model)
    wanted = torch.zeros(WIDTH, device=device)
    for count in COUNTS:
        x = rows(count, device)
        with watching() as seen:
            fast(x)
        assert [call.tokens for call in seen] == [count]
        wanted += (x * 2).sum(0)
        torch.testing.assert_close(cache, wanted)


def test_first_call_with_one_token_runs_each_op_once(device: torch.device) -> None:
    """pg.compile traces such a call on a longer one; the tracing call executes nothing."""
    fast = compiled(lambda x: ops.mix(x * 2) + 1)
    with watching() as seen:
        fast(rows(1, device))
    assert [call.tokens for call in seen] == [1]


def test_pg_capture_runs_each_op_for_its_tracing_and_its_capturing_call(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x * 2) + 1)
    with watching() as seen:
        pg.capture(fast, lambda n: rows(n, device), progress=False)
    # two calls to learn that sizes vary, one per bucket
    assert sorted(call.tokens for call in seen) == [4, 4, 8, 8]


# --- functional ops of other people -------------------------------------------------------------------


LARGEST_FIRST = (8, 8, 5, 3, 3, 1, 4)  # buffers made for the largest bucket serve the others
REPLAYED = len(LARGEST_FIRST) - 2
BUFFER = 8 * WIDTH * 4  # bytes of 8 tokens


@pytest.mark.parametrize("op", ["mix", "mix_strided"])
def test_functional_op_goes_through_a_bridge_buffer(op: str, device: torch.device) -> None:
    """mix_strided returns other strides than its fake promised; the next segment relies on the promise."""
    function = getattr(ops, op)

    def model(x: Tensor) -> Tensor:
        return function(x * 2).view(-1, 2, WIDTH // 2).flatten(1) + 1

    fast = check(model, device, counts=LARGEST_FIRST, expect={"replays": REPLAYED})
    assert pg.explain(fast).buffer_bytes == (1 + 1) * BUFFER  # the input and the bridge


def test_tuple_of_results_has_a_buffer_each(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a, b = ops.mix_pair(x * 2)
        return a * 3 + b

    fast = check(model, device, counts=LARGEST_FIRST, expect={"replays": REPLAYED})
    assert pg.explain(fast).buffer_bytes == (1 + 2) * BUFFER


def test_unused_result_has_no_buffer(device: torch.device) -> None:
    fast = check(lambda x: ops.mix_pair(x * 2)[1] + 1, device, counts=LARGEST_FIRST)
    assert pg.explain(fast).buffer_bytes == (1 + 1) * BUFFER


def test_bridge_buffers_are_shared_by_layers(device: torch.device) -> None:
    """Five layers, but never more than one result alive: one bridge."""

    def model(x: Tensor) -> Tensor:
        for _ in range(5):
            x = ops.mix(x * 2) + 1
        return x

    fast = check(model, device, counts=LARGEST_FIRST, expect={"segments": 6})
    assert pg.explain(fast).buffer_bytes == (1 + 1) * BUFFER


def test_sdpa_is_cut_in_all_its_spellings(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        q = (x * 2).view(1, 1, -1, WIDTH)
        a = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        b = torch.ops.aten.scaled_dot_product_attention(q + 1, q, q)
        return (a + b).view(-1, WIDTH)

    fast = check(model, device)
    found = pg.explain(fast).traces[0].splitting_ops
    assert found == {"aten::scaled_dot_product_attention": 2}


# --- liars --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "message"),
    [("half_precision", "float16"), ("one_row_less", r"\(2, 8\)")],
)
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_op_whose_fake_lies_is_refused_by_name(
    op: str, message: str, graphs: str, device: torch.device
) -> None:
    fast = compiled(lambda x: getattr(ops, op)(x * 2) + 1, cuda_graphs=graphs)
    with pytest.raises(SplittingOpError, match=rf"(?s)toy::{op}.*{message}.*fake"):
        fast(rows(3, device))


def test_lie_about_one_element_of_a_tuple_is_found(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a, b = ops.one_of_two_lies(x * 2)
        return a + b

    with pytest.raises(SplittingOpError, match="float64"):
        compiled(model)(rows(3, device))


def test_result_of_another_dtype_after_the_capture_is_cast_not_misread(device: torch.device) -> None:
    """The bridge buffer fixes dtype and layout, whatever the op returns later."""
    fast = compiled(lambda x: ops.moody(x * 2) + 1)
    x = rows(3, device)
    fast(x), fast(x)
    MOOD[0] = torch.float64
    try:
        assert_same(fast(x), x * 4 + 1)
    finally:
        MOOD[0] = torch.float32


def test_undeclared_write_is_refused_and_names_the_argument(device: torch.device) -> None:
    state = torch.zeros(WIDTH, device=device)
    fast = compiled(lambda x: ops.sneaky(x * 2, state) + 1)
    with pytest.raises(SplittingOpError, match=r"(?s)toy::sneaky.*'state'.*Tensor\(a!\) state"):
        fast(rows(3, device))


def test_declared_write_is_not_mistaken_for_an_undeclared_one(device: torch.device) -> None:
    """`halve` writes x, which another name of the same storage reads."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        ops.append(y, y[0])  # y is not declared as written, but shares the storage that is
        return y + 1

    compiled(model)(rows(3, device))


# --- ops that take padding ----------------------------------------------------------------------------


def test_padded_op_sees_the_bucket_and_zeros_in_the_tail(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix_padded(x) + 1)
    fast(rows(8, device)), fast(rows(8, device))  # leave something in the buffer of the larger bucket
    fast(rows(3, device))
    for count, bucket in ((3, 4), (2, 4), (4, 4), (5, 8), (6, 8)):
        x = rows(count, device)
        with watching() as seen:
            assert_same(fast(x), x * 2 + 1)
        if replays(fast, count):
            assert [call.tokens for call in seen] == [bucket]
            assert torch.equal(seen[0].value[:count], x)
            assert not seen[0].value[count:].any()


@pytest.mark.parametrize("write", [lambda h: h.add_(h[-1:].clone()), lambda h: h[-1:].mul_(3.0)])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_write_in_place_that_mixes_tokens_is_seen(write: Any, compiler: str, device: torch.device) -> None:
    """What a segment writes is an input of its, not an output."""

    def model(x: Tensor) -> Tensor:
        h = x * 2
        o = ops.mix(h)
        write(h)
        return h + ops.mix(o)

    check(model, device, compiler=compiler)


# --- the leak detector --------------------------------------------------------------------------------

define("flash_attn_like(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)


def _bump(x: Tensor) -> None:
    x.add_(1)


define(
    "takes_tables(Tensor x, Tensor block_table) -> Tensor",
    lambda x, t: x * 2,
    lambda x, t: torch.empty_like(x),
)
define("bumps(Tensor(a!) x) -> ()", _bump, lambda x: None)


def leak_of(model: Any, device: torch.device) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = compiled(model)
        fast(rows(3, device))
    leaks = pg.explain(fast).traces[0].leaks
    told = [str(w.message) for w in caught if issubclass(w.category, LeakWarning)]
    assert len(told) == len(leaks)
    assert all(leak in text for leak, text in zip(leaks, told, strict=True))
    return list(leaks)


def test_unregistered_op_named_like_attention_is_reported(device: torch.device) -> None:
    assert leak_of(lambda x: ops.flash_attn_like(x) + 1, device) == ["toy::flash_attn_like"]


def test_unregistered_op_with_a_block_table_is_reported(device: torch.device) -> None:
    table = torch.zeros(4, device=device)
    assert leak_of(lambda x: ops.takes_tables(x, table) + 1, device) == ["toy::takes_tables"]


def test_unregistered_op_that_mutates_is_reported(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        ops.bumps(y)
        return y

    assert leak_of(model, device) == ["toy::bumps"]


def test_registered_and_ordinary_ops_are_not_reported(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = ops.mix(x * 2)
        y.add_(1)
        return torch.relu_(y)

    assert leak_of(model, device) == []


def test_leak_is_shown_by_explain(device: torch.device) -> None:
    fast = compiled(lambda x: ops.flash_attn_like(x) + 1)
    with pytest.warns(LeakWarning, match="register_splitting_op"):
        fast(rows(3, device))
    assert "not registered: toy::flash_attn_like" in str(pg.explain(fast))
