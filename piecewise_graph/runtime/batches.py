"""Batches: runtimes for the batch sizes of a trace whose batch and tokens both vary.

With its batch taken for a number, such a trace has one size, and buckets like any other. A batch between two
sizes is padded where that is proved harmless (Note [A batch and its tokens are proved at once]) and not
slower than the call at its own sizes. Both ways are timed once per batch size and bucket, as soon as it has a
tape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.analysis.claims import is_integer
from piecewise_graph.buckets import bucket_for
from piecewise_graph.compiler.batched_sizes import (
    BatchedSizes,
    Padded,
    cuts_to_rows,
    padded_in_both,
    padding_of_batch,
)
from piecewise_graph.compiler.other_forms import at_batch, at_numbers
from piecewise_graph.compiler.program import Program, as_returned, in_layout, run_steps
from piecewise_graph.context import ForwardContext, get_forward_context
from piecewise_graph.graph_pool import capturing_elsewhere
from piecewise_graph.runtime.bound_addresses import Replaced
from piecewise_graph.runtime.dispatch import Decision
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.padding_cost import PaddingCost, measured
from piecewise_graph.runtime.replay import Replay
from piecewise_graph.runtime.side_channel import Purpose
from piecewise_graph.sizes import ShapeContract, Sizes
from piecewise_graph.telemetry import counters

log = logging.getLogger(__name__)
Made = TypeVar("Made")


class OneSize(Protocol):
    """What Batches asks of the `Runtime` of a batch size."""

    program: Program

    def __call__(self, *args: Any) -> list[Any]: ...

    def decide(self, num_tokens: int) -> Decision: ...

    def replay_for(self, num_tokens: int, context: ForwardContext) -> Replay | None: ...


MakeRuntime = Callable[[Program, Sequence[Any]], OneSize]


class Batches:
    """Serves the calls of one trace by its batch sizes.

    Args:
        program: of the trace.
        state: of the model.
        sizes: which of its symbols is which.

    Attributes:
        requests: of the calls that were served so far.
        rows: that these calls ran, padding included.
        prepared: how often a batch size was made or a proof was tried.
        preparing: seconds of host time that this took.
    """

    def __init__(self, program: Program, state: ModelState, sizes: BatchedSizes) -> None:
        self._program, self._state, self._symbols = program, state, sizes
        self._cuts = cuts_to_rows(program, sizes)
        self._lock = Lock()  # other threads call the model too
        self.requests = self.rows = self.prepared = 0
        self.preparing = 0.0
        self._runtimes: dict[int, OneSize | None] = {}
        self._seen: set[int] = set()
        self._both: Padded | None = None
        self._has_tried_both = False
        self._proved: dict[int, ShapeContract | None] = {}  # what is proved of the batch, by tokens
        self._costs: dict[tuple[int, int], PaddingCost | None] = {}  # by batch size and bucket of tokens

    @property
    def runtimes(self) -> list[OneSize]:
        return [runtime for runtime in self._runtimes.values() if runtime is not None]

    def run(self, sizes: Sizes, args: Sequence[Any], make: MakeRuntime) -> list[Any] | None:
        """A call's outputs; None where no batch size serves it.

        Args:
            make: a program with one size and a call's arguments -> its runtime.
        """
        rows, *others = (sizes[symbol] for symbol in self._symbols.batch)
        size = bucket_for(rows, self._state.config.batches)
        if size is None or any(other != rows for other in others) or get_forward_context().full_graph:
            return None
        with self._lock:
            runtime = self._at(size, sizes, args, make)
            # To fake the ops for a batch may have shown that they hold for some counts of tokens only.
            if runtime is None or runtime.program.contract.size_violation(self._tokens_of(sizes)) is not None:
                return None
            if size != rows and not self._may_pad(runtime, size, sizes, args):
                return None
        try:
            outputs = runtime(*args) if size == rows else self._padded(runtime, size, sizes, args)
        except Replaced:  # a weight, before anything ran
            self._runtimes.pop(size, None)
            return None
        if outputs is not None:
            self.requests, self.rows = self.requests + rows, self.rows + size
        return outputs

    def _padded(self, runtime: OneSize, size: int, sizes: Sizes, args: Sequence[Any]) -> list[Any] | None:
        """The outputs of a call with rows appended; None where it is faster at its own sizes."""
        if not self._pays(runtime, size, sizes, args):
            counters.add("slower_batches")
            return None
        outputs = runtime(*self._grown(args, sizes[self._symbols.batch[0]], size))
        counters.add("padded_batches")
        return self._cut(outputs, args, sizes)

    def _at(self, size: int, sizes: Sizes, args: Sequence[Any], make: MakeRuntime) -> OneSize | None:
        """The runtime of a batch size: made when it returns, or at once where the caller named the sizes."""
        if size in self._runtimes:
            return self._runtimes[size]
        state, fixed = self._state, self._symbols.at_batch(size)
        if self._program.contract.size_violation({**sizes, **fixed}) is not None:
            return None  # at this count of tokens
        at_once = state.config.batch_sizes is not None or state.channel.purpose is Purpose.CAPTURE
        if not state.may_capture() or not (at_once or size in self._seen):
            self._seen.add(size)
            return None
        self._runtimes[size] = runtime = self._made(fixed, args, make)
        return runtime

    def _made(self, fixed: Sizes, args: Sequence[Any], make: MakeRuntime) -> OneSize | None:
        state = self._state
        # What `specialize` compiles is for one size. Where there is one request, code may rely on it.
        shared = not state.config.specialize and 1 not in fixed.values()
        both = self._padded_in_both(args) if shared else None
        program = self._prepared(
            lambda: (
                (both and at_numbers(both.program, fixed))
                or at_batch(self._program, fixed, args, state.config, state.compiled)
            )
        )
        return make(program, args) if program is not None and program.token == self._symbols.tokens else None

    def _prepared(self, make: Callable[[], Made | None]) -> Made | None:
        """What `make` makes; None where the ops cannot be faked at the sizes that it takes for the call's."""
        began = time.perf_counter()
        made = None
        try:
            made = make()
        except Exception as error:  # whatever it is: the call has another way
            if _torch.is_dynamo_control_flow(error):
                raise
            log.info("no batch of its own: %s", error)
        finally:
            self.prepared, self.preparing = self.prepared + 1, self.preparing + time.perf_counter() - began
        return made if self._program.ranks.all("prepare a batch size", made is not None) else None

    def _tokens_of(self, sizes: Sizes) -> Sizes:
        return {self._symbols.tokens: sizes[self._symbols.tokens]}

    def _may_pad(self, runtime: OneSize, size: int, sizes: Sizes, args: Sequence[Any]) -> bool:
        """The call may run with more rows than it has, and more tokens; see the note on their proof."""
        batch, tokens = self._symbols.batch[0], self._symbols.tokens
        count, rows = sizes[tokens], sizes[batch]
        bucket = _bucket(runtime, count) if self._cuts else None
        if bucket is None:
            return False
        apart = any(not step.padded for step in runtime.program.split.segments)
        both = [{batch: b, tokens: t} for b in (rows, size) for t in (count, bucket)]
        padded = self._padded_in_both(args)
        if not (apart and bucket != count) and padded is not None and _holds(padded.of_batch, both):
            return True
        of_batch = [{batch: b} for b in (rows, size)]
        return bucket == count and _holds(self._padding_at(bucket, args), of_batch)

    def _pays(self, runtime: OneSize, size: int, sizes: Sizes, args: Sequence[Any]) -> bool:
        """The padded batch is not slower than the call at its own sizes, as far as is known."""
        requests, count = sizes[self._symbols.batch[0]], sizes[self._symbols.tokens]
        device, ready = self._program.device, runtime.replay_for(count, get_forward_context())
        if ready is None or capturing_elsewhere(device):
            return True  # the call captures its bucket first
        key, rows = (size, ready.captured.tape.bucket), requests * count
        if key not in self._costs:
            with self._state.pool_for(device).using() as nested:
                ready = runtime.replay_for(count, get_forward_context())  # another thread may have dropped it
                if nested or ready is None:
                    return True
                replay = partial(ready.launch_uncounted, self._grown(args, requests, size))
                exact = partial(run_steps, self._program, in_layout(self._program, args, sizes), sizes)
                found = measured(device, replay, exact, rows)
                self._costs[key] = self._program.ranks.first(f"time a batch of {size} requests", found)
        cost = self._costs[key]
        return cost is None or cost.pays(rows)

    def _padded_in_both(self, args: Sequence[Any]) -> Padded | None:
        """The trace for all batches and lengths, where padding of its tokens is proved."""
        if not self._has_tried_both:
            self._has_tried_both, state = True, self._state
            self._both = self._prepared(
                lambda: padded_in_both(self._program, self._symbols, args, state.config, state.compiled)
            )
        return self._both

    def _padding_at(self, bucket: int, args: Sequence[Any]) -> ShapeContract | None:
        """For which batches of `bucket` tokens rows may be appended."""
        if bucket not in self._proved:
            config = self._state.config
            self._proved[bucket] = self._prepared(
                lambda: padding_of_batch(self._program, self._symbols, bucket, args, config)
            )
        return self._proved[bucket]

    def _grown(self, args: Sequence[Any], rows: int, size: int) -> list[Any]:
        """The arguments with more rows: zeros of integers, as the proof takes them, else the first again."""
        grown = list(args)
        for index, given in enumerate(self._program.split.inputs[: len(args)]):
            if given.symbol in self._symbols.batch:
                grown[index] = size
            elif given.spec is not None and not given.bound:
                for dim in self._symbols.batch_dims(given.spec):
                    first = grown[index].narrow(dim, 0, 1)
                    first = torch.zeros_like(first) if is_integer(first) else first
                    grown[index] = torch.cat([grown[index], *[first] * (size - rows)], dim)
        return grown

    def _cut(self, outputs: Sequence[Any], args: Sequence[Any], sizes: Sizes) -> list[Any]:
        """The results as a call without padding returns them."""
        requests, split = sizes[self._symbols.batch[0]], self._program.split

        def live(slot: int, value: Any) -> Any:
            leads = isinstance(value, Tensor) and self._symbols.batch_dims(split.spec(slot))
            return value.narrow(0, 0, requests) if leads else value

        return as_returned(self._program, outputs, args, sizes, live)


def _bucket(runtime: OneSize, count: int) -> int | None:
    """The bucket of tokens that such a call replays, or captures first; None where it runs compiled."""
    ready = runtime.replay_for(count, get_forward_context())
    return runtime.decide(count).bucket if ready is None else ready.captured.tape.bucket


def _holds(proof: ShapeContract | None, calls: Sequence[Sizes]) -> bool:
    """What the proof relies on holds for the sizes of all these calls."""
    return proof is not None and all(proof.size_violation(sizes) is None for sizes in calls)
