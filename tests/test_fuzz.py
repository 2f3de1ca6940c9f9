"""Random programs are right, and the fuzz that says so can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fuzz.blocks import fill
from fuzz.command import main
from fuzz.compare import difference
from fuzz.ops import op_cases, run_op
from fuzz.programs import BLOCKS, ENDINGS, ENTRIES, Program
from fuzz.rows import shard
from fuzz.sequences import Case, Step, Usage, inputs_of
from fuzz.shrink import shrink
from fuzz.trial import case_of, run_case, run_seed
from torch import Tensor, nn

import piecewise_graph as pg

SEEDS = range(40)
CPU = torch.device("cpu")
PLAIN = (("capture_sizes", (4, 8)), ("max_tokens", 8))
CALLS = (Step("call", 1, tokens=7), Step("call", 2, tokens=8), Step("call", 3, tokens=5))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_is_right(seed: int, device: torch.device) -> None:
    """`python -m tests.fuzz replay SEED` shrinks one that is not."""
    row = run_seed(seed, "aot_eager" if seed % 8 == 0 else "eager", device)
    assert not row.failed, f"{row.verdict}: {row.reason}\n{case_of(seed)}"


def test_the_seeds_reach_what_they_are_for() -> None:
    """Programs are cut, have state, keep values; calls repeat sizes; graphs, freezing and resets are met."""
    cases = [case_of(seed) for seed in SEEDS]
    kinds = {step.kind for case in cases for step in case.sequence.steps}
    assert {"call", "frozen", "capture", "update", "replace", "reset", "kept"} <= kinds
    assert {case.program.entry for case in cases} == set(ENTRIES)
    assert sum("scaled_dot_product" in case.program.source for case in cases) > len(SEEDS) / 5
    assert any(case.sequence.copies == 2 for case in cases)


def test_a_seed_is_the_same_case_in_another_process() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from fuzz.trial import case_of; print(case_of(12))"
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(case_of(12)).strip()


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_runs_in_eager_and_in_float64(name: str) -> None:
    for entry in ENTRIES:
        blocks = tuple(fill(name, BLOCKS[name], number, Random(number)) for number in range(2))
        program = Program(entry, blocks, "h")
        answered = 0
        for tokens in (6, 9):
            inputs = inputs_of(program, Step("call", tokens, tokens=tokens), CPU)
            wide = {n: t.double() if t.is_floating_point() else t.clone() for n, t in inputs.items()}
            try:
                program.build()(**inputs), program.build().double()(**wide)
            except (RuntimeError, IndexError, ValueError) as error:
                unfit = error
                continue
            answered += 1
        if answered:
            return
    pytest.fail(f"no entry suits it: {unfit}")


def test_every_ending_runs_in_eager() -> None:
    blocks = tuple(fill(name, BLOCKS[name], n, Random(0)) for n, name in enumerate(("mean_kept", "linear")))
    for ending in ENDINGS:
        program = Program("rows", blocks, ending)
        program.build()(**inputs_of(program, Step("call", tokens=5), CPU))


# --- the fuzz notices ---------------------------------------------------------------------------------


def small(*names: str, steps: tuple[Step, ...] = CALLS) -> Case:
    blocks = tuple(fill(name, BLOCKS[name], number, Random(0)) for number, name in enumerate(names))
    return Case(Program("rows", blocks, "h"), Usage("pg.compile", 1, PLAIN, steps))


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    """Let pg.compile return what calls `answer(model, x)`, counted as a fallback."""

    def compile_to(model: nn.Module, **_: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            pg.counters.add("fallbacks")
            return answer(model, x)

        return call

    monkeypatch.setattr(pg, "compile", compile_to)


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (lambda model, x: model(x), "right", ""),
        (lambda model, x: model(torch.cat([x, x.new_zeros(1, 8)]))[:-1], "wrong", "elements of"),
        (lambda model, x: model(x) + 1e-3, "wrong", "elements of"),
        (lambda model, x: model(x)[:-1], "wrong", "has float32"),
        (lambda model, x: model(x).double(), "wrong", "has float64"),
        (lambda model, x: (model(x),), "wrong", "structure"),
        (lambda model, x: model(x.add_(1) - 1), "wrong", "inputs after the call"),
        (lambda model, x: 1 // 0, "error", "ZeroDivisionError"),
    ],
    ids=["itself", "a padded row", "a little off", "a row less", "dtype", "structure", "writes", "raises"],
)
def test_a_wrong_answer_is_found(
    answer: Callable[..., Any], verdict: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, answer)
    row = run_case(small("linear", "mean"), "eager", CPU)
    assert (row.verdict, words in row.reason) == (verdict, True), row


def test_an_answer_that_changes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.zeros(8, 8)
    answer_with(monkeypatch, lambda model, x: buffer[: len(x)].copy_(model(x)))
    row = run_case(small("linear", steps=(*CALLS, Step("kept"))), "eager", CPU)
    assert row.verdict == "wrong" and "has changed since" in row.reason


def test_a_call_that_is_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg, "compile", lambda model, **_: model)
    row = run_case(small("linear"), "eager", CPU)
    assert row.verdict == "error" and "nor counted" in row.reason


def test_what_rounding_decides_is_not_wrong() -> None:
    """A value on the edge between two integers may be rounded either way; a whole step elsewhere is wrong."""
    eager, other = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    shaken = [torch.tensor([float(n % 2), 1.0]) for n in range(12)]
    assert difference(other, eager, eager.double, lambda: shaken) is None
    assert difference(other.flip(0) * 2, eager, eager.double, lambda: shaken) is not None
    assert difference(torch.tensor([0.0, float("nan")]), eager, eager.double, lambda: shaken) is not None


def test_a_failing_case_is_shrunk_to_what_fails() -> None:
    case = case_of(3)
    needed = case.program.blocks[0].name

    def fails(smaller: Case) -> bool:
        kinds = [step.kind for step in smaller.sequence.steps]
        return needed in [b.name for b in smaller.program.blocks] and "call" in kinds

    found = shrink(case, fails)
    assert [block.name for block in found.program.blocks] == [needed]
    assert [step.kind for step in found.sequence.steps] == ["call"]


# --- the command --------------------------------------------------------------------------------------


def test_rows_are_kept_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, figures = tmp_path / "rows.jsonl", tmp_path / "figures.json"
    command = ["programs", "--seed", "2", "--count", "4", "--shard", "1/2", "--resume", str(rows)]
    main([*command, "--summary", str(figures)])
    first = rows.read_text()
    assert [json.loads(line)["seed"] for line in first.splitlines()] == [2, 4]
    rows.write_text(first + '{"seed": 5, "verd')  # as a killed process leaves it
    main(command)
    assert "0 run" in capsys.readouterr().out
    assert json.loads(figures.read_text())["rows"] == 2


def test_shards_are_a_partition() -> None:
    parts = [shard(range(10), f"{k}/3") for k in (1, 2, 3)]
    assert sorted(n for part in parts for n in part) == list(range(10))
    with pytest.raises(ValueError, match="3/8"):
        shard(range(10), "0/3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "cumsum", "fft.ifft", "masked_fill"])
def test_an_op_is_right_or_counted(name: str, device: torch.device) -> None:
    found = [run_op(case, "eager", device) for case in op_cases(1, name)]
    assert found and not [row for row in found if row.failed]
    served = ("replays", "unpadded_segments", "fallbacks")
    assert all(any(row.counters.get(counter) for counter in served) for row in found)
