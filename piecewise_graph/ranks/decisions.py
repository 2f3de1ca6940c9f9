"""What rank 0 decides at every step, through memory that the ranks of one host map.

Note [One word]
An exchange over a process group at every step would cost a part of the step. Here a decision is one aligned
8-byte word: the number of the step in its upper half, the value in its lower half. A reader sees both or
neither, so there is no lock. The words form a ring, in which rank 0 may be ahead. Each other rank publishes
how many decisions it has read, so that rank 0 overwrites none that is unread.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from piecewise_graph.errors import RankError

CELLS = 256  # decisions that rank 0 may be ahead
LARGEST = (1 << 32) - 1
_APART = 8  # words between what two ranks write: a cache line
_FOLDERS = ("/dev/shm", None)  # None: that for temporary files
_SPIN, _NAP = 2e-3, 2e-4  # seconds


class Decisions:
    """A sequence of whole numbers that rank 0 decides, the same on all ranks. Made by `Ranks.decisions`.

    Args:
        words: of the file that all ranks map; None = this process is alone.
        timeout: seconds that a rank waits for another one.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, words: memoryview | None = None, timeout: float = 600.0
    ) -> None:
        self._rank, self._count, self._words, self._timeout = rank, count, words, timeout
        self._step = 0
        self._lost: RankError | None = None

    def next(self, mine: int) -> int:
        """The decision of the next step: what rank 0 passes as `mine`, from 0 to 4294967295.

        Raises:
            RankError: a rank did not take part in time, or the number is another one.
        """
        if self._words is None:
            return mine
        if self._lost is not None:
            raise self._lost
        self._step += 1
        step, cell = self._step & LARGEST, self._count * _APART + self._step % CELLS
        if self._rank == 0:
            if not 0 <= mine <= LARGEST:
                raise RankError.bad_decision(mine, LARGEST)
            self._wait(lambda: not self._behind(), self._behind)
            self._words[cell] = step << 32 | mine
            return mine
        words = self._words
        self._wait(lambda: words[cell] >> 32 == step, lambda: [0])
        mine = words[cell] & LARGEST
        words[self._rank * _APART] = self._step
        return mine

    def _behind(self) -> list[int]:
        """Ranks that have not read what the next decision would overwrite."""
        assert self._words is not None
        read = self._words[: self._count * _APART : _APART]
        return [rank for rank in range(1, self._count) if read[rank] < self._step - CELLS]

    def _wait(self, ready: Callable[[], bool], late: Callable[[], list[int]]) -> None:
        began = time.monotonic()
        while not ready():
            waited = time.monotonic() - began
            if waited > self._timeout:
                self._lost = RankError.silent(late(), self._step, self._timeout)
                raise self._lost
            time.sleep(0.0 if waited < _SPIN else _NAP)


@contextmanager
def file_for(count: int) -> Iterator[str | None]:
    """The path of a file of zeros for the decisions of `count` ranks; None where none can be written.

    It is gone afterwards. Who has mapped it keeps its content.
    """
    for folder in _FOLDERS:
        with suppress(OSError), tempfile.NamedTemporaryFile(prefix="piecewise_graph_", dir=folder) as file:
            # Zeros, not a hole: a full file system refuses them now, and does not end a rank later.
            file.write(bytes(8 * (count * _APART + CELLS)))
            file.flush()
            yield file.name
            return
    yield None


def mapped(path: str | None) -> memoryview | None:
    """The words of a file, shared with who else maps it; None where there is no such file."""
    if path is None:
        return None
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    except (OSError, ValueError):
        return None
