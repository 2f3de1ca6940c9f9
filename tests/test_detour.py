"""Calls on the pool's stream for a caller on the default one: their order, and what an error leaves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecewise_graph.kernels.detour import Detour


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to streams and events, in order."""
    happened: list[str] = []
    names = iter(["before", "after"])

    def event() -> Any:
        name = next(names)
        return SimpleNamespace(
            record=lambda stream: happened.append(f"{stream.name} records {name}"),
            wait=lambda stream: happened.append(f"{stream.name} waits for {name}"),
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(name="default"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: happened.append(f"device {index}"))
    return happened


def detour(log: list[str], current: int = 0) -> Detour:
    def setter(stream: Any) -> Callable[[], None]:
        return lambda: log.append(f"on {stream.name}")

    own: Any = SimpleNamespace(name="own", device="cuda:0", device_index=0)
    return Detour(own, setter, lambda: current)


THERE = ["default records before", "own waits for before", "on own"]
BACK = ["on default", "own records after", "default waits for after"]


def test_calls_run_on_the_other_stream_between_two_events(log: list[str]) -> None:
    detour(log).run([lambda: log.append("first"), lambda: log.append("second")])
    assert log == [*THERE, "first", "second", *BACK]


def test_an_error_leads_back_too(log: list[str]) -> None:
    def fails() -> None:
        raise ValueError("of an op")

    with pytest.raises(ValueError, match="of an op"):
        detour(log).run([fails, lambda: log.append("never")])
    assert log == [*THERE, *BACK]


def test_another_device_of_the_caller_stays_the_current_one(log: list[str]) -> None:
    detour(log, current=1).run([])
    assert log == [*THERE, "on default", "device 1", *BACK[1:]]
