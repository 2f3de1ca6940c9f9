"""Random numbers of the loop: splitmix64 of seed, length and use.

Bounds are those of eagle_bigrams.py: each is exceeded by luck with probability 1e-6 at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import eagle_bigrams as bigrams
import pytest
import torch
from eagle_cases import one_state_for_all_tests
from eagle_sampling_cases import (
    INT64,
    LARGEST,
    numbers,
)
from hypothesis import given
from torch import Tensor

from piecewise_graph.custom_ops.token_choice import uniforms
from piecewise_graph.eagle.rounds.sampling import (
    ACCEPT,
    DRAFT,
    FIRST,
    SYNTHETIC,
)


@pytest.fixture(scope="module", autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Of the whole file: its speculators are made once."""
    with one_state_for_all_tests():
        yield


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
