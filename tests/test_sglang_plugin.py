"""The plugin for SGLang, against doubles: what it takes, what it refuses, and SGLang's order of calls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import sglang_doubles as doubles
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import piecewise_graph as pg
from piecewise_graph.integrations import sglang as plugin
from piecewise_graph.integrations.errors import IntegrationError

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
SEGMENTS, SIZES = doubles.LAYERS + 1, doubles.SIZES
PROMPTS = [[3, 4, 5], [6], list(range(9)), [1, 2, 3, 4], list(range(20, 36))]
LONG = list(range(17))  # above the largest size
FLAG = "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph"
BACKEND = "sglang.srt.model_executor.runner_backend.tc_piecewise_cuda_graph_backend"


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch)
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "eager")
    plugin.register()


def runner(compiler: str = plugin.COMPILER, **given: Any) -> doubles.PrefillCudaGraphRunner:
    server = doubles.ServerArgs(**given)
    server.cuda_graph_config.prefill.tc_compiler = compiler
    return doubles.PrefillCudaGraphRunner(server)


def compare(ours: Any, prompts: list[list[int]]) -> None:
    """Each prompt goes on behind the one before, as chunks of one request do."""
    plain, start = runner("eager"), 0
    for tokens in prompts:
        expected = plain.execute(tokens, start)
        torch.testing.assert_close(ours.execute(tokens, start), expected, rtol=1e-4, atol=1e-5)
        start += len(tokens)
    torch.testing.assert_close(ours.kv, plain.kv, rtol=1e-4, atol=1e-5)


def test_the_entry_point_names_the_function() -> None:
    assert '"piecewise_graph.integrations.sglang:register"' in PYPROJECT.read_text()


@pytest.mark.parametrize(("backend", "compiler"), [("tc_piecewise", "eager"), ("breakable", "piecewise")])
def test_nothing_happens_unless_asked(backend: str, compiler: str) -> None:
    server = doubles.ServerArgs()
    server.cuda_graph_config.prefill.backend, server.cuda_graph_config.prefill.tc_compiler = backend, compiler
    made: list[Any] = []
    runner = type("Runner", (), {"model_runner": type("", (), {"server_args": server})})()
    plugin.choose(made.append, runner)
    assert made == [runner]


def test_answers_and_kv_are_those_of_the_uncompiled_model() -> None:
    with pg.counters.expect(traces=1, tapes=len(SIZES), captures=len(SIZES) * SEGMENTS):
        served = runner()
    with pg.counters.expect(traces=0, tapes=0, replays=len(PROMPTS), fallbacks=0):
        compare(served, PROMPTS)


def test_batches_above_the_sizes_and_calls_of_others_run_as_they_are() -> None:
    served = runner()
    with pg.counters.expect(replays=2, fallbacks=0):
        compare(served, [[5, 6], LONG, [7]])


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, SIZES[-1]), min_size=1, max_size=4))
def test_any_lengths(lengths: list[int]) -> None:
    served = runner()
    with pg.counters.expect(replays=len(lengths), fallbacks=0):
        compare(served, [[(7 * i + n) % doubles.VOCABULARY for i in range(n)] for n in lengths])


def test_the_start_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner()
    assert f"{len(SIZES)} buckets in 1 traces" in caplog.text


def test_sglangs_settings_stay_as_they_were() -> None:
    served = runner()
    assert served.model_runner.server_args.cuda_graph_config.prefill.tc_compiler == plugin.COMPILER
    assert served.backend._compile_config.compiler == "inductor"  # its ops in torch's own code


def test_cleanup_gives_the_model_its_forward_back() -> None:
    served = runner()
    inner = served.model_runner.model.model
    served.backend.cleanup()
    assert "forward" not in vars(inner)
    with pytest.raises(pg.errors.PiecewiseError):
        pg.explain(inner)


CASES = {"tp_size": 2, "pp_size": 2, "dp_size": 2, "enable_lora": True, "enable_memory_saver": True}


@pytest.mark.parametrize("name", CASES)
def test_settings_that_are_not_served_are_refused(name: str) -> None:
    told = next(told for setting, _, told in plugin._UNSUPPORTED if setting == name)
    with pytest.raises(IntegrationError, match=f"tc_compiler='piecewise' does not serve a model with {told}"):
        runner(**{name: CASES[name]})


@pytest.mark.parametrize("name", ["install_compile", "capture_one", "cleanup"])
def test_a_method_that_moved_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = dict(vars(doubles.TcPiecewiseCudaGraphBackend))
    del methods[name]
    moved = type("TcPiecewiseCudaGraphBackend", (), methods)
    monkeypatch.setitem(doubles.MODULES[BACKEND], "TcPiecewiseCudaGraphBackend", moved)
    doubles.install(monkeypatch)
    plugin.register()
    with pytest.raises(
        IntegrationError, match=rf"SGLang 0\.5\.17 has no .*\.{name}, .*\n.*use SGLang 0\.5\.17"
    ):
        runner()


@pytest.mark.parametrize(
    ("module", "name"),
    [(BACKEND, "TcPiecewiseCudaGraphBackend"), (FLAG, "is_in_tc_piecewise_cuda_graph")],
)
def test_an_attribute_that_moved_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch, without=[f"{module}:{name}"])
    plugin.register()
    with pytest.raises(IntegrationError, match=rf"has no {module}\.{name}, "):
        runner()
