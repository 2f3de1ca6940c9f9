"""The columns of the serving benchmark, by formula, and the ratios between settings."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, strategies as st

from piecewise_graph.bench.metrics import COLUMNS, Metrics, RequestTimes, Timeline, percentile, ratios, tpot
from piecewise_graph.eagle import Statistics

FIELD = (
    "max_concurrency", "input_throughput", "output_throughput",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "per_user_throughput", "accept_length",
)  # fmt: skip

moments = st.floats(0, 100, allow_nan=False)
requests = st.builds(
    lambda prompt, new, released, wait, took: RequestTimes(
        prompt, new, released, released + wait, released + wait + took
    ),
    st.integers(1, 1000), st.integers(1, 1000), moments, moments, st.floats(0.001, 100),
)  # fmt: skip


def served(*times: RequestTimes, synthetic: float | None = None) -> Timeline:
    return Timeline(times, len(times), Statistics((), synthetic))


def test_columns_are_those_of_the_field() -> None:
    assert COLUMNS == FIELD


def test_metrics_of_two_requests_by_hand() -> None:
    found = Metrics.of(served(RequestTimes(10, 5, 0.0, 0.5, 2.5), RequestTimes(30, 3, 1.0, 1.1, 2.1)), 2)
    assert found.input_throughput == pytest.approx((10 + 30) / 2.5)
    assert found.output_throughput == pytest.approx((5 + 3) / 2.5)
    assert found.mean_ttft_ms == found.median_ttft_ms == pytest.approx((500 + 100) / 2)
    assert found.p99_ttft_ms == pytest.approx(100 + 0.99 * 400)
    assert found.mean_tpot_ms == pytest.approx((2000 / 4 + 1000 / 2) / 2)
    assert found.per_user_throughput == pytest.approx(1 / 0.5)
    assert found.accept_length == 1.0 and found.synthetic is None


def test_time_per_output_token_needs_two_tokens() -> None:
    assert tpot(RequestTimes(1, 1, 0.0, 0.5, 0.5)) is None
    alone = Metrics.of(served(RequestTimes(1, 1, 0.0, 0.5, 0.5)), 1)
    assert (alone.mean_tpot_ms, alone.p99_tpot_ms, alone.per_user_throughput) == (None, None, None)
    both = Metrics.of(served(RequestTimes(1, 1, 0.0, 0.5, 0.5), RequestTimes(1, 2, 0.0, 0.5, 0.75)), 2)
    assert both.mean_tpot_ms == pytest.approx(250)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1])
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


@given(st.lists(requests, min_size=1, max_size=20))
def test_throughputs_belong_to_one_duration(times: list[RequestTimes]) -> None:
    found = Metrics.of(served(*times), len(times))
    seconds = max(each.last for each in times)
    assert found.output_throughput * seconds == pytest.approx(sum(each.output_tokens for each in times))
    asked, made = (sum(getattr(t, name) for t in times) for name in ("input_tokens", "output_tokens"))
    assert found.input_throughput / found.output_throughput == pytest.approx(asked / made)
    assert found.median_ttft_ms <= found.p99_ttft_ms * (1 + 1e-9)
    if found.mean_tpot_ms is not None and found.per_user_throughput is not None:
        assert found.per_user_throughput * found.mean_tpot_ms == pytest.approx(1000)


def test_medians_and_ratios_over_turns() -> None:
    def turn(last: float) -> Metrics:
        return Metrics.of(served(RequestTimes(4, 5, 0.0, 1.0, last)), 1)

    fast, slow = [turn(2.0), turn(3.0), turn(4.0)], [turn(5.0), turn(5.0), turn(5.0)]
    assert Metrics.median_of(fast) == fast[1]
    found = {ratio.column: ratio for ratio in ratios(fast, slow)}
    throughput = found["output_throughput"]
    assert (throughput.value, throughput.low, throughput.high) == pytest.approx((5 / 3, 5 / 4, 5 / 2))
    times = found["median_tpot_ms"]
    assert (times.value, times.low, times.high) == pytest.approx((2 / 4, 1 / 4, 3 / 4))
    assert found["median_ttft_ms"].value == 1.0
