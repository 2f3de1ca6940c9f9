"""Readable names of the arguments of a traced graph."""

from __future__ import annotations

import re

# Where a placeholder of a graph that stands for several weights keeps its name.
MERGED_NAME = "piecewise_merged_name"
# Where a node of a segment keeps the path of the module that called its function.
MODULE = "piecewise_module"


def readable_source(source: str) -> str:
    """`L['self']._modules['lm_head']._parameters['weight']` -> `self.lm_head.weight`."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    source = re.sub(r"^(type\()?[LG]\['([^']+)'\]", r"\1\2", source)
    return re.sub(r"^(?:kwargs|args)\['([^']+)'\]", r"\1", source)
