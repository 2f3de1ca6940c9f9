"""What a trial holds and measures: models beside one another, what a call did, and what it raised."""

from __future__ import annotations

import copy
import logging
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import piecewise_graph as pg
from fuzz.compare import snapshot

LONGEST_S = 180


class Failure(Exception):
    """A verdict other than "right", and its reason."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(verdict, reason)
        self.verdict, self.reason = verdict, reason


@dataclass
class Pair:
    """A model and its compiled form, and beside it the same model for eager."""

    model: nn.Module
    fast: Callable[..., Any]
    eager: nn.Module
    frozen: Callable[..., Any] | None = None
    moved: bool = False  # storage of a weight moved, and graphs were not dropped since


@contextmanager
def quietly_in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Failure("error", f"took longer than {LONGEST_S} s")

    previous, level = signal.signal(signal.SIGALRM, late), logging.root.manager.disable
    signal.alarm(LONGEST_S)
    logging.disable()  # torch reports what it could not trace; the verdict says so
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outcome(model: nn.Module, given: dict[str, Tensor]) -> tuple[Any, Exception | None]:
    try:
        return model(**given), None
    except Exception as error:
        return None, error


def snapshot_inputs(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the same layout; an expanded tensor stays expanded."""
    return {n: t[:1].clone().expand(t.shape) if 0 in t.stride() else t.clone() for n, t in given.items()}


def run(model: nn.Module, given: dict[str, Tensor]) -> tuple[Any, Any, Any]:
    with torch.no_grad():
        return snapshot((model(**given), given, state(model)))


def exact(before: nn.Module, given: dict[str, Tensor]) -> tuple[Any, Any, Any]:
    model = copy.deepcopy(before).cpu().double()
    return run(model, {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in given.items()})


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


def copy_state(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(source.buffers(), target.buffers(), strict=True):
            other.copy_(one)


def served() -> int:
    found = pg.counters.snapshot()
    return sum(found[name] for name in ("tapes", "replays", "fallbacks", "failed_captures"))


@contextmanager
def mode_around(mode: str) -> Iterator[None]:
    around = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
    with around[mode]():
        yield


def close(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


def line_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def place_of(error: BaseException) -> str:
    """The deepest line of the library that the error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "piecewise_graph" in f.filename]
    return f" [{frames[-1].filename.rpartition('piecewise_graph/')[2]}:{frames[-1].lineno}]" if frames else ""
