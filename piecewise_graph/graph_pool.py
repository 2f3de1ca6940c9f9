"""GraphPool: the memory that captured graphs share, the stream they are captured on, their lifetime.

Note [Sharing a pool]
All buckets of a model, and all models that were given the same pool, reuse the same memory: graphs are
replayed one after another, never side by side, and whatever outlives a forward is copied out. So the
pool needs as much as its largest bucket, not the sum. The price: everything a graph wrote is
overwritten by the next replay of *any* graph in the pool.

Note [Off the default stream]
Graphs launched one after another into CUDA's legacy default stream leave the device idle between them: on
an H200, 18 us per boundary where each graph runs 8 GEMVs, against 1.3 us on any other stream (and 5.0 us of
host time per launch against 3.2). A caller on the default stream is therefore served on the pool's stream,
with one event before and one after. A caller on another stream is served there.

Note [cuBLAS workspaces]
A captured GEMM holds the address of a workspace that torch keeps per stream. The workspaces are cleared
before the captures, so that the first captured GEMM allocates one inside the pool. They are cleared again
afterwards, so that no other GEMM writes there. Work that is under way may still use one: its memory goes back
to its stream, where whoever gets it next runs later.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.errors import GraphPoolError
from piecewise_graph.kernels.detour import Detour
from piecewise_graph.kernels.early_reads import unwritten as reads_only
from piecewise_graph.kernels.turns import Turns
from piecewise_graph.ranks.collectives import alone
from piecewise_graph.sizes import kept
from piecewise_graph.stand_in import StandIn

Tensors = Sequence[Tensor]
Run = Callable[..., Tensors]


class Owner(Protocol):
    """Whoever captured into a pool; told to let go of its graphs when the pool is released."""

    def drop_graphs(self) -> None: ...


class GraphPool:
    """Memory, stream and lifetime of captured graphs; pass one to several models to share it.

    Args:
        poison: debugging aid for the CPU's stand-in graphs: fill each segment's outputs with NaN (or
            the largest integer) once their last reader ran, so that a stale read shows.

    The pool belongs to the device of its first model. After `release()` it may be used again.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison
        self._device: torch.device | None = None
        self._memory: torch.cuda.MemPool | None = None
        self._spent: list[torch.cuda.MemPool] = []  # of graphs made before a capture that could not be ended
        self._stream: torch.cuda.Stream | None = None
        self._detour: Detour | None = None
        self._sentinel: Callable[[], None] | None = None
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._stand_ins: weakref.WeakSet[StandIn] = weakref.WeakSet()
        self._turns = Turns(_torch.stream_address)

    @property
    def device(self) -> torch.device | None:
        """The device that the pool serves; None before its first capture."""
        return self._device

    def bytes(self) -> int:
        """Device bytes held by captured graphs; on a CPU what the outputs of their stand-ins take."""
        if self._memory is None:
            return sum(stand_in.owned_bytes for stand_in in self._stand_ins)
        return sum(_torch.pool_bytes(memory.id) for memory in (self._memory, *self._spent))

    def join(self, device: torch.device, owner: Owner) -> None:
        """Called by a model before it captures.

        Raises:
            GraphPoolError: the pool serves another device.
        """
        if self._device is not None and self._device != device:
            raise GraphPoolError.wrong_device(str(self._device), str(device))
        self._device = device
        self._owners.add(owner)
        if device.type == "cuda" and self._memory is None:
            self._stream = torch.cuda.Stream(device)
            self._detour = Detour(self._stream, _torch.stream_setter, _torch.current_device)
            self._turns.on(device)
            self._take_memory(device)

    def _take_memory(self, device: torch.device) -> None:
        self._sentinel = None  # should the new one fail, no memory is taken for it once more
        self._memory = torch.cuda.MemPool()
        self._sentinel = self._capture_sentinel(device)

    def _capture_sentinel(self, device: torch.device) -> Callable[[], None]:
        """A graph that lives as long as the memory.

        When the last graph of a pool dies, torch retires the pool's id, MemPool or not, and the next capture
        into it fails in a way that the process does not survive. Graphs come and go here, so one stays.
        Its tensor belongs to the pool's stream, because it is freed while that stream may not have filled it.
        """
        torch.cuda.synchronize(device)
        with torch.cuda.stream(self._stream):
            counter = torch.zeros(1, device=device)
            return self._capture_graph(lambda: (counter.zero_(),), ())[0]

    def using(self) -> Turns:
        """Hold the pool for one forward: its graphs run one after another.

        Entering says whether a forward of this thread holds it already: the new one is called from inside of
        a splitting op, and a replay would overwrite what the outer one has computed.
        """
        return self._turns

    @contextmanager
    def session(self) -> Iterator[None]:
        """Surround the warm-up and the captures of one bucket: own stream, no garbage collection."""
        if self._stream is None:  # a CPU's stand-ins survive a garbage collection
            with self.using():
                yield
            return
        with self.using(), collector_off():
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:  # memory that the caller frees now may still be in use
                current.wait_stream(self._stream)

    def run_off_default_stream(self, calls: Iterable[Callable[[], Any]]) -> None:
        """Make `calls` in order, inside `using()`, ordered with the caller's stream.

        See Note [Off the default stream].
        """
        if self._detour is not None and self._turns.address == 0:
            self._detour.run(calls)
        else:
            for call in calls:
                call()

    def capture(
        self, run: Run, inputs: Sequence[object], *, warm: Tensors | None = None, written: Tensors = ()
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Capture `run(*inputs)`. Call it inside `session()`, after a warm-up of the same shapes.

        Args:
            written: what `run` writes beside its outputs; left as it is, because a capture runs nothing.
            warm: what the warm-up returned. A CPU's stand-in begins with copies of it and runs nothing, as
                a capture runs nothing: for runs with effects that must not happen twice.

        Returns:
            (replay, outputs): `replay()` recomputes `outputs` in place from what `inputs` hold then.
        """
        if self._memory is None:
            with kept(written if warm is None else ()), alone():
                outputs = run(*inputs) if warm is None else [tensor.clone() for tensor in warm]
            stand_in = StandIn(run, inputs, outputs)
            self._stand_ins.add(stand_in)
            return stand_in, outputs
        return self._capture_graph(run, inputs)

    def _capture_graph(
        self, run: Run, inputs: Sequence[object]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        memory: Any = self._memory
        try:
            # thread_local: other threads (a NCCL watchdog, a pinned-memory loader) may go on calling CUDA.
            graph.capture_begin(memory.id, capture_error_mode="thread_local")
            outputs = run(*inputs)
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        return graph.replay, outputs

    def capture_call(
        self,
        body: Callable[[], Any],
        *,
        device: torch.device | str,
        name: str = "captured call",
        unwritten: Iterable[Tensor] = (),
    ) -> CapturedCall:
        """Capture a callable as one graph in this pool.

        `body` runs once as a warm-up, effects included, and is then captured. It reads and writes tensors at
        fixed addresses. The caller keeps these tensors alive. What `body` returns is ignored. Call what this
        returns to replay.

        Args:
            device: the device that `body` works on. On a CPU a replay calls `body` again.
            name: names the replay in errors, and in the trace of a profiler.
            unwritten: tensors that `body` reads and whose memory it does not write, a model's weights for
                instance. Kernels may read them before those in front of them are done.

        Raises:
            GraphPoolError: the pool serves another device, or the caller is capturing a graph already.
            torch.OutOfMemoryError: the graph does not fit.
        """
        device = torch.device(device)
        if capturing_elsewhere(device):
            raise GraphPoolError.inside_capture(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        call = CapturedCall(self, name)
        self.join(device, call)
        with self.session(), reads_only(unwritten):
            body()
            with clean_cublas(device):
                call.replay, _ = self.capture(lambda: (body(), ())[1], (), warm=())
        return call

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed; where that fails too, later captures need other memory."""
        assert self._memory is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks that the graph is empty
            try:
                graph.capture_end()
            except RuntimeError:
                _torch.forget_capture(graph, self._memory)
                if self._sentinel is not None and self._device is not None:
                    self._spent.append(self._memory)
                    self._take_memory(self._device)

    def drop_graphs(self) -> None:
        """Have everybody who captured here let go of their graphs; the memory stays."""
        for owner in list(self._owners):
            owner.drop_graphs()

    def release(self) -> None:
        """Drop every graph captured in this pool and give its memory back; models capture anew.

        Raises:
            GraphPoolError: called while one of the graphs is in use.
        """
        with self._turns.lock:
            if self._turns.taken:
                raise GraphPoolError.busy()
            self.drop_graphs()
            held, self._spent = [] if self._memory is None else [self._memory, *self._spent], []
            self._memory = self._stream = self._detour = self._device = self._sentinel = None
            self._turns.on(None)
            if held:
                torch.cuda.synchronize()
                held.clear()
                gc.collect()
                torch.cuda.empty_cache()


class CapturedCall:
    """What `GraphPool.capture_call` returns: calling it replays the graph, ordered with the caller's stream.

    Attributes:
        replay: the bare launch; None once the graph was dropped.
    """

    def __init__(self, pool: GraphPool, name: str) -> None:
        self.name, self._pool = name, pool
        self.replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        """
        Raises:
            GraphPoolError: the graph was dropped, or another graph of the pool is in use.
        """
        with _torch.named_range(self.name), self._pool.using() as nested:
            if nested:
                raise GraphPoolError.inside_forward(self.name)
            if self.replay is None:
                raise GraphPoolError.dropped(self.name)
            self._pool.run_off_default_stream((self.replay,))

    def drop_graphs(self) -> None:
        self.replay = None


def capturing_elsewhere(device: torch.device) -> bool:
    """The caller is capturing a graph, where ours do not belong."""
    return _is_gpu(device) and _torch.capturing()


@cache
def _is_gpu(device: torch.device) -> bool:
    """A device makes a new string of its type each time that it is asked: a third of a microsecond."""
    return device.type == "cuda"


@contextmanager
def clean_cublas(device: torch.device) -> Iterator[None]:
    """Surround the captures of one bucket (Note [cuBLAS workspaces])."""
    if device.type != "cuda":
        yield
        return
    _torch.clear_cublas_workspaces()
    try:
        yield
    finally:
        _torch.clear_cublas_workspaces()


@contextmanager
def collector_off() -> Iterator[None]:
    """No cyclic collection during a capture: freeing a graph or unloading a kernel would invalidate it.

    Nothing is collected before it either: in a process that has imported torch and transformers, that takes
    as long as the captures of a large model.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
