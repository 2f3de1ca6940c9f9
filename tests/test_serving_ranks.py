"""`bench serving` on several ranks: rank 0 decides what a step releases, and all serve the same."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import values
from test_serving_load import Asked
from torch import distributed

import piecewise_graph as pg
from piecewise_graph.bench.drive import drive
from piecewise_graph.bench.load import Load, arrivals
from piecewise_graph.cli import processes
from piecewise_graph.cli.commands import main
from piecewise_graph.eagle import Sampling
from piecewise_graph.ranks.exchange import ranks_of_groups

TINY = [
    "bench", "serving", "--tp", "2", "--random-weights", "tiny", "--device", "cpu", "--compiler", "eager",
    "--concurrency", "2", "--num-prompts", "4", "--input-len", "16", "--output-len", "8",
]  # fmt: skip


# The loop.


class Stepped:
    """An engine of which a step takes a random time; it notes which requests each step served."""

    def __init__(self) -> None:
        self.live, self.batches, self.clock = list[Asked](), list[list[int]](), random.Random(os.getpid())

    @property
    def unfinished(self) -> int:
        return len(self.live)

    def add_request(self, prompt: Any, *, max_new_tokens: int, sampling: Any, on_tokens: Any) -> Asked:
        self.live.append(Asked(prompt, max_new_tokens, sampling, on_tokens))
        return self.live[-1]

    def step(self) -> None:
        time.sleep(self.clock.uniform(0.0, 0.004))
        self.batches.append([each.sampling.seed for each in self.live])
        for each in self.live:
            each.tokens.append(0)
            each.on_tokens(each, [0])
        self.live = [each for each in self.live if len(each.tokens) < each.max_new_tokens]

    synthetic_accept_length = None


def _clock() -> float:
    """That of rank 1 runs twice as fast."""
    return time.perf_counter() * (1 + distributed.get_rank())


def _driven(engine: Any, load: Any) -> int:
    world: Any = distributed.group.WORLD
    told = ranks_of_groups([world.group_name], 20.0).decisions()
    leads, slept = distributed.get_rank() == 0, list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    timeline = drive(engine, load, 3, Sampling(), decide=told.next, leads=leads, clock=_clock, sleep=sleep)
    assert leads or not slept  # it would come late to what rank 0 has decided meanwhile
    return len(timeline.requests)


def _batches() -> list[list[int]]:
    engine = Stepped()
    assert _driven(engine, arrivals(Load(4, 9, 0.2, 100.0, vocab_size=9), 20)) == 20
    return engine.batches


def test_ranks_with_other_clocks_serve_the_same_batches() -> None:
    first, second = values(2, _batches)
    assert first == second and {each for batch in first for each in batch} == {*range(20)}
    assert len({tuple(batch) for batch in first}) > 5  # requests come and go


def _served() -> list[list[int]]:
    """Tokens of a sharded model under a load with arrival times, in the order of the requests."""
    from piecewise_graph.eagle import Speculator
    from piecewise_graph.eagle.head.random_models import MODEL_SHAPES, random_model, sharded

    pg.register_attention()
    torch.manual_seed(0)
    target = sharded(random_model(MODEL_SHAPES["tiny"], "cpu", "piecewise", torch.float32))
    options = {"compiler": "eager", "rank_timeout": 60.0}
    speculator = Speculator(target, shapes=[0], max_requests=3, max_seq_len=32, options=options)
    assert speculator.ranks.count == distributed.get_world_size()
    engine, made = speculator.engine(), []
    add = engine.add_request

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(add(*args, **kwargs))
        return made[-1]

    engine.add_request = noted  # type: ignore[method-assign]
    _driven(engine, arrivals(Load(6, 9, 0.2, 50.0, vocab_size=500), 6))
    return [request.tokens for request in made]


@pytest.mark.slow
def test_ranks_with_other_clocks_generate_the_same_tokens() -> None:
    first, second = values(2, _served, within=300.0)
    assert first == second and len(first) == 6 and all(first)


# The command.


def _assert_served(file: Path, printed: str, rate: float | str) -> None:
    results = json.loads(file.read_text())
    assert printed.count("max_concurrency") == 1
    assert results["command"].startswith("python -m piecewise_graph bench serving --tp 2 --random-weights")
    (row,) = results["rows"]
    assert row["max_concurrency"] == 2 and row["output_throughput"] > 0 and row["mean_tpot_ms"] > 0
    assert results["load"]["request_rate"] == rate


@pytest.mark.slow
def test_the_command_serves_a_load_on_several_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "piecewise_graph", *TINY, "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    _assert_served(tmp_path / "out.json", done.stdout, "inf")


def _on_this_rank(*options: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        return main([*TINY, *options]), told.getvalue()


@pytest.mark.slow
def test_the_command_serves_a_draft_and_a_load_that_arrives_on_several_ranks(tmp_path: Path) -> None:
    """In ranks that another launcher than the command has started."""
    more = ["--request-rate", "50", "--random-draft", "eagle1", "--json", str(tmp_path / "out.json")]
    answers = values(2, _on_this_rank, *more, within=500.0)
    assert [status for status, _ in answers] == [0, 0]
    _assert_served(tmp_path / "out.json", "".join(printed for _, printed in answers), 50.0)


def _in_a_group(tp: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        return main([*TINY, "--tp", tp]), told.getvalue()


def test_another_number_of_processes_is_refused() -> None:
    for status, told in values(2, _in_a_group, "3"):
        assert status == 2 and "--tp 3 cannot run in 2 processes" in told and "pass --tp 2" in told


def test_a_process_without_its_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("RANK", raising=False)
    assert main(TINY) == 2
    error = capsys.readouterr().err
    assert "LOCAL_RANK is set" in error and "start all of them by torchrun" in error


@pytest.mark.parametrize(
    ("options", "gpus", "says"),
    [
        (["--device", "cuda"], 0, "torch finds 0 on this host"),
        (["--device", "cuda", "--tp", "4"], 3, "pass --tp 3"),
        (["--device", "cuda:1"], 2, "names one GPU"),
        (["--device", "nowhere"], 0, "device 'nowhere' cannot be used"),
        (["--device", "meta"], 0, "device 'meta' cannot be used"),
        (["--dtype", "float99"], 0, "dtype 'float99' cannot be used"),
        (["--steps", "3"], 0, "--random-draft eagle1"),
        (["--json", "nowhere/out.json"], 0, "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_refused_before_processes_are_started(
    options: list[str],
    gpus: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("processes are started"))
    monkeypatch.setattr("piecewise_graph.cli.serving_command.start", processes.start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert main([*TINY, *options]) == 2
    error = capsys.readouterr().err
    assert "What to do" in error and says in error


def test_files_and_models_are_looked_at_before_processes_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("piecewise_graph.cli.serving_command.start", lambda *_: pytest.fail("started"))
    serving = ["bench", "serving", "--tp", "2", "--device", "cpu"]
    assert main([*serving, "--model", str(tmp_path)]) == 2
    assert "there is no config.json in it" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main([*serving, "--model", str(tmp_path), "--prompts", str(tmp_path / "none.txt")]) == 2
    assert "none.txt cannot be read" in capsys.readouterr().err
    assert main([*serving, "--random-weights", "tiny", "--draft", str(tmp_path / "none")]) == 2
    assert "holds no draft head" in capsys.readouterr().err


def test_the_sharding_of_an_accelerator_is_not_asked_for_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    assert main(TINY) == 2
    assert "pass --device cuda" in capsys.readouterr().err


def test_processes_are_started_with_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And their exit status is the command's."""
    seen: list[list[str]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, command: list[str]) -> None:
            seen.append(command)
            super().__init__([sys.executable, "-c", "raise SystemExit(7)"])

    monkeypatch.setattr(subprocess, "Popen", Started)
    assert main(TINY) == 7
    assert seen[0][:2] == [sys.executable, "-m"] and seen[0][-len(TINY) - 2 :] == [
        "-m",
        "piecewise_graph",
        *TINY,
    ]
    assert seen[0][4:6] == ["--nproc-per-node", "2"]
