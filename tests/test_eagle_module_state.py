"""Modules of which something else than a weight changes between generations: followed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_cases import QUICK, greedy, random_head, resources, small_target
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.eagle import Speculator, SpeculatorError

PROMPTS = [[3, 5, 7, 9], [2, 4]]
Change = Callable[[Any], None]


class Adapted(nn.Linear):
    """A linear with adapters, of which some are active."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.active, self.scales = ["one"], {"one": 1.0, "two": -3.0}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(self.scales[name] for name in self.active)


def attention_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 9


def activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def active_adapter(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.active[:] = ["two"]


def one_more_adapter(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.active.append("two")


def scale_of_an_adapter(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.scales["one"] = -2.0


def hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *given: -given[-1])


CHANGES = {
    attention_scale: "self_attn were captured with scaling = .*; it is .* now",
    activation: "act_fn were captured with its class = .*Tanh",
    active_adapter: r"down_proj were captured with active = \['one'\]; it is \['two'\] now",
    one_more_adapter: r"it is \['one', 'two'\] now",
    scale_of_an_adapter: "down_proj were captured with scales = .*-2.0",
    hook: "mlp were captured with _forward_hooks = ",
}


def adapted(attention: str = "piecewise") -> Any:
    model = small_target(attention, layers=3)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    return model


def made(graphs: Any, kind: str = "") -> tuple[Any, Speculator]:
    target = adapted()
    draft = random_head(target, kind) if kind else None
    asked: dict[str, Any] = {"max_requests": 2, "max_seq_len": 32, "batch_sizes": [2], **QUICK}
    return target, Speculator(target, draft, shapes=[2 if draft else 0], graphs=graphs, **asked)


def generate(speculator: Speculator) -> list[list[int]]:
    tokens: list[list[int]] = speculator.generate(PROMPTS, max_new_tokens=6)
    return tokens


@torch.no_grad()
def plain(*changes: Change) -> list[list[int]]:
    model = adapted("sdpa")
    for change in changes:
        change(model)
    return [each.tokens for each in greedy(model, PROMPTS, 6)]


@pytest.mark.parametrize(
    ("change", "graphs"),
    [*((change, "piecewise") for change in CHANGES), (active_adapter, "full"), (hook, "full")],
)
def test_graphs_refuse_it_until_they_are_dropped(change: Change, graphs: str) -> None:
    target, speculator = made(graphs)
    assert generate(speculator) == plain()
    change(target)
    for _ in range(2):
        with pytest.raises(SpeculatorError, match=CHANGES[change]):
            generate(speculator)
    torch._dynamo.reset()
    assert generate(speculator) == plain(change) != plain()


@pytest.mark.parametrize("graphs", ["eager", "compiled"])
@pytest.mark.parametrize("change", [attention_scale, activation, one_more_adapter])
def test_other_modes_follow(change: Change, graphs: str) -> None:
    target, speculator = made(graphs)
    assert generate(speculator) == plain()
    change(target)
    assert generate(speculator) == plain(change) != plain()


def test_what_is_changed_back_or_equal_is_no_change() -> None:
    target, speculator = made("full")
    found = generate(speculator)
    captured = pg.counters.snapshot()["phase_captures"], pg.counters.snapshot()["captures"]
    linear, was = target.model.layers[1].mlp.down_proj, target.model.layers[0].self_attn.scaling
    attention_scale(target)
    with pytest.raises(SpeculatorError):
        generate(speculator)
    target.model.layers[0].self_attn.scaling = was
    linear.active, linear.scales = (
        list(linear.active),
        {name: 0.5 + x - 0.5 for name, x in linear.scales.items()},
    )
    assert generate(speculator) == found
    assert captured == (pg.counters.snapshot()["phase_captures"], pg.counters.snapshot()["captures"])


def test_a_draft_is_compared_too() -> None:
    _, speculator = made("full", "eagle1")
    generate(speculator)
    resources(speculator).models.draft.layers[0].mlp.act_fn = nn.Tanh()
    with pytest.raises(SpeculatorError, match=r"draft\.layers\.0\.mlp\.act_fn were captured"):
        generate(speculator)


@pytest.mark.parametrize("graphs", ["eager", "full"])
def test_attributes_of_the_causal_lm_itself_are_read_as_they_are(graphs: str) -> None:
    target = small_target(layers=3)
    kind = type(target)

    class Shifting(kind):  # type: ignore[misc, valid-type]
        shift = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits.roll(self.shift, -1)
            return found

    target.__class__, target.shift = Shifting, 0
    asked: dict[str, Any] = {"max_requests": 2, "max_seq_len": 32, "batch_sizes": [2], **QUICK}
    speculator = Speculator(target, shapes=[0], graphs=graphs, **asked)
    before = generate(speculator)
    target.shift = 1
    if graphs == "full":
        with pytest.raises(
            SpeculatorError, match=r"target\.head\.model were captured with shift = 0; it is 1"
        ):
            generate(speculator)
        torch._dynamo.reset()
    after = generate(speculator)
    assert [tokens[0] for tokens in after] == [
        (tokens[0] + 1) % target.config.vocab_size for tokens in before
    ]
