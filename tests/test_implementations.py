"""Who serves an attention call: what a mode cannot do, which one is chosen, and what is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import DECODE, MIXED, TREE, Shape, case_of, check

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import AttentionBatch, attention, implementations, modes
from piecewise_graph.custom_ops.attention.implementations import (
    NAMES,
    Implementation,
    able_implementations,
    choose,
    fastest_first,
    load,
    serve,
)
from piecewise_graph.custom_ops.attention.modes import Mode
from piecewise_graph.custom_ops.errors import AttentionError


def mode(**limits: Any) -> Mode:
    """The torch reference's two functions under other declarations."""
    reference = load("torch").modes[0]
    return Mode(reference.attend, reference.prepare, **limits)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Implementation]]:
    """What `load` finds; tests put their own implementations in. The reference is always there."""
    reference = load("torch")
    found = {name: Implementation(missing=f"No module named {name!r}") for name in NAMES}
    found["torch"] = reference
    monkeypatch.setattr(implementations, "load", found.__getitem__)
    yield found


# --- Mode.reason ---


REASONS = {
    "device": (mode(devices=frozenset({"cuda"})), MIXED, "it does not run on device type 'cpu'"),
    "dtype": (mode(dtypes=frozenset({torch.float16})), MIXED, "it has no kernels for torch.float32"),
    "head_dim": (mode(head_dims=frozenset({128})), MIXED, "it has no kernels for head_dim 64"),
    "page size": (mode(page_sizes=frozenset({1, 64})), MIXED, "it does not read pages of 16 tokens"),
    "group": (
        mode(max_group=4),
        dataclasses.replace(MIXED, heads=16),
        "it serves at most 4 query heads per KV head",
    ),
    "tree": (mode(), TREE, "it has no tree mask"),
    "window": (mode(), dataclasses.replace(MIXED, window=3), "it has no sliding window"),
    "soft cap": (mode(), dataclasses.replace(MIXED, softcap=3.0), "it has no soft cap"),
    "uniform": (
        mode(uniform=True),
        MIXED,
        "it needs the same number of rows from every request (query_len)",
    ),
    "rows": (mode(max_query_len=3), MIXED, "it serves at most 3 rows per request"),
    "else": (mode(limits=lambda call, batch: f"not layer {call.layer}"), MIXED, "not layer 1"),
}


@pytest.mark.parametrize("what", REASONS)
def test_a_mode_says_what_it_cannot_do(what: str) -> None:
    limited, shape, reason = REASONS[what]
    case = case_of(shape)
    assert limited.reason(case.call, case.batch, False) == reason


def test_a_mode_that_is_not_capturable_says_so_only_in_a_full_graph() -> None:
    case = case_of()
    assert mode().reason(case.call, case.batch, True) == "it cannot be part of a full graph"
    assert mode().reason(case.call, case.batch, False) is None
    assert mode(capturable=True).reason(case.call, case.batch, True) is None


@pytest.mark.parametrize("absent", ["host_seq_lens", "host_query_lens"])
def test_a_mode_that_plans_asks_for_lengths_on_the_host(absent: str) -> None:
    case = case_of()
    assert mode(host_lengths=True).reason(case.call, case.batch, False) is None
    batch = dataclasses.replace(case.batch, **{absent: None})
    reason = mode(host_lengths=True).reason(case.call, batch, False)
    assert reason == "it plans on the host and the batch has no host_query_lens and host_seq_lens"
    assert mode().reason(case.call, batch, False) is None


@pytest.mark.parametrize(
    ("shape", "able"),
    [
        (MIXED, mode()),
        (
            MIXED,
            mode(
                devices=frozenset({"cpu"}),
                dtypes=frozenset({torch.float32}),
                head_dims=frozenset({64}),
                page_sizes=frozenset({16}),
                max_group=2,
                max_query_len=4,
                limits=lambda call, batch: None,
            ),
        ),
        (DECODE, mode(uniform=True, max_query_len=1)),
        (TREE, mode(tree_mask=True, uniform=True)),
        (dataclasses.replace(MIXED, window=3), mode(window=True)),
        (dataclasses.replace(MIXED, softcap=3.0), mode(softcap=True)),
    ],
    ids=["no limits", "at every limit", "decode", "tree", "window", "soft cap"],
)
def test_a_mode_that_can_has_no_reason(shape: Shape, able: Mode) -> None:
    case = case_of(shape)
    assert able.reason(case.call, case.batch, False) is None


# --- choose ---


@pytest.mark.parametrize("captured", [False, True])
def test_the_reference_can_do_everything_there_is(captured: bool) -> None:
    for shape in (MIXED, DECODE, TREE, dataclasses.replace(MIXED, window=3, softcap=3.0)):
        case = case_of(shape)
        assert choose(case.call, case.batch, captured) is load("torch").modes[0]


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    case = case_of(implementation="flashattention")
    with pytest.raises(AttentionError, match="'flashattention'") as caught:
        choose(case.call, case.batch, False)
    assert all(name in caught.value.remedy for name in ("auto", *NAMES))


def test_a_package_that_is_not_installed_is_named_with_an_alternative(
    installed: dict[str, Implementation],
) -> None:
    case = case_of(implementation="flashinfer")
    with pytest.raises(AttentionError) as caught:
        choose(case.call, case.batch, False)
    assert "'flashinfer' is not usable here: No module named 'flashinfer'" in caught.value.what
    assert caught.value.remedy == "use torch."


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_what_is_not_installed_here_says_so(name: str) -> None:
    if load(name).missing is None:
        pytest.skip(f"{name} is installed")
    case = case_of(implementation=name)
    with pytest.raises(AttentionError, match="not usable here: No module named"):
        serve(case.batch, case.call, captured=False)
    assert load(name).modes == ()
    assert name not in able_implementations(case.call, case.batch, False)


def test_an_import_that_fails_is_a_reason_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(name: str, package: str) -> None:
        tried.append(name)
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    load.cache_clear()
    try:
        assert [load("flashinfer").missing for _ in "ab"] == [
            "libcudart.so.13: cannot open shared object file"
        ] * 2
        assert tried == [".flashinfer_xqa"]
    finally:
        load.cache_clear()


def test_a_package_that_does_not_load_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, package: str) -> None:
        raise RuntimeError("built for another CUDA")

    monkeypatch.setattr(importlib, "import_module", fail)
    load.cache_clear()
    try:
        assert load("flash_attn") == Implementation(missing="it does not load: built for another CUDA")
    finally:
        load.cache_clear()


def test_the_gpu_is_one_of_those_that_a_mode_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    on_gpu = SimpleNamespace(q=SimpleNamespace(is_cuda=True, device="cuda"), traits=case.call.traits)
    monkeypatch.setattr(modes, "compute_capability", {"cuda": 8}.__getitem__)
    reason = mode(capabilities={9, 10}).reason(on_gpu, case.batch, False)  # type: ignore[arg-type]
    assert reason == "it does not run on compute capability 8"
    assert mode(capabilities=range(8, 100)).reason(on_gpu, case.batch, False) is None  # type: ignore[arg-type]


def test_a_graph_of_the_caller_takes_a_mode_that_may_be_captured(
    installed: dict[str, Implementation],
) -> None:
    installed["torch"] = Implementation((mode(),))
    case = case_of()
    q, k, v = case.call.q, case.call.k, case.call.v
    with pg.forward_context(attention=case.batch, in_graph=False):
        attention(q, k, v, implementation="torch")
    with (
        pg.forward_context(attention=case.batch, in_graph=True),
        pytest.raises(AttentionError, match="it cannot be part of a full graph"),
    ):
        attention(q, k, v, implementation="torch")


def test_an_implementation_that_cannot_says_why_and_who_can(installed: dict[str, Implementation]) -> None:
    installed["triton"] = Implementation((mode(head_dims=frozenset({128})),))
    installed["flash_attn"] = Implementation((mode(),))
    case = case_of(implementation="triton")
    with pytest.raises(AttentionError) as caught:
        choose(case.call, case.batch, False)
    assert "'triton' cannot serve this call: it has no kernels for head_dim 64." in caught.value.what
    assert caught.value.remedy == "use flash_attn or torch."


def test_the_reason_given_is_that_of_the_mode_that_comes_nearest(
    installed: dict[str, Implementation],
) -> None:
    far = mode(uniform=True, dtypes=frozenset({torch.float16}))
    near = mode(page_sizes=frozenset({1}))
    installed["flashinfer"] = Implementation((far, near))
    case = case_of(implementation="flashinfer")
    with pytest.raises(AttentionError, match=r"it does not read pages of 16 tokens\.") as caught:
        choose(case.call, case.batch, False)
    assert "query_len" not in str(caught.value)


def test_nobody_else_can_is_said_too(installed: dict[str, Implementation]) -> None:
    installed["torch"] = Implementation((mode(capturable=False),))
    for name in ("torch", "auto"):
        case = case_of(implementation=name)
        with pytest.raises(AttentionError, match="it cannot be part of a full graph") as caught:
            choose(case.call, case.batch, True)
        assert caught.value.remedy == "no implementation that is usable here can do this."


def test_the_first_mode_that_can_is_taken(installed: dict[str, Implementation]) -> None:
    uniform, ragged = mode(uniform=True, capturable=True), mode(host_lengths=True)
    installed["flashinfer"] = Implementation((uniform, ragged))
    for shape, captured, taken in ((DECODE, False, uniform), (DECODE, True, uniform), (MIXED, False, ragged)):
        case = case_of(shape, "flashinfer")
        assert choose(case.call, case.batch, captured) is taken


def test_auto_takes_the_fastest_that_is_here_and_can(installed: dict[str, Implementation]) -> None:
    fast, uniform = mode(), mode(uniform=True)
    case, decode = case_of(implementation="auto"), case_of(DECODE, "auto")
    assert choose(case.call, case.batch, False) is installed["torch"].modes[0]
    installed["flashinfer"] = Implementation((fast,))
    installed["triton"] = Implementation((uniform,))
    assert choose(case.call, case.batch, False) is fast
    assert choose(decode.call, decode.batch, False) is uniform
    assert able_implementations(decode.call, decode.batch, False) == ("triton", "flashinfer", "torch")


def test_auto_imports_nothing_behind_the_one_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def first_can(name: str) -> Implementation:
        asked.append(name)
        return Implementation((mode(),))

    monkeypatch.setattr(implementations, "load", first_can)
    case = case_of(implementation="auto")
    choose(case.call, case.batch, False)
    assert asked == [NAMES[0]]


def test_auto_is_right_with_what_is_installed_here() -> None:
    check(case_of(implementation="auto"), 1e-5)


def test_a_nan_of_the_model_shows() -> None:
    case = case_of()
    case.call.q[2] = float("nan")
    serve(case.batch, case.call, captured=False)
    assert case.call.out.isnan().flatten(1).any(1).tolist() == [False, False, True, False, False]


def test_a_batch_prepares_once_for_equal_calls(installed: dict[str, Implementation]) -> None:
    prepared: list[tuple[int, bool]] = []
    reference = installed["torch"].modes[0]

    def prepare(batch: AttentionBatch, call: Any) -> None:
        prepared.append((call.layer, call.window is None))

    installed["torch"] = Implementation((dataclasses.replace(reference, prepare=prepare),))
    case = case_of()
    for layer, window in ((0, None), (1, None), (0, 3), (1, 3), (0, None)):
        call = dataclasses.replace(case.call, layer=layer, window=window)
        serve(case.batch, call, captured=False)
    assert prepared == [(0, True), (0, False)]
    serve(case.batch, dataclasses.replace(case.call), captured=True)
    assert prepared[2:] == [(1, True)]


def test_auto_tries_flash_attn_first_for_long_prompts() -> None:
    decode, prefill = case_of(), case_of(Shape(((0, 300),)))
    assert fastest_first(decode.batch, decode.call.traits)[0] == "triton"
    assert fastest_first(prefill.batch, prefill.call.traits)[0] == "flash_attn"
    assert set(fastest_first(prefill.batch, prefill.call.traits)) == set(NAMES)
    one_order = dataclasses.replace(prefill.call.traits, deterministic=True)
    assert fastest_first(prefill.batch, one_order)[0] == "triton"
    assert choose(prefill.call, prefill.batch, False) is not None
