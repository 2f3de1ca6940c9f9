"""Acceptance statistics, under the names that the field uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_COUNTERS = ("num_rounds", "num_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass
class Counts:
    """Counts of one request, or of many together.

    Attributes:
        num_drafts: rounds that drafted.
        num_draft_tokens: tokens that the target verified, `N - 1` per draft.
        num_accepted_tokens: draft tokens that the target accepted, the bonus excluded.
        accepted_at: per draft position, the number of rounds that accepted it.
        num_rounds, num_tokens: all rounds, plain ones included, and the tokens that they made.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_tokens: int = 0

    def add_round(self, steps: int, draft_tokens: int, accept_length: int) -> None:
        """One round of one request; `accept_length` counts the bonus."""
        self.num_rounds += 1
        self.num_tokens += accept_length
        if not steps:
            return
        self.num_drafts += 1
        self.num_draft_tokens += draft_tokens
        self.num_accepted_tokens += accept_length - 1
        self.accepted_at += [0] * (steps - len(self.accepted_at))
        for position in range(accept_length - 1):
            self.accepted_at[position] += 1

    def __iadd__(self, other: Counts) -> Counts:
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_at += [0] * (len(other.accepted_at) - len(self.accepted_at))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count
        return self


@dataclass(frozen=True)
class Statistics:
    """Statistics of a generation. `str()` is for people.

    Attributes:
        requests: counts of each, in the order of the prompts.
        synthetic: mean accept length that synthetic acceptance was set to; None = the target decided.
    """

    requests: tuple[Counts, ...]
    synthetic: float | None = None

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.requests:
            total += counts
        return total

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafting round, the bonus included."""
        total = self.total
        return 1 + total.num_accepted_tokens / total.num_drafts if total.num_drafts else 1.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Per draft position, the share of drafts that accepted it."""
        total = self.total
        return tuple(count / total.num_drafts for count in total.accepted_at)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for json.dump."""
        total = self.total
        return {
            **{name: getattr(total, name) for name in _COUNTERS},
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rates": list(self.acceptance_rates),
            "synthetic_acceptance_length": self.synthetic,
        }

    def __str__(self) -> str:
        total = self.total
        lines = [f"{name}: {getattr(total, name)}" for name in _COUNTERS[2:]]
        lines.append(f"mean acceptance length: {self.mean_acceptance_length:.2f}")
        lines += [f"acceptance at token {i}: {rate:.2f}" for i, rate in enumerate(self.acceptance_rates)]
        if self.synthetic is not None:
            lines.insert(0, f"SYNTHETIC acceptance: a mean of {self.synthetic:.2f} was set, not measured")
        return "\n".join(lines)
