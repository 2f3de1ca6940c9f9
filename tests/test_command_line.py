"""`python -m piecewise_graph`: its help, and the commands that need no draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecewise_graph.cli.commands import main

MODEL = str(Path(__file__).resolve().parents[1] / "benchmarks" / "models" / "byte-llama")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["demo"], ["--max-tokens MAX_TOKENS largest bucket (default: 256)", "(default: inductor)"]),
        (["explain"], ["(default: the repository's)", "--device DEVICE that the models run on (default: "]),
        (
            ["generate"],
            [
                "(default: 3 with a draft, else 0)",
                "0 = greedy (default: 0.0)",
                "(default: full)",
                "meaningless",
            ],
        ),
        (
            ["bench", "serving"],
            ["a list (default: 1,4,16,32)", "(default: inf)", "(default: 512)", "(default: --graphs)"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0].isalpha() else "",
)
def test_help_shows_defaults(
    command: list[str], says: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for text in says:
        assert text in printed
    assert "None" not in printed and "==" not in printed


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "transformers" in printed and "registered" in printed


def test_explain_captures_the_repositorys_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--compiler", "eager", "--max-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert MODEL.rsplit("/", 1)[1] in printed and "9 steps: 5 segments" in printed


@pytest.mark.slow
def test_demo_completes_text_like_eager(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--compiler", "eager", "--max-tokens", "8", "--new-tokens", "4", "--prompt", "import os\n"]
    assert main(["demo", "--model", MODEL, *options]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 tokens equal to eager" in printed
    assert "torch.compile" in printed and "give the tokens of plain decoding" in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "./nowhere"], "the model './nowhere' cannot be used: there is no such folder"),
        (["--model", str(Path(__file__).parent)], "cannot be used: there is no config.json in it"),
        (["--model", MODEL, "--dtype", "fp8"], "dtype 'fp8' cannot be used"),
        (["--model", MODEL, "--device", "gpu"], "device 'gpu' cannot be used"),
    ],
)
def test_explain_says_what_it_cannot_load(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and "What to do:" in error


def test_a_damaged_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in Path(MODEL).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:1000])
    assert main(["explain", "--model", str(tmp_path)]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["demo", "--prompt", ""], "an empty prompt has no tokens"),
        (["generate", "--model", MODEL, "--prompt", ""], "an empty prompt has no tokens"),
        (["explain", "--new-tokens", "4"], "unrecognized arguments: --new-tokens"),
        (["explain", "--prompt", "import"], "unrecognized arguments: --prompt"),
    ],
)
def test_options_without_meaning_are_refused_by_name(
    command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_acceptance_without_a_draft_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", MODEL, "--synthetic-accept-length", "2"]) == 2
    assert "--synthetic-accept-length 2.0 needs a draft" in capsys.readouterr().err
