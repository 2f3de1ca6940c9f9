"""What compare_commits runs in a process of its own: benchmarks of one commit, imported from PYTHONPATH.

A process that is given a core times host work a few rounds at a time. It prints TURN when it is about to, and
goes on when it has read a line: two such processes can live side by side, and only one of them works.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

TURN = "@turn"
Timings = dict[str, Any]
_ROUNDS = 10  # of a turn


def main(told: str) -> None:
    """
    Args:
        told: JSON of `cache` (the folder of what compilers make), `core` (null: any) and `runs`, each a
            benchmark's name and its arguments.
    """
    given = json.loads(told)
    importlib.import_module("benchmarks.bench_backend")  # it moves the compilers' caches to an empty folder
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": given["cache"], "TRITON_CACHE_DIR": given["cache"] + "/triton"}
    for name, *arguments in given["runs"]:
        benchmark: Any = importlib.import_module(f"benchmarks.{name}")
        if given["core"] is not None:
            benchmark.alternate_host = by_turns(benchmark.alternate_host, given["core"])
        benchmark.main(arguments)


def by_turns(alternate_host: Callable[..., Timings], core: int) -> Callable[..., Timings]:
    """`benchmarks.common.alternate_host`, some rounds per turn: medians of its medians and quartiles."""

    def taking_turns(sides: Mapping[str, Any], *, rounds: int, **options: Any) -> Timings:
        os.sched_setaffinity(0, {core})
        parts = []
        for _ in range(max(rounds // _ROUNDS, 1)):
            print(TURN, flush=True)
            sys.stdin.readline()
            parts.append(alternate_host(sides, rounds=_ROUNDS, **options))
        return {name: _median([part[name] for part in parts]) for name in sides}

    return taking_turns


def _median(timings: list[Any]) -> Any:
    fields = ("median", "low", "high")
    return type(timings[0])(*(statistics.median(getattr(t, field) for t in timings) for field in fields))


if __name__ == "__main__":
    main(sys.argv[1])
