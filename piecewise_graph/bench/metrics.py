"""The field's columns: throughput, time to first token, time per output token, accept length."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from piecewise_graph.eagle.statistics import Statistics

RATIO_COLUMNS = ("output_throughput", "median_tpot_ms", "median_ttft_ms")


@dataclass(frozen=True)
class RequestTimes:
    """One served request; times in seconds since the load began.

    Attributes:
        released: when it was given to the engine.
        first, last: when the host learned of its first and its last token.
    """

    input_tokens: int
    output_tokens: int
    released: float
    first: float
    last: float


@dataclass(frozen=True)
class Timeline:
    """A load that was served to its end.

    Attributes:
        most_at_once: largest number of requests in the engine at the same time.
        statistics: of all rounds; they say whether acceptance was synthetic.
    """

    requests: tuple[RequestTimes, ...]
    most_at_once: int
    statistics: Statistics

    @property
    def seconds(self) -> float:
        """From the beginning of the load to the last token."""
        return max(request.last for request in self.requests)


@dataclass(frozen=True)
class Metrics:
    """Columns of a served load. Throughputs are in tokens per second, other times in milliseconds.

    Attributes:
        ttft: time to first token, from when a request was released to the engine.
        tpot: time per output token after the first; None where every request had one token only.
        per_user_throughput: output tokens per second of one request, 1 / mean tpot.
        accept_length: tokens per drafting round, the bonus included; 1 where nothing drafted.
        synthetic: the synthetic accept length; None = real acceptance.
    """

    max_concurrency: int
    input_throughput: float
    output_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    per_user_throughput: float | None
    accept_length: float
    synthetic: float | None = None

    @classmethod
    def of(cls, timeline: Timeline, concurrency: int) -> Metrics:
        requests = timeline.requests
        tpots = [value for request in requests if (value := tpot(request)) is not None]
        mean = statistics.fmean(tpots) if tpots else None
        return cls(
            concurrency,
            sum(request.input_tokens for request in requests) / timeline.seconds,
            sum(request.output_tokens for request in requests) / timeline.seconds,
            *_milliseconds([request.first - request.released for request in requests]),
            *_milliseconds(tpots),
            1 / mean if mean else None,
            timeline.statistics.mean_acceptance_length,
            timeline.statistics.synthetic,
        )

    @classmethod
    def median_of(cls, turns: Sequence[Metrics]) -> Metrics:
        """Column by column, over several turns of one setting."""
        columns = {each.name: [getattr(turn, each.name) for turn in turns] for each in fields(cls)}
        medians: dict[str, Any] = {
            name: None if None in values else statistics.median(values) for name, values in columns.items()
        }
        return cls(**medians | {"max_concurrency": turns[0].max_concurrency})

    def to_dict(self) -> dict[str, Any]:
        """The columns, and whether acceptance was synthetic."""
        row = asdict(self)
        synthetic = row.pop("synthetic")
        return row | {"acceptance": acceptance(synthetic), "synthetic_accept_length": synthetic}


COLUMNS = tuple(each.name for each in fields(Metrics) if each.name != "synthetic")


def acceptance(synthetic: float | None) -> str:
    """The word that labels every figure."""
    return "real" if synthetic is None else "SYNTHETIC"


def tpot(request: RequestTimes) -> float | None:
    """Seconds per output token after the first; None if there is no other."""
    if request.output_tokens < 2:
        return None
    return (request.last - request.first) / (request.output_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as in numpy by default."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _milliseconds(seconds: Sequence[float]) -> tuple[Any, Any, Any]:
    """Mean, median and 99th percentile."""
    if not seconds:
        return None, None, None
    found = statistics.fmean(seconds), statistics.median(seconds), percentile(seconds, 99)
    return tuple(value * 1e3 for value in found)  # type: ignore[return-value]


@dataclass(frozen=True)
class Ratio:
    """One column of one setting over another's.

    Attributes:
        value: ratio of the medians over all turns.
        low, high: smallest and largest ratio of a single turn.
    """

    column: str
    value: float
    low: float
    high: float


def ratios(first: Sequence[Metrics], second: Sequence[Metrics]) -> list[Ratio]:
    """Columns of `first` over those of `second`, turn by turn; undefined ones are left out."""
    found = []
    for column in RATIO_COLUMNS:
        ours, theirs = ([getattr(turn, column) for turn in side] for side in (first, second))
        if all(ours) and all(theirs):
            single = [a / b for a, b in zip(ours, theirs, strict=True)]
            value = statistics.median(ours) / statistics.median(theirs)
            found.append(Ratio(column, value, min(single), max(single)))
    return found
