"""What to do about each reason that `pg.counters` and `pg.explain` name.

The tables in `piecewise_graph/README.md` say what each one means.
"""

from __future__ import annotations

_REPLACED = "none needed: it was compiled again and the file replaced"
_ONE_SEGMENT = "move the cut: keep producer and consumer between the same two splitting ops"
_ROWS = "compute it outside of the model, or use sizes that are capture sizes"
_OWN_FOLDER = "give cache_dir a private folder: chmod 700, owned by the user of the process"
_NO_CACHE = "none needed: the segment is compiled in every process"
_NO_MERGE = "none needed: these linears run one by one"
_NOT_EXACT = "none needed: the code for all sizes serves this one"

REMEDIES = {
    # the model or the call stays outside of graphs
    "a_symbolic_float_crosses_a_cut": "make the number a tensor, or compute it where it is used",
    "a_tuple_crosses_a_cut": "let the splitting op return tensors or a flat tuple of them, unpacked at once",
    "above_max_tokens": "raise max_tokens, or split the batch",
    "an_effect_crosses_a_cut": _ONE_SEGMENT,
    "autocast": "call the model outside of torch.autocast, with weights in the dtype that it should use",
    "autocast_region_crosses_a_cut": "end torch.autocast before the splitting op, and enter it again after",
    "bucket_outside_trace": "add a capture size inside the range that pg.explain prints for the trace",
    "capture_failed": "read the failure in pg.explain; after mending it, pg.reset() captures again",
    "captured_by_caller": "none needed; call the model once before you capture around it",
    "changes_a_shape_in_place": "call it without the underscore, h = h.t() in place of h.t_()",
    "cuda_graphs_off": "compile with cuda_graphs='auto'",
    "data_dependent": "keep .item() and branches on values outside of the model, or in a splitting op",
    "data_dependent_size": "keep nonzero() and boolean masks outside of the model, or in a splitting op",
    "generate_not_compiled": "ask for tokens alone, without beams or a draft; leave cache_implementation out",
    "grad_enabled": "call it under torch.no_grad() or torch.inference_mode()",
    "grad_enabled_inside": "remove torch.enable_grad() from the model's forward",
    "lazy_conjugate": "call resolve_conj() or resolve_neg() on it",
    "mixed_devices": "move the part, weights and inputs, to the device of the others",
    "nested_forward": "give the inner model a GraphPool of its own",
    "no_token_dimension": "name the dimension that counts tokens: pg.compile(model, token_dim=...)",
    "no_tokens": "skip the call when there is nothing to run",
    "not_captured": "capture it before serving: pg.capture(..., sizes=...)",
    "not_traced_by_dynamo": "look for torch.compiler.disable or the recompile limit (TORCH_LOGS=recompiles)",
    "number_varies": "pass the number as a tensor, or keep it the same",
    "op_not_capturable": "register the op with capturable=True, if it may be captured",
    "over_budget": "raise max_graph_bytes, or choose fewer or smaller capture_sizes",
    "random_numbers": "call model.eval(), or draw the numbers outside and pass them in",
    "ranks_differ": "give all ranks parts of the same sizes, and the same options",
    "reads_beyond_a_view": "slice or unfold instead of as_strided, or clone its argument first",
    "returns_a_view": "clone the view that the forward returns, or remove the graph break behind it",
    "second_dynamic_dimension": "pass batch_sizes, flatten requests to [1, tokens], or keep the batch size "
    "the same; make a slice of columns contiguous",
    "splitting_op_inside_higher_order_op": "call the op outside of checkpoint, cond, map and the like",
    "tensor_subclass": "pass the tensors that it is made of, and use such a weight where it is read",
    "writes_an_input": "write a buffer of the module, or call torch._dynamo.mark_static_address(tensor)",
    # a segment runs at the exact number of tokens
    "derived_size": _ROWS,
    "mixes_tokens": _ROWS,
    "no_padding_proof": "read in pg.explain which op it is; pg.register_padding_rule for an op of your own",
    "overlapping_memory": "make it contiguous: the argument, or the result of a splitting op",
    "padding_unproven": "capture with pg.capture on inputs that differ from token to token",
    "proof_failed": "let the segment run at sizes below the bucket too, or use sizes that are capture sizes",
    "writes_static_input": "none needed: sizes that return, and capture sizes, have graphs",
    "size_is_a_number": "pass the number as a tensor, or use sizes that are capture sizes",
    # cache_dir
    "checksum": _REPLACED,
    "foreign": _REPLACED,
    "load_failed": _REPLACED,
    "other_key": _REPLACED,
    "sizes": _REPLACED,
    "truncated": _REPLACED,
    "file_of_another_user": _OWN_FOLDER,
    "file_writable_by_others": _OWN_FOLDER,
    "folder_of_another_user": _OWN_FOLDER,
    "folder_writable_by_others": _OWN_FOLDER,
    "no_file": "remove the link or folder of that name from cache_dir",
    "no_file_owners": "leave cache_dir out: this system does not say who owns a file",
    "unreadable": "give the process the right to read cache_dir",
    "unwritable": "give the process the right to write to cache_dir, and room on the disk",
    "holds_objects": _NO_CACHE,
    "not_opaque": _NO_CACHE,
    "not_serializable": _NO_CACHE,
    "python_function": _NO_CACHE,
    "sizes_elsewhere": _NO_CACHE,
    "unnamed_object": _NO_CACHE,
    # merge_linears
    "inference_tensor": "load the model outside of torch.inference_mode()",
    "no_room": "free memory: one group's weights exist twice for a moment",
    "shared_storage": "drop what else holds it: a kept state_dict, a tied weight, other graphs",
    "strided_output": _NO_MERGE,
    "unaligned": _NO_MERGE,
    "weight_read_elsewhere": _NO_MERGE,
    "weight_used_twice": _NO_MERGE,
    # specialize
    "differs": _NOT_EXACT,
    "reads_an_object": _NOT_EXACT,
    "runs_uncompiled": _NOT_EXACT,
}


def remedy(reason: str) -> str:
    """What to do about `reason`; where it is free text (an exception), that is all there is to go by."""
    return REMEDIES.get(reason, "mend what it says")
