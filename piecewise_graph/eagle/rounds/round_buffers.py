"""Static buffers, declared as data: what graphs hand to each other.

Letters of shapes: `R` rows of the request table (row 0: padding), `B` requests of a batch, `N` draft tokens,
`S` steps, `H` hidden size of the draft, `F` columns of the target's features, `V` vocabulary, `P` columns of
the request table, `G` tokens of the feature ring buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

import torch
from torch import Tensor

from piecewise_graph.custom_ops.kv_cache import to_device


@dataclass(frozen=True)
class Field:
    """One buffer.

    Attributes:
        shape: letters, replaced by their sizes on allocation, or numbers.
        dtype: None = the model's.
        pad: initial value of all rows; rows of padded requests keep it.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: torch.dtype | None = torch.int32
    pad: float = 0


# What a request carries from one round to the next, by its row in the request table. The host sends these
# when it admits the request: they are columns of one int32 matrix, so one copy and one write send them all.
# What has 8 bytes comes first, and the columns are an even number, so that these bytes are aligned.
REQUEST = (
    Field("seed", ("R",), torch.int64),
    Field("seq_lens", ("R",)),  # tokens whose target K and V are right
    Field("root", ("R",)),  # the token after them, chosen and not yet computed
    Field("request_index", ("R",)),  # synthetic acceptance differs between requests of one seed
    Field("temperature", ("R",), torch.float32),
    Field("top_k", ("R",)),
    Field("top_p", ("R",), torch.float32, pad=1),
)
_CODES: dict[torch.dtype | None, str] = {torch.int64: "q", torch.int32: "i", torch.float32: "f"}
_SENT = Struct("=q" + "".join(_CODES[field.dtype] for field in REQUEST))  # the row comes first
_WORD, _SLOT_WORDS = 4, 2

# These only the device writes.
STATE = (
    Field("hidden", ("R", "H"), None),  # of draft-extend, where the next draft begins
)

# Ring buffer of the latest plain rounds' features, for a draft that has to catch up; row `position % G`.
FEATURE_RING = (Field("feature_ring", ("R", "G", "F"), None),)

# What the phases of a round hand to each other, by row of the batch.
ROUND = (
    Field("requests", ("B",)),
    Field("seq_lens", ("B",)),
    Field("root", ("B",)),
    Field("block_table", ("B", "P")),
    Field("drafts", ("B", "S")),
    Field("result", ("B", "S+2")),  # out_tokens, then accept_length
)
# What the draft reads of the target; plain rounds hand none on.
FEATURES = (Field("features", ("BN", "F"), None),)
# The distributions that a chain was drawn from; only where tokens are sampled.
DRAFT_PROBS = (Field("draft_probs", ("B", "S", "V"), torch.float32),)


class Buffers(dict[str, Tensor]):
    """Buffers by name, also as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def allocate(
    fields: Sequence[Field], sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device
) -> Buffers:
    """Allocate every field, filled with its `pad`."""
    found = Buffers()
    for field in fields:
        shape = [size if isinstance(size, int) else sizes[size] for size in field.shape]
        found[field.name] = torch.full(shape, field.pad, dtype=field.dtype or dtype, device=device)
    return found


def allocate_requests(num_rows: int, device: torch.device) -> Buffers:
    """The columns of `REQUEST` as views of one matrix, and that matrix as `requests_sent`."""
    matrix = torch.zeros(num_rows, _SENT.size // _WORD - _SLOT_WORDS, dtype=torch.int32, device=device)
    found, begin = Buffers(requests_sent=matrix), 0
    for field in REQUEST:
        assert field.dtype is not None
        end = begin + field.dtype.itemsize // _WORD
        found[field.name] = matrix[:, begin:end].view(field.dtype)[:, 0]
        found[field.name].fill_(field.pad)
        begin = end
    return found


def send_requests(state: Buffers, rows: Mapping[int, Mapping[str, float]]) -> None:
    """Write rows of `allocate_requests`, without waiting.

    Args:
        rows: by row of the request table, a value for every field of `REQUEST`.
    """
    packed = bytearray().join(
        _SENT.pack(slot, *(values[field.name] for field in REQUEST)) for slot, values in rows.items()
    )
    host = torch.frombuffer(packed, dtype=torch.int32).view(len(rows), -1)
    sent = to_device(host, state.requests_sent.device)
    slots = sent[:, :_SLOT_WORDS].view(torch.int64)[:, 0]
    state.requests_sent.index_copy_(0, slots, sent[:, _SLOT_WORDS:])
