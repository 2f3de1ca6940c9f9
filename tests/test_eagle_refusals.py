"""What the speculative loop refuses: requests, speculators, shapes and samplings, each with its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from eagle_cases import (
    TREES,
    VOCABULARY,
    all_free,
    assert_greedy,
    greedy,
    one_state_for_all_tests,
    random_head,
    small_pair,
    small_prompts,
    small_target,
    twin,
)
from eagle_request_cases import LENGTH, LOOKAHEAD, SHAPES, answers, make

import piecewise_graph as pg
from piecewise_graph.custom_ops.errors import AttentionError, CacheError
from piecewise_graph.eagle import DraftShape, Sampling, Speculator, SpeculatorError


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def loop() -> Speculator:
    return make()


# What cannot be served.


def generates(loop: Speculator) -> bool:
    """The loop still works, and owes nothing."""
    prompts = small_prompts([3, 9])
    return loop.generate(prompts, max_new_tokens=7) == answers(prompts, 7) and all_free(loop)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_request_too_large_for_all_pages(at: int) -> None:
    loop = make(num_pages=30 + LOOKAHEAD)
    prompts = small_prompts([3] * 3)
    prompts.insert(at, small_prompts([20])[0])
    with pytest.raises(CacheError, match=r"a request of .* needs .* pages of 1 tokens; the cache has"):
        loop.generate(prompts, max_new_tokens=10)
    assert all_free(loop)
    assert generates(loop)


def test_tree_wider_than_the_targets_window_is_refused() -> None:
    """When its round is made; the loop goes on with what fits."""
    target = small_target(window=8)
    loop = Speculator(
        target, twin(target), shapes=[TREES[2], 2], max_requests=2, max_seq_len=LENGTH, graphs="eager"
    )
    with pytest.raises(AttentionError, match="a sliding window of 8 tokens and a tree mask of 16"):
        loop.generate([[1, 2], [3]], max_new_tokens=9)
    assert all_free(loop)
    prompts = small_prompts([12, 3])
    found = loop.generate(prompts, max_new_tokens=9, shape=2)
    assert_greedy(found, greedy(small_target("sdpa", window=8), prompts, 9), [9, 9])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompts": [[1], []]}, "request 1 cannot be served: its prompt is empty"),
    "token above": ({"prompts": [[1], [2, VOCABULARY]]}, f"request 1 .* token {VOCABULARY} of its prompt"),
    "token below": ({"prompts": [[-1]]}, f"token -1 of its prompt is none of the target's {VOCABULARY}"),
    "no tokens": ({"max_new_tokens": 0}, "request 0 .* max_new_tokens is 0"),
    "one of none": ({"prompts": [[1]] * 2, "max_new_tokens": [3, -1]}, "request 1 .* max_new_tokens is -1"),
    "too long": ({"max_new_tokens": LENGTH}, f"1 prompt tokens and {LENGTH} new ones are {LENGTH + 1}"),
    "counts": ({"max_new_tokens": [1, 2]}, "2 values of max_new_tokens for 1 prompts"),
    "samplings": ({"sampling": [Sampling()] * 3}, "3 values of sampling for 1 prompts"),
    "no samplings": ({"sampling": []}, "0 values of sampling for 1 prompts"),
    "shape": ({"shape": DraftShape(2, 2)}, "a tree of 2 steps, top-k 2, 7 tokens was not named"),
    "steps": ({"shape": 4}, "a chain of 4 was not named .* has a chain of 5, a tree of 3"),
    "half a step": ({"shape": 1.5}, "1.5 is no shape"),
    "word": ({"shape": "best"}, "'best' is no shape"),
    "a prompt, not a list of them": ({"prompts": [1, 2]}, "request 0 .* its prompt is 1"),
    "text": ({"prompts": ["import"]}, "request 0 .* its prompt is 'import'"),
    "half a token": ({"prompts": [[1.5]]}, r"request 0 .* its prompt is \[1.5\]"),
    "stop as text": ({"stop": "x"}, "its stop is 'x'"),
    "one stop": ({"stop": 13}, "its stop is 13"),
    "no such stop": ({"stop": [VOCABULARY]}, f"token {VOCABULARY} of its stop tokens"),
    "sampling": ({"sampling": 0.7}, "its sampling is 0.7"),
    "half a new token": ({"max_new_tokens": 8.5}, "max_new_tokens is 8.5"),
    "no number of tokens": ({"max_new_tokens": True}, "max_new_tokens is True"),
    "phase": ({"graphs": {"prefil": "eager"}}, "graphs={'prefil': 'eager'} names no phase"),
    "way": ({"graphs": "fast"}, "graphs={'draft': 'fast'} names no phase, or no graph mode"),
    "prefill": ({"graphs": {"prefill": "compiled"}}, "this speculator runs prompts 'eager'"),
    "rates": ({"synthetic": 9.0, "shape": 5}, "a mean of 9.0 tokens from 5 steps"),
    "rates as text": ({"synthetic": ["a"] * 5, "shape": 5}, r"no acceptance rates: \['a', "),
    "digits as rates": ({"synthetic": "11111", "shape": 5}, "no acceptance rates: 11111"),
    "no rates": ({"synthetic": object, "shape": 5}, "no acceptance rates: <class 'object'>"),
    "list of ways": ({"graphs": ["full"]}, r"graphs=\['full'\] names no graph mode"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case: str, loop: Speculator) -> None:
    asked, what = REFUSED[case]
    with pytest.raises(SpeculatorError, match=what) as caught:
        loop.generate(**({"prompts": [[1]], "max_new_tokens": 2} | asked))
    assert "What to do:" in str(caught.value)
    assert generates(loop)


# Loops and shapes that cannot be.

LOOPS: dict[str, tuple[dict[str, Any], str]] = {
    "no shape": ({"shapes": []}, "no round can have this shape"),
    "one shape": ({"shapes": 3}, "shapes=3"),
    "auto": ({"shapes": ["auto"]}, "'auto' is no shape"),
    "too deep": ({"shapes": [300]}, "301 draft tokens of 300 steps"),
    "too few rows": ({"shapes": [(3, 3)]}, "is no shape"),
    "length": ({"max_seq_len": 0}, "max_seq_len=0"),
    "half a length": ({"max_seq_len": 64.5}, "max_seq_len=64.5"),
    "length as text": ({"max_seq_len": "64"}, "max_seq_len='64'"),
    "half a page": ({"shapes": [0], "page_size": 1.5}, "page_size=1.5"),
    "half a request": ({"max_requests": 1.5}, "max_requests=1.5"),
    "one batch size": ({"batch_sizes": 4}, "batch_sizes=4"),
    "no rows": ({"prefill_rows": None}, "prefill_rows=None"),
    "no way": ({"graphs": None}, "graphs=None names no graph mode"),
    "no pages": ({"num_pages": 1}, "num_pages=1"),
    "empty pages": ({"shapes": [0], "page_size": 0}, "page_size=0"),
    "positions": ({"max_seq_len": 513}, "max_seq_len=513 and a target of 512 positions"),
    "pages": ({"page_size": 16}, "a tree of 3 steps, top-k 4, 16 tokens, with pages of 16 tokens"),
    "requests": ({"max_requests": 0}, "max_requests=0"),
    "batches": ({"batch_sizes": [4, 0]}, r"batch_sizes=\[4, 0\]"),
    "prefill": ({"prefill_rows": 0}, "prefill_rows=0"),
    "way": ({"graphs": "quick"}, "graphs={'draft': 'quick'}"),
    "phase": ({"graphs": {"drafting": "full"}}, "graphs={'drafting': 'full'} names no phase"),
    "full prefill": ({"graphs": {"prefill": "full"}}, "graphs={'prefill': 'full'}"),
    "steps": ({"shapes": [-1]}, "-1 steps"),
    "half a shape": ({"shapes": 1.5}, "shapes=1.5"),
    "shapes as a tensor": ({"shapes": torch.tensor([3, 0])}, r"tensor\(3\) is no shape"),
    "list of options": ({"options": [1]}, r"options of pg.compile are \[1\]"),
    "options as text": ({"draft_options": "inductor"}, "options of pg.compile are 'inductor'"),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loop_is_refused(case: str) -> None:
    asked, what = LOOPS[case]
    with pytest.raises(SpeculatorError, match=f"(?s){what}.*What to do:"):
        make(**asked)


def test_longest_request_is_what_the_target_has_positions_for() -> None:
    target, _, draft = small_pair("twin")
    assert Speculator(target, draft, shapes=[0]).max_seq_len == 512


@pytest.mark.parametrize("rules", ["greedy", ["gredy"]])
def test_rules_that_are_none_are_refused(loop: Speculator, rules: Any) -> None:
    with pytest.raises(SpeculatorError, match="pass a list of some of greedy, sampled, filtered"):
        loop.prepare(rules=rules)


def test_ways_of_one_generation_are_the_loops_own_but_for_those_named() -> None:
    """A chain of one token drafts with the head alone; what the other phases run stays eager."""
    loop = make("eagle1", shapes=[1])
    with pg.counters.expect(traces=1, phase_captures=0):
        loop.generate([[1, 2]], max_new_tokens=4, graphs={"draft": "compiled"})


def test_numbers_of_numpy_are_taken() -> None:
    whole = {"max_requests": 3, "max_seq_len": LENGTH, "page_size": 2, "prefill_rows": 7, "num_pages": 99}
    sizes = {"shapes": np.array([1]), "batch_sizes": np.array([2, 1])}
    loop = make(**sizes, **{name: np.int64(value) for name, value in whole.items()})
    assert loop.batch_sizes == (1, 2, 3)
    assert generates(loop)
    loop.engine(synthetic=np.float32(1.5)).close()


def test_loop_without_a_draft_is_refused() -> None:
    with pytest.raises(SpeculatorError, match="a chain of 5 needs a draft model"):
        Speculator(small_pair("twin")[0], shapes=SHAPES)


NO_TARGETS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda target: None,
    "folder": lambda target: "byte-llama",
    "class": type,
    "module": lambda target: torch.nn.Linear(3, 3),
    "draft": lambda target: small_pair("twin")[2],
    "pg.compile": lambda target: pg.compile(target, compiler="eager"),
    "torch.compile": lambda target: torch.compile(target, backend="eager"),
}


@pytest.mark.parametrize("case", NO_TARGETS)
def test_what_is_no_model_of_transformers_is_refused_by_name(case: str) -> None:
    """A compiled one, too: parts that were put into a copy of it were put into the model itself."""
    target = small_target()
    given = NO_TARGETS[case](target)
    for serve in (lambda: Speculator(given, shapes=[0]), lambda: pg.continuous_batching(given)):
        with pytest.raises(
            AttentionError, match=f"a {type(given).__name__} is no causal LM (?s:.*)What to do:"
        ):
            serve()
    prompts = small_prompts([3])
    found = Speculator(target, shapes=[0], max_seq_len=LENGTH, graphs="eager").generate(
        prompts, max_new_tokens=4
    )
    assert_greedy(found, greedy(small_target("sdpa"), prompts, 4), [4])


def test_decoder_without_a_head_is_refused() -> None:
    with pytest.raises(SpeculatorError, match="Model has no lm_head"):
        Speculator(small_target().model, shapes=[0])


@pytest.mark.parametrize("case", ["folder", "module", "target"])
def test_what_is_no_draft_is_refused(case: str) -> None:
    target = small_target()
    draft = target if case == "target" else NO_TARGETS[case](target)
    with pytest.raises(
        SpeculatorError, match=f"the draft is a {type(draft).__name__}, which is no draft head"
    ):
        Speculator(target, draft)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_is_not_ours_is_refused(attention: str) -> None:
    target = small_target(attention)
    with pytest.raises(SpeculatorError, match=f"attention is '{attention}'"):
        Speculator(target, shapes=[0])


def test_draft_that_reads_layers_the_target_has_not_is_refused() -> None:
    draft = random_head(small_target(layers=5), "eagle3")
    with pytest.raises(SpeculatorError, match="input of target layer 4; the target has layers 0 to 2"):
        Speculator(small_pair("twin")[0], draft, shapes=[1])


def test_more_branches_than_the_draft_has_tokens_are_refused() -> None:
    with pytest.raises(SpeculatorError, match="top-k 33 of a draft with 32 tokens"):
        make("eagle3", shapes=[DraftShape(1, 33, 4)])


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"steps": -1}, "-1 steps with top-k 1"),
    "no branch": ({"steps": 2, "topk": 0}, "2 steps with top-k 0"),
    "tree without depth": ({"steps": 0, "topk": 2}, "0 steps with top-k 2"),
    "half a step": ({"steps": 1.5}, "steps=1.5"),
    "half a branch": ({"steps": 1, "topk": 1.5}, "topk=1.5"),
    "half a token": ({"steps": 3, "topk": 2, "num_draft_tokens": 7.5}, "num_draft_tokens=7.5"),
    "short chain": ({"steps": 3, "num_draft_tokens": 3}, "3 draft tokens of 3 steps"),
    "long chain": ({"steps": 3, "num_draft_tokens": 5}, "5 draft tokens of 3 steps"),
    "root alone": ({"steps": 2, "topk": 2, "num_draft_tokens": 1}, "1 draft tokens of 2 steps"),
    "more than drafted": ({"steps": 2, "topk": 2, "num_draft_tokens": 8}, "8 draft tokens of 2 steps"),
    "more than kernels hold": ({"steps": 5, "topk": 8, "num_draft_tokens": 257}, "257 draft tokens"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_shape_is_refused(case: str) -> None:
    asked, what = IMPOSSIBLE[case]
    with pytest.raises(SpeculatorError, match=f"(?s){what}.*What to do:"):
        DraftShape(**asked)


SAMPLINGS: dict[str, Any] = {
    "temperature": [-0.1, float("inf"), float("nan")],
    "top_k": [-1],
    "top_p": [0.0, 1.1, float("nan")],
    "seed": [-1, 2**62],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in SAMPLINGS for value in SAMPLINGS[name]]
)
def test_sampling_is_refused(name: str, value: float) -> None:
    with pytest.raises(SpeculatorError, match=f"(?s){name}={value}.*What to do:"):
        Sampling(**{name: value})
