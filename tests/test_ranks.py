"""Processes that run one model together decide together: on no rank a hang, on no rank another answer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Answer, on_ranks, only_on, values
from torch import Tensor, distributed, nn
from torch.nn import functional

import piecewise_graph as pg
from piecewise_graph.errors import PiecewiseError

WIDTH, BUCKETS = 8, [4, 8]
TIMEOUT = 20.0


class Summed(nn.Module):
    """Each rank multiplies by a weight of its own, and all sum."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(distributed.get_rank())
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight)
        distributed.all_reduce(y)
        return y.relu()


def rows(tokens: int) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))


def served(compiled: Any, model: nn.Module, counts: Sequence[int]) -> dict[str, int]:
    """Counters of calls whose answers are those of the model."""
    before = pg.counters.snapshot()
    for tokens in counts:
        x = rows(tokens)
        torch.testing.assert_close(compiled(x), model(x))
    after = pg.counters.snapshot()
    return {name: moved for name in after if (moved := after[name] - before.get(name, 0))}


def compiled_here(model: nn.Module, **options: Any) -> Any:
    usual = {"compiler": "eager", "capture_sizes": BUCKETS, "max_tokens": 8, "rank_timeout": TIMEOUT}
    return pg.compile(model, token_dim={"x": 0}, **usual | options)


def run(counts: Sequence[int], patch: tuple[str, Any] | None = None, **options: Any) -> dict[str, int]:
    """Serve calls on a model of this rank; `patch` on rank 1 alone."""
    model = Summed()
    around: AbstractContextManager[None] = nullcontext() if patch is None else only_on(1, *patch)
    with around:
        compiled = compiled_here(model, **options)
        found = served(compiled, model, counts)
    assert str(pg.explain(compiled))
    return found


def same_on_all(answers: Sequence[dict[str, int]]) -> dict[str, int]:
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_over_ranks_lies_inside_of_a_segment(ranks: int) -> None:
    counts = [3, 3, 2, 4, 7, 8, 5, 1]
    found = same_on_all(values(ranks, run, counts))
    assert found["segments"] == found["captures"] / len(BUCKETS) == 1
    assert found["replays"] == len(counts) - len(BUCKETS)  # a bucket's first call captures it
    assert "fallbacks" not in found and "unpadded_segments" not in found


def _says_mixed(original: Any, *args: Any, **kwargs: Any) -> str:
    return "mixes_tokens"


def test_padding_that_one_rank_refuses_is_refused_by_all() -> None:
    patch = "piecewise_graph.recorder.rehearse.padding_reason", _says_mixed
    found = same_on_all(values(2, run, [3, 3, 2, 8], patch))
    assert found["unpadded_segments:mixes_tokens"] == 2 == found["replays"] and "captures" not in found


def _fails(original: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no capture here")


@pytest.mark.parametrize("counts", [[3, 3, 4, 7], [4, 4, 8, 8]])
def test_a_capture_that_fails_on_one_rank_fails_on_all(counts: list[int]) -> None:
    found = same_on_all(values(2, run, counts, ("piecewise_graph.graph_pool.GraphPool.capture", _fails)))
    assert (
        found["failed_captures"] == 2 and found["fallbacks:capture_failed"] == 2 and "captures" not in found
    )


def _sleeps(original: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(1.0)
    return original(*args, **kwargs)


def test_a_rank_may_be_late() -> None:
    late = values(2, run, [3, 8, 3], ("piecewise_graph.graph_pool.GraphPool.capture", _sleeps))
    assert same_on_all(late)["captures"] == 2


def explained(patch: tuple[str, Any]) -> str:
    model = Summed()
    with only_on(1, *patch):
        compiled = compiled_here(model)
        served(compiled, model, [3, 3])
    return str(pg.explain(compiled))


def _planned() -> tuple[list[Any], str, str]:
    model = Summed()
    compiled = compiled_here(model)
    compiled(rows(3))
    plan = pg.plan(compiled, [8, 4])
    return [plan.ranks, (plan.pool_bytes, plan.buffer_bytes)], str(plan), str(pg.explain(compiled))


def test_plan_and_explain_say_what_each_rank_holds() -> None:
    for rank, (numbers, plan, explained) in enumerate(values(2, _planned)):
        of_ranks, own = numbers
        assert len(of_ranks) == 2 and of_ranks[rank] == own and "  rank 1: " in plan
        assert f"  rank {rank} of 2\n" in explained


def test_explain_says_on_which_rank_a_capture_failed() -> None:
    for page in values(2, explained, ("piecewise_graph.graph_pool.GraphPool.capture", _fails)):
        assert "rank 0: captured; rank 1: RuntimeError: no capture here" in page


def _errors(answers: Sequence[Answer]) -> list[str]:
    assert all(answer.error is not None and answer.seconds < TIMEOUT for answer in answers), answers
    return [str(answer.error) for answer in answers]


def test_a_compile_that_fails_on_one_rank_raises_on_all() -> None:
    """At once, not when the others have waited for a timeout."""
    patch = "piecewise_graph._torch.compile_segment", _fails
    other, failing = _errors(on_ranks(2, run, [3], patch))
    assert "RankError: rank 1 could not compile a trace: RuntimeError: no capture here" in other
    assert "RuntimeError: no capture here" in failing and "RankError" not in failing.partition("\n")[0]


def _other_size() -> Any:
    return run([3 if distributed.get_rank() else 8])


def test_ranks_that_are_called_with_other_sizes_raise() -> None:
    for error in _errors(on_ranks(2, _other_size)):
        assert (
            "RankError: the ranks do not agree about which bucket to capture: rank 0: 8; rank 1: 4." in error
        )


def _called_twice() -> list[str]:
    model, heard = Summed(), []
    compiled = compiled_here(model)
    with only_on(1, "piecewise_graph.runtime.bucket_capture.rehearse", _fails):
        for tokens in (3, 8):
            try:
                compiled(rows(tokens))
            except (PiecewiseError, RuntimeError) as error:
                heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_after_a_forward_that_failed_on_one_rank_all_raise() -> None:
    """The others wait for sums that it has not made. The next ones are no answer to these."""
    began = time.monotonic()
    (failed, again), (own, own_again) = values(2, _called_twice)
    told = "RankError: rank 1 could not capture 4 tokens: RuntimeError: no capture here"
    assert failed.startswith(told) and again == failed and own_again.startswith(told)
    assert "no capture here" in own and not own.startswith("RankError") and time.monotonic() - began < TIMEOUT


def _dies(original: Any, *args: Any, **kwargs: Any) -> Any:
    os._exit(1)


def test_a_rank_that_dies_ends_the_wait_of_the_others() -> None:
    patch = "piecewise_graph.graph_pool.GraphPool.capture", _dies
    waiting, gone = on_ranks(2, run, [3, 3], patch)
    assert gone.error == "died"
    assert (
        "RankError: a rank did not answer when all were to" in str(waiting.error)
        and waiting.seconds < TIMEOUT
    )


def _hangs(original: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(12.0)
    return original(*args, **kwargs)


def _impatient() -> Any:
    return run([3], ("piecewise_graph.graph_pool.GraphPool.capture", _hangs), rank_timeout=2.0)


def test_a_rank_that_hangs_ends_the_wait_of_the_others_after_the_timeout() -> None:
    waiting, late = on_ranks(2, _impatient)
    assert "option rank_timeout" in str(waiting.error)
    assert 2.0 <= waiting.seconds < late.seconds - 5.0  # both compile first, for as long as that takes


def _larger(original: Any, *args: Any, **kwargs: Any) -> list[Any]:
    from dataclasses import replace

    found = original(*args, **kwargs)
    return [replace(each, graph_bytes=each.graph_bytes * 100) if each.tokens == 8 else each for each in found]


def test_a_budget_that_one_rank_exceeds_holds_for_all() -> None:
    answers = values(2, _on_budget)
    assert same_on_all(answers)["fallbacks:over_budget"] == 2


def _on_budget() -> Any:
    patch = "piecewise_graph.recorder.memory_plan._try_out", _larger
    return run([3, 8, 3, 8], patch, max_graph_bytes=64 * WIDTH * 4)


def _cached(folder: str) -> dict[str, int]:
    own = f"{folder}/{distributed.get_rank()}"
    if (
        not Path(own).exists() and distributed.get_rank() == 0
    ):  # an earlier process filled the cache of rank 0
        Path(own).mkdir(mode=0o700)
    return run([3, 3, 8], compiler="inductor", cache_dir=own)


@pytest.mark.slow
def test_a_cache_that_one_rank_has_changes_nothing(tmp_path: Path) -> None:
    first = values(2, _cached, str(tmp_path))
    for file in (tmp_path / "1").iterdir():
        file.unlink()
    second = values(2, _cached, str(tmp_path))
    assert [each.get("compiles", 0) for each in first] == [1, 1]
    assert [each.get("compiles", 0) for each in second] == [0, 1]
    assert [each["replays"] for each in (*first, *second)] == [1] * 4
