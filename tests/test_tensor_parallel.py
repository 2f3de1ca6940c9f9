"""A model of transformers on several ranks (`tp_plan="auto"`): graphs as on one, and the same tokens."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import only_on, values
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

import piecewise_graph as pg
from piecewise_graph.custom_ops.kv_cache import PagedKVCache
from piecewise_graph.eagle import Speculator, load_draft, save_draft
from piecewise_graph.errors import AddressMovedError

MODELS = Path(__file__).parent.parent / "benchmarks" / "models"
PROMPT = [byte + 3 for byte in b"import os\nimport sys\n"]
PROMPTS = [PROMPT, PROMPT[:5]]
OPTIONS = {"compiler": "eager", "rank_timeout": 60.0}
HEAD_DIM = 64


def model(tp: bool, attention: str = "sdpa") -> Any:
    logging.disable(logging.WARNING)  # transformers renames the option in each release
    warnings.simplefilter("ignore")
    kind = {"tp_plan": "auto"} if tp else {}
    path = str(MODELS / "byte-llama")
    made = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=attention, dtype=torch.float32, **kind
    ).eval()
    assert isinstance(made.lm_head.weight, DTensor) is tp
    return made


def _local(weight: Any) -> torch.Tensor:
    part: torch.Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return part


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 259, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def _forwards(compiler: str) -> dict[str, Any]:
    """The largest difference from one process, counters of calls, and what is saved."""
    whole, sharded = model(tp=False), model(tp=True)
    compiled = pg.compile(sharded, capture_sizes=[1, 8], max_tokens=8, **OPTIONS | {"compiler": compiler})
    apart = 0.0
    for tokens in (8, 5, 1, 7, 2, 1):
        expected = whole(input_ids=_ids(tokens), use_cache=False).logits
        got = compiled(input_ids=_ids(tokens), use_cache=False).logits
        apart = max(apart, float((got - expected).abs().max()))
    saved = sharded.state_dict()
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in saved.items()
    }
    unequal = [name for name, value in whole.state_dict().items() if not torch.equal(full[name], value)]
    return {"apart": apart, "unequal": unequal, "counters": pg.counters.snapshot()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "compiler"), [(2, "eager"), (4, "eager"), (2, "inductor")])
def test_forwards_of_a_sharded_model_are_replayed(ranks: int, compiler: str) -> None:
    """With 4 ranks and 2 KV heads, two ranks hold each of them."""
    for found in values(ranks, _forwards, compiler, within=300.0):
        counters, layers = found["counters"], 4
        assert found["apart"] < 2e-4 and not found["unequal"]
        assert counters["traces"] == 1 and counters["segments"] == layers + 1 == counters["op_steps"] + 1
        assert counters["captures"] == 2 * counters["segments"]
        assert counters["replays"] == 6 - 2 and counters["fallbacks"] == counters["unpadded_segments"] == 0


def _generated() -> dict[str, Any]:
    whole, compiled = model(tp=False), pg.compile(model(tp=True), max_tokens=32, **OPTIONS)
    options = {"max_new_tokens": 12, "do_sample": False}
    ids = torch.tensor([PROMPT])
    expected = whole.generate(ids, **options).tolist()
    return {
        "same": [compiled.generate(ids, **options).tolist() == expected for _ in range(2)],
        "counters": pg.counters.snapshot(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_generate_gives_the_tokens_of_one_process(ranks: int) -> None:
    for found in values(ranks, _generated):
        assert found["same"] == [True, True]
        assert found["counters"]["replays"] >= 2 * (12 - 2) and found["counters"]["fallbacks"] == 0


def _speculator(tp: bool, head: str | None, shard: bool, **options: Any) -> tuple[Speculator, Any]:
    pg.register_attention()
    target = model(tp, "piecewise")
    draft = None if head is None else load_draft(head, target, shard=shard)
    shapes = [0 if head is None else 3, 0]
    return Speculator(target, draft, shapes=shapes, max_requests=2, options=OPTIONS, **options), draft


def _served_alone(head: str | None) -> Any:
    speculator, _ = _speculator(False, head, False, graphs="eager")
    return speculator.generate(PROMPTS, max_new_tokens=12, return_stats=True)


def of_one_process(head: str | None) -> Any:
    """Tokens, and how much of each draft was accepted: a wrong draft changes no token."""
    (found,) = values(1, _served_alone, head)
    return found


def _speculated(head: str | None, shard: bool, drafts: str, expected: Any) -> dict[str, Any]:
    speculator, draft = _speculator(True, head, shard, draft_options=OPTIONS | {"compiler": drafts})
    answer = speculator.generate(PROMPTS, max_new_tokens=12, return_stats=True)
    found = {"same": answer == expected, "counters": pg.counters.snapshot()}
    found["rows"] = 0 if draft is None else len(_local(draft.layers[0].self_attn.k_proj.weight))
    found["accepted"] = sum(each.num_accepted_tokens for each in answer[1].requests)
    with only_on(1, "piecewise_graph.eagle.rounds.round.seconds_of", _slow_drafts):
        planned = speculator.generate(PROMPTS, max_new_tokens=12, shape="auto")
    return found | {"planned": planned == expected[0], "plan": str(speculator.planner)}


def _slow_drafts(original: Any, runners: Any, device: torch.device) -> float:
    has_draft = any(runner.name == "draft" for runner in runners)
    return float(original(runners, device)) * (100.0 if has_draft else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "head", "shard", "drafts", "kv_heads"),
    [
        (2, None, True, "eager", 0),
        (4, None, True, "eager", 0),
        (2, "eagle1", True, "inductor", 1),
        (2, "eagle3", True, "eager", 1),
        (2, "eagle1", False, "eager", 2),
    ],
)
def test_the_engine_gives_the_tokens_of_one_process(
    ranks: int, head: str | None, shard: bool, drafts: str, kv_heads: int
) -> None:
    """Its rounds are full graphs, each rank's attention reads the KV heads of the rank."""
    path = head and str(MODELS / f"byte-llama-{head}")
    answers = values(ranks, _speculated, path, shard, drafts, of_one_process(path), within=300.0)
    for found in answers:
        assert found["rows"] == kv_heads * HEAD_DIM and (found["accepted"] > 0) is (head is not None)
        assert found["same"] and found["planned"]
        assert found["counters"]["phase_captures"] > 0 and found["counters"]["phase_replays"] > 0
    assert len({found["plan"] for found in answers}) == 1  # made of the times of one rank


@pytest.mark.slow
def test_a_head_with_as_many_kv_heads_as_ranks_is_cut_and_accepts_the_same(tmp_path: Path) -> None:
    """The repository's head, each KV head of it twice, is the same function with one KV head per rank."""
    published = MODELS / "byte-llama-eagle1"
    config = json.loads((published / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    tensors = load_file(published / "model.safetensors")
    for name in ("k_proj", "v_proj"):
        weight = tensors[f"layers.0.self_attn.{name}.weight"].unflatten(0, (2, HEAD_DIM))
        tensors[f"layers.0.self_attn.{name}.weight"] = weight.repeat_interleave(2, 0).flatten(0, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    path = str(tmp_path)
    for found in values(4, _speculated, path, True, "eager", of_one_process(path), within=300.0):
        assert found["rows"] == HEAD_DIM and found["accepted"] > 0
        assert found["same"] and found["planned"]


def _moved() -> str:
    pg.register_attention()
    target = model(tp=True, attention="piecewise")
    speculator = Speculator(target, shapes=[0], max_requests=1, options=OPTIONS)
    answer = speculator.generate([PROMPT], max_new_tokens=4)
    projection = target.model.layers[1].self_attn.q_proj
    weight = projection.weight
    projection.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    try:
        speculator.generate([PROMPT], max_new_tokens=4)
        told = "nothing"
    except AddressMovedError as error:
        told = str(error)
    projection.weight = weight
    assert speculator.generate([PROMPT], max_new_tokens=4) == answer
    return told


def test_a_sharded_weight_that_moved_is_refused_before_graphs_read_it() -> None:
    for told in values(2, _moved):
        assert "layers.1.self_attn.q_proj.weight" in told


def _saved(folder: str) -> bool:
    target, head = model(tp=True), str(MODELS / "byte-llama-eagle3")
    draft = load_draft(head, target)
    own = Path(folder) / str(torch.distributed.get_rank())
    save_draft(draft, own)
    saved, whole = (load_draft(path, target, shard=False).state_dict() for path in (str(own), head))
    names = [name for name in whole if name.partition(".")[0] not in draft.shared]
    return isinstance(draft.layers[0].mlp.up_proj.weight, DTensor) and all(
        torch.equal(saved[name], whole[name]) for name in names
    )


def test_a_draft_that_is_cut_over_ranks_is_saved_whole(tmp_path: Path) -> None:
    assert values(2, _saved, str(tmp_path)) == [True, True]


def _cuts_its_head(target: Any) -> bool:
    draft = load_draft(str(MODELS / "byte-llama-eagle1"), target)
    return any(isinstance(weight, DTensor) for weight in draft.layers.parameters())


def _beside_fsdp() -> bool:
    target = model(tp=False)
    torch.distributed.fsdp.fully_shard(target)
    return _cuts_its_head(target)


def _beside_one_rank() -> bool:
    target = model(tp=False)
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(target, mesh, {"model.layers.0.mlp.up_proj": ColwiseParallel()})
    return _cuts_its_head(target)


def test_one_rank_has_nothing_to_cut() -> None:
    assert values(1, _beside_one_rank) == [False]


def test_a_draft_is_whole_beside_a_target_whose_ranks_gather_weights() -> None:
    assert values(2, _beside_fsdp) == [False, False]


def _heads() -> list[int]:
    target = model(tp=True)
    room = {"num_pages": 2, "page_size": 4, "dtype": torch.float32, "device": "cpu"}
    before = PagedKVCache.for_model(target, **room).kv_heads
    pg.compile(target, **OPTIONS)
    return [before, PagedKVCache.for_model(target, **room).kv_heads]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cache_has_the_heads_of_its_rank(ranks: int) -> None:
    assert values(ranks, _heads) == [[1, 1]] * ranks


class Packed(torch.nn.Module):
    """A layer whose projections have no weight of that name, as those of quantised models."""

    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.k_proj = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(self.k_proj(x)) + self.v_proj(x)


def test_a_model_of_one_process_may_have_any_projections() -> None:
    layer, x = Packed(), torch.randn(3, 8)
    with torch.no_grad():
        compiled = pg.compile(layer, token_dim={"x": 0}, compiler="eager")
        torch.testing.assert_close(compiled(x), layer(x))
