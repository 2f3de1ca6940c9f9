"""What serves a linear of few rows in code of exact sizes: measured, remembered, kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piecewise_graph.compiler import linear_choice
from piecewise_graph.kernels.linear import tuning


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
class TestMeasuring:
    def test_the_choice_is_remembered_and_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        weight = weight_of(512, 1024)
        monkeypatch.setattr(linear_choice, "_measured", {})
        first = linear_choice.choose(2, weight, None, str(tmp_path))
        assert first is not None and "library" in first and min(first.values()) > 0
        monkeypatch.setattr(linear_choice, "_measured", {})
        monkeypatch.setattr(linear_choice.tuning, "fastest", None)  # nothing is measured again
        assert linear_choice.choose(2, weight, None, str(tmp_path)) == first
        assert linear_choice.choose(2, weight, None, None) == first

    @pytest.mark.parametrize(
        "content", ["", "[]", '{"times": {"library": "x"}}', '{"times": {"rm -rf": 1.0}}', "\x00"]
    )
    def test_a_bad_file_costs_a_measurement(
        self, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight = weight_of(512, 1024)
        monkeypatch.setattr(linear_choice, "_measured", {})
        linear_choice.choose(2, weight, None, str(tmp_path))
        (file,) = tmp_path.glob("*.linear")
        file.write_text(content)
        monkeypatch.setattr(linear_choice, "_measured", {})
        assert linear_choice.choose(2, weight, None, str(tmp_path)) is not None
        assert "library" in json.loads(file.read_text())["times"]


def test_nothing_is_measured_on_a_cpu() -> None:
    assert linear_choice.choose(1, torch.zeros(4, 4), None, None) is None


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_kernels_are_compiled_side_by_side_before_one_is_timed(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(tuning, "compile_ahead", lambda config, *rest, gated: begun.append(config.name))
    monkeypatch.setattr(tuning, "_copies", lambda weight: [weight])
    x, weight = (torch.zeros(rows, 4096, dtype=torch.bfloat16) for rows in (tokens, 512))
    at_first_timing: list[list[str]] = []

    def timed(call: Callable[[], object], turns: int, weights: Sequence[Tensor]) -> float:
        at_first_timing.append(list(begun))
        return 1.0

    times = tuning.fastest(x, weight, None, None, timed)
    assert sorted(times) == sorted({"library", *begun}) and len(begun) == len(set(begun)) > 5
    assert at_first_timing[0] == begun


def test_handicaps_decide_close_calls_only() -> None:
    kernels_first, others_first = linear_choice.PREFERENCES
    close = {"library": 10.0, "generated": 9.9, "1 512 1 4 1": 10.1}
    assert linear_choice.preferred(close, kernels_first) == "1 512 1 4 1"
    assert linear_choice.preferred(close, others_first) == "generated"
    clear = {"library": 10.0, "generated": 20.0, "1 512 1 4 1": 12.0}
    assert {linear_choice.preferred(clear, handicaps) for handicaps in linear_choice.PREFERENCES} == {
        "library"
    }


def test_a_way_names_what_the_op_takes() -> None:
    assert linear_choice.config_of("generated") is None
    assert linear_choice.config_of("library") == []
    assert linear_choice.config_of("1 512 4 8 1") == [1, 512, 4, 8, 1]
