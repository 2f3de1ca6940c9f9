"""What can go wrong in speculative decoding: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piecewise_graph.errors import PiecewiseError


class EagleError(PiecewiseError, ValueError):
    """A draft head, or its use, that does not fit the target model or the checkpoint."""

    @classmethod
    def bad_config(cls, field: str, value: object, expected: str) -> EagleError:
        return cls(f"DraftConfig({field}={value!r}) cannot work.", f"pass {expected}.")

    @classmethod
    def wrong_module(cls, name: str, found: Sequence[int], expected: Sequence[int]) -> EagleError:
        return cls(
            f"{name} to be shared has a weight of shape {tuple(found)}, the draft needs {tuple(expected)}.",
            f"pass the target's module of the same vocabulary and hidden size, or {name}=None: "
            "the draft then makes its own.",
        )

    @classmethod
    def no_mapping(cls, draft_vocabulary: int, vocabulary: int) -> EagleError:
        return cls(
            f"the draft has {draft_vocabulary} tokens and the target {vocabulary}, and no d2t maps them.",
            "pass d2t, int64, target id minus draft id of every draft token.",
        )

    @classmethod
    def wrong_mapping(cls, what: str) -> EagleError:
        return cls(
            f"d2t cannot be right: {what}.",
            "d2t holds offsets, not ids: target id = draft id + d2t[draft id]. Use the d2t that the head was "
            "trained with, for this target's vocabulary.",
        )

    @classmethod
    def no_head(cls, target: str) -> EagleError:
        return cls(
            f"{target} has no embedding and lm_head, which a draft head shares.",
            "pass the whole causal LM, as AutoModelForCausalLM loads it, and not its decoder alone.",
        )

    @classmethod
    def no_checkpoint(cls, folder: Path, missing: str) -> EagleError:
        return cls(
            f"{folder} holds no draft head: {missing}.",
            "pass a local folder with config.json and model.safetensors, or shards and their index, or "
            "pytorch_model.bin; huggingface_hub.snapshot_download(name) makes one and returns it.",
        )

    @classmethod
    def unreadable(cls, file: Path, why: object) -> EagleError:
        return cls(f"{file} cannot be read: {why}.", "it is cut off or damaged; download or write it again.")

    @classmethod
    def bad_checkpoint_config(cls, folder: Path, what: object) -> EagleError:
        return cls(
            f"{folder}/config.json describes no draft head: {what}.",
            "correct config.json, or download it again.",
        )

    @classmethod
    def unsupported_head(cls, folder: Path, what: str) -> EagleError:
        return cls(
            f"the draft head in {folder} is of a kind that is not supported: {what}.",
            "use an EAGLE, EAGLE-2 or EAGLE-3 head whose layers are Llama's or Qwen's, without quantisation.",
        )

    @classmethod
    def other_target(cls, folder: Path, what: str, head: int, target: int) -> EagleError:
        return cls(
            f"the draft head in {folder} is for a target with {what} {head}, this one has {target}.",
            "load the head that was trained for this model.",
        )

    @classmethod
    def wrong_feature_layer(cls, folder: Path, field: str, layer: int, layers: int, shift: int) -> EagleError:
        return cls(
            f"{folder}/config.json: {field} names layer {layer}, but the target has {layers} layers.",
            f"that field goes from {-shift} to {layers - 1 - shift}; "
            "load the head that was trained for this model.",
        )

    @classmethod
    def missing_tensor(cls, folder: Path, name: str, shape: Sequence[int], others: int) -> EagleError:
        more = f", nor {others} more" if others else ""
        bias = (
            ' A head that was trained without this bias says so in config.json, as "bias": false.'
            if name == "fc.bias"
            else ""
        )
        return cls(
            f"the draft head in {folder} has no tensor {name}, of shape {tuple(shape)}{more}.",
            f"the checkpoint is incomplete, or config.json is of another head.{bias}",
        )

    @classmethod
    def unexpected_tensors(cls, folder: Path, names: Sequence[str]) -> EagleError:
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return cls(
            f"the draft head in {folder} has tensors that its config.json does not account for: {shown}.",
            "without them it would compute something else than it was trained to. Correct config.json if it "
            "is of another head; a kind of head that has such weights is not supported.",
        )

    @classmethod
    def wrong_tensor_shape(
        cls, folder: Path, name: str, found: Sequence[int], expected: Sequence[int]
    ) -> EagleError:
        return cls(
            f"the draft head in {folder}: {name} has shape {tuple(found)}, not {tuple(expected)}.",
            "config.json is of another head, or the head is of another target model.",
        )

    @classmethod
    def own_lm_head(cls) -> EagleError:
        return cls(
            "an EAGLE-1 head has no lm_head of its own in any checkpoint layout, and this one has.",
            "make it with lm_head=target_model.get_output_embeddings(), as load_draft does.",
        )
