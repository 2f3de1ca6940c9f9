"""Decode batches of vLLM as one graph each, in the buffers that vLLM fills at every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

# Tensors of attention metadata that captured kernels read; not every backend has all of them.
_METADATA = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


class DecodeBatch:
    """A captured batch, and what it takes for granted of the calls that it serves.

    vLLM keeps alive what its kernels read through its own context: the KV cache, and buffers of metadata.

    Args:
        inputs: of the model, as they were captured.
        context: vLLM's forward context of that call.
        graph: what pg.capture_in_place returned for them.
        own_attention: see Note [Shared pages] in vllm_attention.py.
    """

    def __init__(
        self, inputs: Mapping[str, Any], context: Any, graph: Any, *, own_attention: bool = False
    ) -> None:
        self.graph, self.own_attention = graph, own_attention
        self._inputs = {name: _place(value) for name, value in inputs.items()}
        metadata, slots = _by_layer(context.attn_metadata), _by_layer(context.slot_mapping)
        # Layers of a group share one object, in every batch. So the first layer of each is asked.
        self._metadata = tuple((layer, tuple(_places(each))) for layer, each in _first_of_each(metadata))
        self._slots = tuple((layer, _place(each)) for layer, each in _first_of_each(slots))

    def fits(self, inputs: Mapping[str, Any], context: Any) -> bool:
        """The graph is there, and inputs, slots and what is looked at of the metadata lie where they did."""
        known = self._inputs
        if (
            self.graph.dropped
            or len(inputs) != len(known)
            or any(_place(inputs[name]) != known.get(name) for name in inputs)
        ):
            return False
        metadata, slots = _by_layer(context.attn_metadata), _by_layer(context.slot_mapping)
        for layer, places in self._metadata:
            each = metadata.get(layer)
            for name, place in places:
                if _place(getattr(each, name, None)) != place:
                    return False
        return all(_place(slots.get(layer)) == place for layer, place in self._slots)


def _place(value: Any) -> Any:
    """Where a tensor lies, and its shape; anything else as it is."""
    return (value.data_ptr(), value.shape) if isinstance(value, Tensor) else value


def _by_layer(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _first_of_each(by_layer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(layer, value) of each distinct value, by identity."""
    seen = set[int]()
    for layer, value in by_layer.items():
        if id(value) not in seen:
            seen.add(id(value))
            yield layer, value


def _places(metadata: Any) -> Iterator[tuple[str, Any]]:
    for name in _METADATA:
        yield name, _place(getattr(metadata, name, None))
