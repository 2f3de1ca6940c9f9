"""One vLLM engine in a process of its own, and what bench_vllm asks of it.

The engine runs in that process itself, without vLLM's second one, so that its steps can be timed and profiled
one by one. vLLM is imported there and nowhere else; what vLLM does not import itself is imported late, so
that it is no part of a side's start.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.vllm_sides import OWN, SIDES, environment_of

if TYPE_CHECKING:
    from piecewise_graph.bench.load import Arrival

COUNTS = ("replays", "full_replays", "fallbacks", "fallbacks:above_max_tokens")  # of this backend
ANSWER_S = 180  # seconds that an answer may take
PHASES = ("load_model", "determine_available_memory", "compile_or_warm_up_model")  # of a worker's start
Row = dict[str, Any]
Prompt = list[int]


class Engine:
    """The parent's end: each method of `Served` can be asked for by its name.

    Args:
        side: in `SIDES`.
        settings: of `vllm.LLM`, beside the side's.

    Raises:
        EngineError: with what the process said, from `ready` and `ask`.
    """

    def __init__(self, side: str, settings: Mapping[str, Any]) -> None:
        self.side, self._began = side, time.monotonic()
        processes = multiprocessing.get_context("spawn")
        self._connection, theirs = processes.Pipe()
        given = {**settings, **SIDES[side].settings}
        self._process = processes.Process(target=_serve, args=(side, given, theirs))
        self._process.start()
        theirs.close()

    def ready(self, patience: float) -> Row:
        """Wait until it is: seconds since its process was started, of making the engine, and of `PHASES`."""
        told = self._answer(patience)
        return {"side": self.side, "ready_s": time.monotonic() - self._began, **told}

    def ask(self, name: str, **options: Any) -> Any:
        self._connection.send((name, options))
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """Kill it and the processes that it has started: vLLM's own way out takes seconds, for nothing."""
        group = self._process.pid
        assert group is not None
        with suppress(ProcessLookupError):  # it has not become a group yet, or is gone
            os.killpg(group, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _answer(self, patience: float) -> Any:
        try:
            if not self._connection.poll(patience):
                raise EngineError(f"no answer in {patience:.0f} s")
            answer = self._connection.recv()
        except EOFError:
            raise EngineError("its process ended") from None
        if isinstance(answer, EngineError):
            raise answer
        return answer


class EngineError(Exception):
    """What went wrong in an engine's process."""


def _serve(side: str, settings: Mapping[str, Any], parent: Connection) -> None:
    os.environ |= environment_of(side)
    os.setpgid(0, 0)
    try:
        served = _engine_of(side)(settings)
        parent.send({"engine_s": served.seconds, "phases": served.phases})
        while True:
            name, options = parent.recv()
            parent.send(getattr(served, name)(**options))
    except EOFError:
        pass
    except Exception as problem:
        parent.send(EngineError(f"{type(problem).__name__}: {' '.join(str(problem).split())[-600:]}"))


def _engine_of(side: str) -> Callable[[Mapping[str, Any]], Any]:
    if side != OWN:
        return Served
    from benchmarks.own_engine import OwnEngine

    return OwnEngine


@dataclass
class Load:
    """A closed loop's requests, and when each one began, gave its first token and its last one.

    Attributes:
        waiting: name, prompt and number of new tokens of each.
    """

    waiting: list[tuple[str, Prompt, int]]
    began: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


class Served:
    """The engine, with counts of its forwards and preempted requests, and the time of its model's calls."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from vllm import LLM

        self.forwards = self.preempted = self._requests = 0
        self._given = 0  # tokens of the requests that the last step answered
        self.calls: list[tuple[float, float]] = []  # host seconds of the first runner's calls of its model,
        self._launching = 0.0  # and of the graph launches in them
        self.phases: dict[str, float] = {}  # seconds
        self._count()
        self._draw = random.Random(0)
        began = time.monotonic()
        self.llm = LLM(**settings)
        self.engine = self.llm.llm_engine
        self.seconds = time.monotonic() - began

    def _count(self) -> None:
        """Count what vLLM does, where it does it."""
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        from vllm.v1.worker.gpu_worker import Worker

        execute, preempt = Worker.execute_model, Scheduler._preempt_request
        forward, replay = GPUModelRunner._model_forward, torch.cuda.CUDAGraph.replay

        def execute_model(worker: Any, scheduled: Any, *args: Any, **options: Any) -> Any:
            self.forwards += scheduled.total_num_scheduled_tokens > 0
            return execute(worker, scheduled, *args, **options)

        def preempt_request(*args: Any, **options: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **options)

        def model_forward(*args: Any, **options: Any) -> Any:
            began, launching = time.perf_counter(), self._launching
            try:
                return forward(*args, **options)
            finally:
                self.calls.append((time.perf_counter() - began, self._launching - launching))

        def timed_replay(graph: Any) -> None:
            began = time.perf_counter()
            replay(graph)
            self._launching += time.perf_counter() - began

        for name in PHASES:
            setattr(Worker, name, self._timed(name, getattr(Worker, name)))
        Worker.execute_model, Scheduler._preempt_request = execute_model, preempt_request
        GPUModelRunner._model_forward, torch.cuda.CUDAGraph.replay = model_forward, timed_replay

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - began

        return timed

    # --- throughput ---------------------------------------------------------------------------------

    def load(self, users: int, requests: Sequence[Arrival]) -> Row:
        """Serve the requests, `users` at a time.

        Returns:
            tok_s (output tokens per second), medians tpot_ms and ttft_ms, forwards, this backend's counts.
        """
        before = self._counts()
        load = Load([(self._name(), list(each.prompt), each.max_new_tokens) for each in requests])
        wanted = {name: new for name, _, new in load.waiting}
        began = time.perf_counter()
        while load.waiting and len(load.began) < users:
            self._begin(load)
        while len(load.last) < len(load.began):
            for out in self.engine.step():
                now = time.perf_counter()
                load.first.setdefault(out.request_id, now)
                if out.finished:
                    load.last[out.request_id] = now
                    if load.waiting:
                        self._begin(load)
        wall = time.perf_counter() - began
        each = [(load.last[name] - load.first[name]) / max(wanted[name] - 1, 1) for name in load.last]
        until = [load.first[name] - load.began[name] for name in load.last]
        row = {
            "tok_s": sum(wanted.values()) / wall,
            "tpot_ms": 1e3 * median(each),
            "ttft_ms": 1e3 * median(until),
        }
        return row | self._counts_since(before)

    def _begin(self, load: Load) -> None:
        name, prompt, new_tokens = load.waiting.pop(0)
        load.began[name] = time.perf_counter()
        self._add(name, prompt, new_tokens)

    # --- one decode step ----------------------------------------------------------------------------

    def decode(self, users: int, prompt: int, steps: int, profiled: int = 0) -> Row:
        """Decode steps of `users` requests that nothing joins or leaves.

        Args:
            profiled: steps under torch's profiler, and again under Python's; 0 = none.

        Returns:
            step_ms (wall), tokens_per_step (of a request), call_us (until a call of the model returns; of
            the first runner), launch_us (of it, in launches of graphs), and of the profiled ones idle
            (IdleTime), busy_ms (the device's, per step) and host: what Python's time went to, by function.
        """
        import torch

        names = [self._name() for _ in range(users)]
        for name in names:
            self._add(name, self._random(prompt), new_tokens=4 * (24 + steps + 2 * profiled))
        self._steps(24)  # prompts are read, and the first decode steps are over
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.calls.clear()
        before = self._given
        row: Row = {"step_ms": 1e3 * self._steps(steps) / steps}
        row["tokens_per_step"] = (self._given - before) / (users * steps)
        if self.calls:
            row["call_us"], row["launch_us"] = (1e6 * median(part) for part in zip(*self.calls, strict=True))
        if profiled:
            from benchmarks.vllm_profile import device_time, host_time

            work = partial(self._steps, profiled)
            row |= {"idle": device_time(work, profiled), "host": host_time(work, profiled)}
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return row

    def _steps(self, count: int) -> float:
        """Seconds of them: vLLM reads each step's tokens, so the device is at most one step behind."""
        began, found = time.perf_counter(), []
        for _ in range(count):
            found = self.engine.step()
        taken = time.perf_counter() - began
        self._given = sum(len(each.outputs[0].token_ids) for each in found)
        return taken

    # --- answers ------------------------------------------------------------------------------------

    def answers(self, prompts: Sequence[Prompt], new_tokens: int) -> Row:
        """Greedy tokens of each prompt, the gaps of the two largest logits, and the counts."""
        from vllm import SamplingParams

        before = self._counts()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        wanted = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=2
        )
        found = [each.outputs[0] for each in self.llm.generate(given, wanted, use_tqdm=False)]
        gaps = [[_gap(each) for each in out.logprobs] for out in found]
        return {"tokens": [list(out.token_ids) for out in found], "gaps": gaps, **self._counts_since(before)}

    def answers_after_sleep(self, prompts: Sequence[Prompt], new_tokens: int) -> Row:
        """As `answers`, after the weights were on the host for a while and the KV cache was given up."""
        self.llm.sleep(level=1)
        self.llm.wake_up()
        return self.answers(prompts, new_tokens)

    def answers_beside_aborted(self, prompts: Sequence[Prompt], new_tokens: int) -> Row:
        """As `answers`, without gaps, and every second request is aborted after some steps."""
        before, tokens = self._counts(), dict[str, list[int]]()
        names = [self._name() for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._add(name, prompt, new_tokens)
        self._steps(12)
        self.engine.abort_request(names[1::2])
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                tokens[out.request_id] = list(out.outputs[0].token_ids)
        left = [tokens.get(name, []) for name in names[::2]]
        return {"tokens": left, **self._counts_since(before)}

    def _add(self, name: str, prompt: Prompt, new_tokens: int) -> None:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, asked)

    def _name(self) -> str:
        self._requests += 1
        return f"bench-{self._requests}"

    def _random(self, length: int) -> Prompt:
        return [self._draw.randrange(1000, 100000) for _ in range(length)]

    def _counts(self) -> dict[str, int]:
        backend = sys.modules.get("piecewise_graph")  # vLLM imports it, because it is a plugin
        counted = backend.counters.snapshot() if backend is not None else {}
        found = {name: counted.get(name, 0) for name in COUNTS}
        return {"forwards": self.forwards, "preempted": self.preempted, **found}

    def _counts_since(self, before: Mapping[str, int]) -> dict[str, int]:
        return {name: value - before[name] for name, value in self._counts().items()}


def _gap(logprobs: Mapping[int, Any]) -> float:
    """Between the two largest."""
    first, second = sorted((each.logprob for each in logprobs.values()), reverse=True)[:2]
    return float(first - second)
