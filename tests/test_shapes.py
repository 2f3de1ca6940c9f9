"""Every call is right or refused by name, whatever its shapes; and how many traces that takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build, call, random_ids, rows
from torch import Tensor, nn
from transformers import DynamicCache

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

MAX_TOKENS = 16
BUCKETS = (1, 2, 4, 8, 16)  # the default capture sizes up to MAX_TOKENS
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "compiler": "eager"}
COUNTS = (13, 7, 1, 20, 2, 16, 17, 5, 1, 13)


class Attend(nn.Module):
    """Linear, attention, `after`: two segments around one splitting op, over rows `[T, 8]`."""

    def __init__(self, after: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[None, None]
        return self.after(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0, 0])


def by_pg_compile(model: Any, **options: Any) -> Any:
    return pg.compile(model, **OPTIONS | options)


def by_torch_compile(model: Any, token_dim: Any = None, **options: Any) -> Any:
    """What a stack writes that knows nothing of us but the backend's name."""
    return torch.compile(model, backend="piecewise", options=OPTIONS | options)


both_ways = pytest.mark.parametrize("compile", [by_pg_compile, by_torch_compile])


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def features(tokens: int, device: torch.device, width: int = 8) -> Tensor:
    return torch.randn(tokens, width).to(device)


def moved(name: str) -> int:
    return pg.counters.snapshot().get(name, 0)


# --- the token count: 1, 0, and in which order ---


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
    """Tracing at one token, rehearsal and capture leave a cache written exactly once."""
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


# --- plain torch.compile ---


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
    """Traces of fixed shapes (the first size, one token) of features wider than max_tokens are captured."""
    model = Wide()
    compiled = by_torch_compile(model)
    with pg.counters.expect(**{"fallbacks:above_max_tokens": 0}):
        for n in (5, 1, 7):
            x = features(n, device, width=MAX_TOKENS * 4)
            assert_same(compiled(x), model(x))


@both_ways
def test_two_models_of_one_class_answer_with_their_own_weights(compile: Any, device: torch.device) -> None:
    """Dynamo shares what it compiled between modules of one class whose options are equal."""
    models = [Attend().to(device) for _ in range(2)]
    compiled = [compile(model, token_dim={"x": 0}) for model in models]
    for n in (5, 1, 7, 5, 20):
        x = features(n, device)
        for run, model in zip(compiled, models, strict=True):
            assert_same(run(x), model(x))


def test_ten_models_of_one_class_are_all_compiled(device: torch.device) -> None:
    """More than Dynamo's recompile limit of 8, which counts per code object."""
    models = [Attend().to(device) for _ in range(10)]
    with pg.counters.expect(traces=10, fallbacks=0):
        for model in models:
            x = features(5, device)
            assert_same(by_pg_compile(model, token_dim={"x": 0})(x), model(x))


def test_a_model_that_cannot_run_at_the_proofs_size_is_right(device: torch.device) -> None:
    """Normalising over tokens needs two of them; the padding proof of bucket 2 must not need one."""
    model = Attend(lambda x: F.batch_norm(x, None, None, training=True)).to(device)
    compiled = by_pg_compile(model, token_dim={"x": 0})
    for n in (2, 3, 2, 7, 3):
        x = features(n, device)
        assert_same(compiled(x), model(x))


# --- other dimensions ---


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        ("llama", by_pg_compile),
        ("mixtral", by_pg_compile),
        ("bert", by_pg_compile),
        ("llama", by_torch_compile),
    ],
)
def test_a_batch_size_that_changes_is_right(name: str, compile: Any, device: torch.device) -> None:
    model = build(name, layers=1, device=device)
    compiled = compile(model)
    for batch, n in ((1, 5), (2, 5), (2, 7), (3, 1), (1, 7), (4, 4), (1, 1), (2, 20)):
        inputs = call(name, random_ids(n, batch, device))
        assert_same(rows(compiled(**inputs)), rows(model(**inputs)))


class TwoLengths(nn.Module):
    """Attention of T queries over S keys."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query, key = (x * 2)[None, None], memory[None, None]
        return F.scaled_dot_product_attention(query, key, key)[0, 0] + 1


@both_ways
def test_a_second_dynamic_dimension_is_right_and_counted(compile: Any, device: torch.device) -> None:
    model = TwoLengths().to(device)
    compiled = compile(model, token_dim={"x": 0})
    for tokens, length in ((5, 9), (6, 9), (7, 11), (5, 12), (12, 12), (3, 20), (1, 21)):
        x, memory = features(tokens, device), features(length, device)
        assert_same(compiled(x, memory), model(x, memory))
    assert moved("fallbacks:second_dynamic_dimension") > 0


class SumOfTwo(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y


class TwoSums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y.cumsum(0) + 1


@pytest.mark.parametrize("sizes", [[(5, 5), (6, 7), (9, 2), (4, 4)], [(6, 7), (5, 5), (7, 1), (1, 1)]])
def test_token_dimensions_that_disagree_are_right(
    sizes: Sequence[tuple[int, int]], device: torch.device
) -> None:
    compiled = by_pg_compile(TwoSums().to(device), token_dim={"x": 0, "y": 0})
    for first, second in sizes:
        x, y = features(first, device), features(second, device)
        for got, want in zip(compiled(x, y), TwoSums()(x, y), strict=True):
            assert_same(got, want)


def test_token_dimensions_that_must_agree_are_refused_by_name(device: torch.device) -> None:
    compiled = by_pg_compile(SumOfTwo().to(device), token_dim={"x": 0, "y": 0})
    x = features(5, device)
    assert_same(compiled(x, x + 1), x * 3 + 1)
    with pytest.raises(pg.errors.PiecewiseError, match="What to do"):
        compiled(features(6, device), features(7, device))
    one = features(1, device)
    assert_same(compiled(x, one), x * 2 + one)  # broadcasting is legal
    assert_same(compiled(x, x), x * 3)


def test_position_ids_of_another_length_are_right_or_refused_by_name(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    ids = random_ids(6, device=device)
    for length in (6, 7, 5, 6, 12, 1, 6):
        positions = torch.arange(3, 3 + length, device=device)[None]
        inputs = call("llama", ids) | {"position_ids": positions}
        if length == 6:
            assert_same(compiled(**inputs).logits, model(**inputs).logits)
        else:  # a lone position is legal in eager, but transformers cannot be traced with it
            with pytest.raises(pg.errors.PiecewiseError, match="What to do"):
                compiled(**inputs)


@both_ways
def test_positions_are_used_as_given(compile: Any, device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = compile(model)
    for n in COUNTS:
        positions = torch.randint(0, 500, (1, n)).to(device)
        inputs = call("llama", random_ids(n, device=device)) | {"position_ids": positions}
        assert_same(compiled(**inputs).logits, model(**inputs).logits)


# --- memory layout ---


@both_ways
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_slices_of_a_larger_batch_buffer_are_right(compiler: str, compile: Any, device: torch.device) -> None:
    """A serving stack keeps one `[B, longest]` buffer: rows are further apart than T."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(128, 8)

        def forward(self, input_ids: Tensor) -> Tensor:
            return (self.embed(input_ids) + input_ids[..., None]) * 2

    model = Sum().to(device)
    compiled = compile(model, compiler=compiler)
    longest = random_ids(40, batch=2, device=device)
    for n in (9, 5, 20, 9, 40, 16):
        for ids in (longest[:, :n].clone(), longest[:, :n], longest[:, -n:], longest[:, :n].t().clone().t()):
            assert_same(compiled(ids), model(ids))


@both_ways
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_transposed_and_expanded_features_are_right(
    compiler: str, compile: Any, device: torch.device
) -> None:
    model = Attend().to(device)
    compiled = compile(model, token_dim={"x": 0}, compiler=compiler)
    for n in (9, 5, 20, 1):
        for x in (
            features(n, device),
            torch.randn(8, n).to(device).t(),
            torch.randn(n, 16).to(device)[:, ::2],
            torch.randn(2 * n, 8).to(device)[::2],
            torch.randn(1, 8).to(device).expand(n, 8),
        ):
            assert_same(compiled(x), model(x))


def test_the_same_tensor_passed_twice_is_right_and_so_are_two(device: torch.device) -> None:
    compiled = by_pg_compile(SumOfTwo().to(device), token_dim={"x": 0, "y": 0})
    for n in (5, 7, 1):
        x, y = features(n, device), features(n, device)
        assert_same(compiled(x, x), x * 3)
        assert_same(compiled(x, y), x * 2 + y)


# --- what a call passes besides ---


def test_int32_ids_are_right(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    for dtype in (torch.int32, torch.int64, torch.int32):
        for n in (5, 1, 12):
            ids = random_ids(n, device=device)
            assert_same(compiled(**call("llama", ids.to(dtype))).logits, model(**call("llama", ids)).logits)


@pytest.mark.parametrize(
    ("name", "batch", "compile"),
    [
        ("llama", 1, by_pg_compile),
        ("llama", 3, by_pg_compile),
        ("mistral", 3, by_pg_compile),
        ("gpt2", 1, by_pg_compile),
        ("bert", 1, by_pg_compile),
        ("bert", 3, by_pg_compile),
        ("llama", 3, by_torch_compile),
    ],
)
def test_left_padded_masks_are_right(name: str, batch: int, compile: Any, device: torch.device) -> None:
    model = build(name, layers=1, device=device)
    compiled = compile(model)
    for n in (9, 5, 20, 1):
        for padding in (0, n // 2):
            mask = torch.ones(batch, n, dtype=torch.long, device=device)
            mask[0, :padding] = 0
            inputs = call(name, random_ids(n, batch, device)) | {"attention_mask": mask}
            live = mask.bool()  # what a masked row holds is nobody's business
            assert_same(rows(compiled(**inputs))[live], rows(model(**inputs))[live])


def greedy(forward: Any, prompt: Tensor, steps: int) -> list[int]:
    """Prefill, then one token at a time, over a cache that grows."""
    cache, ids, found = DynamicCache(), prompt, []
    for _ in range(steps):
        output = forward(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        found += ids[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("name", "batch", "compile"),
    [
        ("llama", 1, by_pg_compile),
        ("llama", 2, by_pg_compile),
        ("gpt2", 1, by_pg_compile),
        ("llama", 1, by_torch_compile),
    ],
)
def test_prefill_then_decode_gives_eagers_tokens(
    name: str, batch: int, compile: Any, device: torch.device
) -> None:
    model = build(name, layers=2, device=device)
    compiled = compile(model)
    for prompt in (7, 1):
        ids = random_ids(prompt, batch, device)
        assert greedy(compiled, ids, steps=4) == greedy(model, ids, steps=4)


def test_arguments_by_position_and_by_name_share_a_trace(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    ids = random_ids(6, device=device)
    with pg.counters.expect(traces=1):
        assert_same(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert_same(compiled(input_ids=ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_mutated_activation_is_written_back(device: torch.device) -> None:
    def add_in_place(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    compiled = by_pg_compile(add_in_place, token_dim={"x": 0})
    for n in (1, 5, 5, 1, 7, 20):
        x = features(n, device)
        before = x.clone()
        assert_same(compiled(x), (before + 1) * 2)
        assert_same(x, before + 1)
    assert moved("fallbacks:writes_an_input") == 6


# --- modes ---


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) * (2 if self.training else 1)


@both_ways
def test_train_and_eval_after_compiling_are_obeyed(compile: Any, device: torch.device) -> None:
    model = Doubles().to(device).eval()
    compiled = compile(model, token_dim={"x": 0})
    for training in (False, True, False, True):
        model.train(training)
        for n in (5, 1, 5, 9):
            x = features(n, device)
            assert_same(compiled(x), model(x))


def test_dropout_is_on_in_training_and_never_captured(device: torch.device) -> None:
    model = build("gpt2", layers=2, device=device)
    compiled = by_pg_compile(model)
    inputs = call("gpt2", random_ids(6, device=device))
    steady = compiled(**inputs).logits
    model.train()
    with pg.counters.expect(replays=0, tapes=0, **{"fallbacks:random_numbers": 2}):
        noisy = [compiled(**inputs).logits for _ in range(2)]
    assert not torch.equal(*noisy)
    model.eval()
    assert_same(compiled(**inputs).logits, steady)


def test_inference_mode_and_no_grad_may_alternate(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    for inference, n in ((True, 5), (False, 5), (True, 6), (False, 7), (True, 1)):
        inputs = call("llama", random_ids(n, device=device))
        with torch.inference_mode(inference):
            assert_same(compiled(**inputs).logits, model(**inputs).logits)


def test_grad_mode_runs_compiled_with_the_reason_and_right_gradients(device: torch.device) -> None:
    model = Attend().to(device)
    compiled = by_pg_compile(model, token_dim={"x": 0})
    compiled(features(5, device))
    x = features(6, device)
    with torch.enable_grad(), pg.counters.expect(replays=0, **{"fallbacks:grad_enabled": 1}):
        compiled(x).sum().backward()
        got, model.linear.weight.grad = model.linear.weight.grad, None
        model(x).sum().backward()
    assert_same(got, model.linear.weight.grad)
    with pg.counters.expect(fallbacks=0):
        assert_same(compiled(x), model(x))


# --- models that look at their token count ---


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
def test_every_look_at_the_count_is_right_or_refused_by_name(
    formula: Any, counts: Sequence[int], device: torch.device
) -> None:
    model = Attend(formula).to(device)
    compiler = "inductor" if formula in (SPECIAL["squeeze"], SPECIAL["squeeze_any"]) else "eager"
    compiled = by_pg_compile(model, token_dim={"x": 0}, compiler=compiler)
    answered = 0
    for n in counts:
        x = features(n, device)
        try:
            got = compiled(x)
        except pg.errors.PiecewiseError:
            continue
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{n} tokens")
        answered += 1
    assert answered >= len(counts) - 1  # one count may be a constant of the model


@pytest.mark.parametrize("name", ["truth", "bool_arithmetic", "parity", "chunk", "first_eight"])
def test_torch_compile_is_right_whatever_looks_at_the_count(name: str, device: torch.device) -> None:
    model = Attend(SPECIAL[name]).to(device)
    compiled = by_torch_compile(model)
    for n in (11, 3, 1, 2, 8, 20, 1):
        x = features(n, device)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_model_that_fixes_its_count_is_refused_by_name(device: torch.device) -> None:
    def unrolled(x: Tensor) -> Tensor:
        total = x * 0
        for row in range(x.shape[0]):
            total = total + x[row]
        return total

    compiled = by_pg_compile(unrolled, token_dim={"x": 0})
    with pytest.raises(pg.errors.TokenDimError, match="fixes its token count"):
        compiled(features(5, device))


def test_many_branches_are_right_with_every_untraced_call_counted(device: torch.device) -> None:
    def by_power(x: Tensor) -> Tensor:
        for power in range(1, 12):
            if x.shape[0] < 2**power:
                return x * power
        return x

    compiled = by_pg_compile(by_power, token_dim={"x": 0})
    refused = 0
    for power in range(1, 12):
        ones = torch.ones(2**power - 1, 2, device=device)
        try:
            assert_same(compiled(ones), ones * power)
        except pg.errors.TokenDimError:
            refused += 1
    served = moved("tapes") + moved("replays") + moved("fallbacks")
    assert served + refused == 11
    assert moved("traces") + moved("fallbacks:not_traced_by_dynamo") + refused >= 11


# --- where the token dimension is ---


class Named(nn.Module):
    """The token dimension is the last of `hidden` and the first of `scale`."""

    def forward(self, hidden: Tensor, scale: Tensor, *, shift: float = 0.0) -> Tensor:
        return (hidden * scale + shift).relu()


@pytest.mark.parametrize(
    "token_dim", [{"hidden": 1}, {"hidden": -1}, {"scale": 0}, {"hidden": 1, "scale": 0}]
)
def test_token_dim_is_found_in_positional_and_keyword_arguments(token_dim: Any, device: torch.device) -> None:
    model = Named().to(device)
    compiled = by_pg_compile(model, token_dim=token_dim)
    with pg.counters.expect(traces=1, **{"fallbacks:above_max_tokens": 1}):
        for n in (5, 1, 7, 20, 16):
            hidden, scale = torch.randn(3, n).to(device), torch.randn(n).to(device)
            assert_same(compiled(hidden, scale), model(hidden, scale))
    for n in (6, 17):
        hidden, scale = torch.randn(3, n).to(device), torch.randn(n).to(device)
        assert_same(compiled(scale=scale, hidden=hidden, shift=0.5), model(hidden, scale, shift=0.5))


@pytest.mark.parametrize(
    ("token_dim", "message"),
    [
        ({"hiden": 1}, "'hiden'.*hidden, scale"),
        ({"hidden": 2}, "dimension 2 of 'hidden'.*from 0 to 1"),
        ({"hidden": -3}, "dimension -3 of 'hidden'"),
        ({"shift": 0}, "no tensor of that name"),
        (None, "cannot tell.*hidden has shape.*scale has shape"),
    ],
)
def test_a_wrong_or_missing_token_dim_says_what_there_is(
    token_dim: Any, message: str, device: torch.device
) -> None:
    compiled = by_pg_compile(Named().to(device), token_dim=token_dim)
    with pytest.raises(pg.errors.TokenDimError, match=f"(?s){message}"):
        compiled(torch.randn(3, 5).to(device), torch.randn(5).to(device))


def test_a_lone_one_dimensional_tensor_needs_no_token_dim(device: torch.device) -> None:
    compiled = by_pg_compile(lambda ids: ids * 2 + 1)
    with pg.counters.expect(traces=1):
        for n in (4, 1, 9):
            ids = torch.arange(n, device=device)
            assert torch.equal(compiled(ids), ids * 2 + 1)


def test_inputs_embeds_lead_where_there_are_no_ids(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    with pg.counters.expect(traces=1):
        for n in (5, 1, 12, 9):
            inputs = {"inputs_embeds": torch.randn(1, n, 64).to(device), "use_cache": False}
            assert_same(compiled(**inputs).logits, model(**inputs).logits)


# --- inputs that cannot work ---


@pytest.mark.parametrize("before", [False, True], ids=["first call", "after others"])
def test_ids_of_a_wrong_dtype_are_refused_by_name(before: bool, device: torch.device) -> None:
    compiled = by_pg_compile(build("llama", layers=2, device=device))
    if before:
        compiled(**call("llama", random_ids(5, device=device)))
    with pytest.raises(pg.errors.TraceError, match=r"(?s)input_ids: float32\[1, 5\].*What to do"):
        compiled(**call("llama", random_ids(5, device=device).float()))
    compiled(**call("llama", random_ids(6, device=device)))  # and the next call works


@pytest.mark.parametrize("before", [False, True], ids=["first call", "after others"])
def test_ids_on_another_device_are_refused_by_name(before: bool, device: torch.device) -> None:
    compiled = by_pg_compile(build("llama", layers=2, device=device))
    if before:
        compiled(**call("llama", random_ids(5, device=device)))
    elsewhere = torch.device("cpu" if device.type == "cuda" else "meta")
    message = f"(?s)'input_ids' is on {elsewhere}.*weights are on {device}.*What to do"
    with pytest.raises(pg.errors.TraceError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(**call("llama", random_ids(5, device=elsewhere)))
    compiled(**call("llama", random_ids(6, device=device)))


def test_features_of_a_wrong_width_are_refused_by_name(device: torch.device) -> None:
    compiled = by_pg_compile(Attend().to(device), token_dim={"x": 0})
    compiled(features(5, device))
    with pytest.raises(pg.errors.PiecewiseError, match=r"(?s)x: float32\[5, 9\].*What to do"):
        compiled(features(5, device, width=9))
