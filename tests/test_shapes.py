"""Memory layouts, other arguments and modes: every call is right or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build, call, random_ids, rows
from shape_cases import (
    Attend,
    SumOfTwo,
    assert_same,
    both_ways,
    by_pg_compile,
    by_torch_compile,
    features,
    moved,
)
from torch import Tensor, nn
from transformers import DynamicCache

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


# --- memory layout ------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_slices_of_a_larger_batch_buffer_are_right(compiler: str, compile: Any, device: torch.device) -> None:
    """A serving stack keeps one `[B, longest]` buffer, so rows are further apart than T."""

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


# --- what a call passes besides -----------------------------------------------------------------------


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
            live = mask.bool()  # masked rows may hold anything
            assert_same(rows(compiled(**inputs))[live], rows(model(**inputs))[live])


def greedy(forward: Any, prompt: Tensor, steps: int) -> list[int]:
    """Prefill, then decode one token at a time with a cache that grows."""
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
        pytest.param("llama", 1, by_torch_compile, marks=pytest.mark.slow),
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


# --- modes --------------------------------------------------------------------------------------------


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
