"""From logits to distributions and draws, and what a request may ask for.

Bounds are those of eagle_bigrams.py: each is exceeded by luck with probability 1e-6 at most.
"""

from __future__ import annotations

import math
from typing import Any

import eagle_bigrams as bigrams
import numpy as np
import pytest
import torch
from eagle_sampling_cases import (
    LARGEST,
    SETTINGS,
    TABLE,
    numbers,
)
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from piecewise_graph.custom_ops.token_choice import argmax
from piecewise_graph.eagle import (
    Sampling,
    SpeculatorError,
)
from piecewise_graph.eagle.rounds.sampling import (
    FIRST,
    distribution,
    draw,
)

# --- distributions


@st.composite
def rows_of_logits(draw: st.DrawFn) -> tuple[list[list[float]], Sampling]:
    width = draw(st.integers(1, 12))
    # Eighths: ties are common, and float32 holds them exactly.
    logit = st.integers(-40, 40).map(lambda n: n / 8)
    rows = draw(st.lists(st.lists(logit, min_size=width, max_size=width), min_size=1, max_size=3))
    temperature = draw(st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.5, 4.0]))
    top_p = draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-7]))
    return rows, Sampling(temperature, draw(st.integers(0, width + 3)), top_p)


def distribution_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """Every row by the same settings."""
    shape, device = logits.shape[:-1], logits.device
    return distribution(
        logits,
        torch.full(shape, sampling.temperature, device=device),
        torch.full(shape, sampling.top_k, dtype=torch.int32, device=device),
        torch.full(shape, sampling.top_p, device=device),
    )


def is_borderline(row: list[float], sampling: Sampling) -> bool:
    """Whether rounding decides what top_p keeps."""
    without = Sampling(sampling.temperature, sampling.top_k)
    sums = bigrams.probabilities(torch.tensor([row]), without)[0].sort(descending=True).values.cumsum(0)
    return sampling.top_p < 1 and bool(((sums - sampling.top_p).abs() < 1e-5).any())


class TestDistribution:
    @settings(max_examples=150)
    @given(rows_of_logits())
    def test_equals_the_definition(
        self, device: torch.device, case: tuple[list[list[float]], Sampling]
    ) -> None:
        rows, sampling = case
        assume(not any(is_borderline(row, sampling) for row in rows))
        found = distribution_of(torch.tensor(rows, device=device), sampling).cpu()
        wanted = bigrams.probabilities(torch.tensor(rows), sampling)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
        assert ((found > 0) == (wanted > 0)).all()

    def test_settings_are_of_each_row(self, device: torch.device) -> None:
        """`[B, N, V]` with settings `[B, 1]`, as verify calls it."""
        logits = torch.randn(len(SETTINGS), 3, 8, device=device)
        columns = {
            "temperature": torch.tensor([s.temperature for s in SETTINGS], device=device)[:, None],
            "top_k": torch.tensor([s.top_k for s in SETTINGS], dtype=torch.int32, device=device)[:, None],
            "top_p": torch.tensor([s.top_p for s in SETTINGS], device=device)[:, None],
        }
        found = distribution(logits, **columns)
        for row, sampling in enumerate(SETTINGS):
            torch.testing.assert_close(found[row], distribution_of(logits[row], sampling))

    def test_filters_that_keep_everything_change_nothing(self, device: torch.device) -> None:
        """A request that asks for none gets the same beside one that does."""
        logits = torch.randn(4, 33, device=device)
        plain = distribution(logits, torch.full((4,), 0.8, device=device))
        for top_k in (0, 33, 34, 2**31 - 1):
            assert distribution_of(logits, Sampling(0.8, top_k)).equal(plain)

    def test_of_equal_logits_top_k_keeps_the_first(self, device: torch.device) -> None:
        found = distribution_of(torch.tensor([[1.0, 3, 3, 3, 2]], device=device), Sampling(1.0, top_k=2))
        assert found.tolist() == [[0, 0.5, 0.5, 0, 0]]

    def test_of_equal_logits_top_p_keeps_as_few_as_will_do(self, device: torch.device) -> None:
        even = torch.zeros(1, 4, device=device)
        assert distribution_of(even, Sampling(1.0, top_p=0.5)).tolist() == [[0.5, 0.5, 0, 0]]
        kept = distribution_of(even, Sampling(1.0, top_p=0.51))
        torch.testing.assert_close(kept.cpu(), torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]))

    def test_top_p_counts_what_top_k_left(self, device: torch.device) -> None:
        """Of 0.4, 0.3, 0.2, 0.1 two are left, 4/7 and 3/7: the first alone has 0.5."""
        logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device).log()
        assert distribution_of(logits, Sampling(1.0, 2, 0.5)).tolist() == [[1, 0, 0, 0]]
        assert (distribution_of(logits, Sampling(1.0, 0, 0.5))[0] > 0).tolist() == [True, True, False, False]

    @pytest.mark.parametrize("top_p", [1e-7, 1e-30, 1e-50])
    def test_a_tiny_top_p_keeps_the_best(self, device: torch.device, top_p: float) -> None:
        found = distribution_of(torch.tensor([[1.0, 2, 3, 0]], device=device), Sampling(1.0, top_p=top_p))
        assert found.tolist() == [[0, 0, 1, 0]]

    def test_temperature_zero_is_all_on_the_first_of_the_largest(self, device: torch.device) -> None:
        logits = torch.tensor([[1.0, 5, 5, 0], [-3, -2, -1, -1]], device=device)
        for found in (distribution_of(logits, Sampling()), distribution(logits, logits.new_zeros(2))):
            assert found.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-38, 1e-44])
    def test_a_tiny_temperature_is_all_on_the_largest(self, device: torch.device, temperature: float) -> None:
        """Dividing by it overflows."""
        logits = torch.tensor([[1.0, -50, 30, 29]], device=device)
        assert distribution_of(logits, Sampling(temperature)).tolist() == [[0, 0, 1, 0]]

    def test_a_huge_temperature_is_even(self, device: torch.device) -> None:
        found = distribution_of(torch.tensor([[1.0, -50, 30, 29]], device=device), Sampling(1e38))
        torch.testing.assert_close(found.cpu(), torch.full((1, 4), 0.25))

    def test_tokens_that_are_ruled_out_stay_out(self, device: torch.device) -> None:
        """Logits of minus infinity, as masks write them, under every setting."""
        logits = torch.tensor([[0.5, -math.inf, 1, -math.inf]], device=device)
        for sampling in SETTINGS:
            found = distribution_of(logits, sampling)
            assert found[0, 1::2].tolist() == [0, 0]
            assert found.sum().item() == pytest.approx(1)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_logits_are_computed_in_float32(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        logits = torch.randn(2, 9, device=device).to(dtype)
        found = distribution_of(logits, Sampling(0.7, 5, 0.9))
        assert found.dtype == torch.float32
        assert found.equal(distribution_of(logits.float(), Sampling(0.7, 5, 0.9)))


# --- draws


def drawn(probs: Tensor, uniform: Tensor) -> list[int]:
    tokens: list[int] = draw(probs, uniform.to(probs)).tolist()
    return tokens


@st.composite
def weights_and_uniform(draw: st.DrawFn) -> tuple[list[float], float]:
    """Sixteenths, some of them zero; any number that `uniforms` may return."""
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9).filter(any))
    uniform = st.one_of(st.integers(0, 2**24 - 1), st.sampled_from([0, 1, 2**23, 2**24 - 2, 2**24 - 1]))
    return [count / 16 for count in counts], draw(uniform) / 2**24


class TestDraw:
    @settings(max_examples=200)
    @given(weights_and_uniform())
    def test_is_the_first_whose_sum_exceeds_the_number(
        self, device: torch.device, case: tuple[list[float], float]
    ) -> None:
        """Sums that are not 1 are scaled. A number may be on an edge but for rounding."""
        weights, uniform = case
        [token] = drawn(torch.tensor([weights], device=device), torch.tensor([uniform]))
        goal, before = uniform * sum(weights), sum(weights[:token])
        assert weights[token] > 0
        assert before - 1e-6 <= goal <= before + weights[token] + 1e-6

    def test_a_number_on_the_edge_is_the_next_token(self, device: torch.device) -> None:
        probs = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0]], device=device).expand(5, -1)
        assert drawn(probs, torch.tensor([0, 0.25, 0.5, 0.75, LARGEST])) == [1, 3, 4, 4, 4]

    @pytest.mark.parametrize("total", [1 - 2**-20, 0.9, 1 + 2**-20])
    def test_sums_that_rounding_left_short_or_long(self, device: torch.device, total: float) -> None:
        probs = torch.tensor([[0.5, 0.5, 0.0]], device=device) * total
        assert drawn(probs.expand(3, -1), torch.tensor([0, 0.49, LARGEST])) == [0, 0, 1]

    def test_never_a_token_without_probability(self, device: torch.device) -> None:
        """A wide vocabulary of which most is filtered out, at numbers from 0 to the largest."""
        generator = torch.Generator().manual_seed(0)
        probs = torch.rand(32, 1 << 17, generator=generator) ** 8
        probs = torch.where(torch.rand(probs.shape, generator=generator) < 0.95, 0.0, probs).to(device)
        probs = probs / probs.sum(1, keepdim=True)
        numbers = torch.linspace(0, LARGEST, 32, device=device)
        for uniform in (numbers, torch.zeros_like(numbers), torch.full_like(numbers, LARGEST)):
            assert (probs.gather(1, draw(probs, uniform)[:, None]) > 0).all()

    def test_shares_are_the_probabilities(self, device: torch.device) -> None:
        probs = bigrams.probabilities(TABLE, Sampling(1.0, top_k=6))[0]
        uniform = numbers(device, range(1 << 14), 3, FIRST).to(device)
        tokens = draw(probs.float().to(device).expand(len(uniform), -1), uniform.float())
        distance = bigrams.joint_distance(tokens.cpu()[:, None], probs)
        assert distance < bigrams.joint_bound(probs, len(uniform))


# --- what a request may ask for


class TestSamplingSettings:
    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"temperature": -0.5}, "temperature=-0.5"),
            ({"temperature": math.nan}, "temperature=nan"),
            ({"temperature": math.inf}, "temperature=inf"),
            ({"top_k": -1}, "top_k=-1"),
            ({"top_k": 2.5}, "top_k=2.5"),
            ({"top_k": 2**31}, "top_k=2147483648"),
            ({"top_p": 0.0}, "top_p=0.0"),
            ({"top_p": 1.5}, "top_p=1.5"),
            ({"top_p": math.nan}, "top_p=nan"),
            ({"seed": -1}, "seed=-1"),
            ({"seed": 2**62}, f"seed={2**62}"),
            ({"seed": 1.5}, "seed=1.5"),
            ({"temperature": "1"}, "temperature='1'"),
            ({"temperature": None}, "temperature=None"),
            ({"temperature": True}, "temperature=True"),
            ({"temperature": torch.tensor(0.5)}, r"temperature=tensor\(0.5"),
            ({"top_p": "1"}, "top_p='1'"),
            ({"top_p": True}, "top_p=True"),
            ({"top_k": True}, "top_k=True"),
            ({"seed": False}, "seed=False"),
        ],
    )
    def test_what_means_nothing_is_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(SpeculatorError, match=f"nothing can be sampled like this: {message}"):
            Sampling(**settings)

    def test_edges_are_taken(self) -> None:
        Sampling(0.0, 0, 1.0, 0)
        Sampling(1e30, 2**31 - 1, 1e-30, 2**62 - 1)
        Sampling(np.float32(0.5), np.int64(3), np.float64(0.5), np.uint8(7))


@pytest.mark.parametrize("how", [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 3, 0.9)], ids=str)
def test_row_of_nan_and_infinity_is_certain_in_every_batch(
    how: tuple[float, int, float], device: torch.device
) -> None:
    """Its token is that of a greedy request, whatever stands beside it and however it is sampled."""
    nan, inf = torch.nan, torch.inf
    broken = torch.tensor(
        [[0, inf, nan, 1], [0, nan, inf, 1], [-inf] * 4, [nan] * 4, [3, -inf, inf, inf], [1, nan, 2, 3]]
    )
    logits = torch.cat([broken, torch.tensor([[1.0, 2.0, -inf, 0.0]])]).to(device)
    temperature, top_k, top_p = (torch.full((len(logits),), x, device=device) for x in how)
    uniform = torch.linspace(0, 0.999, len(logits), device=device)

    def tokens(order: Tensor) -> list[int]:
        more = (top_k, top_p) if how[1] else ()
        rows = [x[order] for x in (temperature, *more)]
        return draw(distribution(logits[order], *rows), uniform[order]).tolist()

    every = torch.arange(len(logits), device=device)
    found = tokens(every)
    assert found[: len(broken)] == argmax(logits)[: len(broken)].tolist() == [1, 1, 0, 0, 2, 1]
    assert tokens(every.flip(0)) == found[::-1]
    assert [tokens(every[index : index + 1])[0] for index in every.tolist()] == found
