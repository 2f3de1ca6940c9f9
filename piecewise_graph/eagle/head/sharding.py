"""A draft head on several ranks: its layers are cut as those of a tensor-parallel target.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053): a rank has some heads and some columns of the MLP, and
two sums over ranks close a layer. `fc` and the norms stay whole: they are small, and cutting `fc` would need
a sum of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .draft import DraftModel

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def shard_like(target: nn.Module, draft: DraftModel) -> None:
    """Keep this rank's part of the head's layers only, beside a tensor-parallel target; as of `load_draft`.

    Every rank has the same head, and cuts its own copy: nothing is exchanged.
    """
    mesh = _mesh_of(target)
    if mesh is None or mesh.ndim != 1 or mesh.size() == 1 or _is_gathered(target):
        return
    # Cutting would move the layers to the mesh's devices, and leave the rest where it was asked to be.
    if draft.fc.weight.device.type not in (mesh.device_type, "meta") or not _divides(draft, mesh.size()):
        return
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel() for name in _ROWS}
    for layer in draft.layers:
        parallelize_module(layer, mesh, plan, src_data_rank=None)


def _mesh_of(target: nn.Module) -> DeviceMesh | None:
    found: Any = (getattr(parameter, "device_mesh", None) for parameter in target.parameters())
    return next((mesh for mesh in found if mesh is not None), None)


def _is_gathered(target: nn.Module) -> bool:
    """Whether each rank gathers whole weights before it uses them: FSDP cuts weights, but not the work."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in target.modules())


def _divides(draft: DraftModel, ranks: int) -> bool:
    return draft.config.num_key_value_heads % ranks == 0 and draft.config.intermediate_size % ranks == 0
