"""Random schedules: which requests come when, how they end, and what disturbs the ranks meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from piecewise_graph.eagle import DraftShape, Sampling

LENGTHS = (1, 2, 3, 5, 8, 12, 16)  # of prompts; few, since the answers to all are computed once
TEXTS, NEW_TOKENS = 6, 24
STOPS = tuple(ord(letter) + 3 for letter in "\n e(s")
LONGEST = max(LENGTHS) + NEW_TOKENS
TREE = DraftShape(3, 2, 8)

# What speculators are made of. Pages are as many as one of the longest requests needs, and a few more: others
# are preempted.
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"shapes": [0], "page_size": 4, "num_pages": 1 + 13, "max_requests": 4, "batch_sizes": [1, 4]},
    "chains": {"shapes": [3, 1, 0], "page_size": 2, "num_pages": 1 + 26, "max_requests": 3},
    "trees": {"shapes": [TREE, 2, 0], "page_size": 1, "num_pages": 1 + 56, "max_requests": 4},
    "tapes": {
        "shapes": [2, 0],
        "page_size": 4,
        "num_pages": 1 + 13,
        "max_requests": 2,
        "graphs": "piecewise",
    },
}
_HOW = (
    Sampling(temperature=0.8),
    Sampling(temperature=1.5, top_k=20),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=2.0, top_k=40, top_p=0.9),
)


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        arrives: the step before which it is queued.
        text, length: which of the texts its prompt begins, and how many of its tokens it takes.
        aborted_before: the step before which it is aborted.
        aborts_after: its own callback aborts it when it has so many tokens.
        raises_after: its callback raises, once, when it has so many tokens.
    """

    arrives: int
    text: int
    length: int
    new_tokens: int
    sampling: Sampling
    stop: tuple[int, ...] = ()
    aborted_before: int | None = None
    aborts_after: int | None = None
    raises_after: int | None = None


@dataclass(frozen=True)
class Schedule:
    """What is served, by which speculator, and what disturbs it.

    Attributes:
        loop: a name of `LOOPS`.
        options: of its engine.
        sleeps: seconds by (step, rank).
        reset_before: the step before which all graphs are dropped.
    """

    seed: int
    loop: str
    options: Mapping[str, Any]
    requests: tuple[Asked, ...]
    sleeps: Mapping[tuple[int, int], float]
    reset_before: int | None = None

    def __str__(self) -> str:
        head = f"# seed {self.seed}: {self.loop}, {dict(self.options)}, reset before {self.reset_before}\n"
        sleeps = f"# sleeps by (step, rank): {dict(self.sleeps)}\n"
        return head + sleeps + "\n".join(f"# {index}: {asked}" for index, asked in enumerate(self.requests))


def schedule_of(seed: int, ranks: int) -> Schedule:
    """The schedule of a seed; all ranks draw the same one."""
    random = Random(seed)
    loop = random.choice(tuple(LOOPS))
    shapes = LOOPS[loop]["shapes"]
    options: dict[str, Any] = {
        "shape": "auto" if random.random() < 0.4 else random.choice(shapes),
        "overlap": random.random() < 0.6,
    }
    hurry = random.choice((0, 1, 4, 10))  # steps between arrivals, at the most
    mixed = random.random() < 0.6
    requests, step = [], 0
    for _ in range(random.randint(1, 12)):
        step += random.randint(0, hurry)
        requests.append(_asked(random, step, mixed))
    places = [(random.randrange(step + 20), random.randrange(ranks)) for _ in range(random.choice((0, 1, 4)))]
    return Schedule(
        seed,
        loop,
        options,
        tuple(requests),
        {place: round(random.uniform(0.0, 0.05), 3) for place in places},
        random.randrange(1, step + 10) if random.random() < 0.08 else None,
    )


def _asked(random: Random, arrives: int, mixed: bool) -> Asked:
    how = Sampling()
    if mixed and random.random() < 0.5:
        chosen = random.choice(_HOW)
        how = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, seed=random.randrange(2**40))
    new_tokens = min(random.randint(1, 2 * NEW_TOKENS), NEW_TOKENS)
    ends: dict[str, int] = {}
    if random.random() < 0.2:
        ends["aborted_before"] = arrives + random.randint(0, 12)
    elif random.random() < 0.1:
        ends["aborts_after"] = random.randint(1, new_tokens)
    elif random.random() < 0.1:
        ends["raises_after"] = random.randint(1, new_tokens)
    stop = tuple(random.sample(STOPS, random.randint(1, 2))) if random.random() < 0.3 else ()
    return Asked(arrives, random.randrange(TEXTS), random.choice(LENGTHS), new_tokens, how, stop, **ends)
