"""The functions of `_torch` that speak to the device do what they say on the torch that is installed."""

from __future__ import annotations

import sys

import pytest
import torch

from piecewise_graph import _torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_grad")]


def test_pool_bytes_counts_one_pool_only(device: torch.device) -> None:
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    assert _torch.pool_bytes(pool.id) == 0
    with torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(8 << 20, dtype=torch.uint8, device=device)
    assert _torch.pool_bytes(pool.id) >= kept.nbytes
    assert _torch.pool_bytes(other.id) == 0


def test_pool_bytes_keeps_the_references_to_its_id() -> None:
    """Once this fails, torch is mended, and `pool_bytes` may ask without lending references."""
    pools = [torch.cuda.MemPool() for _ in range(300)]
    pool_id = pools[-1].id
    number = max(pool_id)
    assert number > 256  # Python keeps smaller ones for ever
    before = sys.getrefcount(number)
    for _ in range(10):
        assert _torch.pool_bytes(pool_id) == 0
    assert sys.getrefcount(number) == before


def test_a_capture_that_cannot_be_ended_is_forgotten(device: torch.device) -> None:
    memory, x, stream = torch.cuda.MemPool(), torch.ones(1, device=device), torch.cuda.Stream()
    failed, good = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        failed.capture_begin(memory.id, capture_error_mode="thread_local")
        with pytest.raises(RuntimeError):
            (x + 1).item()
        with pytest.raises(RuntimeError):
            failed.capture_end()
        _torch.forget_capture(failed, memory)
        before = _torch.pool_bytes(memory.id)
        torch.zeros(8 << 20, dtype=torch.uint8, device=device)
        assert _torch.pool_bytes(memory.id) == before
        assert memory.use_count() == 1  # else its end would be the process's
        good.capture_begin(capture_error_mode="thread_local")
        y = x + 1
        good.capture_end()
        good.replay()
        assert y.item() == 2
        assert torch.rand(3, device=device).max() < 1


def test_cublas_workspaces_can_be_cleared(device: torch.device) -> None:
    a = torch.randn(256, 256, device=device)
    wanted = a @ a
    _torch.clear_cublas_workspaces()
    torch.testing.assert_close(a @ a, wanted)


def test_a_stream_is_made_the_current_one(device: torch.device) -> None:
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    try:
        _torch.stream_setter(stream)()
        assert torch.cuda.current_stream() == stream
        assert _torch.stream_address(device) != 0
    finally:
        _torch.stream_setter(before)()
    assert torch.cuda.current_stream() == before
    assert _torch.current_device() == torch.cuda.current_device()
