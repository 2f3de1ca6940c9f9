"""The ops at both ends of a round: from what requests carry to the batch, and back."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .metadata_buffers import Accepted, Gathered, RequestState
from .op_dispatch import metadata_op
from .op_signature import ints


@metadata_op(lambda call: None)
def gather_requests(
    requests: Annotated[Tensor, ints("B")],
    table: Annotated[Tensor, ints("R", "P")],
    state: RequestState,
    out: Gathered,
) -> None:
    """Lengths, roots and pages of a batch, before anything of a round is computed.

    Args:
        requests: `Batch.requests`; padded requests get what row 0 holds.
        table: `RequestTable.block_table`.
        out: written. Its `seq_lens` may be those of the batch.
    """
    rows = requests.long()
    out.seq_lens.copy_(state.seq_lens[rows])
    out.root_tokens.copy_(state.root_tokens[rows])
    out.block_table.copy_(table[rows])


@metadata_op(lambda call: None, writes=("result",))
def scatter_accepted(
    requests: Annotated[Tensor, ints("B")],
    accepted: Accepted,
    result: Annotated[Tensor, ints("B", "S+2")],
    out: RequestState,
) -> None:
    """Where the next round of each request starts, and what the host reads of this one.

    Args:
        requests: `Batch.requests`; row 0 of `out` gets what padded requests have, which is 0.
        result: written: `accepted.out_tokens`, then `accepted.accept_length`.
        out: written at the rows of `requests`.
    """
    rows = requests.long()
    out.seq_lens.index_copy_(0, rows, accepted.new_seq_lens)
    out.root_tokens.index_copy_(0, rows, accepted.bonus)
    result.copy_(torch.cat([accepted.out_tokens, accepted.accept_length[:, None]], 1))
