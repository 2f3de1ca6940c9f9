"""The decision table of one call, row by row, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecewise_graph.recorder.mode import FULL
from piecewise_graph.runtime.dispatch import Action, Captured, Decision, Situation, decide

LAZY = Situation(sizes=(4, 8), may_capture=True)


def compiled_because(reason: str) -> Decision:
    return Decision(Action.COMPILED, None, reason)


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_first_call_of_a_bucket_captures_it(tokens: int, bucket: int) -> None:
    assert decide(tokens, LAZY) == Decision(Action.CAPTURE, bucket)


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_captured_bucket_is_replayed(tokens: int, bucket: int) -> None:
    given = replace(LAZY, piecewise=Captured({4: True, 8: True}), may_capture=False)
    assert decide(tokens, given) == Decision(Action.REPLAY, bucket)


def test_tape_that_was_not_proven_serves_its_exact_size_only() -> None:
    given = replace(LAZY, piecewise=Captured({4: False}))
    assert decide(4, given) == Decision(Action.REPLAY, 4)
    assert decide(3, given) == Decision(Action.CAPTURE, 4)
    assert decide(3, replace(given, may_capture=False)) == compiled_because("not_captured")


def test_larger_captured_bucket_does_not_stand_in_for_a_missing_one() -> None:
    given = replace(LAZY, piecewise=Captured({8: True}), may_capture=False)
    assert decide(3, given) == compiled_because("not_captured")


@pytest.mark.parametrize(
    ("tokens", "change", "reason"),
    [
        (3, {"blocked": "random_numbers"}, "random_numbers"),
        (0, {"blocked": "random_numbers"}, "random_numbers"),
        (0, {}, "no_tokens"),
        (9, {}, "above_max_tokens"),
        (9, {"piecewise": Captured(unpaddable={16: "derived_size"})}, "above_max_tokens"),
        (8, {"invalid": frozenset({8})}, "bucket_outside_trace"),
        (3, {"piecewise": Captured(unpaddable={4: "derived_size"})}, "derived_size"),
        (3, {"piecewise": Captured(failed={4: "broke"})}, "capture_failed"),
        (3, {"piecewise": Captured(failed={4: "broke"}), "over_budget": {4}}, "capture_failed"),
        (3, {"over_budget": {4, 8}}, "over_budget"),
        (3, {"over_budget": {4}, "may_capture": False}, "over_budget"),
        (3, {"may_capture": False}, "not_captured"),
    ],
)
def test_reasons_in_their_order(tokens: int, change: dict[str, object], reason: str) -> None:
    assert decide(tokens, replace(LAZY, **change)) == compiled_because(reason)  # type: ignore[arg-type]


def test_budget_keeps_from_capturing_and_not_from_replaying() -> None:
    given = replace(LAZY, piecewise=Captured({8: True}), over_budget={8})
    assert decide(8, given) == Decision(Action.REPLAY, 8)
    assert decide(4, given) == Decision(Action.CAPTURE, 4)


def test_exact_size_of_an_unpaddable_trace_is_captured_and_replayed() -> None:
    given = replace(LAZY, piecewise=Captured(unpaddable={4: "mixes_tokens"}))
    assert decide(4, given) == Decision(Action.CAPTURE, 4)
    assert decide(4, replace(given, piecewise=replace(given.piecewise, proven={4: True}))) == Decision(
        Action.REPLAY, 4
    )


def test_bucket_outside_of_the_trace_is_skipped_for_the_next_one() -> None:
    assert decide(3, replace(LAZY, invalid=frozenset({4}))) == Decision(Action.CAPTURE, 8)


def test_a_size_that_returns_gets_graphs_of_its_own_where_no_bucket_fits_it() -> None:
    given = replace(LAZY, invalid=frozenset({4, 8}), returning={3})
    assert decide(3, given) == Decision(Action.CAPTURE, 3)
    assert decide(2, given) == compiled_because("bucket_outside_trace")
    captured = replace(given, may_capture=False, piecewise=Captured(proven={3: False}))
    assert decide(3, captured) == Decision(Action.REPLAY, 3)


def test_failed_bucket_does_not_touch_the_others() -> None:
    given = replace(LAZY, piecewise=Captured(failed={4: "broke"}))
    assert decide(5, given) == Decision(Action.CAPTURE, 8)


@pytest.mark.parametrize("tokens", range(12))
def test_every_decision_has_a_bucket_or_a_reason(tokens: int) -> None:
    for given in (
        LAZY,
        replace(LAZY, may_capture=False),
        replace(LAZY, piecewise=Captured({4: True, 8: False})),
    ):
        found = decide(tokens, given)
        assert (found.bucket is None) == (found.reason is not None) == (found.action is Action.COMPILED)


# --- full graphs --------------------------------------------------------------------------------------

ASKED = replace(LAZY, full=Captured())


def test_full_graph_is_captured_and_replayed_where_it_is_asked_for() -> None:
    assert decide(3, ASKED) == Decision(Action.CAPTURE, 4, mode=FULL)
    assert decide(3, replace(ASKED, full=Captured({4: True}))) == Decision(Action.REPLAY, 4, mode=FULL)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"not_full": "op_not_capturable"}, "op_not_capturable"),
        ({"full": Captured(unpaddable={4: "mixes_tokens"})}, "mixes_tokens"),
        ({"full": Captured(failed={4: "broke"})}, "capture_failed"),
    ],
)
def test_call_that_cannot_be_one_graph_is_piecewise_and_says_why(
    change: dict[str, object], reason: str
) -> None:
    given = replace(ASKED, **change)  # type: ignore[arg-type]
    assert decide(3, given) == Decision(Action.CAPTURE, 4, not_full=reason)
    given = replace(given, piecewise=Captured({4: True}))
    assert decide(3, given) == Decision(Action.REPLAY, 4, not_full=reason)


def test_missing_full_graph_leaves_the_piecewise_tape_after_capture_is_sealed() -> None:
    given = replace(ASKED, may_capture=False)
    assert decide(3, given) == Decision(Action.COMPILED, None, "not_captured", not_full="not_captured")
    given = replace(given, piecewise=Captured({4: True}))
    assert decide(3, given) == Decision(Action.REPLAY, 4, not_full="not_captured")


def test_unpaddable_full_graph_serves_its_exact_size() -> None:
    given = replace(ASKED, full=Captured({4: True}, unpaddable={4: "mixes_tokens"}))
    assert decide(4, given) == Decision(Action.REPLAY, 4, mode=FULL)
