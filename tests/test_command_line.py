"""`python -m piecewise_graph`: its help, and the commands that need no draft."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from internals import fail_capture

import piecewise_graph as pg
from piecewise_graph.cli import doctor_command
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
        (["serve"], ["to listen on (default: 8000)", "(default: 16)", "(default: what transformers finds"]),
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


def test_doctor_runs_what_it_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_CACHE_DIR", str(tmp_path / "cache"))
    with pg.counters.expect(tapes=3, replays=2, compiles=3):
        assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "everything that is here works"
    state = {line[8:30].strip(): line.split()[0] for line in lines[:-1]}
    assert "BROKEN" not in state.values()
    for name in (
        "torch",
        "backend 'piecewise'",
        "capture and replay",
        "replay of a bucket",
        "compiler",
        "cache_dir",
    ):
        assert state[name] == "ok", name
    assert state["attention 'torch'"] == state["register_attention"] == "ok"
    assert "several GPUs" in state
    assert list((tmp_path / "cache").iterdir())


def a_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(doctor_command, "serve", lambda batch, call, captured: call.out.copy_(call.q))
    return "attention 'torch'      is off by"


def an_old_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(doctor_command, "version", lambda package: "2.10.1+cpu")
    return "torch                  2.10.1+cpu is too old"


def a_checkout_without_entry_point(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(doctor_command, "entry_points", lambda group: SimpleNamespace(names=set()))
    return "backend 'piecewise'    torch.compile does not know it"


def a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> str:
    fail_capture(monkeypatch, RuntimeError("the driver is too old"), of="full")
    return "graphs                 RuntimeError: the driver is too old"


@pytest.mark.parametrize(
    "fault", [a_wrong_attention, an_old_torch, a_checkout_without_entry_point, a_capture_that_fails]
)
def test_doctor_finds_a_fault_and_says_what_to_do(
    fault: Callable[[pytest.MonkeyPatch], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "eager")
    says = fault(monkeypatch)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if f"BROKEN  {says}" in line)
    assert "what to do: " in lines[at + 1] and lines[-1].endswith("broken")


def test_doctor_names_a_cache_folder_that_others_may_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PIECEWISE_GRAPH_CACHE_DIR", str(tmp_path))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert (
        "BROKEN  cache_dir" in printed and "folder_writable_by_others" in printed and "chmod 700" in printed
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What doctor says of so many GPUs, of which these pairs have no access from the first to the second."""

    def said(count: int, *apart: tuple[int, int], **variables: str) -> str:
        for name in ("NCCL_GRAPH_MIXING_SUPPORT", "NCCL_NVLS_ENABLE"):
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in apart)
        return "\n".join(map(str, doctor_command._ranks()))

    return said


def test_doctor_says_one_line_where_there_are_not_several_gpus(gpus: Callable[..., str]) -> None:
    assert gpus(0) == "--      several GPUs           none here"
    assert gpus(1) == "--      several GPUs           one here"


def test_doctor_says_what_sums_over_ranks(gpus: Callable[..., str]) -> None:
    assert gpus(4).startswith(
        "ok      several GPUs           4 with peer access: sums over ranks, up to a few MiB,"
    )
    apart = gpus(3, (0, 2), (2, 1)).splitlines()[0]  # from the lower one, from the higher one
    wanted = (
        "--      several GPUs           3 without peer access between 0-2, 1-2: NCCL sums over ranks there"
    )
    assert apart == wanted


def test_doctor_says_what_to_set_for_nccl(gpus: Callable[..., str]) -> None:
    """With mixing off, NCCL forbids calls outside of graphs while a graph runs, on any stream."""
    unset = gpus(2)
    assert unset.count("--  ") == 2 == unset.count("what to do: ")
    assert "where every call of the model is replayed, set NCCL_GRAPH_MIXING_SUPPORT=0 before" in unset
    assert "set NCCL_NVLS_ENABLE=0 where that fails" in unset
    assert gpus(2, NCCL_GRAPH_MIXING_SUPPORT="1", NCCL_NVLS_ENABLE="2") == unset
    off = gpus(2, NCCL_GRAPH_MIXING_SUPPORT="0", NCCL_NVLS_ENABLE="0")
    assert off.count("what to do: ") == 1 and "no call outside of a graph may be launched while" in off
    assert "unset it, unless every call of the model is replayed" in off


def test_explain_captures_the_repositorys_model_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    assert main(["explain", "--compiler", "eager", "--max-tokens", "8", "--html", str(file)]) == 0
    printed = capsys.readouterr().out
    assert MODEL.rsplit("/", 1)[1] in printed and "9 steps: 5 segments" in printed
    assert f"written to {file}" in printed
    assert file.read_text().count('class="segment"') == 5 + 3  # segments, then one mark per structure


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
        (["--model", MODEL, "--dtype", "float8_e4m3fn"], "dtype 'float8_e4m3fn' cannot be used"),
        (["--model", MODEL, "--dtype", ""], "dtype '' cannot be used"),
        (["--model", MODEL, "--device", "gpu"], "device 'gpu' cannot be used"),
        (["--model", MODEL, "--device", "hpu"], "device 'hpu' cannot be used"),
        (["--model", MODEL, "--device", "meta"], "device 'meta' cannot be used"),
        (["--model", ""], "the model '' cannot be used"),
        (["--model", __file__], "cannot be used"),
        (["--html", "/nonexistent/page.html"], "its folder does not exist"),
        (["--html", "/"], "--html / cannot be written: Is a directory"),
        (["--html", f"{__file__}/page.html"], "its folder does not exist"),
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


@pytest.mark.parametrize("command", ["explain", "generate"])
def test_a_model_without_some_of_its_weights_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers fills them with random numbers; whether a head is tied is in config.json."""
    for file in Path(MODEL).iterdir():
        shutil.copy(file, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    assert main([command, "--model", str(tmp_path)]) == 2
    assert "its files do not hold lm_head.weight, which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["demo", "--prompt", ""], "an empty prompt has no tokens"),
        (["generate", "--model", MODEL, "--prompt", ""], "an empty prompt has no tokens"),
        (["demo", "--prompt", "a\udcff"], "the prompt is not valid UTF-8"),
        (["serve", MODEL, "--port", "65536"], "pass a port from 1 to 65535"),
        (["serve", MODEL, "--page-size", "24"], "argument --page-size: invalid choice"),
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


def command_line(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process that prepares itself by `script`, then runs the command line."""
    names = "import importlib, os, signal, sys\nfrom types import SimpleNamespace"
    run = f"{names}\n{script}\nfrom piecewise_graph.cli.commands import main\nsys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", run, *arguments], stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("command", [["generate", "--model", MODEL], ["serve", MODEL]], ids=lambda c: c[0])
def test_without_transformers_a_command_says_what_it_needs(command: list[str]) -> None:
    process = command_line("sys.modules['transformers'] = None", *command)
    said = process.communicate()[1]
    assert process.returncode == 2 and "pip install transformers" in said and "Traceback" not in said


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_a_command_quietly(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    prints = "importlib.import_module = lambda *_: SimpleNamespace(run=lambda _: print('text') or 0)"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    process = command_line(prints, "doctor", stdout=writing, env=environment)
    os.close(writing)
    assert process.communicate()[1] == "" and process.returncode == 141


@pytest.mark.parametrize("output", [None, io.StringIO()], ids=["a file", "no file"])
def test_another_pipe_that_breaks_is_an_error_like_any_other(output: io.StringIO | None) -> None:
    def breaks(_: object) -> int:
        raise BrokenPipeError("a worker has gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(BrokenPipeError, match="a worker"):
        if output is not None:
            patch.setattr(sys, "stdout", output)
        patch.setattr(doctor_command, "run", breaks)
        main(["doctor"])


def test_ctrl_c_ends_a_command_in_one_line() -> None:
    """Once the package is loaded; here where the first import of the command is."""
    at_once = "importlib.import_module = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    process = command_line(at_once, "generate", "--model", MODEL)
    assert process.communicate()[1] == "interrupted\n"
    assert process.returncode == 130
