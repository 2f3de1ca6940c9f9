"""Every token count is right or refused by name, with a bounded number of traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build, call, random_ids, rows
from shape_cases import (
    COUNTS,
    MAX_TOKENS,
    Attend,
    assert_same,
    both_ways,
    by_pg_compile,
    by_torch_compile,
    features,
    moved,
)
from torch import Tensor, nn

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


# --- the token count: 1, 0, and in which order --------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral", "bert"])
def test_first_call_at_one_token_still_makes_one_trace(name: str, device: torch.device) -> None:
    model = build(name, layers=2, device=device)
    compiled = by_pg_compile(model)
    with pg.counters.expect(traces=1, **{"fallbacks:above_max_tokens": 2}):
        for n in (1, *COUNTS):  # 20 and 17 are above max_tokens
            inputs = call(name, random_ids(n, device=device))
            assert_same(rows(compiled(**inputs)), rows(model(**inputs)))


LIBRARY = torch.library.Library("pg_test_shapes", "DEF")
LIBRARY.define("logged_copy(Tensor x, Tensor(a!) log) -> Tensor")
LIBRARY.impl("logged_copy", lambda x, log: (log.add_(1), x.clone())[1], "CompositeExplicitAutograd")
LIBRARY.impl("logged_copy", lambda x, log: torch.empty_like(x), "Meta")


def test_no_splitting_op_runs_twice_in_any_call(device: torch.device) -> None:
    """Tracing at one token, rehearsal and capture together write a cache once."""
    pg.register_splitting_op("pg_test_shapes::logged_copy")

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("log", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.pg_test_shapes.logged_copy(x * 2, self.log) + 1

    model = Logs().to(device)
    compiled = by_pg_compile(model, token_dim={"x": 0})
    for calls, n in enumerate((1, 1, 7, 5, 7, 20, 16, 2), start=1):
        x = features(n, device)
        assert_same(compiled(x), x * 2 + 1)
        assert model.log.item() == calls


def test_no_tokens_is_refused_by_name(device: torch.device) -> None:
    compiled = by_pg_compile(build("llama", layers=2, device=device))
    for _ in range(2):  # before and after the model was traced
        with pytest.raises(pg.errors.InputError, match="'input_ids' holds no tokens"):
            compiled(**call("llama", random_ids(0, device=device)))
        compiled(**call("llama", random_ids(5, device=device)))


@both_ways
def test_no_tokens_gives_eagers_answer_where_there_is_one(compile: Any, device: torch.device) -> None:
    model = Attend().to(device)
    compiled = compile(model, token_dim={"x": 0})
    for n in (0, 5, 0, 1, 0):
        x = features(n, device)
        assert_same(compiled(x), model(x))


# --- plain torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_torch_compile_takes_at_most_three_traces_in_one_pool(name: str, device: torch.device) -> None:
    model = build(name, layers=2, device=device)
    compiled = by_torch_compile(model)
    for n in COUNTS:
        inputs = call(name, random_ids(n, device=device))
        assert_same(rows(compiled(**inputs)), rows(model(**inputs)))
    assert moved("traces") <= 3  # fixed shapes, dynamic, one token
    report = pg.explain(compiled)
    assert len(report.traces) == moved("traces")
    assert sum(len(trace.buckets) for trace in report.traces) == moved("tapes")
    assert moved("replays") + moved("tapes") + moved("fallbacks") == len(COUNTS)


def test_torch_compile_is_right_for_size_dependent_segments(device: torch.device) -> None:
    model = Attend(lambda x: x / x.shape[0]).to(device)
    compiled = by_torch_compile(model)
    for n in COUNTS:
        x = features(n, device)
        assert_same(compiled(x), model(x))
    assert moved("traces") <= 3


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_width_above_max_tokens_is_not_taken_for_the_token_count(device: torch.device) -> None:
    """Traces of fixed shapes (the first size, one token) are captured for features wider than max_tokens."""
    model = Wide()
    compiled = by_torch_compile(model)
    with pg.counters.expect(**{"fallbacks:above_max_tokens": 0}):
        for n in (5, 1, 7):
            x = features(n, device, width=MAX_TOKENS * 4)
            assert_same(compiled(x), model(x))


@both_ways
def test_two_models_of_one_class_answer_with_their_own_weights(compile: Any, device: torch.device) -> None:
    """Dynamo shares compiled code between modules of one class with equal options."""
    models = [Attend().to(device) for _ in range(2)]
    compiled = [compile(model, token_dim={"x": 0}) for model in models]
    for n in (5, 1, 7, 5, 20):
        x = features(n, device)
        for run, model in zip(compiled, models, strict=True):
            assert_same(run(x), model(x))


def test_ten_models_of_one_class_are_all_compiled(device: torch.device) -> None:
    """Ten models exceed Dynamo's recompile limit of 8, which counts per code object."""
    models = [Attend().to(device) for _ in range(10)]
    with pg.counters.expect(traces=10, fallbacks=0):
        for model in models:
            x = features(5, device)
            assert_same(by_pg_compile(model, token_dim={"x": 0})(x), model(x))


def test_a_model_that_cannot_run_at_the_proofs_size_is_right(device: torch.device) -> None:
    """Normalising over tokens needs two tokens, so the padding proof of bucket 2 cannot run with one."""
    model = Attend(lambda x: F.batch_norm(x, None, None, training=True)).to(device)
    compiled = by_pg_compile(model, token_dim={"x": 0})
    for n in (2, 3, 2, 7, 3):
        x = features(n, device)
        assert_same(compiled(x), model(x))


# --- models that look at their token count ------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self, above: int) -> None:
        super().__init__()
        self.above = above
        self.attend = Attend()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.above:
            return self.attend(x)
        return self.attend(x * 3) - 1


@pytest.mark.parametrize(
    ("counts", "traces"),
    [
        # one per side, and one for the single token, which no trace is trusted with where there are several
        ((9, 3, 5, 6, 12, 4, 1, 16, 20, 2), 3),
        ((3, 9, 1, 5, 6), 3),
        ((3, 9, 2, 5, 6), 2),
        ((1, 20, 5, 6, 3, 9, 2, 4), 3),  # traced on a longer row first, then at 1 itself, then for 2 to 5
    ],
)
def test_a_branch_on_the_count_makes_a_trace_per_side(
    counts: Sequence[int], traces: int, device: torch.device
) -> None:
    model = Branch(above=5).to(device)
    compiled = by_pg_compile(model, token_dim={"x": 0})
    outside = sum(n == 5 for n in counts)  # its bucket, 8, takes the other side
    above = sum(n > MAX_TOKENS for n in counts)
    with pg.counters.expect(traces=traces, fallbacks=outside + above):
        for n in counts:
            x = features(n, device)
            assert_same(compiled(x), model(x))
    assert moved("fallbacks:bucket_outside_trace") == outside


@pytest.mark.parametrize("first", [1, 7])
@both_ways
def test_a_branch_at_one_token_is_right(compile: Any, first: int, device: torch.device) -> None:
    model = Branch(above=1).to(device)
    compiled = compile(model, token_dim={"x": 0})
    for n in (first, 1, 2, 5, 1, 7, 20, 1):
        x = features(n, device)
        assert_same(compiled(x), model(x))
    assert moved("traces") <= (2 if compile is by_pg_compile else 3)


SPECIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "one_unlike_others": lambda x: x if x.shape[0] == 1 else x * 2,
    "not_one": lambda x: x * 2 if x.shape[0] != 1 else x,
    "at_least_two": lambda x: x * 2 if x.shape[0] >= 2 else x,
    "ternary_max": lambda x: x * max(x.shape[0], 2),
    "min": lambda x: x * min(x.shape[0], 6),
    "truth": lambda x: x * 2 if x.shape[0] - 1 else x,
    "squeeze": lambda x: x.squeeze(0) * 2,
    "squeeze_any": lambda x: x.squeeze() * 2,
    "not": lambda x: x if not x.shape[0] - 1 else x * 2,
    "member": lambda x: x * 2 if x.shape[0] in (1, 3) else x,
    "whole_shape": lambda x: x * 2 if x.shape == (1, 8) else x,
    "float_of_condition": lambda x: x * float(x.shape[0] > 1),
    "root": lambda x: x * x.shape[0] ** 0.5,
    "len": lambda x: x * 2 if len(x) > 1 else x,
    "numel": lambda x: x * 2 if x.numel() > 8 else x,
    "and": lambda x: x * 2 if x.shape[0] > 1 and x.shape[0] < 7 else x,
    "parity": lambda x: x * 2 if x.shape[0] % 2 else x,
    "bool_arithmetic": lambda x: x * (1 + (x.shape[0] > 1)),
    "integer_of_condition": lambda x: x * int(x.shape[0] > 1),
    "integer_of_condition_above": lambda x: x * int(x.shape[0] > 6),
    "while": lambda x: x * sum(1 for k in (1, 2, 4, 8) if k < x.shape[0]),
    "broadcast_one": lambda x: x + torch.ones(1 if x.shape[0] == 1 else x.shape[0], 1, device=x.device),
    "view": lambda x: x.view(-1, 2, 8) if x.shape[0] % 2 == 0 else x,
    "chunk": lambda x: x.chunk(2)[0] * 2,
    "first_eight": lambda x: x[:8] * 2,
    "last_four": lambda x: x[-4:] * 2,
    "std": lambda x: x.std(0),
    "from_the_second": lambda x: x[1:] * 2,
    "pad_to_eight": lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 8)) * 2,
}


@pytest.mark.parametrize("counts", [(11, 3, 1, 2, 8, 20, 7, 1), (1, 2, 5, 1, 9)])
@pytest.mark.parametrize("formula", SPECIAL.values(), ids=SPECIAL)
def test_every_look_at_the_count_is_right(formula: Any, counts: Sequence[int], device: torch.device) -> None:
    model = Attend(formula).to(device)
    compiler = "inductor" if formula in (SPECIAL["squeeze"], SPECIAL["squeeze_any"]) else "eager"
    compiled = by_pg_compile(model, token_dim={"x": 0}, compiler=compiler)
    for n in counts:
        x = features(n, device)
        got, wanted = compiled(x), model(x)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{n} tokens")


@pytest.mark.parametrize("counts", [(9, 6, 4, 3, 1, 2), (6, 9, 1, 3, 8)])
@pytest.mark.parametrize("reads", ["x", "y"])
def test_branch_on_a_count_that_equals_another_one_only_later(
    reads: str, counts: Sequence[int], device: torch.device
) -> None:
    """The symbol in the branch's condition is replaced by that of the other input afterwards."""
    attend = Attend().to(device)

    def model(x: Tensor, y: Tensor) -> Tensor:
        odd = (x if reads == "x" else y).shape[0] % 2
        x, y = (x * 2, y * 2) if odd else (x + 1, y + 1)
        return attend(x + y)

    compiled = by_pg_compile(model, token_dim={"x": 0, "y": 0}, compiler="eager")
    for n in counts:
        x, y = features(n, device), features(n, device)
        torch.testing.assert_close(compiled(x, y), model(x, y), rtol=1e-5, atol=1e-5, msg=f"{n} tokens")


@pytest.mark.parametrize("name", ["truth", "bool_arithmetic", "parity", "chunk", "first_eight"])
def test_torch_compile_is_right_whatever_looks_at_the_count(name: str, device: torch.device) -> None:
    model = Attend(SPECIAL[name]).to(device)
    compiled = by_torch_compile(model)
    for n in (11, 3, 1, 2, 8, 20, 1):
        x = features(n, device)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def unrolled(x: Tensor) -> Tensor:
    total = x * 0
    for row in range(x.shape[0]):
        total = total + x[row]
    return total


def spread(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, x.shape[0], device=x.device)[:, None]


def scaled(x: Tensor) -> Tensor:
    return x * math.log(x.shape[0] + 1)


@pytest.mark.parametrize("model", [unrolled, spread, scaled])
def test_a_model_that_fixes_its_count_has_a_trace_per_size(
    model: Callable, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    compiled, counts = by_pg_compile(model, token_dim={"x": 0}, max_tokens=16), (5, 9, 5, 1, 12, 9, 20, 1)
    sizes = len(set(counts))
    expected = {"traces": sizes, "tapes": sizes - 1, "fallbacks:above_max_tokens": 1}
    with pg.counters.expect(**expected, fallbacks=1, replays=len(counts) - sizes):
        for n in counts:
            x = features(n, device)
            assert_same(compiled(x), model(x))
    (warning,) = [record.message for record in caplog.records if "piecewise_graph" in record.name]
    assert "fixes its token count" in warning and "so far 5 and 9." in warning


def test_a_callers_own_mark_is_named_where_the_model_fixes_the_size(device: torch.device) -> None:
    x = features(5, device)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(pg.errors.TokenDimError, match=r"marked as dynamic: (?s:.*)leave out"):
        by_pg_compile(unrolled, token_dim={"x": 0})(x)


def test_many_branches_are_right_with_every_untraced_call_counted(device: torch.device) -> None:
    def by_power(x: Tensor) -> Tensor:
        for power in range(1, 12):
            if x.shape[0] < 2**power:
                return x * power
        return x

    compiled = by_pg_compile(by_power, token_dim={"x": 0})
    for power in range(1, 12):
        ones = torch.ones(2**power - 1, 2, device=device)
        assert_same(compiled(ones), ones * power)
    assert moved("tapes") + moved("replays") + moved("fallbacks") == 11
    assert moved("traces") + moved("fallbacks:not_traced_by_dynamo") >= 11
