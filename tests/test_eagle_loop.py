"""Sessions, catching up, resets and the command line of the speculative loop, with the repository's pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_cases import QUICK, prefill, resources, small_target, twin
from transformers import AutoModelForCausalLM

import piecewise_graph as pg
from piecewise_graph.cli.commands import main
from piecewise_graph.eagle import DraftShape, Speculator, load_draft
from piecewise_graph.eagle.rounds import phase_runner
from piecewise_graph.eagle.rounds.compiled_forward import Forward
from piecewise_graph.eagle.rounds.phase_runner import PhaseRunner
from piecewise_graph.eagle.rounds.resources import RING_TOKENS
from piecewise_graph.eagle.serving.shape_planner import PROBE_EVERY, Planner

MODELS = Path(__file__).resolve().parents[1] / "benchmarks" / "models"
TARGET, HEAD = str(MODELS / "byte-llama"), str(MODELS / "byte-llama-eagle1")
CHAIN, TREE, PLAIN = DraftShape(3), DraftShape(3, 2, 6), DraftShape(0)
TEXTS = ("import os\nimport sys\n", "def main():\n    return ", "class Parser:\n    def __init__(self")
EAGER = {"options": {"compiler": "eager"}, "draft_options": {"compiler": "eager"}}


def prompts(count: int = 3) -> list[list[int]]:
    return [[byte + 3 for byte in text.encode()] for text in (TEXTS * count)[:count]]


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pg.register_attention()
    target: Any = AutoModelForCausalLM.from_pretrained(
        TARGET, attn_implementation="piecewise", dtype=torch.float32
    )
    target = target.to(device).eval()
    return Speculator(
        target, load_draft(HEAD, target), shapes=[CHAIN, TREE, PLAIN], max_requests=4, max_seq_len=256,
        **EAGER,
    )  # fmt: skip


@pytest.fixture
def stepped(speculator: Speculator) -> Iterator[Any]:
    """Opens sessions and closes what a failed test leaves open."""
    opened = []

    def open_session(**asked: Any) -> Any:
        engine, requests = speculator.session(prompts(), **asked)
        opened.append(engine)
        return engine, requests

    yield open_session
    for engine in opened:
        engine.close()


def test_trained_head_is_accepted_and_a_tree_accepts_no_less(speculator: Speculator) -> None:
    tokens, chain = speculator.generate(prompts(), max_new_tokens=40, shape=CHAIN, return_stats=True)
    same, tree = speculator.generate(prompts(), max_new_tokens=40, shape=TREE, return_stats=True)
    assert tokens == same == speculator.generate(prompts(), max_new_tokens=40, shape=PLAIN)
    assert chain.mean_acceptance_length > 2
    assert tree.mean_acceptance_length >= chain.mean_acceptance_length


def positions_that_the_draft_extends(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of every forward of the draft over the target's features, its positions."""
    found: list[list[int]] = []
    original = Forward.__call__

    def forward(self: Forward, mode: str, batch: Any, /, **inputs: torch.Tensor) -> Any:
        if "features" in inputs:
            found.append(inputs["positions"].tolist())
        return original(self, mode, batch, **inputs)

    monkeypatch.setattr(Forward, "__call__", forward)
    return found


@pytest.mark.parametrize("plain_rounds", [1, 70])
def test_draft_catches_up_with_rounds_that_ran_without_it(
    speculator: Speculator, stepped: Any, plain_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states that the next draft begins with are those of a draft that was there all the time."""
    read = positions_that_the_draft_extends(monkeypatch)
    engine, requests = stepped(max_new_tokens=120, shape=PLAIN)
    for _ in range(1 + plain_rounds):  # prefill is a step of its own
        engine.step()
    read.clear()
    with torch.no_grad():
        prefill(speculator).catch_up(requests)
    kept = min(plain_rounds, RING_TOKENS)  # older features were overwritten by later ones
    assert read == [[at for r in requests for at in range(r.length - kept, r.length)]]
    slots = [request.slot for request in requests]
    found = resources(speculator).state.hidden[slots].clone()
    longer = [[*r.prompt, *r.tokens[:-1]] for r in requests]
    engine.close()
    fresh, again = speculator.session(longer, max_new_tokens=1)
    fresh.step()  # prefill is all there is to do
    expected = resources(speculator).state.hidden[[request.slot for request in again]]
    if plain_rounds <= RING_TOKENS:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    else:  # the oldest tokens are lost to the draft: still a draft, but another one
        assert found.isfinite().all()


def test_planner_gives_the_tokens_of_plain_decoding(speculator: Speculator) -> None:
    asked = {"max_new_tokens": PROBE_EVERY, "return_stats": True}
    plain, _ = speculator.generate(prompts(1), shape=PLAIN, **asked)
    tokens, statistics = speculator.generate(prompts(1), shape="auto", **asked)
    assert tokens == plain
    assert statistics.total.num_tokens >= PROBE_EVERY - 1
    assert {key[0] for key in speculator.planner.latest} <= set(speculator.batch_sizes)


def test_a_round_is_timed_with_one_wait(speculator: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the test's clock a phase takes 1 ms, and to wait for the device 10 ms: a round waits once."""
    clock, run = [0.0], PhaseRunner.__call__

    def advance(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(phase_runner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(phase_runner, "_wait", lambda device: advance(10e-3))
    monkeypatch.setattr(PhaseRunner, "__call__", lambda self: (advance(1e-3), run(self)))
    monkeypatch.setattr(speculator, "planner", Planner(speculator.shapes))
    speculator.generate(prompts(1), max_new_tokens=4, shape="auto")
    (choice,) = speculator.planner.latest.values()
    for each in choice.estimates:
        assert len(each.seconds) == 2 + bool(each.shape.steps)
        assert sum(each.seconds.values()) == pytest.approx(len(each.seconds) * 1e-3 + 10e-3)


def test_sessions_step_by_step_and_give_everything_back(speculator: Speculator, stepped: Any) -> None:
    expected = speculator.generate(prompts(), max_new_tokens=20)
    table = resources(speculator).table
    free = table.free_pages
    engine, requests = stepped(max_new_tokens=20)
    assert engine.unfinished == len(TEXTS)
    while engine.unfinished:
        before = [len(request.tokens) for request in requests]
        engine.step()
        assert all(len(r.tokens) > n or r.finished for r, n in zip(requests, before, strict=True))
    assert [request.tokens for request in requests] == expected
    half, _ = stepped(max_new_tokens=20)
    half.step()
    half.close()
    assert table.free_pages == free
    assert table.open_slots == ()


def test_rewound_session_repeats_itself(stepped: Any) -> None:
    engine, requests = stepped(max_new_tokens=100)
    for _ in range(2):  # the prompts, and a round: the first one begins with another draft
        engine.step()
    engine.rewind()
    taken = []
    for _ in range(2):
        for _ in range(3):
            engine.step()
        taken.append([list(request.tokens) for request in requests])
        engine.rewind()
    assert taken[0] == taken[1]


def test_graphs_are_captured_once_and_again_after_a_reset(speculator: Speculator) -> None:
    def generate() -> Any:
        return speculator.generate(prompts(), max_new_tokens=12, shape=CHAIN, overlap=False)

    expected = generate()
    rounds = 4
    with pg.counters.expect(phase_captures=0, captures=0):
        assert generate() == expected
    pg.reset()
    with pg.counters.expect(phase_captures=3):
        assert generate() == expected
    with pg.counters.expect(phase_captures=0):
        before = pg.counters.snapshot()["phase_replays"]
        assert generate() == expected
        assert (pg.counters.snapshot()["phase_replays"] - before) % 3 == 0
        assert pg.counters.snapshot()["phase_replays"] - before >= rounds


class Counts(torch.nn.Module):
    """Changes itself in Python, or not."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes, self.calls = changes, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.calls = self.calls + 1
        return x * 2 + 1


@pytest.mark.parametrize("changes", [False, True])
def test_a_forward_that_cannot_be_frozen_is_called_compiled(
    changes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Counts(changes)
    options = {"compiler": "eager", "pool": pg.GraphPool()}
    forward = Forward(model, {"x": 0}, [4], options, lambda: None, outputs="copy")
    with torch.no_grad():
        for _ in range(3):
            before, x = model.calls, torch.randn(4, 3)
            torch.testing.assert_close(forward("piecewise", None, x=x), x * 2 + 1)
    assert model.calls == before + changes
    assert ("Counts is called with Dynamo's checks" in caplog.text) is changes


def test_the_models_of_a_loop_are_frozen(speculator: Speculator, caplog: pytest.LogCaptureFixture) -> None:
    pg.reset()
    for shape in (CHAIN, TREE):
        speculator.generate(prompts(), max_new_tokens=4, shape=shape)
    assert "Dynamo's checks" not in caplog.text


def test_generate_command_prints_text_times_and_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", TARGET, "--draft", HEAD, "--steps", "2", "--max-new-tokens", "16"]
    assert main([*asked, "--compiler", "eager", "--prompt", TEXTS[0]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(TEXTS[0])
    for word in (
        "plain decoding",
        "a chain of 2",
        "speed-up",
        "mean acceptance length:",
        "acceptance at token 1",
    ):
        assert word in printed
    assert "SYNTHETIC" not in printed


@pytest.mark.parametrize(
    "options, says",
    [
        (["--steps", "3"], "needs a draft model and there is none"),
        (["--draft", HEAD, "--steps", "three"], "--steps three"),
        (["--draft", HEAD, "--synthetic-accept-length", "9"], "a mean of 9.0 tokens from 3 steps"),
        (["--dtype", "fp8"], "dtype 'fp8' cannot be used"),
        (["--device", "gpu"], "device 'gpu' cannot be used"),
        (["--top-p", "90"], "top_p=90"),
        (["--max-new-tokens", "5000"], "a target of 2048 positions"),
        (["--model", "./nowhere"], "the model './nowhere' cannot be used"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generate_command_says_what_it_cannot_serve(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", TARGET, "--compiler", "eager", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and "What to do:" in error


def test_generate_command_labels_synthetic_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", TARGET, "--draft", HEAD, "--topk", "2", "--max-new-tokens", "16"]
    assert main([*asked, "--compiler", "eager", "--synthetic-accept-length", "2", "--graphs", "eager"]) == 0
    assert "SYNTHETIC acceptance: a mean of 2.00" in capsys.readouterr().out


@pytest.mark.parametrize("own_code", [False, True])
def test_a_model_of_transformers_is_traced_once(own_code: bool) -> None:
    """Its decoder and its head. Any other one is traced at one token as well: does it do the same there?"""
    model = small_target()
    if own_code:
        model.__class__ = type("Mine", (type(model),), {"__module__": __name__})
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    Speculator(model, shapes=[PLAIN], max_requests=2, max_seq_len=16, **QUICK).prepare()
    assert stats["unique_graphs"] - before == 2 * (1 + own_code)


@pytest.mark.parametrize("own_code", [False, True])
def test_a_lone_prompt_of_one_token_needs_no_trace_while_serving(own_code: bool) -> None:
    """Requests would wait for it. The draft's forward over prompts was traced at its first single row."""
    target = small_target()
    draft = twin(target)
    if own_code:
        target.__class__ = type("Mine", (type(target),), {"__module__": __name__})
    loop = Speculator(
        target, draft, shapes=[2], max_requests=2, max_seq_len=16, graphs={"prefill": "compiled"}, **QUICK
    )
    loop.prepare()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    loop.generate([[5]], max_new_tokens=2)
    assert stats["unique_graphs"] == before
