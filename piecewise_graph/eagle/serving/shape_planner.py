"""Planner: how much to draft, from measured times and observed acceptance.

A round of shape s makes `1 + sum over depths d <= S of survival[d]` tokens on average, the bonus included,
and takes `draft + verify + extend` seconds. Seconds are measured before the first choice for a batch size.
Survival is the share of rounds that accept depth d. It is observed while requests run, for all batch sizes
together. The shape with the most tokens per second runs.

Drafts that do not run are not observed. So a round is now and then a probe: it runs the draft that has not
run for the longest time. Plain decoding makes one token per round and needs no probe. A depth that no round
has reached is assumed to survive like the deepest known one. A tree that has never run is assumed to lie
halfway (geometrically) between the chain and perfect acceptance.

A draft after plain rounds is expensive: it first has to read the tokens that it missed, which took 4 ms on
an H200 for a 1B model whose round takes 1.2 ms, and with 16 requests and more 5 to 8 % of 256 rounds. While
plain decoding is fastest, probes back off: each failed probe doubles the wait before that kind of draft is
tried again (all chains are one kind, each tree is its own), up to 4096 rounds. A draft that has become good
may go unnoticed for as long, which is 5 s of rounds of 1.2 ms. A successful probe resets the wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..options import DraftShape

REPLAN_EVERY, PROBE_EVERY, PROBE_AT_LEAST_EVERY = 8, 64, 4096  # rounds
_PRIOR, _PRIOR_ROUNDS = (
    0.7,
    2.0,
)  # assumed acceptance of a depth given the one above, and its weight in rounds
_LATE = 2  # a probe that was not observed after so many rounds never will be
_MEMORY = 128.0  # rounds in which the weight of an observation falls to 1 / e

PlannerKey = tuple[Any, ...]  # the batch size, then whatever else the times of phases depend on


@dataclass(frozen=True)
class Estimate:
    """The planner's estimate of one shape at one batch size.

    Attributes:
        seconds: of each phase.
        tokens: per request and round.
    """

    shape: DraftShape
    seconds: Mapping[str, float]
    tokens: float

    @property
    def rate(self) -> float:
        """Tokens per second of one request."""
        return self.rate_of(self.tokens)

    def rate_of(self, tokens: float) -> float:
        """Tokens per second if a round makes `tokens`."""
        return tokens / sum(self.seconds.values())


@dataclass(frozen=True)
class Choice:
    """The shape of a round, and the numbers behind the choice. `str()` is for people.

    Attributes:
        estimates: of all shapes, the fastest first.
        probe: the shape runs only because it has not run for long.
    """

    shape: DraftShape
    size: int
    estimates: tuple[Estimate, ...]
    probe: bool

    def __str__(self) -> str:
        lines = [
            f"{self.size} requests: {self.shape}" + (", to see whether it has become better" * self.probe)
        ]
        lines += [f"  {'shape':44s} {'tokens':>7s} {'ms':>8s} {'tokens/s':>9s}  phases (ms)"]
        for each in self.estimates:
            phases = ", ".join(f"{name} {value * 1e3:.3f}" for name, value in each.seconds.items())
            total = sum(each.seconds.values())
            lines.append(
                f"  {each.shape!s:44s} {each.tokens:7.2f} {total * 1e3:8.3f} {each.rate:9.1f}  {phases}"
            )
        return "\n".join(lines)


class Planner:
    """Chooses among `shapes`; one planner may serve many engines, and learns from all of them.

    Attributes:
        latest: the latest choice per key.
    """

    def __init__(self, shapes: Sequence[DraftShape]) -> None:
        self.shapes = tuple(shapes)
        self.latest: dict[PlannerKey, Choice] = {}
        self._seconds: dict[PlannerKey, dict[DraftShape, Mapping[str, float]]] = {}
        self._seen: dict[DraftShape, _Survival] = {}
        self._last_run = dict.fromkeys(self.shapes, 0)
        self._rounds = 0
        self._patience: dict[DraftShape, int] = {}  # kind -> rounds between its probes beside plain decoding
        self._probe: tuple[Choice, int] | None = None  # and when it was chosen, until it is observed
        self._next_probe = PROBE_EVERY - REPLAN_EVERY

    def __str__(self) -> str:
        return "\n".join(map(str, self.latest.values())) or "nothing was chosen yet"

    def knows(self, key: PlannerKey) -> bool:
        """Whether the phases were measured for this key."""
        return key in self._seconds

    def measure(self, key: PlannerKey, seconds: Mapping[DraftShape, Mapping[str, float]]) -> None:
        """Set the seconds of the phases of every shape."""
        self._seconds[key] = dict(seconds)

    def choose(self, key: PlannerKey) -> Choice:
        """The shape of the next round."""
        latest = self.latest.get(key)
        if latest is not None and not latest.probe and self._rounds % REPLAN_EVERY:
            return latest
        estimates = sorted(
            (Estimate(shape, self._seconds[key][shape], self._tokens(shape)) for shape in self.shapes),
            key=lambda each: -each.rate,
        )
        shape = estimates[0].shape
        stalest = self._stalest(shape) if self._rounds >= self._next_probe else None
        choice = Choice(stalest or shape, key[0], tuple(estimates), probe=stalest is not None)
        if choice.probe:
            self._probe, self._next_probe = (choice, self._rounds), self._rounds + PROBE_EVERY
        self.latest[key] = choice
        return choice

    def observe(self, shape: DraftShape, accept_lengths: Sequence[int]) -> None:
        """Add a round of `shape`: the accept length of each request, bonus included."""
        self._rounds += 1
        self._last_run[shape] = self._rounds
        if self._probe is not None and self._probe[0].shape == shape:
            self._learn_from(*self._probe, sum(accept_lengths) / len(accept_lengths))
            self._probe = None
        if shape.steps:
            seen = self._seen.setdefault(_kind(shape), _Survival(shape.steps))
            for depth in range(1, shape.steps + 1):
                seen.add(depth, sum(length > depth for length in accept_lengths) / len(accept_lengths))

    def _stalest(self, best: DraftShape) -> DraftShape | None:
        """The draft that has not run for the longest time, of those that a probe is due for."""
        due = [each for each in self.shapes if each.steps and each != best and self._is_due(each, best)]
        return min(due, key=self._last_run.__getitem__, default=None)

    def _is_due(self, shape: DraftShape, best: DraftShape) -> bool:
        if best.steps:
            return True
        kind = _kind(shape)
        latest = max(self._last_run[each] for each in self.shapes if each.steps and _kind(each) == kind)
        return self._rounds - latest >= self._patience.get(kind, PROBE_EVERY) - REPLAN_EVERY

    def _learn_from(self, probe: Choice, chosen_at: int, tokens: float) -> None:
        """Set how long the next probe of this kind waits."""
        best = probe.estimates[0]
        probed = next(each for each in probe.estimates if each.shape == probe.shape)
        if best.shape.steps or self._rounds - chosen_at > _LATE:
            return
        kind = _kind(probed.shape)
        waited = self._patience.get(kind, PROBE_EVERY)
        was_better = probed.rate_of(tokens) > best.rate
        self._patience[kind] = PROBE_EVERY if was_better else min(2 * waited, PROBE_AT_LEAST_EVERY)

    def _tokens(self, shape: DraftShape) -> float:
        """Expected tokens of a round."""
        kept, total = 1.0, 1.0
        for depth in range(1, shape.steps + 1):
            kept *= self._conditional(shape, depth)
            total += kept
        return total

    def _conditional(self, shape: DraftShape, depth: int) -> float:
        """The share of rounds that accept this depth, of those that accept the depth above."""
        own = self._seen.get(_kind(shape))
        if own is not None:
            return own.conditional(depth)
        chains = [seen for kind, seen in self._seen.items() if not kind.is_tree]
        chain = chains[0].conditional(depth) if chains else _PRIOR
        return chain**0.5 if shape.is_tree else chain


def _kind(shape: DraftShape) -> DraftShape:
    """A representative of the shapes that share observations: chains of all lengths are one kind."""
    return shape if shape.is_tree else DraftShape(1)


class _Survival:
    """Acceptance of each depth; recent rounds weigh most."""

    def __init__(self, depths: int) -> None:
        self._accepted: list[float] = []
        self._reached: list[float] = []
        self._latest_share = 1.0
        self._grow(depths)

    def add(self, depth: int, share: float) -> None:
        """Add a round in which `share` of the requests accepted `depth`."""
        self._grow(depth)
        fade = 1 - 1 / _MEMORY
        above = 1.0 if depth == 1 else self._latest_share
        self._latest_share = share
        self._accepted[depth - 1] = self._accepted[depth - 1] * fade + share
        self._reached[depth - 1] = self._reached[depth - 1] * fade + above

    def conditional(self, depth: int) -> float:
        """Share of those that accepted the depth above; of the deepest known depth if none was as deep."""
        index = min(depth, len(self._reached)) - 1
        return self._accepted[index] / self._reached[index]

    def _grow(self, depths: int) -> None:
        """New depths start with the prior."""
        missing = depths - len(self._reached)
        self._accepted += [_PRIOR * _PRIOR_ROUNDS] * missing
        self._reached += [_PRIOR_ROUNDS] * missing
