"""`vllm serve` with this backend in processes of its own, and a client that reads a stream."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.eagle_pair import MODELS
from benchmarks.vllm_sides import environment_of

MODEL = str(MODELS / "byte-llama")
PATIENCE = 180  # seconds until the server answers
ASKED = {
    "eager": ["--enforce-eager"],
    "v1": list[str](),
    "piecewise": ["-cc.backend=piecewise"],
}


class ServerError(Exception):
    """The server did not come up, or did not answer."""


def streamed(prompts: Sequence[list[int]], new_tokens: int) -> Iterator[dict[str, Any]]:
    """Per server how many of its answers differ from the eager one's, chunks per answer, and its log."""
    wanted = list[list[int]]()
    for side, asked in ASKED.items():
        with server(side, asked) as (port, log):
            answers = [list(stream(port, prompt, new_tokens)) for prompt in prompts]
            told = re.findall(r"(?:target model|planned memory).*", log.read_text())[:12]
        found = [[token for chunk in answer for token in chunk] for answer in answers]
        wanted = wanted or found
        differ = sum(own != other for own, other in zip(found, wanted, strict=True))
        counts = {"prompts": len(prompts), "differ": differ, "chunks": [len(answer) for answer in answers]}
        yield {"side": side, **counts, "log": told}


@contextmanager
def server(side: str, asked: Sequence[str]) -> Iterator[tuple[int, Path]]:
    """(its port, its log), once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", MODEL, "--port", str(port)]
    command += ["--max-model-len", "1024", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.1", *asked]
    environment = {**os.environ, **environment_of(side), "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # the engine has a process of its own, by default
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            _wait(process, port, log)
            yield port, log
        finally:
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise ServerError(f"vllm serve did not answer; its log ends: {log.read_text()[-1500:]}")


def stream(port: int, prompt: list[int], new_tokens: int) -> Iterator[list[int]]:
    """The tokens of each chunk, as it comes."""
    asked = {
        "model": MODEL, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(asked), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ServerError(f"vllm serve refused a prompt: {response.read().decode()[:500]}")
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            chunk = json.loads(data)
            if "choices" not in chunk:
                raise ServerError(f"vllm serve broke a stream off: {data[:500]}")
            tokens = chunk["choices"][0].get("token_ids")
            if tokens:
                yield tokens
