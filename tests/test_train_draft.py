"""The trainer of the draft heads, on the CPU: its attention, its measuring and one tiny run."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import sysconfig
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from piecewise_graph.eagle.head.checkpoints import load_draft, save_draft
from piecewise_graph.eagle.head.draft import DraftModel
from piecewise_graph.eagle.head.draft_config import DraftConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed
train_draft = importlib.import_module("benchmarks.train_draft")
windows = importlib.import_module("benchmarks.draft_windows")
train_model = importlib.import_module("benchmarks.train_model")

KINDS = ("eagle1", "eagle3")
VOCABULARY = 40


@pytest.fixture(scope="module")
def tiny_target() -> Any:
    """Four layers, random weights, large enough ones for greedy chains to differ."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_draft(target: Any, kind: str, num_layers: int = 1) -> DraftModel:
    changes: dict[str, Any] = {"num_layers": num_layers}
    if kind == "eagle3":
        changes |= {"feature_layers": (1, 2, 3), "draft_vocab_size": 24}
    shared = {"embed_tokens": target.get_input_embeddings()}
    shared |= {"lm_head": target.lm_head} if kind == "eagle1" else {}
    d2t = torch.randperm(VOCABULARY)[:24].sort().values - torch.arange(24) if kind == "eagle3" else None
    draft = DraftModel(DraftConfig.for_target(target.config, kind, **changes), **shared, d2t=d2t)
    with torch.no_grad():  # as large as the target's
        for parameter in draft.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return draft


class OneByOne:
    """What inference does: keys and values of one sequence are kept, and each new row sees all of them."""

    def __init__(self) -> None:
        self.kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: None) -> Tensor:
        out = []
        for row in range(len(q)):
            kept = self.kept.setdefault(layer, [])
            kept.append((k[row], v[row]))
            keys, values = (torch.stack(part).repeat_interleave(2, 1) for part in zip(*kept, strict=True))
            weights = (torch.einsum("hd,nhd->hn", q[row], keys) * scale).softmax(-1)
            out.append(torch.einsum("hn,nhd->hd", weights, values))
        return torch.stack(out)


def incrementally(draft: DraftModel, tokens: Tensor, features: Tensor, rows: int, more: list[int]) -> Tensor:
    """Hidden states of a chain after the first `rows` of the text, the tokens of `more` being fed to it."""
    attend = OneByOne()
    for layer in draft.layers:
        layer.self_attn.attend = attend
    hidden = draft(tokens[:rows], torch.arange(rows), draft.project(features[:rows]))[-1:]
    out = [hidden]
    for step, token in enumerate(more):
        hidden = draft(torch.tensor([token]), torch.tensor([rows + step]), hidden)
        out.append(hidden)
    return torch.cat(out)


@pytest.mark.parametrize(("kind", "layers"), [("eagle1", 1), ("eagle3", 1), ("eagle3", 2)])
def test_step_of_training_is_what_inference_computes(tiny_target: Any, kind: str, layers: int) -> None:
    """Row i of step s is the s-th row of a chain that starts at row i - s."""
    draft = tiny_draft(tiny_target, kind, layers)
    ids = torch.randint(VOCABULARY, (2, 8))
    features, _ = windows.observe(tiny_target, ids, draft.config)
    with torch.no_grad():
        steps = list(windows.unroll(draft, ids[:, 1:], features[:, :-1], 4))
        for sequence in range(2):
            tokens, given = ids[sequence, 1:], features[sequence, :-1]
            for start in range(4):
                more = tokens[start + 1 : start + 4].tolist()
                expected = incrementally(draft, tokens, given, start + 1, more)
                found = torch.stack([steps[s][sequence, start + s] for s in range(4)])
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_chain_reach_no_gradient_of_later_text(tiny_target: Any, kind: str) -> None:
    draft = tiny_draft(tiny_target, kind)
    features = torch.randn(1, 6, draft.feature_size, requires_grad=True)
    *_, last = windows.unroll(draft, torch.randint(VOCABULARY, (1, 6)), features, 3)
    last[0, 4].sum().backward()  # its chain starts at row 2
    seen = features.grad[0].abs().sum(-1) > 0
    assert seen.tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_measured_chains_are_the_greedy_chains_of_inference(tiny_target: Any, kind: str) -> None:
    draft = tiny_draft(tiny_target, kind)
    ids, starts = torch.randint(VOCABULARY, (2, 9)), torch.tensor([0, 3, 7])
    features, _ = windows.observe(tiny_target, ids, draft.config)
    drafted = windows.draft_chains(draft, ids[:, 1:], features[:, :-1], starts, 4)
    assert drafted.shape == (2, 3, 4)
    for sequence in range(2):
        for chain, start in enumerate(starts.tolist()):
            found = drafted[sequence, chain].tolist()
            with torch.no_grad():
                hidden = incrementally(
                    draft, ids[sequence, 1:], features[sequence, :-1], start + 1, found[:-1]
                )
                assert draft.to_target(draft.logits(hidden).argmax(-1)).tolist() == found


def greedy_chain(target: Any, prefix: Tensor, length: int) -> list[int]:
    ids = prefix[None]
    for _ in range(length):
        ids = torch.cat([ids, target(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prefix) :].tolist()


def test_survivals_end_at_the_first_token_that_the_target_would_not_take(tiny_target: Any) -> None:
    """Chain number e of every window is the target's own but for its token e."""
    ids, starts = torch.randint(VOCABULARY, (2, 9)), torch.tensor([1, 2, 5, 7])
    chains = [[greedy_chain(tiny_target, row[: s + 2], 3) for s in starts.tolist()] for row in ids]
    drafted = torch.tensor(chains)
    for wrong in range(3):
        drafted[:, wrong, wrong] = (drafted[:, wrong, wrong] + 1) % VOCABULARY
    kept = windows.survivals(tiny_target, ids, starts, drafted)
    expected = [[False, False, False], [True, False, False], [True, True, False], [True, True, True]]
    assert kept.tolist() == [expected, expected]


class Counting(nn.Module):
    """A draft that says one more than the last token, where the target adds one too, but up to 5 only."""

    config, d2t = SimpleNamespace(feature_layers=None), None

    def project(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        return nn.functional.one_hot((tokens + 1) % 10, 10).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def to_target(self, ids: Tensor) -> Tensor:
        return ids


def counting_target(input_ids: Tensor, **options: Any) -> SimpleNamespace:
    logits = nn.functional.one_hot((input_ids + 1).clamp(max=5), 10).float()
    if (cache := options.get("past_key_values")) is not None:
        cache.update(*[torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)] * 2, 0)
    return SimpleNamespace(logits=logits, hidden_states=(logits,))


def test_accept_lengths_of_a_case_counted_by_hand() -> None:
    """After 0, 1, 2, 3 and 4 the draft is right 5, 4, 3, 2 and 1 times; after 5 the target says 5."""
    text = torch.tensor([[9, 0, 1, 2, 3, 4, 5]])
    rates = windows.heldout_survival(Counting(), counting_target, text, starts=6, length=3)
    assert rates == pytest.approx([5 / 6, 4 / 6, 3 / 6])
    assert windows.accept_lengths(rates) == pytest.approx([1 + 5 / 6, 2.5, 3.0])
    every_other = windows.heldout_survival(Counting(), counting_target, text, starts=3, length=3)
    assert every_other == pytest.approx([2 / 3, 2 / 3, 1 / 3])  # rows 1, 3 and 5: after 1, 3 and 5


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One tiny run's heads and results; the process's global state is put back."""
    folder = tmp_path_factory.mktemp("smoke")
    deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with torch.random.fork_rng(devices=[]):
        options = ["--smoke", "--steps", "8", "--out", str(folder), "--results", str(folder / "r.json")]
        assert train_draft.main(options) == 0
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return folder, folder / "r.json"


def test_results_have_their_schema_and_the_loss_falls(smoke: tuple[Path, Path]) -> None:
    report: dict[str, Any] = json.loads(smoke[1].read_text(encoding="utf-8"))
    assert {"env", "command", "rows", "marks", "run"} == set(report)
    assert report["command"] == "python -m benchmarks.train_draft --smoke --steps 8"
    for kind in KINDS:
        rows = [row for row in report["rows"] if row["method"] == kind]
        assert [row["step"] for row in rows] == [0, 6, 8]
        assert rows[2]["train_loss"] < 0.95 * rows[1]["train_loss"]
        run, folder = report["run"][kind], smoke[0] / f"byte-llama-{kind}"
        assert run["steps"] == 8
        assert run["survival"] == sorted(run["survival"], reverse=True)
        assert run["bytes"] == (folder / "model.safetensors").stat().st_size
    assert [mark["met"] for mark in report["marks"] if "bytes" in mark["name"]] == [True, True]
    assert all(set(mark) == {"name", "value", "limit", "met"} for mark in report["marks"])


@pytest.mark.parametrize("kind", KINDS)
def test_card_says_what_was_measured(smoke: tuple[Path, Path], kind: str) -> None:
    run = json.loads(smoke[1].read_text(encoding="utf-8"))["run"][kind]
    card = (smoke[0] / f"byte-llama-{kind}" / "README.md").read_text(encoding="utf-8")
    assert f"| 5 | {run['survival'][4]:.3f} | {run['accept_lengths'][4]:.3f} |" in card
    assert "8 steps of 4 x 64 tokens on a CPU" in card


@pytest.mark.parametrize("kind", KINDS)
def test_saved_head_is_the_trained_one(tmp_path: Path, kind: str) -> None:
    target = train_draft.load_target(train_draft.TARGET, "cpu")
    stream = torch.randint(3, 259, (3000,), dtype=torch.int16)
    draft = train_draft.build_draft(kind, target, stream, 0)
    save_draft(train_draft.round_weights(copy.deepcopy(draft)), tmp_path / kind)
    loaded = load_draft(tmp_path / kind, target)
    for parameter in draft.parameters():
        parameter.data = parameter.data.bfloat16().float()
    hidden, ids = torch.randn(5, draft.feature_size), torch.randint(3, 259, (5,))
    with torch.no_grad():
        results = []
        for model in (draft, loaded):
            windows.install(model, 1)
            out = model(ids, torch.arange(5), model.project(hidden))
            results.append((out, model.logits(out), model.to_target(torch.arange(128))))
    for saved, found in zip(*results, strict=True):
        assert torch.equal(saved, found)


def test_draft_vocabulary_holds_the_bytes_that_the_text_uses() -> None:
    target = train_draft.load_target(train_draft.TARGET, "cpu")
    used = torch.randperm(256)[:128].sort().values + 3
    draft = train_draft.build_draft("eagle3", target, used.repeat(3), 0)
    assert torch.equal(draft.to_target(torch.arange(128)), used)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[used])


def test_verify_tells_the_same_heads_from_others(smoke: tuple[Path, Path], tmp_path: Path) -> None:
    files = train_model.read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    verify = partial(train_draft.verify, files, train_draft.load_target(train_draft.TARGET, "cpu"), smoke[0])
    assert verify(smoke[1], "cpu") == 0
    report, changed = json.loads(smoke[1].read_text(encoding="utf-8")), tmp_path / "changed.json"
    report["run"]["eagle3"]["accept_lengths"][2] += 0.1
    changed.write_text(json.dumps(report), encoding="utf-8")
    assert verify(changed, "cpu") == 1
    report["env"]["corpus_sha256"] = "another"
    changed.write_text(json.dumps(report), encoding="utf-8")
    assert verify(changed, "cpu") == 2


def test_smoke_run_does_not_overwrite_the_published_heads() -> None:
    with pytest.raises(SystemExit):
        train_draft.main(["--smoke"])


def test_steps_are_fitted_to_the_time() -> None:
    settings = train_draft.Settings(**train_draft.SMOKE | {"steps": 10**9, "minutes": 0.1, "unroll": 2})
    target = train_draft.load_target(train_draft.TARGET, "cpu")
    stream = torch.randint(3, 259, (3000,), dtype=torch.int16)
    draft = train_draft.build_draft("eagle3", target, stream, 0)
    heldout = torch.randint(3, 259, (2, 33))
    _, rows, run = train_draft.train(draft, target, stream, heldout, settings)
    assert run["steps"] == rows[-1]["step"] <= run["planned_steps"] < 10**6


def test_half_precision_trains_as_on_a_gpu(tiny_target: Any) -> None:
    settings = train_draft.Settings(unroll=3, noise=0.1, feature_weight=1.0)
    ids = torch.randint(VOCABULARY, (2, 17))
    for kind in KINDS:
        draft, losses = tiny_draft(tiny_target, kind), []
        rounded = train_draft.round_weights(copy.deepcopy(tiny_target))
        for enabled, teacher in ((False, tiny_target), (True, rounded)):
            generator = torch.Generator().manual_seed(0)
            chosen = settings if kind == "eagle1" else train_draft.Settings(unroll=3)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                losses.append(windows.draft_loss(draft, teacher, ids, chosen, generator))
        losses[1].backward()
        assert losses[1].dtype == torch.float32
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.03)
        assert all(
            p.grad is not None and p.grad.isfinite().all() for p in draft.parameters() if p.requires_grad
        )
