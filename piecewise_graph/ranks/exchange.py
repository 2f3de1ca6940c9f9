"""Ranks: processes that run one model together decide together.

Note [Decide once]
A rank that captures, pads or falls back where another one does not sends other sizes than that one expects,
or another number of collectives: the model hangs, or computes garbage. So what a rank finds out by looking or
by timing is exchanged before it is acted upon. A replay exchanges nothing beyond its collectives: it follows
from what was decided.

Each exchange has a name, and all ranks make the same ones in the same order. A rank that fails in between
sends its error with its next exchange, and all raise there. Exchanges have a process group of their own, on
the host (gloo), with a timeout: a rank that dies, or hangs, ends the wait of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch import distributed, nn

from piecewise_graph import _torch
from piecewise_graph.errors import RankError
from piecewise_graph.ranks.decisions import Decisions, file_for, mapped

T = TypeVar("T")
_Wait = tuple[str, Callable[[], int | None]]  # what sums, and the rank that one has waited for in vain


@dataclass(frozen=True)
class _Reply:
    """What a rank says in an exchange: its answer to a question, or why it cannot answer."""

    question: str
    answer: Any = None
    error: str | None = None


class Ranks:
    """The processes of one group. Without one (`ALONE`), this process decides by itself.

    Args:
        exchange: sends a message to all ranks and returns those of all, by rank.
        timeout: seconds that a rank waits for the others.
        members: their numbers in the whole job.
        waits: what `check` asks, shared by all who watch sums of this group.

    Attributes:
        rank, count: of this process in the group.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        exchange: Callable[[_Reply], Sequence[_Reply]] | None = None,
        timeout: float = 600.0,
        members: Sequence[int] = (),
        waits: list[_Wait] | None = None,
    ) -> None:
        self.rank, self.count, self.members = rank, count, tuple(members)
        self._exchange, self._timeout = exchange, timeout
        self._lost: RankError | None = None
        self._waits: list[_Wait] = [] if waits is None else waits

    @property
    def several(self) -> bool:
        """There are others to decide with."""
        return self._exchange is not None

    def answers(self, question: str, mine: T) -> list[T]:
        """Each rank's answer, by rank.

        Args:
            question: the same on all ranks.
            mine: of a few bytes; it is pickled.

        Raises:
            RankError: a rank has failed, is asked something else, or did not answer in time. All ranks raise.
        """
        if self._exchange is None:
            return [mine]
        return [message.answer for message in self._messages(_Reply(question, mine))]

    def all(self, question: str, mine: bool) -> bool:
        """Whether every rank says yes."""
        return all(self.answers(question, mine))

    def first(self, question: str, mine: T) -> T:
        """What rank 0 says."""
        return self.answers(question, mine)[0]

    def same(self, question: str, mine: object) -> None:
        """See that all ranks say the same.

        Raises:
            RankError: they do not; all ranks raise.
        """
        answers = self.answers(question, mine)
        if any(answer != answers[0] for answer in answers):
            raise RankError.differs(question, answers)

    def decisions(self) -> Decisions:
        """For what rank 0 decides at every step of a loop, without an exchange per step.

        Collective; all ranks are on one host.

        Raises:
            RankError: they cannot share a file; all ranks raise.
        """
        if self._exchange is None:
            return Decisions()
        with file_for(self.count) if self.rank == 0 else nullcontext() as made:
            path = self.first("name a file for decisions", made)
            words = mapped(path)
            if not self.all("map the file for decisions", words is not None):
                raise RankError.no_shared_file(path)
        return Decisions(self.rank, self.count, words, self._timeout)

    @contextmanager
    def together(self, what: str, *, sums: bool = False) -> Iterator[None]:
        """The block succeeds on all ranks, or raises on all of them.

        Args:
            sums: the block sums over ranks. Where one leaves it early, the others wait for rows that never
                come, and would take the next ones for them. So all raise from then on.

        Raises:
            RankError: it failed on another rank.
        """
        try:
            yield
            self.answers(what, True)
        except RankError as error:  # which all ranks raise
            self._lost = error if sums else self._lost
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"[:1000]
            if self._exchange is not None and self._lost is None:
                with suppress(RankError):  # what has failed here is the news
                    self._send(_Reply(what, error=cause))
                if sums:
                    self._lost = RankError.failed(self.rank, what, cause)
            raise

    def watch(self, what: str, late: Callable[[], int | None]) -> None:
        """Have `check` ask for the rank that a sum on the device has waited for in vain, if there is one.

        Args:
            what: the sums that may wait, for people.
        """
        if (what, late) not in self._waits:
            self._waits.append((what, late))

    def __str__(self) -> str:
        kinds = ", ".join(what for what, _ in self._waits)
        return f"rank {self.rank} of {self.count}" + (f"; by kernels: {kinds}" if kinds else "")

    def check(self) -> None:
        """See that no sum on the device has waited in vain, which leaves wrong numbers behind.

        It looks and does not wait: what is still running is not known yet.

        Raises:
            RankError: one has; it raises from now on.
        """
        for _, late in self._waits:
            if self._lost is None and (rank := late()) is not None:
                self._lost = RankError.late(rank)
        if self._lost is not None:
            raise self._lost

    def _messages(self, mine: _Reply) -> Sequence[_Reply]:
        found = self._send(mine)
        for rank, message in enumerate(found):
            if message.error is not None:
                raise RankError.failed(rank, message.question, message.error)
        if any(message.question != mine.question for message in found):
            raise RankError.differs("what they decide", [message.question for message in found])
        return found

    def _send(self, mine: _Reply) -> Sequence[_Reply]:
        self.check()
        assert self._exchange is not None
        try:
            return self._exchange(mine)
        except RuntimeError as error:  # torch.distributed has no other for a timeout, or a rank that is gone
            self._lost = RankError.lost(mine.question, str(error))
            raise self._lost from error


ALONE = Ranks()


def ranks_of_groups(groups: Sequence[str], timeout: float) -> Ranks:
    """Those who run a trace together: the largest of the groups that its collectives name.

    Collective: the first call with a group and a timeout makes a group for exchanges, on all of its ranks.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    named = {name: _torch.process_group(name) for name in groups}
    if not named:
        return ALONE
    largest = max(named, key=lambda name: named[name].size())  # the first of several: names differ by rank
    return ALONE if named[largest].size() == 1 else _ranks(named[largest], timeout)


def ranks_of(model: nn.Module, timeout: float = 600.0) -> Ranks:
    """The processes that hold parts of a model's weights; this one alone where none is sharded.

    For a loop of one's own that several ranks run: what depends on a clock, or on when a result arrives, is
    to be the same on all of them (`ranks_of(model).first("the next batch", mine)`).

    Collective: the first call for a group and a timeout makes a group for exchanges, on all of its ranks.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    sharded = next((p for p in model.parameters() if _torch.is_sharded(p)), None)
    mesh: Any = getattr(sharded, "device_mesh", None)
    return (
        ALONE if mesh is None or mesh.ndim != 1 else ranks_of_groups([mesh.get_group().group_name], timeout)
    )


@cache
def _ranks(group: Any, timeout: float) -> Ranks:
    members = distributed.get_process_group_ranks(group)
    others = distributed.new_group(
        members, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
    )

    def exchange(mine: _Reply) -> Sequence[_Reply]:
        found: list[Any] = [None] * len(members)
        distributed.all_gather_object(found, mine, group=others)
        return found

    return Ranks(distributed.get_rank(group), len(members), exchange, timeout, members, _waits_of(group))


@cache
def _waits_of(_: Any) -> list[_Wait]:
    """What those of a group watch, whatever timeout they ask with."""
    return []
