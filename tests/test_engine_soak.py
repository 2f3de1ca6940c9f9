"""The engine for a long time: nothing grows, and every request still gets the tokens of a lone run."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Iterator

import pytest
import torch
from eagle_cases import (
    QUICK,
    all_free,
    one_state_for_all_tests,
    resources,
    small_prompts,
)
from eagle_engine_cases import CHAIN, lone, make
from internals import count_checked_calls, count_frozen_plans

from piecewise_graph.eagle import Request, Speculator


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


def soak(loop: Speculator, count: int) -> list[Request]:
    """Requests of all lengths come whenever there are few; a tenth of them are aborted."""
    rng, engine = random.Random(0), loop.engine(overlap=True)
    some: list[Request] = []
    came = 0
    while came < count or engine.unfinished:
        while came < count and engine.unfinished < 2 * loop.max_requests:
            [prompt] = small_prompts([rng.randint(1, 6)], came % 50)
            request = engine.add_request(prompt, max_new_tokens=rng.randint(1, 6))
            came += 1
            if came % 100 == 0:
                some.append(request)
            elif came % 10 == 0:
                engine.abort(request)
        engine.step()
    return some


def alive() -> tuple[int, int, int]:
    """(objects of any kind, plans and checked calls among them: new sizes make both)."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), count_frozen_plans(objects), count_checked_calls(objects)


def check_soak(count: int, mode: str) -> None:
    made = make(graphs={"prefill": mode}, max_requests=16, batch_sizes=[16], **QUICK)
    made.prepare()
    soak(made, 100)  # whatever is made once is made
    objects, plans, calls = alive()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    some = soak(made, count)
    assert all_free(made)
    objects_now, plans_now, calls_now = alive()
    # Some are made once, however long it runs; those of a plan, a checked call, a request that is kept.
    of_sizes = 45 * (plans_now - plans) + 10 * (calls_now - calls)
    assert objects_now - objects < 300 + of_sizes + 20 * len(some)
    assert plans_now <= resources(made).limits.prefill_rows
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 30_000  # KiB
    if torch.cuda.is_available():
        assert torch.cuda.memory_allocated() == on_gpu
    assert all(request.tokens == lone(request, CHAIN) for request in some)


@pytest.mark.parametrize("mode", ["compiled", "piecewise"])
def test_soak(mode: str) -> None:
    check_soak(500 if torch.cuda.is_available() else 250, mode)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "piecewise"])
def test_long_soak(mode: str) -> None:
    check_soak(10_000, mode)
