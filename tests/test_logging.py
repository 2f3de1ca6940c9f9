"""What the library logs: through torch's TORCH_LOGS, and one warning for a model without graphs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import Blocks, compiled, ops, rows

ROOT = Path(__file__).parent.parent
PROGRAM = """
import torch
import piecewise_graph as pg
model = torch.nn.Linear(4, 4)
fast = pg.compile(model, token_dim={"input": 0}, compiler="eager", max_tokens=4)
with torch.no_grad():
    for count in (3, 3, 5, 5):
        fast(torch.ones(count, 4))
"""


def test_torch_logs_shows_split_capture_and_first_fallback() -> None:
    environment = {**os.environ, "TORCH_LOGS": "+piecewise_graph", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = done.stderr.splitlines()
    (split,) = [line for line in lines if "split into" in line]
    assert "1 steps: 1 segments, 1 of them distinct, no splitting op; replayed: yes" in split
    (captured,) = [line for line in lines if "captured" in line]
    assert "captured 4 tokens, piecewise: 1 graphs, " in captured and " bytes, " in captured
    (fallback,) = [line for line in lines if "first fallback" in line]
    assert "above_max_tokens: raise max_tokens" in fallback
    assert any("segment_0: structure" in line for line in lines)


@pytest.mark.usefixtures("no_grad")
def test_a_model_without_graphs_warns_once(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "piecewise_graph"):
        fast = compiled(lambda x: ops.mix(x) + torch.rand_like(x))
        fast(rows(3, device)), fast(rows(4, device))
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("piecewise")]
    assert "no call of this model is replayed so far: random_numbers; call model.eval()" in warning


@pytest.mark.usefixtures("no_grad")
def test_a_model_with_graphs_or_without_wanting_them_is_quiet(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "piecewise_graph"):
        compiled(Blocks().to(device))(rows(3, device))
        compiled(lambda x: ops.mix(x) + torch.rand_like(x), cuda_graphs="off")(rows(3, device))
    assert not [record for record in caplog.records if record.name.startswith("piecewise")]
