"""Schemas, fakes and dispatch of the metadata ops. Needs torch only; kernels live elsewhere.

Every op writes declared outputs and returns nothing, reads no device data on the host, allocates nothing on
CUDA, and so runs inside a CUDA graph. Call it, `build_tree(batch, ...)`, which dispatches
`torch.ops.piecewise.build_tree`: the torch reference on a CPU, one Triton launch on CUDA. Or bind it once and
launch it many times: `launch = build_tree.bind(batch, ...); launch()` skips dispatch, checks and Triton's
own.

A greedy round with a chain: `draft_steps`, `build_tree`, `accept_greedy`: three launches. Names of shapes are
explained in `metadata_buffers.py`. Wrong sizes, dtypes and devices raise MetadataError before anything is
written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec

import torch
from torch import Tensor

from . import accept_reference, argument_checks, reference
from .metadata_buffers import Accepted, Batch, Branches, DraftSteps, ExtendRows, PagedKV, Tree

Args = tuple[Any, ...]
P = ParamSpec("P")

_library = torch.library.Library("piecewise", "FRAGMENT")
_BATCH = "Tensor requests, Tensor seq_lens, Tensor table, int page_size"


class MetadataOp(Generic[P]):
    """An op of the namespace `piecewise`: call it, or bind it.

    Attributes:
        name: of the op.
        flatten: (the call's arguments) -> the op's arguments, in the order of its schema.
    """

    def __init__(self, name: str, flatten: Callable[P, Args], reference: Callable[..., None]) -> None:
        self.name, self.flatten, self._reference = name, flatten, reference
        self._op = getattr(torch.ops.piecewise, name).default
        update_wrapper(self, flatten)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run once, on the current stream."""
        self._op(*self.flatten(*args, **kwargs))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[[], None]:
        """A zero-argument launch on these very tensors, which the caller keeps alive.

        Raises:
            MetadataError: the tensors do not fit together. A launch checks nothing any more.
        """
        flat = self.flatten(*args, **kwargs)
        if flat[0].is_cuda:
            from . import metadata_launches

            return metadata_launches.bind(self.name, flat)
        argument_checks.for_op(self.name)(*flat)
        return partial(self._reference, *flat)


def _op(
    schema: str, reference: Callable[..., None], batch: str = _BATCH
) -> Callable[[Callable[P, Args]], MetadataOp[P]]:
    """Define an op of a batch and `schema`; the function that is decorated flattens its arguments."""

    def define(flatten: Callable[P, Args]) -> MetadataOp[P]:
        name = flatten.__name__
        check = argument_checks.for_op(name)

        def on_cpu(*args: Any) -> None:
            check(*args)
            reference(*args)

        def on_cuda(*args: Any) -> None:
            from . import metadata_launches

            metadata_launches.bind(name, args)()

        _library.define(f"{name}({batch}, {schema}) -> ()")
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, on_cuda, "CUDA")
        # It returns nothing, and its outputs have their layout already.
        torch.library.register_fake(f"piecewise::{name}", lambda *args: None, lib=_library)
        return MetadataOp(name, flatten, reference)

    return define


@_op(
    "Tensor query_lens, Tensor(a!) qo_indptr, Tensor(b!) slot_mapping, Tensor(c!) positions, "
    "Tensor(d!) block_table",
    reference.extend_batch,
)
def extend_batch(batch: Batch, query_lens: Tensor, out: ExtendRows) -> Args:
    """Metadata of a batch that appends tokens: prefill, chunked prefill, or decode with query_lens of 1.

    Args:
        batch: seq_lens `[B]` count the tokens after this batch.
        query_lens: int32 `[B]` tokens that each request appends. Row j of request b is its token
            `seq_lens[b] - query_lens[b] + j`.
        out: written; T rows, at least the sum of query_lens (rows that do not fit are dropped).
    """
    return (*batch.args, query_lens, *out.args)


@_op("Tensor(a!) kv_indptr, Tensor(b!) kv_indices, Tensor(c!) last_page_len", reference.kv_indices)
def kv_indices(batch: Batch, out: PagedKV) -> Args:
    """The pages of each request one after another: what FlashInfer's wrappers call a paged KV layout."""
    return (*batch.args, *out.args)


@_op(
    "Tensor(b!) positions, Tensor(c!) slot_mapping",
    reference.advance,
    batch="Tensor requests, Tensor(a!) seq_lens, Tensor table, int page_size",
)
def advance(batch: Batch, positions: Tensor, slot_mapping: Tensor) -> Args:
    """The next step of plain decode, in place: every request's next token joins it.

    Args:
        batch: seq_lens `[B]` count the tokens so far and are written: one more each.
        positions, slot_mapping: int32 `[B]`, written: position `seq_len` (the old one) and its slot.
    """
    return (*batch.args, positions, slot_mapping)


@_op(
    "Tensor(a!) positions, Tensor(b!) slot_mapping, Tensor(c!) out_seq_lens, Tensor(d!)? kv_indptr, "
    "Tensor(e!)? kv_indices",
    reference.draft_steps,
)
def draft_steps(batch: Batch, out: DraftSteps) -> Args:
    """Metadata of all S - 1 draft forwards of a round in one launch.

    EAGLE's draft writes, for the token that follows position i, its own K and V at i (the pair of that token
    and the target's feature at i); so after draft-extend the draft cache holds seq_len tokens, and forward s
    puts branch j at token `seq_len + s*k + j`. Reserve `seq_len + max(N, (S-1)*k)` tokens before the round.
    All branches of a level have position `seq_len + s`. Without kv buffers no prefix is copied; with them, a
    chain's are final, and a tree's extension is written level by level by `select_branches`.

    Source: EAGLE-2 (arXiv 2406.16858) for the tree of top-k branches; SGLang's draft decode, whose kv_indices
    miss the top-k factor (sglang#27338) and the ancestors.

    Args:
        batch: seq_lens `[B]` before the round: tokens whose target K and V are right.
        out: written.
    """
    return (*batch.args, *out.args)


@_op(
    "int level, Tensor probs, Tensor child_tokens, Tensor(a!) scores, Tensor(b!) tokens, Tensor(c!) parents, "
    "Tensor(d!) hidden_index, Tensor(e!) candidates, Tensor(f!) all_scores, Tensor(g!) all_tokens, "
    "Tensor(h!) all_parents, Tensor(i!) ancestors, Tensor(j!) mask, Tensor? kv_indptr, "
    "Tensor(k!)? kv_indices",
    reference.select_branches,
)
def select_branches(
    batch: Batch, level: int, probs: Tensor, child_tokens: Tensor, branches: Branches, steps: DraftSteps
) -> Args:
    """Take the children of one level in: append them to the candidates, keep the best k as branches.

    Level 0 follows draft-extend: the root's k children are the branches. Level l follows draft forward l - 1:
    of the k² products of branch score and child probability the k largest stay, ties to the lower index, so
    that a parent always ranks before its children. The last level (S - 1) only appends. A branch inherits the
    ancestors and the mask row of its parent and adds itself; so do its entries of `steps.kv_indices` for
    forward l.

    Source: EAGLE-2 (arXiv 2406.16858), expansion phase.

    Args:
        level: 0 to S - 1.
        probs: float32 `[B, k]` at level 0, else `[B, k, k]`: draft probabilities of each branch's top-k
            children, in [0, 1].
        child_tokens: int32 or int64, same shape: their token ids (the target's: map a draft vocabulary
            before).
        branches: read and written in place.
        steps: of the same round; its kv_indices may be None.
    """
    return (*batch.args, level, probs, child_tokens, *branches.args, steps.kv_indptr, steps.kv_indices)


@_op(
    "Tensor root_tokens, Tensor draft_tokens, Tensor? scores, Tensor? parents, Tensor(a!) tokens, "
    "Tensor(b!) positions, Tensor(c!) mask, Tensor(d!) retrieve_index, Tensor(e!) next_token, "
    "Tensor(f!) next_sibling, Tensor(g!) slot_mapping, Tensor(h!) out_seq_lens, Tensor(i!) qo_indptr",
    reference.build_tree,
)
def build_tree(
    batch: Batch,
    root_tokens: Tensor,
    draft_tokens: Tensor,
    out: Tree,
    *,
    scores: Tensor | None = None,
    parents: Tensor | None = None,
) -> Args:
    """Inputs of a verify forward: the best N - 1 of C candidates under the root, or a chain as it is.

    Candidates are ranked by score, ties to the lower index, and become nodes 1 to N - 1 by ascending index.
    So a parent's node comes before its children's, and siblings come in the order in which they were
    proposed.

    Source: EAGLE-2 (arXiv 2406.16858), reranking phase; retrieve_index, next_token and next_sibling mean what
    they mean in SGLang's build_tree_kernel_efficient.

    Args:
        batch: seq_lens `[B]` before verify; the root is token `seq_len`.
        root_tokens: int32 or int64 `[B]`: the bonus token of the round before.
        draft_tokens: int32 or int64 `[B, C]` candidates, `Branches.all_tokens`; of a chain `[B, N - 1]`.
        out: written.
        scores: float32 `[B, C]`, not negative, at most the parent's; None for a chain.
        parents: int32 `[B, C]` candidate that each extends, -1 for the root; None for a chain.
    """
    return (*batch.args, root_tokens, draft_tokens, scores, parents, *out.args)


_ACCEPTED = (
    "Tensor(a!) accept_index, Tensor(b!) accept_len, Tensor(c!) out_tokens, Tensor(d!) bonus, "
    "Tensor(e!) new_seq_lens, Tensor(f!) select_index, Tensor(g!) input_ids, Tensor(h!) hidden_index, "
    "Tensor(i!) out_positions, Tensor(j!) out_slot_mapping"
)
_MUTABLE_TABLE = "Tensor requests, Tensor seq_lens, Tensor(z!) table, int page_size"


@_op(
    f"Tensor tokens, Tensor? mask, Tensor target_ids, {_ACCEPTED}",
    accept_reference.accept_greedy,
    batch=_MUTABLE_TABLE,
)
def accept_greedy(
    batch: Batch, tokens: Tensor, target_ids: Tensor, out: Accepted, *, mask: Tensor | None = None
) -> Args:
    """Accept the path on which every draft token is the target's choice; commit; prepare draft-extend.

    The output equals plain greedy decoding token for token. The commit of a tree (mask given, page size 1)
    permutes the request's entries of `batch.table` at tokens `seq_len .. seq_len + N - 1`: slots of the
    accepted path first, in order, then the others in theirs. No K or V is copied, no slot is lost. A chain's
    accepted tokens are in place already, whatever the page size. Reserve `seq_len + N` tokens before the
    round: a row without pages for all of them is not permuted.

    Source: draft-extend rows of fixed size as in sglang#6606 and #9588; the commit permutes a block table
    where SGLang moves K and V.

    Args:
        batch: seq_lens `[B]` before verify.
        tokens: int32 `[B*N]`, `Tree.tokens`.
        target_ids: int32 or int64 `[B*N]`: the target's argmax at every row of the verify forward.
        out: written.
        mask: bool `[B, N, N]`, `Tree.mask`; None for a chain (N = S + 1).

    Raises:
        MetadataError: a tree with a page size above 1.
    """
    return (*batch.args, tokens, mask, target_ids, *out.args)


@_op(
    f"Tensor tokens, Tensor target_probs, Tensor draft_probs, Tensor uniforms, {_ACCEPTED}",
    accept_reference.accept_chain,
)
def accept_chain(
    batch: Batch, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor, out: Accepted
) -> Args:
    """Rejection sampling of a chain whose tokens were sampled from the draft; commit; prepare draft-extend.

    Draft i is accepted when `u_i q_i(x) < p_i(x)`. The bonus is drawn from the normalised max(p - q, 0) at
    the first refusal, from p after the last draft. Output has the target's distribution, whatever q is.

    Source: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).

    Args:
        batch: seq_lens `[B]` before verify.
        tokens: int32 `[B*N]`, `Tree.tokens` of a chain; token i of a request was drawn from draft_probs[:,
            i-1].
        target_probs: float32 `[B, N, V]`: what the target samples from, after temperature, top-p and the
            like.
        draft_probs: float32 `[B, N-1, V]`: what the draft sampled from, in the target's vocabulary.
        uniforms: float32 `[B, N]` in [0, 1): column i > 0 tests draft i, column 0 draws the bonus.
        out: written.
    """
    return (*batch.args, tokens, target_probs, draft_probs, uniforms, *out.args)


@_op(
    f"Tensor tokens, Tensor? mask, Tensor target_probs, Tensor uniforms, {_ACCEPTED}",
    accept_reference.accept_tree,
    batch=_MUTABLE_TABLE,
)
def accept_tree(
    batch: Batch,
    tokens: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    out: Accepted,
    *,
    mask: Tensor | None = None,
) -> Args:
    """Rejection sampling of a tree whose tokens were chosen, not sampled; commit; prepare draft-extend.

    A node's children are tried in order: child c is accepted when `u_c (1 - mass of those refused before) <
    p(c)`. The bonus is drawn from p at the last accepted node, without the children refused there. Each
    proposal is a point mass, so the output has the target's distribution, whatever the draft's top-k found.

    Source: SpecInfer (arXiv 2305.09781), multi-step speculative sampling; EAGLE (arXiv 2401.15077), appendix.

    Args:
        batch: seq_lens `[B]` before verify.
        tokens: int32 `[B*N]`, `Tree.tokens`; children of one node differ.
        target_probs: float32 `[B, N, V]`, normalised: what the target samples from at each node.
        uniforms: float32 `[B, N]` in [0, 1): column c > 0 tests node c, column 0 draws the bonus.
        out: written.
        mask: bool `[B, N, N]`, `Tree.mask`; None for a chain (N = S + 1).

    Raises:
        MetadataError: a tree with a page size above 1.
    """
    return (*batch.args, tokens, mask, target_probs, uniforms, *out.args)
