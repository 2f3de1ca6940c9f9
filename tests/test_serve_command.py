"""`python -m piecewise_graph serve`: its answers over HTTP, its end, and what it says where it cannot run."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from piecewise_graph.cli import serve_command
from piecewise_graph.cli.commands import main

ROOT = Path(__file__).resolve().parents[1]
MODEL = str(ROOT / "benchmarks" / "models" / "byte-llama")
PROMPTS = ("Hello", "import torch\n", "def f(x):\n    return")
NEW = 16
PATIENCE = 60  # seconds, on a machine that does other things beside


@pytest.fixture
def packages() -> None:
    """Skips where the server's packages are missing."""
    for name in serve_command._PACKAGES:
        pytest.importorskip(name)


def by_transformers() -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    answers = []
    for prompt in PROMPTS:
        asked = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**asked, do_sample=False, max_new_tokens=NEW)[0, asked.input_ids.shape[1] :]
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return answers


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE).close()
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    server.kill()
    pytest.fail(f"no server came up:\n{server.communicate()[1][-3000:]}")


def complete(url: str, prompt: str, **more: Any) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": NEW, "temperature": 0} | more).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_answers_are_those_of_transformers_and_steps_are_replayed(ended_by: signal.Signals) -> None:
    port = free_port()
    url = f"http://localhost:{port}"
    words = f"serve {MODEL} --compiler eager --device cpu --max-batch-tokens 64 --num-blocks 64 --port {port}"
    command = [sys.executable, "-m", "piecewise_graph", *words.split()]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            wait_for(url, server)
            for streams in (False, True):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    complete(url, "Hello", max_tokens=5000, stream=streams)
                assert refused.value.code == 400
                assert "of 16 tokens; the cache has 64" in json.load(refused.value)["error"]
            with ThreadPoolExecutor(len(PROMPTS)) as clients:
                answers = [list(clients.map(complete, [url] * 3, PROMPTS)) for _ in range(2)]
            server.send_signal(ended_by)
            printed, log = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
    assert answers == [by_transformers()] * 2
    assert server.returncode == 0, log
    replays = re.search(r"^(\d+) replays of \d+ graphs; \d+ buckets in 1 traces$", printed, re.MULTILINE)
    assert replays and int(replays[1]) >= NEW, printed
    assert "Traceback" not in log
    assert "fallback" not in printed


def refusal(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["serve", MODEL, "--compiler", "eager", "--device", "cpu", *more]) == 2
    error = capsys.readouterr().err.splitlines()
    says = next(index for index, line in enumerate(error) if line.startswith("  What to do: "))
    return "\n".join(error[says - 1 : says + 1])


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        ("transformers.cli.serve", "Serve", ""),
        ("transformers.cli.serve", "Serve", "start_server"),
        ("transformers.cli.serve", "Serve", "kill_server"),
        ("transformers.cli.serving.model_manager", "ModelManager", ""),
        ("transformers.cli.serving.model_manager", "ModelManager", "_validate_args"),
        ("transformers.cli.serving.model_manager", "ModelManager", "_load_model"),
    ],
)
def test_a_version_without_a_hook_is_named(
    module: str,
    name: str,
    attribute: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner = getattr(import_module(module), name) if attribute else import_module(module)
    monkeypatch.delattr(owner, attribute or name)
    said = refusal(capsys)
    assert f"transformers {transformers.__version__} has no {module}.{name}" in said
    assert attribute in said and 'pip install "transformers[serving]==' in said


def without_an_option(self: Any, force_model: str) -> None: ...


def with_another_manager(self: Any, **_: Any) -> None: ...


def with_an_attention_list(self: Any, attn_implementation: str, **_: Any) -> None:
    raise ValueError(f"Unsupported attention implementation: '{attn_implementation}'.")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("start", "says"),
    [
        (without_an_option, "has no transformers.cli.serve.Serve("),
        (with_another_manager, "does not load its model with transformers.cli.serving.model_manager"),
        (with_an_attention_list, "does not load its model with transformers.cli.serving.model_manager"),
    ],
)
def test_a_server_that_is_built_in_another_way_is_refused(
    start: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module("transformers.cli.serve")
    other = {"__init__": start, "start_server": print, "kill_server": print}
    if start is not without_an_option:
        other["__signature__"] = signature(module.Serve)
    monkeypatch.setattr(module, "Serve", type("Serve", (), other))
    assert says in refusal(capsys)


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"openai", "pydantic"}
    monkeypatch.setattr(serve_command, "find_spec", lambda name: name if name in found else None)
    said = refusal(capsys)
    assert "needs fastapi and uvicorn: not installed" in said
    assert 'What to do: pip install "transformers[serving]"' in said


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--dtype", "fp8"], "dtype 'fp8' cannot be used"),
        (["--device", "gpu"], "device 'gpu' cannot be used"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, *more)


@pytest.mark.usefixtures("packages")
def test_a_damaged_model_is_refused_and_the_manager_put_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(MODEL).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:1000])
    module = import_module("transformers.cli.serving.model_manager")
    before = module.ModelManager
    assert main(["serve", str(tmp_path), "--device", "cpu"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert main(["serve", "./nowhere", "--device", "cpu"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert module.ModelManager is before
