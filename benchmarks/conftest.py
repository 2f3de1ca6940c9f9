"""Fixtures of `pytest benchmarks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def inference() -> Iterator[None]:
    """No gradients, in fixtures of whole modules too."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
