"""Options: unknown names, values that cannot work, the environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.buckets import default_capture_sizes
from piecewise_graph.errors import ConfigError, PiecewiseError


def identity(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("max_token", "max_tokens"), ("capture_size", "capture_sizes"), ("cudagraphs", "cuda_graphs")],
)
def test_unknown_option_names_the_nearest_field(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)'{wrong}'.*did you mean '{near}'"):
        pg.compile(identity, **{wrong: 4})


def test_unknown_option_far_from_all_lists_them() -> None:
    with pytest.raises(ConfigError) as raised:
        pg.compile(identity, zzzz=1)
    assert "did you mean" not in str(raised.value)
    assert all(field.name in str(raised.value) for field in dataclasses.fields(pg.PiecewiseConfig))


@pytest.mark.parametrize("sizes", [[], [0], [-1, 2], [1.5], [True], "1,2", 8, {4, 8}, ["4"], [4, None]])
def test_bad_capture_sizes_are_refused(sizes: object) -> None:
    with pytest.raises(ConfigError, match="capture_sizes"):
        pg.PiecewiseConfig(capture_sizes=sizes)  # type: ignore[arg-type]


def test_capture_size_above_max_tokens_is_refused_by_both_names() -> None:
    with pytest.raises(ConfigError, match=r"(?s)capture_sizes.*max_tokens=8"):
        pg.PiecewiseConfig(capture_sizes=[4, 16], max_tokens=8)


@pytest.mark.parametrize("value", [0, -1, 1.5, "512", None, True])
def test_bad_max_tokens_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        pg.PiecewiseConfig(max_tokens=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["compiler", "cuda_graphs", "capture", "outputs", "check", "padding", "one_token"]
)
@pytest.mark.parametrize("value", ["nonsense", None, 3, True])
def test_bad_choice_lists_the_choices(name: str, value: object) -> None:
    default = getattr(pg.PiecewiseConfig(), name)
    with pytest.raises(ConfigError, match=f"(?s){name}=.*{default!r}"):
        pg.PiecewiseConfig(**{name: value})  # type: ignore[arg-type]


def test_unhashable_choice_is_refused_like_any_other() -> None:
    with pytest.raises(ConfigError, match="compiler"):
        pg.PiecewiseConfig(compiler=["inductor"])  # type: ignore[arg-type]


def test_pool_must_be_a_graph_pool() -> None:
    with pytest.raises(ConfigError, match="GraphPool"):
        pg.PiecewiseConfig(pool=(0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [3, "", b"folder", True, ["folder"]])
def test_cache_dir_must_be_a_path(value: object) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cache_dir=.*path of a folder"):
        pg.PiecewiseConfig(cache_dir=value)  # type: ignore[arg-type]


def test_cache_dir_survives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    wanted = str(tmp_path / "segments")
    assert pg.PiecewiseConfig(cache_dir="segments").cache_dir == wanted
    assert pg.PiecewiseConfig(cache_dir=Path("segments")) == pg.PiecewiseConfig(cache_dir=wanted)
    assert pg.PiecewiseConfig(cache_dir="~/segments").cache_dir == str(tmp_path / "user" / "segments")


def test_sizes_are_sorted_without_repeats() -> None:
    assert pg.PiecewiseConfig(capture_sizes=[8, 1, 4, 8], max_tokens=8).sizes == (1, 4, 8)
    assert pg.PiecewiseConfig(max_tokens=100).sizes == default_capture_sizes(100)


def test_config_is_frozen_and_equal_configs_are_equal() -> None:
    config = pg.PiecewiseConfig(max_tokens=16)
    assert config == pg.PiecewiseConfig(max_tokens=16) != pg.PiecewiseConfig(max_tokens=8)
    assert hash(config) == hash(pg.PiecewiseConfig(max_tokens=16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_tokens = 8  # type: ignore[misc]


def test_every_config_error_is_a_value_error_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="What to do: ") as raised:
        pg.PiecewiseConfig(max_tokens=0)
    assert isinstance(raised.value, PiecewiseError)


# --- the environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("max_tokens", "64", 64),
        ("compiler", "aot_eager", "aot_eager"),
        ("capture_sizes", "[1, 2, 4]", (1, 2, 4)),
        ("capture_sizes", "1, 2, 4", (1, 2, 4)),
        ("capture_sizes", "None", default_capture_sizes(512)),
        ("outputs", "static", "static"),
    ],
)
def test_environment_sets_a_field(
    field: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PIECEWISE_GRAPH_{field.upper()}", text)
    assert getattr(pg.PiecewiseConfig.from_options(None), field) == value


def test_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_MAX_TOKENS", "64")
    assert pg.PiecewiseConfig.from_options({"max_tokens": 32}).max_tokens == 32


def test_misspelt_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_MAX_TOKEN", "64")
    with pytest.raises(ConfigError, match="PIECEWISE_GRAPH_MAX_TOKENS"):
        pg.PiecewiseConfig.from_options(None)


@pytest.mark.parametrize(("field", "text"), [("MAX_TOKENS", "many"), ("CAPTURE_SIZES", "[0]"), ("POOL", "3")])
def test_bad_value_in_the_environment_is_refused(
    field: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PIECEWISE_GRAPH_{field}", text)
    with pytest.raises(ConfigError, match=field.lower()):
        pg.PiecewiseConfig.from_options(None)


def test_environment_reaches_a_stack_that_passes_no_options(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "eager")
    monkeypatch.setenv("PIECEWISE_GRAPH_CUDA_GRAPHS", "off")
    with torch.no_grad(), pg.counters.expect(**{"fallbacks:cuda_graphs_off": 1, "tapes": 0}):
        torch.compile(identity, backend="piecewise")(torch.ones(4, device=device))


# --- torch.compile ------------------------------------------------------------------------------------


def catalogued(error: BaseException | None) -> PiecewiseError | None:
    """The library's own error in a chain of causes: Dynamo wraps the errors of a backend."""
    while error is not None and not isinstance(error, PiecewiseError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


@pytest.mark.parametrize("options", [{"max_token": 4}, {"capture_sizes": [0]}])
def test_bad_options_of_torch_compile_have_a_config_error_as_cause(options: dict[str, object]) -> None:
    with torch.no_grad(), pytest.raises(Exception, match="What to do") as raised:
        torch.compile(identity, backend="piecewise", options=options)(torch.ones(4))
    assert isinstance(catalogued(raised.value), ConfigError)


def test_mode_of_torch_compile_is_refused() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="reduce-overhead") as raised:
        torch.compile(identity, backend="piecewise", mode="reduce-overhead")(torch.ones(4))
    assert isinstance(catalogued(raised.value), ConfigError)


def test_unknown_keywords_of_future_torch_versions_are_accepted() -> None:
    from piecewise_graph.backend import piecewise

    graph = torch.fx.symbolic_trace(identity)
    with torch.no_grad():
        assert callable(piecewise(graph, [torch.ones(4)], options={"compiler": "eager"}, name="block"))
