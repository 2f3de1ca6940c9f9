"""Who serves an attention call: what a mode lacks, which one is chosen, and what is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, check, make_case

from piecewise_graph.custom_ops.attention import AttentionBatch, implementations
from piecewise_graph.custom_ops.attention.implementations import (
    NAMES,
    Implementation,
    Mode,
    able_implementations,
    choose,
    fastest_first,
    load,
)
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache

CPU = torch.device("cpu")
MIXED = Shape(((5, 1), (0, 4), (0, 0)))
DECODE = Shape(((5, 1), (0, 1)), uniform=True)
TREE = Shape(((5, 3), (2, 3)), tree=True)
CACHE = {
    "num_layers": 2,
    "num_pages": 9,
    "page_size": 16,
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": torch.float32,
    "device": "cpu",
}


def case_of(shape: Shape = MIXED, implementation: str = "torch", **call: Any) -> Case:
    case = make_case(shape, dtype=torch.float32, device=CPU, implementation=implementation)
    return dataclasses.replace(case, call=dataclasses.replace(case.call, memo={}, **call))


def mode(**limits: Any) -> Mode:
    """The torch reference's two functions under other declarations."""
    reference = load("torch").modes[0]
    return Mode(prepare=reference.prepare, attend=reference.attend, **limits)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Implementation]]:
    """What `load` finds; tests put their own implementations in. The reference is always there."""
    reference = load("torch")
    found = {name: Implementation(name, (), f"No module named {name!r}") for name in NAMES}
    found["torch"] = reference
    monkeypatch.setattr(implementations, "load", found.__getitem__)
    yield found


# --- Mode.lacks ---


LACKS = {
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


@pytest.mark.parametrize("what", LACKS)
def test_a_mode_says_what_it_lacks(what: str) -> None:
    limited, shape, reason = LACKS[what]
    case = case_of(shape)
    assert limited.lacks(case.call, case.batch, False) == reason


def test_a_mode_that_is_not_capturable_lacks_that_only_in_a_full_graph() -> None:
    case = case_of()
    assert mode().lacks(case.call, case.batch, True) == "it cannot be part of a full graph"
    assert mode().lacks(case.call, case.batch, False) is None
    assert mode(capturable=True).lacks(case.call, case.batch, True) is None


@pytest.mark.parametrize("absent", ["host_seq_lens", "host_query_lens"])
def test_a_mode_that_plans_lacks_lengths_on_the_host(absent: str) -> None:
    case = case_of()
    assert mode(host_lengths=True).lacks(case.call, case.batch, False) is None
    batch = dataclasses.replace(case.batch, **{absent: None})
    reason = mode(host_lengths=True).lacks(case.call, batch, False)
    assert reason == "it plans on the host and the batch has no host_query_lens and host_seq_lens"
    assert mode().lacks(case.call, batch, False) is None


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
def test_a_mode_that_can_lacks_nothing(shape: Shape, able: Mode) -> None:
    case = case_of(shape)
    assert able.lacks(case.call, case.batch, False) is None


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
        case.batch.run(case.call, captured=False)
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
        assert tried == [".flashinfer"]
    finally:
        load.cache_clear()


def test_an_implementation_that_cannot_says_why_and_who_can(installed: dict[str, Implementation]) -> None:
    installed["triton"] = Implementation("triton", (mode(head_dims=frozenset({128})),))
    installed["flash_attn"] = Implementation("flash_attn", (mode(),))
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
    installed["flashinfer"] = Implementation("flashinfer", (far, near))
    case = case_of(implementation="flashinfer")
    with pytest.raises(AttentionError, match=r"it does not read pages of 16 tokens\.") as caught:
        choose(case.call, case.batch, False)
    assert "query_len" not in str(caught.value)


def test_nobody_else_can_is_said_too(installed: dict[str, Implementation]) -> None:
    installed["torch"] = Implementation("torch", (mode(capturable=False),))
    for name in ("torch", "auto"):
        case = case_of(implementation=name)
        with pytest.raises(AttentionError, match="it cannot be part of a full graph") as caught:
            choose(case.call, case.batch, True)
        assert caught.value.remedy == "no implementation that is usable here can do this."


def test_the_first_mode_that_can_is_taken(installed: dict[str, Implementation]) -> None:
    uniform, ragged = mode(uniform=True, capturable=True), mode(host_lengths=True)
    installed["flashinfer"] = Implementation("flashinfer", (uniform, ragged))
    for shape, captured, taken in ((DECODE, False, uniform), (DECODE, True, uniform), (MIXED, False, ragged)):
        case = case_of(shape, "flashinfer")
        assert choose(case.call, case.batch, captured) is taken


def test_auto_takes_the_fastest_that_is_here_and_can(installed: dict[str, Implementation]) -> None:
    fast, uniform = mode(), mode(uniform=True)
    case, decode = case_of(implementation="auto"), case_of(DECODE, "auto")
    assert choose(case.call, case.batch, False) is installed["torch"].modes[0]
    installed["flashinfer"] = Implementation("flashinfer", (fast,))
    installed["triton"] = Implementation("triton", (uniform,))
    assert choose(case.call, case.batch, False) is fast
    assert choose(decode.call, decode.batch, False) is uniform
    assert able_implementations(decode.call, decode.batch, False) == ("triton", "flashinfer", "torch")


def test_auto_imports_nothing_behind_the_one_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def first_can(name: str) -> Implementation:
        asked.append(name)
        return Implementation(name, (mode(),))

    monkeypatch.setattr(implementations, "load", first_can)
    case = case_of(implementation="auto")
    choose(case.call, case.batch, False)
    assert asked == [NAMES[0]]


def test_auto_is_right_with_what_is_installed_here() -> None:
    check(case_of(implementation="auto"), 1e-5)


def test_a_nan_of_the_model_shows() -> None:
    case = case_of()
    case.call.q[2] = float("nan")
    case.batch.run(case.call, captured=False)
    assert case.call.out.isnan().flatten(1).any(1).tolist() == [False, False, True, False, False]


# --- the call against the cache ---


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kv_heads": 1}, "the model has 2 KV heads of 64, its KV cache 1 of 64"),
        ({"head_dim": 32}, "the model has 2 KV heads of 64, its KV cache 2 of 32"),
        ({"num_layers": 1}, "layer 1 of the model, and a KV cache of 1 layers"),
        ({"dtype": torch.float16}, "the model computes torch.float32, its KV cache holds torch.float16"),
    ],
)
def test_a_cache_of_another_model_is_refused(change: dict[str, Any], found: str) -> None:
    case = case_of()
    batch = dataclasses.replace(case.batch, kv_cache=PagedKVCache(**{**CACHE, **change}))
    with pytest.raises(AttentionError) as caught:
        batch.run(case.call, captured=False)
    assert found in caught.value.what


def test_a_negative_layer_is_refused() -> None:
    case = case_of(layer=-1)
    with pytest.raises(AttentionError, match="layer -1 of the model"):
        case.batch.run(case.call, captured=False)


def test_a_window_smaller_than_the_tree_is_refused() -> None:
    case = case_of(dataclasses.replace(TREE, window=3))
    choose(case.call, case.batch, False)
    case = case_of(dataclasses.replace(TREE, window=2))
    with pytest.raises(AttentionError, match="a sliding window of 2 tokens and a tree mask of 3"):
        choose(case.call, case.batch, False)


@pytest.mark.parametrize("layer", [-1, 2])
def test_the_layer_of_every_call_is_checked(layer: int) -> None:
    """Layers share what a batch remembers of its calls: the first one's check is not enough."""
    case = case_of(layer=0)
    case.batch.run(case.call, captured=False)
    before = [cached.clone() for cached in (*case.batch.kv_cache.k, *case.batch.kv_cache.v)]
    with pytest.raises(AttentionError, match=f"layer {layer} of the model, and a KV cache of 2"):
        case.batch.run(dataclasses.replace(case.call, layer=layer, memo={}), captured=False)
    for cached, old in zip((*case.batch.kv_cache.k, *case.batch.kv_cache.v), before, strict=True):
        assert torch.equal(cached, old)


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "k of more rows": (lambda call: {"k": torch.cat([call.k] * 2), "v": torch.cat([call.v] * 2)}, "k .10, 2"),
    "k of fewer rows": (lambda call: {"k": call.k[:-1], "v": call.v[:-1]}, r"k \(4, 2"),
    "v of fewer rows": (lambda call: {"v": call.v[:-1]}, r"v \(4, 2, 64\)"),
    "v of other size": (lambda call: {"v": call.v[..., :32]}, r"v \(5, 2, 32\)"),
    "k of other size": (lambda call: {"k": call.k[..., :32], "v": call.v[..., :32]}, r"k \(5, 2, 32\)"),
    "k's dtype": (lambda call: {"k": call.k.double()}, "k torch.float64"),
    "v's dtype": (lambda call: {"v": call.v.double()}, "v torch.float64"),
    "q's dtype": (lambda call: {"q": call.q.double()}, "q is torch.float64"),
    "heads": (lambda call: {"q": call.q[:, :3], "out": call.out[:, :3]}, r"q \(5, 3, 64\)"),
    "no heads": (lambda call: {"k": call.k[:, :0], "v": call.v[:, :0]}, r"k \(5, 0, 64\)"),
    "dimensions": (lambda call: {"q": call.q[None]}, r"q \(1, 5, 4, 64\)"),
    "window 0": (lambda call: {"window": 0}, "window=0"),
    "window below": (lambda call: {"window": -3}, "window=-3"),
    "softcap 0": (lambda call: {"softcap": 0.0}, "softcap=0"),
    "softcap below": (lambda call: {"softcap": -5.0}, "softcap=-5"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_arguments_that_do_not_belong_together_are_refused(what: str) -> None:
    change, found = BAD_CALLS[what]
    case = case_of()
    with pytest.raises(AttentionError, match=found):
        dataclasses.replace(case.call, memo={}, **change(case.call))


def test_too_few_rows_are_refused() -> None:
    case = case_of()
    rows = {name: getattr(case.call, name)[:-1] for name in ("q", "k", "v", "out")}
    with pytest.raises(AttentionError, match="the batch describes 5 tokens, but the model was called with 4"):
        case.batch.run(dataclasses.replace(case.call, memo={}, **rows), captured=False)


def test_padded_rows_are_left_alone() -> None:
    case = case_of()
    more = {
        name: torch.cat([getattr(case.call, name), getattr(case.call, name)[:2]])
        for name in ("q", "k", "v", "out")
    }
    case = dataclasses.replace(case, call=dataclasses.replace(case.call, memo={}, live=5, **more))
    before = case.call.out.clone()
    check(case, 1e-5)
    assert torch.equal(case.call.out[5:], before[5:])
    with pytest.raises(AttentionError, match="5 tokens, but the model was called with 6"):
        case.batch.run(dataclasses.replace(case.call, memo={}, live=6), captured=False)


# --- AttentionBatch ---


def fields_of(batch: AttentionBatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "qo_indptr", "slot_mapping"])
def test_integers_of_a_batch_are_int32(name: str) -> None:
    fields = fields_of(case_of().batch)
    fields[name] = fields[name].long()
    with pytest.raises(AttentionError, match=rf"{name} is torch\.int64"):
        AttentionBatch(**fields)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("block_table", (4, 2)), ("block_table", (3,)), ("qo_indptr", (3,)), ("slot_mapping", (5, 1))],
)
def test_shapes_of_a_batch_belong_together(name: str, shape: tuple[int, ...]) -> None:
    fields = fields_of(case_of().batch)
    fields[name] = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(AttentionError, match=rf"{name} is torch\.int32") as caught:
        AttentionBatch(**fields)
    assert "seq_lens names 3 requests" in caught.value.remedy


def test_seq_lens_has_one_dimension() -> None:
    fields = fields_of(case_of().batch)
    fields["seq_lens"] = fields["seq_lens"][:, None]
    with pytest.raises(AttentionError, match=r"seq_lens is torch\.int32"):
        AttentionBatch(**fields)


def test_a_uniform_batch_has_a_slot_for_every_row() -> None:
    fields = fields_of(case_of(DECODE).batch)
    with pytest.raises(AttentionError, match="2 requests of 2 rows each, and 2 slots"):
        AttentionBatch(**{**fields, "query_len": 2, "max_query_len": 2})


def test_a_uniform_batch_has_one_bound_of_rows() -> None:
    fields = fields_of(case_of(DECODE).batch)
    with pytest.raises(AttentionError, match="query_len=1, max_query_len=2"):
        AttentionBatch(**{**fields, "max_query_len": 2})


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 3, 3),
        torch.ones(3, 3, dtype=torch.bool),
        torch.ones(3, 3, 3, dtype=torch.bool),
        torch.ones(2, 2, 3, dtype=torch.bool),
        torch.ones(2, 3, 2, dtype=torch.bool),
    ],
    ids=["dtype", "dimensions", "requests", "rows", "width"],
)
def test_a_tree_mask_fits_its_batch(mask: torch.Tensor) -> None:
    fields = fields_of(case_of(TREE).batch)
    with pytest.raises(AttentionError, match=r"tree_mask is") as caught:
        AttentionBatch(**{**fields, "tree_mask": mask})
    assert "pass bool [2, 3, width], width at least 3" in caught.value.remedy


def test_a_tree_mask_may_be_wider_than_its_rows() -> None:
    fields = fields_of(case_of(TREE).batch)
    AttentionBatch(**{**fields, "tree_mask": torch.ones(2, 3, 5, dtype=torch.bool)})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"host_query_lens": (1, 4)}, "2 host_query_lens for 3 requests"),
        ({"host_seq_lens": (6, 4, 0, 0)}, "4 host_seq_lens for 3 requests"),
        ({"host_query_lens": (0, 5, 0)}, "host_query_lens up to 5, max_query_len=4"),
        ({"host_seq_lens": (7, 4, 0)}, "host_seq_lens up to 7, max_seq_len=6"),
        ({"host_query_lens": (3, 3, 0)}, "host_query_lens of 6 rows, and 5 slots"),
    ],
)
def test_lengths_on_the_host_fit_the_bounds(change: dict[str, Any], found: str) -> None:
    fields = fields_of(case_of().batch)
    with pytest.raises(AttentionError, match=found):
        AttentionBatch(**{**fields, **change})


def test_a_batch_prepares_once_for_equal_calls(installed: dict[str, Implementation]) -> None:
    prepared: list[tuple[int, bool]] = []
    reference = installed["torch"].modes[0]

    def prepare(batch: AttentionBatch, call: Any) -> None:
        prepared.append((call.layer, call.window is None))

    installed["torch"] = Implementation("torch", (dataclasses.replace(reference, prepare=prepare),))
    case = case_of()
    for layer, window in ((0, None), (1, None), (0, 3), (1, 3), (0, None)):
        call = dataclasses.replace(case.call, layer=layer, window=window, memo={})
        case.batch.run(call, captured=False)
    assert prepared == [(0, True), (0, False)]
    case.batch.run(dataclasses.replace(case.call, memo={}), captured=True)
    assert prepared[2:] == [(1, True)]


def test_auto_tries_flash_attn_first_for_long_prompts() -> None:
    decode, prefill = case_of(), case_of(Shape(((0, 300),)))
    assert fastest_first(decode.batch)[0] == "triton"
    assert fastest_first(prefill.batch)[0] == "flash_attn"
    assert set(fastest_first(prefill.batch)) == set(NAMES)
    assert choose(prefill.call, prefill.batch, False) is not None
