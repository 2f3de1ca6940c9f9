"""Rank 0 decides at every step, and the others read it in memory: in order, and nobody waits for ever."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks, values
from torch import distributed

import piecewise_graph as pg
from piecewise_graph.errors import RankError
from piecewise_graph.ranks import decisions
from piecewise_graph.ranks.exchange import Ranks, ranks_of_groups

TIMEOUT = 3.0


def _ranks(timeout: float = TIMEOUT) -> Ranks:
    world: Any = distributed.group.WORLD
    return ranks_of_groups([world.group_name], timeout)


def test_a_process_decides_by_itself() -> None:
    alone = pg.Ranks().decisions()
    assert [alone.next(number) for number in (3, 0, 1 << 40)] == [3, 0, 1 << 40]


def _numbers(count: int, late: int) -> list[int]:
    """What this rank is told; one of the ranks sleeps now and then."""
    rank, found = distributed.get_rank(), []
    told = _ranks(20.0).decisions()
    for step in range(count):
        if rank == late and step % 100 == 7:
            time.sleep(0.01)
        found.append(told.next((step * 7) % 5 if rank == 0 else 99))
    return found


@pytest.mark.parametrize(("ranks", "late"), [(2, 0), (2, 1), (3, 2)])
def test_all_ranks_have_the_decisions_of_rank_0_in_order(ranks: int, late: int) -> None:
    count = 3 * decisions.CELLS + 5  # around the ring
    assert values(ranks, _numbers, count, late) == [[(step * 7) % 5 for step in range(count)]] * ranks


def _ahead() -> list[int]:
    """Decisions that rank 0 had taken when rank 1 took its first."""
    told = _ranks(20.0).decisions()
    steps = [told.next(step) for step in range(decisions.CELLS)] if distributed.get_rank() == 0 else []
    distributed.barrier()
    return steps or [told.next(0) for _ in range(decisions.CELLS)]


def test_rank_0_may_be_ahead_by_the_ring() -> None:
    assert values(2, _ahead) == [[*range(decisions.CELLS)]] * 2


def _gone(rank: int, after: int) -> None:
    """One rank dies after some decisions."""
    told = _ranks().decisions()
    for step in range(4 * decisions.CELLS):
        if distributed.get_rank() == rank and step == after:
            os._exit(1)
        told.next(1)


@pytest.mark.parametrize(("rank", "waiting"), [(0, 1), (1, 0)])
def test_a_rank_that_dies_ends_the_wait_of_the_others(rank: int, waiting: int) -> None:
    answers = on_ranks(2, _gone, rank, 5)
    error, seconds = str(answers[waiting].error), answers[waiting].seconds
    assert answers[rank].error == "died" and TIMEOUT <= seconds < 10 * TIMEOUT
    step = 6 if waiting else 5 + decisions.CELLS + 1
    assert f"RankError: a rank did not answer when all were to take decision {step}: rank {rank}" in error
    assert f"within {TIMEOUT:g} seconds" in error and "option rank_timeout" in error


def _without_file() -> str:
    def no_room(**_: Any) -> Any:
        raise OSError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.NamedTemporaryFile", no_room)
        with pytest.raises(RankError) as caught:
            _ranks().decisions()
    return str(caught.value)


def test_ranks_that_cannot_share_a_file_say_so() -> None:
    for error in values(2, _without_file):
        assert "rank 0 cannot write one" in error and "on one host" in error


def test_a_full_file_system_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_FOLDERS", (str(tmp_path),))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with decisions.file_for(2) as path:
            assert path is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())


def _of_another_host() -> str:
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == 1:
            patch.setattr("piecewise_graph.ranks.exchange.mapped", lambda path: None)
        with pytest.raises(RankError) as caught:
            _ranks().decisions()
    return str(caught.value)


def test_ranks_of_several_hosts_say_so() -> None:
    errors = values(2, _of_another_host)
    assert errors[0] == errors[1] and "not all of them can map" in errors[0]
    assert not Path(errors[0].partition("can map ")[2].split(".\n")[0]).exists()


def test_a_number_that_does_not_fit_is_refused() -> None:
    words = memoryview(bytearray(8 * 1024)).cast("Q")
    with pytest.raises(RankError, match="decide for 0 to 4294967295"):
        decisions.Decisions(0, 2, words, 1.0).next(1 << 32)
