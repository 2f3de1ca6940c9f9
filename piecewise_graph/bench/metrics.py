"""The field's columns: throughput, time to first token, time per output token, acceptance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .drive import RequestTimes, Timeline


@dataclass(frozen=True)
class Metrics:
    """Of a load that was served. Throughputs are in tokens per second, other times in milliseconds.

    Attributes:
        ttft: time to first token, from when a request was released to the engine.
        tpot: time per output token after the first; None where every request had one token only.
        per_user_throughput: output tokens per second of one request, 1 / mean tpot.
        accept_length: tokens per drafting round, the bonus included; 1 where nothing drafted.
        synthetic: the accept length that was decreed; None = the target decided.
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
        """The columns, and whether acceptance was decreed."""
        row = asdict(self)
        decreed = row.pop("synthetic")
        return row | {"acceptance": acceptance(decreed), "synthetic_accept_length": decreed}


COLUMNS = tuple(each.name for each in fields(Metrics) if each.name != "synthetic")


def acceptance(decreed: float | None) -> str:
    """The word that goes with every figure."""
    return "real" if decreed is None else "SYNTHETIC"


def tpot(request: RequestTimes) -> float | None:
    """Seconds per output token after the first; None where there is none after it."""
    if request.output_tokens < 2:
        return None
    return (request.last - request.first) / (request.output_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks linearly, as numpy does by default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _milliseconds(seconds: Sequence[float]) -> tuple[Any, Any, Any]:
    """Mean, median and 99th percentile."""
    if not seconds:
        return None, None, None
    return (
        statistics.fmean(seconds) * 1e3,
        statistics.median(seconds) * 1e3,
        percentile(seconds, 99) * 1e3,
    )
