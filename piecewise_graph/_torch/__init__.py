"""The only package that touches private torch API.

Everything here was tried on torch 2.11 and 2.13 (`tests/test_torch_gates*.py` test each use). Differences
between versions are handled here and nowhere else. Callers take all names from here.
"""

from piecewise_graph._torch.compilers import (
    code_modules as code_modules,
    compile_exact as compile_exact,
    compile_options as compile_options,
    compile_segment as compile_segment,
    compile_whole as compile_whole,
    generated_code as generated_code,
    inductor_cache_dir as inductor_cache_dir,
    kernels_wait_first as kernels_wait_first,
    load_artifact as load_artifact,
    start_compile_workers as start_compile_workers,
)
from piecewise_graph._torch.device import (
    capturing as capturing,
    clear_cublas_workspaces as clear_cublas_workspaces,
    forget_capture as forget_capture,
    named_range as named_range,
    pool_bytes as pool_bytes,
    stream_address as stream_address,
)
from piecewise_graph._torch.graphs import (
    argument_values as argument_values,
    assigned_attributes as assigned_attributes,
    backend_error as backend_error,
    changed_objects as changed_objects,
    comparable as comparable,
    current_root_code as current_root_code,
    end_constants as end_constants,
    example_value as example_value,
    fake_mode_of as fake_mode_of,
    is_compiled_in_place as is_compiled_in_place,
    is_dynamo_control_flow as is_dynamo_control_flow,
    is_marked_static as is_marked_static,
    is_opaque as is_opaque,
    is_specialization_error as is_specialization_error,
    is_trace_error as is_trace_error,
    may_keep_state as may_keep_state,
    module_source as module_source,
    open_floats as open_floats,
    original_callable as original_callable,
    placeholder_source as placeholder_source,
    publish_graph as publish_graph,
    real_object as real_object,
    returned_values as returned_values,
    returns_intermediates as returns_intermediates,
    trace_with_constants as trace_with_constants,
)
from piecewise_graph._torch.ops import (
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
    autocast_functions as autocast_functions,
    droppable_functions as droppable_functions,
    grad_mode_function as grad_mode_function,
    inner_graphs as inner_graphs,
    is_higher_order as is_higher_order,
    observe_ops as observe_ops,
    op_schemas as op_schemas,
    outside_of_modes as outside_of_modes,
    propagate as propagate,
    propagate_fake as propagate_fake,
)
from piecewise_graph._torch.settings import (
    drop_shape_guards as drop_shape_guards,
    floats_stay_constants as floats_stay_constants,
    guard_every_weight as guard_every_weight,
    maybe_mark_dynamic as maybe_mark_dynamic,
    raise_recompile_limit as raise_recompile_limit,
    tell_of_reset as tell_of_reset,
)
from piecewise_graph._torch.symbols import (
    add_size as add_size,
    assume as assume,
    conditions_undone as conditions_undone,
    expression as expression,
    has_unknown_size as has_unknown_size,
    holds as holds,
    is_constant as is_constant,
    is_fixed as is_fixed,
    shape_env_of as shape_env_of,
    shape_guards as shape_guards,
    size_hint as size_hint,
    size_of as size_of,
    takes_all_sizes as takes_all_sizes,
    value_range as value_range,
)
from piecewise_graph._torch.tensors import (
    flatten as flatten,
    functions_while_tracing as functions_while_tracing,
    is_plain_tensor as is_plain_tensor,
    is_same_view as is_same_view,
    is_wrapped as is_wrapped,
    share_storage as share_storage,
    storage_holders as storage_holders,
    storage_id as storage_id,
    traced_functions as traced_functions,
    unflatten as unflatten,
    weak_alias as weak_alias,
)
from piecewise_graph._torch.wrappers import (
    WrapperLayout as WrapperLayout,
    functions_of_wrappers as functions_of_wrappers,
    has_constant_sizes as has_constant_sizes,
    inner_tensors as inner_tensors,
    is_wrapper as is_wrapper,
    meta_of_part as meta_of_part,
    put_together as put_together,
    uncompiled as uncompiled,
)
