"""bench_vllm with a double of vLLM's engine in its processes: turns, counts, marks and tables."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from benchmarks.vllm_report import marks_of, matrix
from piecewise_graph.bench.load import Load, arrivals

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmarks are run as such")

VLLM = """
import sys, time
from collections import namedtuple
from vllm.v1.worker.gpu_worker import Worker

Out = namedtuple("Out", "token_ids logprobs")
Answer = namedtuple("Answer", "request_id finished outputs")
Value = namedtuple("Value", "logprob")
Scheduled = namedtuple("Scheduled", "total_num_scheduled_tokens")

class SamplingParams:
    def __init__(self, max_tokens, **_):
        self.max_tokens = max_tokens

class Engine:
    def __init__(self):
        self.waiting, self.worker = {}, Worker()
        self.worker.load_model()
        self.worker.determine_available_memory()
        self.worker.compile_or_warm_up_model()

    def add_request(self, name, prompt, params):
        self.waiting[name] = [prompt["prompt_token_ids"], params.max_tokens, []]

    def abort_request(self, names):
        for name in names:
            self.waiting.pop(name)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        time.sleep(0.001)
        self.worker.execute_model(Scheduled(len(self.waiting)))
        found = []
        for name, (prompt, wanted, tokens) in list(self.waiting.items()):
            tokens.append(prompt[-1] + len(tokens))
            done = len(tokens) == wanted
            found.append(Answer(name, done, [Out(list(tokens), None)]))
            if done:
                self.waiting.pop(name)
        return found

class LLM:
    def __init__(self, enforce_eager=False, enable_lora=False, compilation_config=None, **_):
        if enable_lora and compilation_config:
            raise ValueError("LoRA adapters are not served")
        self.llm_engine, self.odd = Engine(), not enforce_eager and not compilation_config

    def sleep(self, level):
        self.llm_engine.worker.asleep = True

    def wake_up(self):
        self.llm_engine.worker.asleep = False

    def generate(self, prompts, params, use_tqdm):
        assert not self.llm_engine.worker.asleep
        names = [f"generated {index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts):
            self.llm_engine.add_request(name, prompt, params)
        found = {}
        while len(found) < len(names):
            found |= {each.request_id: each for each in self.llm_engine.step() if each.finished}
        for name in names:
            tokens = found[name].outputs[0].token_ids
            if self.odd and name == names[-1]:
                tokens[2] += 1
            logprobs = [{token: Value(-0.1), token + 1: Value(-0.35)} for token in tokens]
            yield Answer(name, True, [Out(tokens, logprobs)])
"""
MODULES = {
    "vllm/__init__.py": VLLM,
    "vllm/v1/core/sched/scheduler.py": "class Scheduler:\n    def _preempt_request(self): pass\n",
    "vllm/v1/worker/gpu_model_runner.py": "class GPUModelRunner:\n    def _model_forward(self): pass\n",
    "vllm/v1/worker/gpu_worker.py": """
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
class Worker:
    asleep = False
    def load_model(self): pass
    def determine_available_memory(self): pass
    def compile_or_warm_up_model(self): pass
    def execute_model(self, scheduled):
        GPUModelRunner()._model_forward()
""",
}


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`import vllm` finds the double, in the processes that are started."""
    for name, source in MODULES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))  # a spawned process takes over sys.path


def test_sides_take_turns_and_are_counted(double: None, tmp_path: Path) -> None:
    benchmark, out = importlib.import_module("benchmarks.bench_vllm"), tmp_path / "out.json"
    given = ["--parts", "load,decode,eagle,answers", "--shapes", "1b", "--users", "2", "--turns", "2"]
    given += ["--per-user", "2", "--prompts", "3", "--sides", "v1,piecewise"]
    assert benchmark.main([*given, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"] == "python -m benchmarks.bench_vllm " + " ".join(given)
    by_part = {part: [row for row in found["rows"] if row["part"] == part] for part in ("load", "answers")}
    for row in by_part["load"]:
        # 2 turns of 2 requests of each of 2 users, 64 tokens, 2 at a time
        assert row["forwards"] == 2 * 2 * 64 and row["low"] <= row["tok_s"] <= row["high"]
    for row in [row for row in found["rows"] if row["part"] == "decode"]:
        steps = [each for each in row["host"] if "(execute_model)" in each["function"]]
        assert {each["calls"] for each in steps} == {1.0} and row["call_us"] < 1e3 * row["step_ms"]
    starts = [row for row in found["rows"] if row["part"] == "start"]
    assert all(sum(row["phases"].values()) < row["engine_s"] < row["ready_s"] for row in starts)
    assert {len(row["phases"]) for row in starts} == {3}
    assert {row["tokens_per_round"] for row in found["rows"] if row["part"] == "eagle"} == {1.0}
    differ = {row["side"]: row["differences"] for row in by_part["answers"]}
    one = [{"prompt": 2, "token": 2, "gap": pytest.approx(0.25)}]
    assert differ == {"eager": [], "v1": one, "v2": one, "piecewise": []}
    told = {mark["name"]: mark for mark in found["marks"]}
    assert told["64 prompts: answers that differ from eager's"]["limit"] == 1
    assert told["load 1b, 2 users: share not replayed"]["value"] == 1.0  # the double replays nothing
    assert "eagle 1b, 2 users: time of a round over v1's" in told


def test_kernels_are_counted_per_step() -> None:
    taken = (
        ("gemm", "kernel", 4.0),
        ("norm", "kernel", 1.0),
        ("gemm", "kernel", 6.0),
        ("step", "cpu_op", 9.0),
    )
    events = [{"ph": "X", "cat": cat, "name": name, "dur": dur, "ts": 0} for name, cat, dur in taken]
    found = importlib.import_module("benchmarks.vllm_profile").kernels_of(events, steps=2)
    assert found == [{"kernel": "gemm", "calls": 1.0, "us": 5.0}, {"kernel": "norm", "calls": 0.5, "us": 0.5}]


def test_what_is_refused_or_fails_is_a_row(double: None, tmp_path: Path) -> None:
    benchmark, out = importlib.import_module("benchmarks.bench_vllm"), tmp_path / "out.json"
    given = ["--parts", "features", "--features", "abort,sleep", "--prompts", "4"]
    assert benchmark.main([*given, "--out", str(out)]) == 0
    *rows, refused = json.loads(out.read_text())["rows"]
    assert refused["feature"] == "LoRA" and "LoRA adapters are not served" in refused["refused"]
    aborted, slept = [row for row in rows if row["side"] == "piecewise"]
    assert (aborted["prompts"], aborted["differ"]) == (2, 0)  # every second one was aborted
    assert (slept["prompts"], slept["differ"]) == (4, 0)


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3"])
def test_heads_have_architectures_that_vllm_knows(name: str) -> None:
    settings = importlib.import_module("benchmarks.vllm_models").with_feature(name)["speculative_config"]
    folder = Path(settings["model"])
    (known,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert known == {"EAGLE-1": "LlamaForCausalLM", "EAGLE-3": "LlamaForCausalLMEagle3"}[name]
    assert (folder / "model.safetensors").stat().st_size > 0


def test_replays_above_the_largest_size_are_left_out() -> None:
    counts = {"forwards": 100, "replays": 89, "fallbacks:above_max_tokens": 10}
    common = {"part": "load", "shape": "1b", "users": 1, "tpot_ms": 1.0, "ttft_ms": 2.0, "low": 9, "high": 11}
    rows = [
        common | counts | {"side": side, "tok_s": speed} for side, speed in (("v1", 10), ("piecewise", 8))
    ]
    speed, share = (mark.value for mark in marks_of(rows)[1:])
    assert (speed, share) == (1.25, pytest.approx(1 / 90))
    assert "| 1b | 1 | piecewise | 8 (9, 11) | 1.00 | 2.0 | 1.1% | - | - | - |" in matrix(rows)


def test_this_projects_engine_is_one_more_side() -> None:
    own = importlib.import_module("benchmarks.own_engine")
    served = own.OwnEngine({"model": "models/tiny", "max_num_seqs": 2, "max_model_len": 64})
    assert 0 < served.phases["load_model"] < served.seconds
    row = served.load(2, arrivals(Load(5, 4, range_ratio=0.5, vocab_size=512), 3))
    assert row["tok_s"] > 0 and row["tpot_ms"] > 0 and row["ttft_ms"] > 0


def test_the_marks_of_our_engine() -> None:
    common = {"part": "load", "shape": "1b", "users": 16, "tpot_ms": 1.0, "low": 9, "high": 11, "ratio": 0.5}
    rows = [
        common | {"side": "v1", "tok_s": 10, "ttft_ms": 2.0},
        common | {"side": "own", "tok_s": 16, "ttft_ms": 1.0},
    ]
    _, speed, first = marks_of(rows)
    assert (speed.value, speed.limit, first.value) == (0.625, pytest.approx(1 / 1.2), 0.5)
    assert speed.name == "load 1b, 16 users, lengths from 0.5: v1's tok/s over our engine's"
    assert "| 1b | 16 | own, lengths from 0.5 | 16 (9, 11) | 1.00 | 1.0 | - | - | - | - |" in matrix(rows)


@pytest.mark.parametrize(
    "name",
    [
        "bench_vllm",
        "bench_vllm_answers_h200",
        "bench_vllm_features_h200",
        "bench_vllm_load_1b",
        "bench_vllm_load_1b_h200",
        "bench_vllm_load_1b_h200_lengths",
        "bench_vllm_load_8b",
        "bench_vllm_load_8b_backend_h200",
        "bench_vllm_load_8b_engine_h200",
        "bench_vllm_load_8b_h200",
        "bench_vllm_load_8b_many_h200",
    ],
)
def test_the_table_is_made_from_the_results(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    file = folder / "results" / f"{name}.json"
    found = json.loads(file.read_text())
    assert importlib.import_module("benchmarks.bench_vllm").main(["--report", "--out", str(file)]) == 0
    told = capsys.readouterr().out.strip()
    assert told == matrix(found["rows"]) and told in (folder / "README.md").read_text()
    assert [mark.as_row() for mark in marks_of(found["rows"])] == found["marks"]
