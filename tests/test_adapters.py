"""Models with adapters of peft that are not merged: each adapter has a trace and graphs of its own."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch

import piecewise_graph as pg

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("no_grad")
ADAPTERS = ("one", "two")
COUNTS = (8, 1, 5, 2)


@pytest.fixture
def model(device: torch.device) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama", 2, device), config, adapter_name="one")
    model.add_adapter("two", config)
    return model.eval()


def compiled(model: Any, **options: Any) -> Any:
    sizes: dict[str, Any] = {"capture_sizes": [1, 2, 8], "max_tokens": 8}
    return pg.compile(model, token_dim={"input_ids": 1}, compiler="eager", **sizes, **options)


def test_an_adapter_is_traced_once_and_switching_captures_nothing(model: Any, device: torch.device) -> None:
    fast = compiled(model)
    calls = [
        (adapter, models.call("llama", models.random_ids(n, device=device)))
        for n in COUNTS
        for adapter in ADAPTERS
    ]
    wanted = []
    for adapter, call in calls:
        model.set_adapter(adapter)
        wanted.append(model(**call).logits)
    for expected in ({"traces": len(ADAPTERS)}, {"traces": 0, "replays": len(calls)}):
        with pg.counters.expect(fallbacks=0, **expected):
            for (adapter, call), logits in zip(calls, wanted, strict=True):
                model.set_adapter(adapter)
                torch.testing.assert_close(fast(**call).logits, logits)


def test_a_frozen_call_keeps_its_adapter_at_every_token_count(model: Any, device: torch.device) -> None:
    fast, frozen = compiled(model), {}
    longest = models.call("llama", models.random_ids(max(COUNTS), device=device))
    for adapter in ADAPTERS:
        model.set_adapter(adapter)
        frozen[adapter] = pg.freeze(fast, **longest)
    for count in COUNTS:
        call = models.call("llama", models.random_ids(count, device=device))
        for adapter in ADAPTERS:
            model.set_adapter(adapter)
            torch.testing.assert_close(frozen[adapter](**call).logits, model(**call).logits)
