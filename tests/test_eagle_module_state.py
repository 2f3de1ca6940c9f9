"""Modules of which something else than a weight changes between generations: followed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from eagle_cases import QUICK, greedy, random_head, resources, small_target
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.eagle import Speculator, SpeculatorError

PROMPTS = [[3, 5, 7, 9], [2, 4]]
Change = Callable[[Any], AbstractContextManager[None]]  # of a model, undone at its end


class Adapted(nn.Linear):
    """A linear with adapters, of which some are active."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.active, self.scales = ["one"], {"one": 1.0, "two": -3.0}
        self.after = partial(torch.mul, torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x) * sum(self.scales[name] for name in self.active))


@contextmanager
def attention_scale(model: Any) -> Iterator[None]:
    attention = model.model.layers[0].self_attn
    attention.scaling, was = attention.scaling * 9, attention.scaling
    yield
    attention.scaling = was


@contextmanager
def activation(model: Any) -> Iterator[None]:
    mlp = model.model.layers[0].mlp
    mlp.act_fn, was = nn.Tanh(), mlp.act_fn
    yield
    mlp.act_fn = was


@contextmanager
def active_adapter(model: Any) -> Iterator[None]:
    model.model.layers[0].mlp.down_proj.active[:] = ["two"]
    yield
    model.model.layers[0].mlp.down_proj.active[:] = ["one"]


@contextmanager
def one_more_adapter(model: Any) -> Iterator[None]:
    model.model.layers[0].mlp.down_proj.active.append("two")
    yield
    model.model.layers[0].mlp.down_proj.active.pop()


@contextmanager
def scale_of_an_adapter(model: Any) -> Iterator[None]:
    model.model.layers[0].mlp.down_proj.scales["one"] = -2.0
    yield
    model.model.layers[0].mlp.down_proj.scales["one"] = 0.5 + 0.5  # another object


@contextmanager
def arguments_of_a_function(model: Any) -> Iterator[None]:
    linear = model.model.layers[0].mlp.down_proj
    linear.after, was = partial(torch.mul, torch.tensor(-2.0)), linear.after
    yield
    linear.after = was


@contextmanager
def hook(model: Any) -> Iterator[None]:
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *given: -given[-1])
    yield
    handle.remove()


CHANGES = {
    attention_scale: "self_attn were captured with scaling = .*; it is .* now",
    activation: "act_fn were captured with its class = .*Tanh",
    active_adapter: r"down_proj were captured with active = \['one'\]; it is \['two'\] now",
    one_more_adapter: r"it is \['one', 'two'\] now",
    scale_of_an_adapter: "down_proj were captured with scales = .*-2.0",
    arguments_of_a_function: "down_proj were captured with after = ",
    hook: "mlp were captured with _forward_hooks = ",
}


def adapted(attention: str = "piecewise") -> Any:
    model = small_target(attention)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    return model


def made(target: Any, graphs: str, kind: str = "") -> Speculator:
    draft = random_head(target, kind) if kind else None
    asked: dict[str, Any] = {"max_requests": 2, "max_seq_len": 32, "batch_sizes": [2], **QUICK}
    return Speculator(target, draft, shapes=[2 if draft else 0], graphs=graphs, **asked)


def generate(speculator: Speculator) -> list[list[int]]:
    tokens: list[list[int]] = speculator.generate(PROMPTS, max_new_tokens=6)
    return tokens


@torch.no_grad()
def plain(*changes: Change) -> list[list[int]]:
    with ExitStack() as changed:
        model = adapted("sdpa")
        for change in changes:
            changed.enter_context(change(model))
        return [each.tokens for each in greedy(model, PROMPTS, 6)]


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
def test_graphs_refuse_it_until_it_is_undone_or_they_are_dropped(graphs: str) -> None:
    target = adapted()
    speculator = made(target, graphs)
    assert generate(speculator) == plain()
    captured = [pg.counters.snapshot()[name] for name in ("phase_captures", "captures", "traces")]
    for change, says in CHANGES.items():
        with change(target):
            for _ in range(2):
                with pytest.raises(SpeculatorError, match=says):
                    generate(speculator)
    assert generate(speculator) == plain()
    assert captured == [pg.counters.snapshot()[name] for name in ("phase_captures", "captures", "traces")]
    with ExitStack() as changed:
        for change in CHANGES:
            changed.enter_context(change(target))
        torch._dynamo.reset()
        assert generate(speculator) == plain(*CHANGES) != plain()


def test_compiled_forwards_follow() -> None:
    target = adapted()
    speculator = made(target, "compiled")
    for change in (attention_scale, activation, one_more_adapter):
        assert generate(speculator) == plain()
        with change(target):
            assert generate(speculator) == plain(change) != plain()


def test_a_draft_is_compared_too() -> None:
    speculator = made(small_target(), "full", "eagle1")
    generate(speculator)
    resources(speculator).models.draft.layers[0].mlp.act_fn = nn.Tanh()
    with pytest.raises(SpeculatorError, match=r"draft\.layers\.0\.mlp\.act_fn were captured"):
        generate(speculator)


@pytest.mark.parametrize("graphs", ["eager", "full"])
def test_attributes_of_the_causal_lm_itself_are_read_as_they_are(graphs: str) -> None:
    target = small_target()
    kind = type(target)

    class Shifting(kind):  # type: ignore[misc, valid-type]
        shift = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits.roll(self.shift, -1)
            return found

    target.__class__, target.shift = Shifting, 0
    speculator = made(target, graphs)
    before = generate(speculator)
    target.shift = 1
    if graphs == "full":
        with pytest.raises(
            SpeculatorError, match=r"target\.head\.model were captured with shift = 0; it is 1"
        ):
            generate(speculator)
        torch._dynamo.reset()
    after = generate(speculator)
    assert [tokens[0] for tokens in after] == [(tokens[0] + 1) % target.vocab_size for tokens in before]


def test_what_a_call_leaves_behind_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of transformers that do nothing, and what a head held while it failed."""
    target = small_target()
    speculator = made(target, "full")
    found = generate(speculator)
    with torch.no_grad(), pytest.raises(AttentionError, match="batch"):
        target(torch.tensor(PROMPTS[:1]), output_hidden_states=True)
    head = resources(speculator).target.head
    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="out of memory"):
        failing.setattr(nn.Linear, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        head(torch.zeros(1, target.config.hidden_size, device=target.device))
    assert generate(speculator) == found
