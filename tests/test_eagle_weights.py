"""Weights and modules that change between generations: followed, or refused before a token comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_cases import QUICK, greedy, random_head, resources, small_target
from torch import nn

import piecewise_graph as pg
from piecewise_graph.eagle import Speculator, SpeculatorError
from piecewise_graph.errors import AddressMovedError

PROMPTS = [[3, 5, 7, 9], [2, 4]]
CAPTURED = ("piecewise", "full")
Change = Callable[[Any], None]


class Adapter(nn.Module):
    """What is put around a linear, and has no weight itself."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)
        self.more.weight = other(base.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) - 2 * self.more(x)


def other(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().flip(0).contiguous(), requires_grad=False)


def replaced_weight(model: Any) -> None:
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = other(linear.weight)


def moved_weight(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = other(weight).data


def replaced_head(model: Any) -> None:
    made = copy.deepcopy(model.lm_head)
    made.weight = other(made.weight)
    model.set_output_embeddings(made)


def replaced_embedding(model: Any) -> None:
    made = copy.deepcopy(model.model.embed_tokens)
    made.weight = other(made.weight)
    model.set_input_embeddings(made)


def replaced_norm(model: Any) -> None:
    made = copy.deepcopy(model.model.norm)
    made.weight = nn.Parameter(torch.linspace(-1, 1, len(made.weight)), requires_grad=False)
    model.model.norm = made


def replaced_layer(model: Any) -> None:
    made = copy.deepcopy(model.model.layers[1])
    made.mlp.down_proj.weight = other(made.mlp.down_proj.weight)
    model.model.layers[1] = made


def replaced_decoder(model: Any) -> None:
    model.model = copy.deepcopy(model.model)
    replaced_weight(model)


def adapted_head(model: Any) -> None:
    model.lm_head = Adapter(model.lm_head)


WEIGHTS = (replaced_weight, moved_weight)
MODULES = (
    replaced_head, replaced_embedding, replaced_norm, replaced_layer, replaced_decoder, adapted_head,
)  # fmt: skip


def made(kind: str, graphs: Any, **more: Any) -> tuple[Any, Speculator]:
    target = small_target(layers=3)
    draft = random_head(target, kind) if kind else None
    asked: dict[str, Any] = {"max_requests": 2, "max_seq_len": 32, "batch_sizes": [2], **QUICK, **more}
    return target, Speculator(target, draft, shapes=[2 if draft else 0], graphs=graphs, **asked)


def generate(speculator: Speculator) -> list[list[int]]:
    tokens: list[list[int]] = speculator.generate(PROMPTS, max_new_tokens=6)
    return tokens


@torch.no_grad()
def plain(*changes: Change) -> list[list[int]]:
    """What a model with these changes generates by itself."""
    model = small_target("sdpa", layers=3)
    for change in changes:
        change(model)
    return [each.tokens for each in greedy(model, PROMPTS, 6)]


CASES = [
    *(("", change, graphs) for change in (*WEIGHTS, adapted_head) for graphs in ("eager", *CAPTURED)),
    *(
        ("eagle3", change, graphs)
        for change in (replaced_head, replaced_layer)
        for graphs in ("eager", "full")
    ),
    *(("eagle3", replaced_embedding, graphs) for graphs in ("compiled", "piecewise")),
    *(("eagle3", replaced_norm, graphs) for graphs in ("eager", "piecewise")),
    *(("eagle3", replaced_decoder, graphs) for graphs in ("compiled", "full")),
]


@pytest.mark.parametrize(("kind", "change", "graphs"), CASES)
def test_a_change_is_followed_or_refused(kind: str, change: Change, graphs: str) -> None:
    """Graphs hold addresses: they refuse it until they are dropped. Other modes follow."""
    target, speculator = made(kind, graphs)
    assert generate(speculator) == plain()
    change(target)
    if graphs in CAPTURED:
        for _ in range(2):
            with pytest.raises(AddressMovedError, match=r"target\..*weight was captured by address"):
                generate(speculator)
        pg.reset()
    assert generate(speculator) == plain(change) != plain()


@pytest.mark.parametrize("graphs", ["compiled", "full"])
def test_modules_that_are_replaced_before_the_first_generation_are_followed(graphs: str) -> None:
    target, speculator = made("eagle3", graphs)
    for change in MODULES:
        change(target)
    speculator.prepare()
    assert generate(speculator) == plain(*MODULES)


def written_in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(other(model.lm_head.weight))
    state = {name: -tensor for name, tensor in model.model.embed_tokens.state_dict().items()}
    model.model.embed_tokens.load_state_dict(state)


@pytest.mark.parametrize("graphs", CAPTURED)
def test_weights_that_are_written_in_place_are_read(graphs: str) -> None:
    target, speculator = made("eagle3", graphs)
    generate(speculator)
    written_in_place(target)
    assert generate(speculator) == plain(written_in_place) != plain()


@pytest.mark.parametrize("graphs", CAPTURED)
@pytest.mark.parametrize("where", ["layers.0.mlp.down_proj", "fc"])
def test_a_weight_of_the_draft_that_was_replaced_is_refused(where: str, graphs: str) -> None:
    _, speculator = made("eagle1", graphs)
    generate(speculator)
    linear = resources(speculator).models.draft.get_submodule(where)
    linear.weight = other(linear.weight)
    with pytest.raises(AddressMovedError, match=rf"draft\.{where}\.weight"):
        generate(speculator)


def test_tapes_of_prompts_alone_hold_weights_too() -> None:
    target, speculator = made("", {"verify": "eager", "draft": "eager", "prefill": "piecewise"})
    generate(speculator)
    replaced_weight(target)
    with pytest.raises(AddressMovedError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        generate(speculator)
    pg.reset()
    assert generate(speculator) == plain(replaced_weight)


@pytest.mark.parametrize("graphs", CAPTURED)
def test_a_bias_that_was_removed_or_transposed_weights_are_refused(graphs: str) -> None:
    target = small_target(layers=3)
    up, square = target.model.layers[0].mlp.up_proj, target.model.layers[0].self_attn.q_proj
    up.bias = nn.Parameter(torch.ones(up.out_features, device=target.device), requires_grad=False)
    speculator = Speculator(target, shapes=[0], graphs=graphs, max_seq_len=32, batch_sizes=[2], **QUICK)
    generate(speculator)
    up.bias, bias = None, up.bias
    with pytest.raises(AddressMovedError, match=r"up_proj\.bias"):
        generate(speculator)
    up.bias = bias
    square.weight = nn.Parameter(square.weight.data.T, requires_grad=False)
    with pytest.raises(AddressMovedError, match=r"q_proj\.weight"):
        generate(speculator)


@pytest.mark.parametrize("graphs", ["compiled", *CAPTURED])
def test_another_module_is_seen_between_steps(graphs: str) -> None:
    target, speculator = made("", graphs)
    engine, requests = speculator.session(PROMPTS, max_new_tokens=6)
    engine.step()  # prompts
    engine.step()
    tokens = [list(request.tokens) for request in requests]
    replaced_head(target)
    if graphs in CAPTURED:
        for _ in range(2):
            with pytest.raises(AddressMovedError, match="lm_head"):
                engine.step()
        assert [request.tokens for request in requests] == tokens
        pg.reset()
    while engine.unfinished:
        engine.step()
    speculated, continued = requests[0].tokens, [*PROMPTS[0], *tokens[0]]
    rest = speculator.generate([continued], max_new_tokens=6 - len(tokens[0]))[0]
    assert speculated == tokens[0] + rest


@pytest.mark.parametrize("graphs", ["eager", "full"])
def test_a_resized_vocabulary_needs_a_new_speculator(graphs: str) -> None:
    target, speculator = made("eagle3", graphs)
    generate(speculator)
    target.resize_token_embeddings(80)
    if graphs in CAPTURED:
        with pytest.raises(AddressMovedError):
            generate(speculator)
        pg.reset()
    for _ in range(2):
        with pytest.raises(SpeculatorError, match="80 tokens now; the speculator was made for 64"):
            generate(speculator)


@pytest.mark.parametrize("graphs", CAPTURED)
def test_weights_that_are_merged_while_others_are_captured_are_none_that_moved(graphs: str) -> None:
    """The draft is compiled after the target was captured, and its linears are laid side by side then."""
    merging = {"options": {"compiler": "eager", "merge_linears": True}}
    merging["draft_options"] = merging["options"]
    _, speculator = made("eagle1", {"prefill": "piecewise", "verify": graphs}, **merging)
    for _ in range(2):
        assert generate(speculator) == plain()
    layer = resources(speculator).models.draft.layers[0].self_attn
    addresses = [linear.weight.untyped_storage().data_ptr() for linear in (layer.q_proj, layer.k_proj)]
    assert addresses[0] == addresses[1]
