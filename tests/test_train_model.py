"""The trainer of the benchmark model, on the CPU: its data, its tokens and one tiny run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed
train_model = importlib.import_module("benchmarks.train_model")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One tiny run's model folder and results; the process's global state is put back."""
    folder = tmp_path_factory.mktemp("smoke")
    deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    out, results = folder / "model", folder / "results" / "train_model.json"
    with torch.random.fork_rng(devices=[]):
        options = ["--smoke", "--steps", "5", "--out", str(out), "--results", str(results)]
        assert train_model.main(options) == 0
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return out, results


def write_library(root: Path, count: int) -> None:
    """A pretended standard library of `count` usable files and of others to be left out."""
    for index in range(count):
        path = root / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {index}\n", encoding="utf-8")
    for name in ("site-packages/a.py", "test/b.py", "ctypes/test/c.py", "idlelib/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("y = 1\n", encoding="utf-8")
    (root / "_sysconfigdata__linux.py").write_text("z = 1\n", encoding="utf-8")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "empty.py").write_bytes(b"")
    (root / "notes.txt").write_text("no source", encoding="utf-8")


def test_corpus_is_ordered_filtered_and_split_without_overlap(tmp_path: Path) -> None:
    write_library(tmp_path, 400)
    files = train_model.read_corpus(tmp_path)
    assert files == train_model.read_corpus(tmp_path)
    assert len(files) == 400
    assert all(name.startswith("package") for name, _ in files)
    training, heldout = train_model.split_corpus(files)
    assert sorted(training + heldout) == sorted(files)
    assert not {name for name, _ in training} & {name for name, _ in heldout}
    assert 0.01 < len(heldout) / len(files) < 0.12


def test_split_of_a_file_does_not_depend_on_the_other_files(tmp_path: Path) -> None:
    write_library(tmp_path, 400)
    files = train_model.read_corpus(tmp_path)
    heldout = train_model.split_corpus(files)[1]
    fewer = files[::3]
    assert train_model.split_corpus(fewer)[1] == [file for file in fewer if file in heldout]


def test_heldout_windows_predict_every_token_once() -> None:
    files = [("a", b"abc"), ("b", bytes(range(200)))]
    settings = train_model.Settings(device="cpu", window=16)
    windows = train_model.heldout_windows(files, settings)
    stream = train_model.encode_stream(files)
    targets = windows[:, 1:].flatten()
    assert torch.equal(targets[targets != train_model.IGNORED], stream[1:])
    assert torch.equal(windows[1:, 0], windows[:-1, -1])


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n\treturn x  \n", " </s><pad> <unk>\n", "é漢😀\x00\x7f", "", "  \r\n don 't , . "],
)
def test_tokenizer_gives_back_any_text(smoke: tuple[Path, Path], text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smoke[0])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [byte + train_model.BYTE_OFFSET for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_tokenizer_has_the_ids_that_training_used(smoke: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smoke[0])
    everything = bytes(range(256))
    ids = train_model.encode_stream([("all", everything)]).tolist()[1:-1]
    assert [ord(token) for token in tokenizer.convert_ids_to_tokens(ids)] == list(everything)
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (train_model.PAD, train_model.EOS, train_model.EOS)


def test_saved_model_loads_without_warnings_and_generates(
    smoke: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    logging.set_verbosity_warning()
    model = AutoModelForCausalLM.from_pretrained(smoke[0])
    tokenizer = AutoTokenizer.from_pretrained(smoke[0])
    inputs = tokenizer("import", add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    captured = capfd.readouterr()
    assert "[transformers]" not in captured.err + captured.out
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == train_model.VOCABULARY
    assert output.shape[1] > inputs.input_ids.shape[1]
    for config in (model.config, model.generation_config):
        ids = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
        assert ids == (train_model.PAD, train_model.EOS, train_model.EOS)


def test_results_have_their_schema_and_the_loss_falls(smoke: tuple[Path, Path]) -> None:
    report: dict[str, Any] = json.loads(smoke[1].read_text(encoding="utf-8"))
    assert {"env", "command", "rows", "marks"} <= set(report)
    expected = {"gpu", "torch", "transformers", "python"}
    expected |= {"corpus_sha256", "corpus_bytes", "corpus_files"}
    assert set(report["env"]) == expected
    assert report["command"] == "python -m benchmarks.train_model --smoke --steps 5"
    keys = {"step", "train_loss", "heldout_nats_per_byte", "heldout_bits_per_byte"}
    assert all(set(row) == keys for row in report["rows"])
    assert [row["step"] for row in report["rows"]] == [0, 5]
    first, last = (row["heldout_nats_per_byte"] for row in report["rows"])
    assert last < first - 0.5
    assert all(set(mark) == {"name", "value", "limit", "met"} for mark in report["marks"])
    size = next(mark for mark in report["marks"] if mark["name"] == "model_bytes")
    assert size["met"]
    assert size["value"] == sum(file.stat().st_size for file in smoke[0].iterdir())


def test_verify_tells_the_same_model_from_another(smoke: tuple[Path, Path], tmp_path: Path) -> None:
    report = json.loads(smoke[1].read_text(encoding="utf-8"))
    options = ["--device", "cpu", "--verify", str(smoke[0]), "--results"]
    assert train_model.main([*options, str(smoke[1])]) == 0
    changed = tmp_path / "changed.json"
    report["run"]["saved_heldout_nats_per_byte"] -= 0.1
    changed.write_text(json.dumps(report), encoding="utf-8")
    assert train_model.main([*options, str(changed)]) == 1
    report["env"]["corpus_sha256"] = "another"
    changed.write_text(json.dumps(report), encoding="utf-8")
    assert train_model.main([*options, str(changed)]) == 2


def test_smoke_run_does_not_overwrite_the_published_model() -> None:
    with pytest.raises(SystemExit):
        train_model.main(["--smoke"])


def test_time_limit_stops_a_run_and_is_recorded() -> None:
    settings = train_model.Settings(**train_model.SMOKE | {"minutes": 0.0})
    files = [("a", b"x = 1\n" * 200)]
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        heldout = train_model.heldout_windows(files, settings)
        stream = train_model.encode_stream(files)
        _, rows, run = train_model.train(stream, heldout, settings, 0.0)
    torch.use_deterministic_algorithms(deterministic)
    assert run["stopped_by_minutes"]
    assert run["steps"] == rows[-1]["step"] < settings.steps
