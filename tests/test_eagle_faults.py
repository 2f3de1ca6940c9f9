"""What goes wrong around the speculative loop: interrupts, moved weights, models that do not fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from eagle_cases import prefill, resources
from internals import fail_capture
from test_wrapper_weights import Quantised
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig

import piecewise_graph as pg
from piecewise_graph.eagle import DraftConfig, DraftModel, DraftShape, EagleError, Speculator, SpeculatorError
from piecewise_graph.eagle.rounds.round import Round
from piecewise_graph.errors import AddressMovedError

VOCABULARY = 64
EAGER = {"options": {"compiler": "eager"}, "draft_options": {"compiler": "eager"}}
PROMPTS = [[3, 5, 7, 9], [2, 4], [11] * 7]
CHAIN, TREE, PLAIN = DraftShape(3), DraftShape(2, 2, 5), DraftShape(0)


def build_target(device: torch.device, **changes: Any) -> Any:
    pg.register_attention()
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    config = LlamaConfig(**(sizes | changes))
    config._attn_implementation = "piecewise"
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(device)


def build_draft(target: Any, **changes: Any) -> DraftModel:
    head = target.get_output_embeddings()
    config = DraftConfig.for_target(target.config, "eagle1", **changes)
    shared = {"embed_tokens": target.get_input_embeddings(), "lm_head": head}
    return DraftModel(config, **({} if changes else shared)).to(head.weight.device).eval()


@pytest.fixture
def speculator(device: torch.device) -> Speculator:
    target = build_target(device)
    return Speculator(
        target, build_draft(target), shapes=[CHAIN, TREE, PLAIN], max_requests=2, max_seq_len=48, **EAGER
    )


@pytest.mark.parametrize("shape", [CHAIN, TREE, PLAIN], ids=str)
def test_round_that_was_interrupted_is_run_again(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch, shape: DraftShape
) -> None:
    """The device may have accepted tokens that the host never saw."""
    asked: dict[str, Any] = {"max_new_tokens": 16, "shape": shape}
    expected = speculator.generate(PROMPTS, **asked)
    engine, requests = speculator.session(PROMPTS, **asked)
    engine.step()
    original = Round.launch

    def interrupted(*args: Any) -> Any:
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Round, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    while engine.unfinished:
        engine.step()
    assert [request.tokens for request in requests] == expected


def test_prefill_that_was_interrupted_is_begun_anew(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = speculator.generate(PROMPTS, max_new_tokens=8)
    engine, requests = speculator.session(PROMPTS, max_new_tokens=8)
    monkeypatch.setattr(type(prefill(speculator)), "launch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.unfinished == len(PROMPTS)
    monkeypatch.undo()
    while engine.unfinished:
        engine.step()
    assert [request.tokens for request in requests] == expected


def one_size(device: torch.device) -> Speculator:
    """Rounds of one shape and size, so that each phase is captured once."""
    target = build_target(device, num_hidden_layers=1)
    return Speculator(
        target, build_draft(target), shapes=[CHAIN], batch_sizes=[2], max_requests=2, max_seq_len=48, **EAGER
    )


@pytest.mark.parametrize(
    ("failing", "error"),
    [("verify", torch.OutOfMemoryError("wanted 12 GiB")), ("all", RuntimeError("broken"))],
)
def test_phase_that_cannot_be_captured_runs_compiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception
) -> None:
    """The engine goes on. Each run without the graph is counted, and the speculator says why."""
    speculator, prompts = one_size(device), PROMPTS[:2]
    asked: dict[str, Any] = {"max_new_tokens": 6, "overlap": False}
    expected = speculator.generate(prompts, graphs="eager", **asked)
    capture = pg.GraphPool.capture_call
    failures = 3 if failing == "all" else 1

    def broken(self: Any, body: Any, *, name: str, **rest: Any) -> Any:
        if failing in (name, "all"):
            raise error
        return capture(self, body, name=name, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(pg.GraphPool, "capture_call", broken)
        with pg.counters.expect(failed_captures=failures, phase_captures=3 - failures):
            before = pg.counters.snapshot().get("not_full:capture_failed", 0)
            assert speculator.generate(prompts, graphs="full", **asked) == expected
            assert pg.counters.snapshot()["not_full:capture_failed"] > before
    assert len(speculator.failed_captures) == failures
    for text in speculator.failed_captures:
        assert str(error) in text and "batch_sizes" in text and "2 requests, a chain of 3" in text
    with pg.counters.expect(failed_captures=0, phase_captures=0):  # not tried in every round
        assert speculator.generate(prompts, graphs="full", **asked) == expected
    pg.reset()
    assert speculator.generate(prompts, graphs="full", **asked) == expected
    assert speculator.failed_captures == ()


def test_phases_say_that_they_write_no_weight(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels may read weights before the kernels in front of them are done."""
    target = build_target(device)
    draft, told, capture = build_draft(target), dict[str, set[int]](), pg.GraphPool.capture_call
    speculator = Speculator(target, draft, shapes=[CHAIN], max_requests=2, max_seq_len=48, **EAGER)

    def noted(self: Any, body: Any, *, name: str, unwritten: Any, **rest: Any) -> Any:
        given = list(unwritten)
        told[name] = {tensor.data_ptr() for tensor in given}
        return capture(self, body, name=name, unwritten=given, **rest)

    monkeypatch.setattr(pg.GraphPool, "capture_call", noted)
    speculator.generate(PROMPTS[:2], graphs="full", max_new_tokens=6)
    weights = {weight.data_ptr() for model in (target, draft) for weight in model.parameters()}
    assert told == dict.fromkeys(("draft", "verify", "draft-extend"), weights)


def test_tape_that_cannot_be_captured_runs_compiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator, asked = one_size(device), {"max_new_tokens": 4}
    expected = speculator.generate(PROMPTS, graphs="eager", **asked)
    fail_capture(monkeypatch, torch.OutOfMemoryError("wanted 12 GiB"))
    before = pg.counters.snapshot().get("fallbacks:capture_failed", 0)
    assert speculator.generate(PROMPTS, graphs="piecewise", **asked) == expected
    assert pg.counters.snapshot()["fallbacks:capture_failed"] > before


def test_second_engine_is_refused_until_the_first_is_closed(speculator: Speculator) -> None:
    engine, _ = speculator.session(PROMPTS, max_new_tokens=30)
    engine.step()
    with pytest.raises(SpeculatorError, match=r"another engine.*3 unfinished requests"):
        speculator.generate(PROMPTS, max_new_tokens=3)
    speculator.close()
    assert speculator.generate(PROMPTS, max_new_tokens=3)
    assert resources(speculator).table.open_slots == ()


def test_moved_weight_is_refused_before_graphs_read_it(speculator: Speculator) -> None:
    speculator.generate(PROMPTS, max_new_tokens=4)
    weight = resources(speculator).target.head.model.lm_head.weight
    before = weight.data
    weight.data = before.clone()
    with pytest.raises(AddressMovedError, match=r"lm_head.*weight"):
        speculator.generate(PROMPTS, max_new_tokens=4)
    weight.data = before
    assert speculator.generate(PROMPTS, max_new_tokens=4)


def test_a_layer_that_was_replaced_is_refused_unless_its_weights_lie_where_they_lay(
    speculator: Speculator,
) -> None:
    expected = speculator.generate(PROMPTS, max_new_tokens=4)
    mlp = resources(speculator).target.decoder.layers[0].mlp
    layer = mlp.down_proj
    mlp.down_proj = copy.deepcopy(layer)
    with pytest.raises(AddressMovedError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        speculator.generate(PROMPTS, max_new_tokens=4)
    mlp.down_proj.weight = torch.nn.Parameter(layer.weight.data)
    assert speculator.generate(PROMPTS, max_new_tokens=4) == expected
    mlp.down_proj = layer


def test_a_weight_that_was_added_is_refused(speculator: Speculator) -> None:
    speculator.generate(PROMPTS, max_new_tokens=4)
    layer = resources(speculator).target.decoder.layers[0].mlp.down_proj
    layer.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(AddressMovedError, match=r"down_proj\.adapter\.weight"):
        speculator.generate(PROMPTS, max_new_tokens=4)
    del layer.adapter
    assert speculator.generate(PROMPTS, max_new_tokens=4)


def test_a_quantised_weight_that_was_replaced_is_refused(device: torch.device) -> None:
    """It wraps the tensors that graphs read, and has no address of its own."""
    target = build_target(device)
    down = target.model.layers[1].mlp.down_proj
    read, other = Quantised.of(down.weight.detach()), Quantised.of(down.weight.detach().flip(0))
    down.weight = torch.nn.Parameter(read, requires_grad=False)
    speculator = Speculator(target, shapes=[PLAIN], max_requests=3, max_seq_len=48, options=EAGER["options"])
    expected = speculator.generate(PROMPTS, max_new_tokens=4)
    down.weight = torch.nn.Parameter(other, requires_grad=False)
    with pytest.raises(AddressMovedError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        speculator.generate(PROMPTS, max_new_tokens=4)
    down.weight = torch.nn.Parameter(read, requires_grad=False)
    assert speculator.generate(PROMPTS, max_new_tokens=4) == expected


def test_weights_written_in_place_are_seen(speculator: Speculator) -> None:
    before = speculator.generate(PROMPTS, max_new_tokens=8)
    weight = resources(speculator).target.head.model.lm_head.weight
    with torch.no_grad():
        weight.copy_(weight.flip(0))
    after = speculator.generate(PROMPTS, max_new_tokens=8)
    assert after != before
    assert after == speculator.generate(PROMPTS, max_new_tokens=8, shape=PLAIN)


def test_what_inference_mode_made_serves_outside_of_it(device: torch.device) -> None:
    """The speculator, and the first calls of its rounds and tapes, make what later calls write."""
    with torch.inference_mode():
        target = build_target(device)
        made = Speculator(target, build_draft(target), shapes=[CHAIN, PLAIN], max_requests=2, **EAGER)
        first = made.generate(PROMPTS, max_new_tokens=8)
    for shape in (CHAIN, PLAIN):
        assert made.generate(PROMPTS, max_new_tokens=8, shape=shape) == first
    with torch.inference_mode():
        assert made.generate(PROMPTS, max_new_tokens=8, shape="auto") == first


def test_autocast_around_the_loop_changes_nothing(speculator: Speculator, device: torch.device) -> None:
    """Models compute in the dtype of their weights, whichever call has captured the graphs."""
    wanted = speculator.generate(PROMPTS, max_new_tokens=8)
    with torch.autocast(device.type, torch.bfloat16):
        assert speculator.generate(PROMPTS, max_new_tokens=8) == wanted
        target = build_target(device)
        made = Speculator(target, build_draft(target), shapes=[CHAIN], max_requests=2, **EAGER)
        made.prepare()
        assert made.generate(PROMPTS, max_new_tokens=8) == wanted
    assert made.generate(PROMPTS, max_new_tokens=8) == wanted


def test_a_head_of_a_target_without_llamas_fields_asks_for_them() -> None:
    config = GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=VOCABULARY)
    given = {"intermediate_size": 48, "hidden_act": "silu"}
    with pytest.raises(EagleError, match="take as intermediate_size, rms_norm_eps, hidden_act"):
        DraftConfig.for_target(config, "eagle1")
    with pytest.raises(EagleError, match="take as rms_norm_eps"):
        DraftConfig.for_target(config, "eagle1", **given)
    assert DraftConfig.for_target(config, "eagle1", **given, rms_norm_eps=1e-5).rms_norm_eps == 1e-5
    without_heads = MambaConfig(hidden_size=32, vocab_size=VOCABULARY)
    given |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    with pytest.raises(EagleError, match="take as num_attention_heads"):
        DraftConfig.for_target(without_heads, "eagle1", **given)
    head = DraftConfig.for_target(without_heads, "eagle1", **given, num_attention_heads=4)
    assert (head.head_dim, head.num_key_value_heads) == (8, 4)


def test_synthetic_planning_is_labelled_and_teaches_nobody(speculator: Speculator) -> None:
    _, statistics = speculator.generate(
        PROMPTS, max_new_tokens=8, shape="auto", synthetic=3.5, return_stats=True
    )
    assert statistics.synthetic == pytest.approx(3.5, abs=1e-6)
    assert "SYNTHETIC" in str(statistics)
    assert str(speculator.planner) == "nothing was chosen yet"


@pytest.mark.parametrize("shape", [DraftShape(4), DraftShape(3, 2, 7)], ids=str)
def test_every_way_accepts_the_same(device: torch.device, shape: DraftShape) -> None:
    """Forwards whose results are read after another tape ran own them."""
    target = build_target(device)
    speculator = Speculator(
        target, build_draft(target), shapes=[shape], max_requests=3, max_seq_len=48, **EAGER
    )
    found = {}
    for way in ("eager", "compiled", "piecewise", "full"):
        tokens, statistics = speculator.generate(PROMPTS, max_new_tokens=10, graphs=way, return_stats=True)
        found[way] = tokens, statistics.to_dict()
    assert all(each == found["eager"] for each in found.values())


def test_target_with_a_table_of_positions_speculates_to_its_end(device: torch.device) -> None:
    pg.register_attention()
    length = 32
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=length, n_embd=32, n_layer=2, n_head=2)
    config._attn_implementation = "piecewise"
    torch.manual_seed(0)
    target = GPT2LMHeadModel(config).eval().to(device)
    head = DraftConfig(
        kind="eagle1", hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, target_hidden_size=32,
    )  # fmt: skip
    shared = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
    draft = DraftModel(head, **shared).to(device)
    speculator = Speculator(
        target, draft, shapes=[3, 0], max_requests=2, max_seq_len=length, graphs="eager", **EAGER
    )
    asked = {"max_new_tokens": length - len(PROMPTS[0])}
    assert speculator.generate(PROMPTS[:1], **asked) == speculator.generate(PROMPTS[:1], shape=0, **asked)


@pytest.mark.parametrize("name", ["pool", "outputs", "capture", "capture_sizes", "max_tokens"])
def test_options_that_are_the_speculators_own_are_refused(device: torch.device, name: str) -> None:
    with pytest.raises(SpeculatorError, match=name):
        Speculator(build_target(device), shapes=[0], options={name: None})
