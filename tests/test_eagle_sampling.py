"""Sampling: random numbers, distributions, and output that has the target's distribution whatever is drafted.

Bounds are those of eagle_bigrams.py: each is exceeded by luck with probability 1e-6 at most.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import eagle_bigrams as bigrams
import pytest
import torch
from eagle_cases import one_state_for_all_tests
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

import piecewise_graph as pg
from piecewise_graph.custom_ops.token_choice import uniforms
from piecewise_graph.eagle import (
    DraftConfig,
    DraftModel,
    DraftShape,
    Sampling,
    Speculator,
    SpeculatorError,
)
from piecewise_graph.eagle.rounds.sampling import (
    ACCEPT,
    DRAFT,
    FIRST,
    SYNTHETIC,
    distribution,
    draw,
)

CHAIN, TREE2, TREE3 = DraftShape(3), DraftShape(2, 2), DraftShape(2, 3)
PRUNED, BUSHY = DraftShape(3, 3, 8), DraftShape(3, 4, 20)
LARGEST = 1 - 2**-24  # of the numbers that `uniforms` returns
INT64 = st.integers(-(2**63), 2**63 - 1)
TABLE, OTHER = bigrams.random_table(1), bigrams.random_table(2)
NEAR = TABLE + bigrams.random_table(3, scale=0.5)
REQUESTS, PROMPT = 256, [5, 2]
SETTINGS = (
    Sampling(),
    Sampling(0.7),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, top_k=3),
    Sampling(1.3, top_p=0.7),
    Sampling(1.5, top_k=4, top_p=0.8),
    Sampling(0.7, top_k=1),
)


@pytest.fixture(scope="module", autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Of the whole file: its speculators are made once."""
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def target(device: torch.device) -> Any:
    return bigrams.bigram_target(TABLE, device)


@pytest.fixture(scope="module")
def speculators(target: Any) -> dict[str, Speculator]:
    """By their drafts: "loose" knows nothing of the target, "close" errs a little, "same" is the target."""
    tables = {"loose": OTHER, "close": NEAR, "same": None}
    drafts = {name: bigrams.bigram_draft(target, table) for name, table in tables.items()}
    drafts["hidden"] = bigrams.bigram_draft(target, OTHER, reads="hidden")
    shapes = (CHAIN, TREE2, TREE3, PRUNED, DraftShape(0))
    return {name: bigrams.speculator(target, draft, shapes) for name, draft in drafts.items()}


# --- random numbers


def mixed(value: int) -> int:
    """The finaliser of splitmix64, as its authors' C has it, of state `value`."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def unmixed(value: int) -> int:
    """The state that `mixed` maps to `value`."""

    def unshifted(z: int, bits: int) -> int:
        found = z
        for _ in range(64 // bits):
            found = z ^ (found >> bits)
        return found

    z = unshifted(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = unshifted(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (unshifted(z, 30) - 0x9E3779B97F4A7C15) % 2**64


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def expected_uniform(seed: int, length: int, use: int) -> float:
    return (mixed(mixed(mixed(seed) + length) + use) >> 40) / 2**24


def numbers(device: torch.device, seed: Any, length: Any, use: Any) -> Tensor:
    """float64 on the CPU; each argument a number or a range."""

    def tensor(value: Any) -> Tensor:
        return torch.as_tensor(list(value) if isinstance(value, range) else value, device=device)

    return uniforms(tensor(seed), tensor(length), tensor(use)).double().cpu()


def assert_uniform(found: Tensor) -> None:
    """Kolmogorov-Smirnov by the bound of Dvoretzky, Kiefer, Wolfowitz and Massart, and 256 cells."""
    n = len(found)
    ordered = found.sort().values
    steps = torch.arange(n, dtype=torch.float64) / n
    assert max((ordered - steps).abs().max(), (steps + 1 / n - ordered).abs().max()) < bigrams.mean_bound(n)
    assert_even((found * 256).long(), 256)


def assert_even(cells: Tensor, count: int) -> None:
    """Chi-square, by the bound of Laurent and Massart."""
    expected = len(cells) / count
    chi_square = ((cells.bincount(minlength=count) - expected) ** 2 / expected).sum()
    degrees, chance = count - 1, -math.log(bigrams.FAILURE)
    assert chi_square < degrees + 2 * math.sqrt(degrees * chance) + 2 * chance


VARIED = {
    "seed": (range(1 << 16), 7, FIRST),
    "huge seed": (range(2**62 - (1 << 16), 2**62), 7, FIRST),
    "length": (3, range(1 << 16), FIRST),
    "use": (3, 7, range(DRAFT, DRAFT + (1 << 16))),
}


class TestUniforms:
    def test_the_generator_is_splitmix64(self) -> None:
        """Its published first outputs for seed 1234567."""
        golden = 0x9E3779B97F4A7C15
        states = [1234567 + i * golden for i in range(3)]
        published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
        assert [mixed(state % 2**64) for state in states] == published

    @given(INT64, INT64, INT64)
    def test_a_number_is_a_hash_of_seed_length_and_use(
        self, device: torch.device, seed: int, length: int, use: int
    ) -> None:
        """Negative and huge ones too: the same on every machine."""
        assert numbers(device, seed, length, use).item() == expected_uniform(seed, length, use)

    def test_golden_values(self, device: torch.device) -> None:
        """What a request drew yesterday it draws tomorrow."""
        found = numbers(device, [0, 0, 1, 42, 2**62 - 1], [1, 2, 1, 100, 4096], [FIRST, DRAFT, ACCEPT, 5, 9])
        assert found.mul(2**24).long().tolist() == [9736812, 13638977, 5059925, 14623016, 3309513]

    def test_integers_of_any_width_give_the_same(self, device: torch.device) -> None:
        wide = numbers(device, range(8), range(8), ACCEPT)
        ints = torch.arange(8, dtype=torch.int32, device=device)
        assert uniforms(ints.long(), ints, torch.full_like(ints, ACCEPT)).double().cpu().equal(wide)

    def test_shapes_broadcast(self, device: torch.device) -> None:
        column = torch.arange(3, device=device)[:, None]
        found = uniforms(column, column + 5, torch.arange(4, device=device))
        wanted = [[expected_uniform(s, s + 5, use) for use in range(4)] for s in range(3)]
        assert found.dtype == torch.float32 and found.tolist() == wanted

    @pytest.mark.parametrize("bits, wanted", [(2**64 - 1, LARGEST), ((1 << 40) - 1, 0.0)])
    def test_the_largest_is_below_one_and_the_smallest_zero(
        self, device: torch.device, bits: int, wanted: float
    ) -> None:
        use = signed(unmixed(bits) - mixed(mixed(3) + 7))
        assert numbers(device, 3, 7, use).item() == wanted

    @pytest.mark.parametrize("varied", VARIED)
    def test_numbers_are_uniform(self, device: torch.device, varied: str) -> None:
        assert_uniform(numbers(device, *VARIED[varied]))

    @pytest.mark.parametrize("varied", VARIED)
    def test_neighbours_are_independent(self, device: torch.device, varied: str) -> None:
        """Pairs fill the square evenly, and so they are not correlated either."""
        one, other = numbers(device, *VARIED[varied]).view(-1, 2).unbind(1)
        assert_even((one * 16).long() * 16 + (other * 16).long(), 256)
        assert_uncorrelated(one, other)

    @pytest.mark.parametrize(
        "uses",
        [(FIRST, DRAFT), (DRAFT, DRAFT + 1), (DRAFT, ACCEPT), (ACCEPT, ACCEPT + 1), (ACCEPT + 1, SYNTHETIC)],
    )
    def test_uses_are_independent(self, device: torch.device, uses: tuple[int, int]) -> None:
        seeds = range(1 << 16)
        one, other = (numbers(device, seeds, 7, use) for use in uses)
        assert_even((one * 16).long() * 16 + (other * 16).long(), 256)
        assert_uncorrelated(one, other)

    def test_seed_and_length_do_not_trade_places(self, device: torch.device) -> None:
        """A request one token longer is not the next seed's."""
        one = numbers(device, range(1 << 16), 8, FIRST)
        assert_uncorrelated(one, numbers(device, range(1, (1 << 16) + 1), 7, FIRST))
        assert_uncorrelated(one, numbers(device, 8, range(1 << 16), FIRST))


def assert_uncorrelated(one: Tensor, other: Tensor) -> None:
    product = (2 * one - 1) * (2 * other - 1)  # in an interval of length 2
    assert abs(product.mean()) < 2 * bigrams.mean_bound(len(one))


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
        ],
    )
    def test_what_means_nothing_is_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(SpeculatorError, match=f"nothing can be sampled like this: {message}"):
            Sampling(**settings)

    def test_edges_are_taken(self) -> None:
        Sampling(0.0, 0, 1.0, 0)
        Sampling(1e30, 2**31 - 1, 1e-30, 2**62 - 1)


# --- the target's distribution, whatever is drafted

CASES = [
    pytest.param("loose", DraftShape(0), id="plain"),
    pytest.param("loose", CHAIN, id="loose-chain"),
    pytest.param("close", CHAIN, id="close-chain"),
    pytest.param("hidden", CHAIN, id="hidden-chain"),
    pytest.param("loose", TREE2, id="loose-tree2"),
    pytest.param("close", TREE3, id="close-tree3"),
    pytest.param("loose", PRUNED, id="loose-pruned"),
]


def generated(
    speculator: Speculator, samplings: list[Sampling], new: int, shape: DraftShape, batches: int = 1
) -> Tensor:
    """`[n, len(PROMPT) + new]` tokens; every batch has seeds of its own."""
    rows: list[list[int]] = []
    for batch in range(batches):
        fresh = [
            Sampling(s.temperature, s.top_k, s.top_p, seed=batch * len(samplings) + index)
            for index, s in enumerate(samplings)
        ]
        tokens = speculator.generate([PROMPT] * len(fresh), max_new_tokens=new, sampling=fresh, shape=shape)
        rows += [PROMPT + row for row in tokens]
    return torch.tensor(rows)


@pytest.mark.parametrize("draft, shape", CASES)
def test_tokens_have_the_targets_distribution(
    speculators: dict[str, Speculator], draft: str, shape: DraftShape
) -> None:
    """After one token, after two (no number is used twice), and of the first two over all requests."""
    tokens = generated(speculators[draft], [Sampling(1.0)] * REQUESTS, 24, shape, batches=3)
    probs = bigrams.probabilities(TABLE, Sampling(1.0))
    for memory in (1, 2):
        rows = tokens[:, len(PROMPT) - memory :]
        distance = bigrams.transition_distance(rows, probs, memory)
        assert distance < bigrams.transition_bound(rows, probs, memory)
    joint = probs[PROMPT[-1]][:, None] * probs
    first = tokens[:, len(PROMPT) :]
    assert bigrams.joint_distance(first, joint) < bigrams.joint_bound(joint, len(first))


@pytest.mark.parametrize("draft, shape", CASES)
def test_every_setting_has_its_distribution_in_one_batch(
    speculators: dict[str, Speculator], draft: str, shape: DraftShape
) -> None:
    each = REQUESTS // len(SETTINGS)
    mixture = [sampling for sampling in SETTINGS for _ in range(each)]
    tokens = generated(speculators[draft], mixture, 40, shape, batches=2)
    tokens = tokens.view(2, len(SETTINGS), each, -1).transpose(0, 1).flatten(1, 2)[..., len(PROMPT) - 1 :]
    for sampling, rows in zip(SETTINGS, tokens, strict=True):
        probs = bigrams.probabilities(TABLE, sampling)
        distance = bigrams.transition_distance(rows, probs)
        if (probs > 0).sum() == len(probs):  # nothing is left to chance
            assert distance == 0
        assert distance < bigrams.transition_bound(rows, probs)


@pytest.mark.parametrize(
    "wrong", [OTHER, NEAR, TABLE / 1.3, TABLE / 0.8], ids=["loose", "close", "warm", "cold"]
)
def test_the_bound_has_teeth(speculators: dict[str, Speculator], wrong: Tensor) -> None:
    """As many tokens as above would give away the drafts' distributions, and a wrong temperature."""
    tokens = generated(speculators["loose"], [Sampling(1.0)] * REQUESTS, 24, CHAIN, batches=3)
    tokens = tokens[:, len(PROMPT) - 1 :]
    probs = bigrams.probabilities(wrong, Sampling(1.0))
    assert bigrams.transition_distance(tokens, probs) > bigrams.transition_bound(tokens, probs)


def test_an_acceptance_without_test_shows(target: Any) -> None:
    """Of drafts that are all accepted, S of S + 1 tokens have the draft's distribution."""
    draft = bigrams.bigram_draft(target, OTHER)
    believing = bigrams.speculator(target, draft, [CHAIN], synthetic=CHAIN.steps + 1)
    tokens = generated(believing, [Sampling(1.0)] * REQUESTS, 24, CHAIN)
    right, drafted = (bigrams.probabilities(table, Sampling(1.0)) for table in (TABLE, OTHER))
    all_tokens = tokens[:, len(PROMPT) - 1 :]
    bound = bigrams.transition_bound(all_tokens, right)
    assert bigrams.transition_distance(all_tokens, right) > bound
    rounds = tokens[:, len(PROMPT) :].unfold(1, CHAIN.steps + 1, CHAIN.steps + 1).flatten(0, 1)
    assert bigrams.transition_distance(rounds, drafted) < bigrams.transition_bound(rounds, drafted)
    assert bigrams.transition_distance(rounds, right) > bound


# --- how much is accepted


def acceptance(
    probs: Tensor, drafted: Tensor, shape: DraftShape, position: int, root: int, before: int, reads: str
) -> float:
    """Chance that a draft is accepted up to `position`, 0 being the first, after `before` and `root`.

    A drawn token passes with min(1, p / q), so min(p, q) is the chance that it is drawn and passes; a chosen
    one passes with p.
    """
    if position < 0:
        return 1.0
    proposed = drafted[root if reads == "token" else before]
    passed = torch.minimum(probs[root], proposed)
    if shape.is_tree:
        passed = torch.zeros_like(passed).scatter(
            0, (best := proposed.topk(shape.topk).indices), probs[root][best]
        )
    return sum(
        chance
        * acceptance(probs, drafted, shape, position - 1, token, token if reads == "token" else before, reads)
        for token, chance in enumerate(passed.tolist())
        if chance
    )


class TestAcceptance:
    @pytest.mark.parametrize("draft", ["loose", "close", "hidden"])
    @pytest.mark.parametrize("shape", [CHAIN, TREE2, TREE3], ids=str)
    @pytest.mark.parametrize(
        "sampling", [Sampling(1.0), Sampling(1.4, top_k=5, top_p=0.9)], ids=["all", "some"]
    )
    def test_is_what_theory_says(
        self, speculators: dict[str, Speculator], draft: str, shape: DraftShape, sampling: Sampling
    ) -> None:
        """At every position, over the contexts that the first rounds were in."""
        probs = bigrams.probabilities(TABLE, sampling)
        table = {"loose": OTHER, "close": NEAR, "hidden": OTHER}[draft]
        # A tree's children are chosen from all that the draft knows.
        drafted = bigrams.probabilities(table, Sampling(1.0) if shape.is_tree else sampling)
        reads = "hidden" if draft == "hidden" else "token"
        chances = {
            (before, root, i): acceptance(probs, drafted, shape, i, root, before, reads)
            for before in range(len(probs))
            for root in range(len(probs))
            for i in range(shape.steps)
        }
        wanted, found, count = torch.zeros(shape.steps), torch.zeros(shape.steps), 0
        options = {"sampling": bigrams.seeded(sampling, REQUESTS), "shape": shape}
        for had, lengths in bigrams.first_rounds(speculators[draft], [PROMPT] * REQUESTS, 4, **options):
            for (*_, before, root), length in zip(had, lengths, strict=True):
                wanted += torch.tensor([chances[before, root, i] for i in range(shape.steps)])
                found += torch.arange(shape.steps) < length - 1
                count += 1
        assert ((found - wanted).abs() / count < bigrams.mean_bound(count)).all()

    @pytest.mark.parametrize("sampling", SETTINGS, ids=str)
    def test_a_chain_of_the_target_itself_is_accepted_whole(
        self, speculators: dict[str, Speculator], sampling: Sampling
    ) -> None:
        check_all_accepted(speculators["same"], bigrams.seeded(sampling, 64), CHAIN)

    @pytest.mark.parametrize("shape", [TREE2, TREE3], ids=str)
    def test_a_tree_of_the_target_itself_holds_the_greedy_path(
        self, speculators: dict[str, Speculator], shape: DraftShape
    ) -> None:
        check_all_accepted(speculators["same"], [Sampling()] * 8, shape)

    def test_as_many_children_as_tokens_are_accepted_whole(self, target: Any) -> None:
        """The children have all of the target's mass, whatever the draft thinks of them."""
        shape = DraftShape(1, bigrams.VOCABULARY, 1 + bigrams.VOCABULARY)
        tree = bigrams.speculator(target, bigrams.bigram_draft(target, OTHER), [shape], max_requests=64)
        check_all_accepted(tree, bigrams.seeded(Sampling(1.3), 64), shape)


def check_all_accepted(speculator: Speculator, samplings: list[Sampling], shape: DraftShape) -> None:
    prompts = [[index % bigrams.VOCABULARY] for index in range(len(samplings))]
    _, statistics = speculator.generate(
        prompts, max_new_tokens=25, sampling=samplings, shape=shape, return_stats=True
    )
    assert statistics.mean_acceptance_length == shape.steps + 1
    assert statistics.acceptance_rates == (1.0,) * shape.steps


# --- a target that attends


@pytest.fixture(scope="module")
def attentive(device: torch.device) -> Any:
    """Two layers, whose attention and MLP decide as much as the token does."""
    pg.register_attention()
    torch.manual_seed(9)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(bigrams.llama_config(**fields, initializer_range=0.4))
    return model.eval().requires_grad_(False).to(device)


@pytest.fixture(scope="module")
def heads(attentive: Any, device: torch.device) -> dict[str, DraftModel]:
    """Random EAGLE-1 and EAGLE-3 heads; the latter can say five of the eight tokens only."""
    torch.manual_seed(17)
    ids = torch.tensor([0, 2, 3, 5, 7])
    embedding = {"embed_tokens": attentive.get_input_embeddings(), "device": device}
    first = DraftConfig.for_target(attentive.config, "eagle1")
    third = DraftConfig.for_target(attentive.config, "eagle3", draft_vocab_size=len(ids))
    made = {
        "eagle1": DraftModel(first, lm_head=attentive.get_output_embeddings(), **embedding),
        "eagle3": DraftModel(third, d2t=ids - torch.arange(len(ids)), **embedding),
    }
    for head in made.values():
        head.eval().requires_grad_(False)
        for name, weight in head.named_parameters():
            if "proj" in name or "fc" in name:
                weight.mul_(2.5)  # so that what it attends to, and the hidden state, matter
    return made


@pytest.fixture(scope="module")
def attentive_speculators(attentive: Any, heads: dict[str, DraftModel]) -> dict[str, Speculator]:
    return {name: bigrams.speculator(attentive, head, [CHAIN, BUSHY]) for name, head in heads.items()}


@pytest.fixture(scope="module")
def dense(attentive: Any) -> Any:
    """The same model with transformers' own attention, on whole sequences."""
    config = type(attentive.config)(**(attentive.config.to_dict() | {"attn_implementation": "eager"}))
    model = LlamaForCausalLM(config).eval().requires_grad_(False).to(attentive.device)
    model.load_state_dict(attentive.state_dict())
    return model


def probabilities_after(dense: Any, tokens: Tensor) -> Tensor:
    """float64 `[n, length, V]`: of what follows each token."""
    logits: Tensor = dense(input_ids=tokens.to(dense.device), use_cache=False).logits
    return logits.double().softmax(-1).cpu()


class DenseDraft:
    """A head on one sequence at a time, with attention over all of it."""

    def __init__(self, head: DraftModel, dense: Any) -> None:
        self.head, self.dense = copy.deepcopy(head), dense
        for layer in self.head.layers:
            layer.self_attn.attend = self._attend

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(0, 1)

    def guesses(self, tokens: list[int], path: list[int], count: int) -> list[tuple[float, int]]:
        """The likeliest after `tokens` and a draft's `path`; the target has read `tokens` but the last."""
        ids = torch.tensor(tokens + path, device=self.dense.device)
        read = self.dense(input_ids=ids[None, : len(tokens) - 1], output_hidden_states=True)
        layers = self.head.config.feature_layers or [-1]
        hidden = self.head.project(torch.cat([read.hidden_states[layer][0] for layer in layers], -1))
        for rows in range(len(tokens) - 1, len(ids)):
            out = self.head(ids[1 : rows + 1], torch.arange(rows, device=ids.device), hidden)
            hidden = torch.cat([hidden, out[-1:]])
        best = self.head.logits(out[-1]).softmax(-1).topk(count)
        return list(zip(best.values.tolist(), self.head.to_target(best.indices).tolist(), strict=True))

    def tree(self, tokens: list[int], shape: DraftShape) -> list[list[int]]:
        """Paths that are drafted: EAGLE-2's expansion, then its reranking."""
        branches, candidates = [(1.0, list[int]())], list[tuple[float, list[int]]]()
        for _ in range(shape.steps):
            grown = [
                (score * chance, [*path, token])
                for score, path in branches
                for chance, token in self.guesses(tokens, path, shape.topk)
            ]
            candidates += grown
            branches = sorted(grown, reverse=True)[: shape.topk]
        return [path for _, path in sorted(candidates, reverse=True)[: shape.nodes - 1]]

    def accepted(self, tokens: list[int], shape: DraftShape) -> int:
        """How many tokens of a draft are the target's choices."""
        chosen = list(tokens)
        for _ in range(shape.steps):
            chosen.append(int(probabilities_after(self.dense, torch.tensor([chosen]))[0, -1].argmax()))
        path = chosen[len(tokens) :]
        return max((len(p) for p in self.tree(tokens, shape) if p == path[: len(p)]), default=0)


@pytest.mark.parametrize("shape", [CHAIN, BUSHY], ids=str)
@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
class TestAnAttentiveTarget:
    def test_tokens_have_its_distribution(
        self, dense: Any, attentive_speculators: dict[str, Speculator], head: str, shape: DraftShape
    ) -> None:
        """By token and by rank, each given everything before it; and the first two by enumeration."""
        samplings = [Sampling(1.0)] * REQUESTS
        tokens = generated(attentive_speculators[head], samplings, 16, shape, batches=2)
        probs = probabilities_after(dense, tokens)[:, len(PROMPT) - 1 : -1]
        new = tokens[:, len(PROMPT) :, None]
        order = probs.argsort(dim=-1, descending=True)
        ranks = (order == new).int().argmax(-1, keepdim=True)
        for chances, found in ((probs, new), (probs.gather(-1, order), ranks)):
            counts = found.flatten().bincount(minlength=bigrams.VOCABULARY)
            distance = (counts - chances.sum((0, 1))).abs().sum() / 2 / new.numel()
            assert distance < bigrams.martingale_bound(bigrams.VOCABULARY, new.numel())
        joint = self.first_two(dense)
        assert bigrams.joint_distance(new[..., 0], joint) < bigrams.joint_bound(joint, len(new))

    def first_two(self, dense: Any) -> Tensor:
        prompts = torch.tensor([[*PROMPT, token] for token in range(bigrams.VOCABULARY)])
        probs = probabilities_after(dense, prompts)
        return probs[0, len(PROMPT) - 1][:, None] * probs[:, -1]

    def test_greedy_requests_get_its_choice(
        self, dense: Any, attentive_speculators: dict[str, Speculator], head: str, shape: DraftShape
    ) -> None:
        """Beside sampled ones."""
        samplings = [Sampling(), Sampling(1.2), Sampling(0.8, top_k=2)] * 8
        tokens = generated(attentive_speculators[head], samplings, 24, shape)[::3]
        probs = probabilities_after(dense, tokens)[:, len(PROMPT) - 1 : -1]
        assert probs.argmax(-1).equal(tokens[:, len(PROMPT) :])

    def test_greedy_drafts_are_what_the_head_would_say(
        self,
        heads: dict[str, DraftModel],
        dense: Any,
        attentive_speculators: dict[str, Speculator],
        head: str,
        shape: DraftShape,
    ) -> None:
        """Round by round and token by token: its caches, features and positions are right, beside others."""
        drafter = DenseDraft(heads[head], dense)
        prompts = [[a, b, (a + b) % 8, a][: 2 + a % 3] for a in range(8) for b in range(3)]
        samplings = [Sampling(0.0 if i % 2 else 1.0, seed=i) for i in range(len(prompts))]
        options = {"sampling": samplings, "shape": shape}
        found: list[int] = []
        for had, lengths in bigrams.first_rounds(attentive_speculators[head], prompts, 5, **options):
            greedy = [(list(had[i]), lengths[i] - 1) for i in range(1, len(prompts), 2)]
            assert [drafter.accepted(tokens, shape) for tokens, _ in greedy] == [n for _, n in greedy]
            found += [n for _, n in greedy]
        assert {0, 1} <= set(found)


# --- seeds

POOL = [
    ([3], Sampling(), 12),
    ([1, 2, 3, 4, 5], Sampling(1.0, seed=1), 12),
    ([1, 2, 3, 4, 5], Sampling(1.0, seed=2), 7),
    ([6, 0, 6], Sampling(1.4, top_k=4, seed=1), 12),
    ([7] * 11, Sampling(0.8, top_p=0.8, seed=2**62 - 1), 9),
    ([2, 2], Sampling(1.5, top_k=5, top_p=0.9, seed=7), 1),
    ([4, 1, 4, 1], Sampling(), 10),
    ([0], Sampling(2.0, seed=1), 12),
]


def served(speculator: Speculator, chosen: list[int], shape: DraftShape) -> list[list[int]]:
    """What requests of the pool get together."""
    prompts, samplings, lengths = zip(*(POOL[index] for index in chosen), strict=True)
    tokens: list[list[int]] = speculator.generate(
        prompts, max_new_tokens=lengths, sampling=samplings, shape=shape
    )
    return tokens


@pytest.fixture(scope="module")
def serving(attentive: Any, heads: dict[str, DraftModel]) -> Speculator:
    sizes = {"max_requests": 5, "batch_sizes": (1, 2, 5)}
    return bigrams.speculator(attentive, heads["eagle1"], [CHAIN, TREE2, 0], **sizes)


@pytest.fixture(scope="module")
def alone(serving: Speculator) -> dict[tuple[DraftShape, int], list[int]]:
    return {
        (shape, index): served(serving, [index], shape)[0]
        for shape in serving.shapes
        for index in range(len(POOL))
    }


class TestSeeds:
    @settings(max_examples=25)
    @given(chosen=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=9), which=st.integers(0, 2))
    def test_a_request_gets_the_same_in_any_batch(
        self,
        serving: Speculator,
        alone: dict[tuple[DraftShape, int], list[int]],
        chosen: list[int],
        which: int,
    ) -> None:
        """Padded, crowded, waiting for others to finish, beside itself, beside greedy and filtered ones."""
        shape = serving.shapes[which]
        assert served(serving, chosen, shape) == [alone[shape, index] for index in chosen]

    @pytest.mark.parametrize("graphs", ["full", "piecewise", "compiled"])
    def test_a_request_gets_the_same_in_every_graph_mode(
        self,
        attentive: Any,
        heads: dict[str, DraftModel],
        alone: dict[tuple[DraftShape, int], list[int]],
        graphs: str,
    ) -> None:
        options = {"graphs": graphs, "max_requests": 8, "prefill_rows": 16}
        fast = bigrams.speculator(attentive, heads["eagle1"], [CHAIN, TREE2], **options)
        everyone = list(range(len(POOL)))
        for shape in fast.shapes:
            assert served(fast, everyone, shape) == [alone[shape, index] for index in everyone]
            assert served(fast, everyone[::2], shape) == [alone[shape, index] for index in everyone[::2]]

    @pytest.mark.parametrize("shape", [CHAIN, TREE2, DraftShape(0)], ids=str)
    def test_other_seeds_give_other_tokens(
        self, speculators: dict[str, Speculator], shape: DraftShape
    ) -> None:
        tokens = generated(speculators["loose"], [Sampling(1.5)] * 64, 24, shape)
        assert len(tokens.unique(dim=0)) == 64

    @pytest.mark.parametrize("shape", [CHAIN, TREE2], ids=str)
    def test_sampled_neighbours_leave_greedy_requests_alone(
        self, speculators: dict[str, Speculator], shape: DraftShape
    ) -> None:
        """Their tokens, and what was accepted of their drafts."""
        among = [Sampling(), Sampling(1.5), Sampling(1.0, top_k=3)]
        alone, mixed = (
            speculators["close"].generate(
                [PROMPT] * 3, max_new_tokens=30, sampling=samplings, shape=shape, return_stats=True
            )
            for samplings in (Sampling(), among)
        )
        assert alone[0][0] == mixed[0][0]
        assert alone[1].requests[0] == mixed[1].requests[0]
