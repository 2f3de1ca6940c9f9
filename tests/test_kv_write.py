"""The kernels around library attention, in a process of their own that has Triton's interpreter on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
from dataclasses import replace

import torch
from attention_cases import WRONG, Shape, check_cache, make_case
from piecewise_graph.custom_ops.attention import kv_write
from piecewise_graph.kernels.launch import Launcher

Launcher.bind = lambda self, grid, args, *constants: lambda: self._kernel[grid](*args, *constants)
MIXED = ((5, 1), (0, 7), (0, 0), (33, 3), (0, 1), (16, 1))
SHAPES = (
    Shape(MIXED, head_dim=80),
    Shape(((5, 1), (0, 0), (0, 1)), uniform=True),
    Shape(((20, 5), (3, 5), (0, 0)), tree=True),
    Shape(((20, 40), (3, 40), (0, 0)), tree=True),
)
for shape in SHAPES:
    case = make_case(shape, dtype=torch.float32, device=torch.device("cpu"), implementation="torch")
    batch, call = case.batch, case.call
    mask = packed = None
    if batch.tree_mask is not None:
        mask = batch.tree_mask.view(-1, batch.query_len)
        packed = torch.empty(batch.num_tokens, -(-batch.query_len // 32), dtype=torch.int32)
    kv_write.write_kv(batch, call, mask, packed)
    check_cache(case)
    if mask is not None:
        # The same call with another mask, then with another place for it.
        for seen, words in ((mask, packed), (~mask, packed), (mask, torch.empty_like(packed))):
            kv_write.write_kv(batch, call, seen, words)
            bits = (words[:, :, None].long() >> torch.arange(32)) & 1
            assert torch.equal(bits.flatten(1)[:, : batch.query_len].bool(), seen)
    # Another batch with the same call and cache: its rows go to their own slots, and other rows are zeroed.
    other = replace(batch, slot_mapping=batch.slot_mapping.flip(0))
    kv_write.write_kv(other, call, mask, packed)
    k = batch.kv_cache.k[call.layer].flatten(0, 1)
    for row, slot in enumerate(other.slot_mapping.tolist()):
        assert slot == 0 or torch.equal(k[slot], call.k[row]), (shape, row)
    out = torch.cat([call.out, call.out[:3]])
    slots = torch.cat([batch.slot_mapping, batch.slot_mapping.new_zeros(3)])
    batch = replace(batch, slot_mapping=slots, query_len=None)  # three rows that belong to no request
    starts = [*batch.qo_indptr.tolist(), len(out)]
    for found in (out, out.clone()):
        kv_write.zero_padding(batch, call, found)
        for request, length in enumerate([*batch.seq_lens.tolist(), 0]):
            rows = found[starts[request] : starts[request + 1]]
            assert bool((rows == (WRONG if length else 0)).all()), (shape, request)
    kept = [out.clone() for _ in range(100 if shape is SHAPES[1] else 0)]  # each at an address of its own
    for found in kept:
        kv_write.zero_padding(batch, call, found)
    assert len(call.memo) <= 64
for shape in SHAPES[:2]:
    case = make_case(shape, dtype=torch.float32, device=torch.device("cpu"), implementation="torch")
    slots = case.batch.slot_mapping.long()
    slots[-1] = -1  # would be the last slot in front of the layer's
    case = replace(case, batch=replace(case.batch, slot_mapping=slots))
    kv_write.write_kv(case.batch, case.call)
    check_cache(case)
"""


def test_kernels_write_what_they_should_and_nothing_else() -> None:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
