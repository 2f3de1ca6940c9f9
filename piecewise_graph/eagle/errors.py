"""What can go wrong in speculative decoding: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class SpeculatorError(PiecewiseError, ValueError):
    """A request, a shape of speculation or a model that the loop cannot serve."""

    @classmethod
    def no_layer(cls, index: int, layers: int) -> SpeculatorError:
        return cls(
            f"the draft reads the input of target layer {index}; the target has layers 0 to {layers - 1}.",
            "use the draft with the target that it was trained for.",
        )

    @classmethod
    def no_layers(cls, model: str, layers: int) -> SpeculatorError:
        return cls(
            f"{model} has no list of its {layers} decoder layers, so features cannot be taken between them.",
            "use a draft that reads the last hidden state (EAGLE-1), or a model with a list of layers.",
        )

    @classmethod
    def wrong_attention(cls, found: str | None) -> SpeculatorError:
        return cls(
            f"the target's attention is {found!r}, which does not read the paged KV cache.",
            'call pg.register_attention(), and load the model with attn_implementation="piecewise".',
        )

    @classmethod
    def bad_shape(cls, what: str, remedy: str) -> SpeculatorError:
        return cls(f"no round can have this shape: {what}.", remedy)

    @classmethod
    def bad_sampling(cls, what: str, remedy: str) -> SpeculatorError:
        return cls(f"nothing can be sampled like this: {what}.", remedy)

    @classmethod
    def bad_setting(cls, what: str, remedy: str) -> SpeculatorError:
        return cls(f"no speculator can be made or prepared like this: {what}.", remedy)

    @classmethod
    def bad_graphs(
        cls, phase: str, how: object, phases: Sequence[str], ways: Sequence[str]
    ) -> SpeculatorError:
        return cls(
            f"graphs={{{phase!r}: {how!r}}} names no phase, or no way to run one.",
            f"phases are {', '.join(phases)}; ways are {', '.join(ways)}; prefill is never 'full'.",
        )

    @classmethod
    def prefill_is_fixed(cls, asked: object, fixed: str) -> SpeculatorError:
        return cls(
            f"graphs={{'prefill': {asked!r}}} of a generation; this speculator runs prompts {fixed!r}.",
            "pass it when the speculator is made: Speculator(..., graphs={'prefill': ...}).",
        )

    @classmethod
    def unprepared(cls, shape: object, known: Iterable[object]) -> SpeculatorError:
        return cls(
            f"{shape} was not named when the speculator was made, which has {', '.join(map(str, known))}.",
            "name it in shapes= there: buffers and graphs are made before serving.",
        )

    @classmethod
    def no_draft(cls, shape: object) -> SpeculatorError:
        return cls(f"{shape} needs a draft model and there is none.", "pass draft=, or DraftShape(0).")

    @classmethod
    def unlike(cls, what: str, draft: object, target: object) -> SpeculatorError:
        return cls(
            f"the draft's {what} is {draft}, the target's {target}.",
            "use the draft with the target that it was trained for; load_draft(path, target) loads it as the "
            "target's dtype, onto its device.",
        )

    @classmethod
    def capture_failed(cls, phase: str, why: str) -> SpeculatorError:
        return cls(
            f"the graph of phase {phase!r} cannot be captured: {why}",
            f"name fewer batch_sizes= or shapes=, or pass graphs={{{phase!r}: 'piecewise'}}.",
        )

    @classmethod
    def engine_open(cls, unfinished: int) -> SpeculatorError:
        return cls(
            f"another engine of this speculator has {unfinished} unfinished requests.",
            "step it until nothing is unfinished, or close it: engine.close(), or speculator.close().",
        )

    @classmethod
    def foreign_request(cls, index: int) -> SpeculatorError:
        return cls(
            f"request {index} is none of this engine's.", "abort it where add_request was called for it."
        )

    @classmethod
    def fixed_option(cls, name: str) -> SpeculatorError:
        return cls(
            f"the option {name!r} is the speculator's own.",
            "leave it out; sizes, pool and outputs follow from shapes=, batch_sizes= and graphs=.",
        )

    @classmethod
    def bad_request(cls, index: int, what: str, remedy: str) -> SpeculatorError:
        return cls(f"request {index} cannot be served: {what}.", remedy)

    @classmethod
    def bad_rates(cls, what: str) -> SpeculatorError:
        return cls(
            f"these are no acceptance rates: {what}.",
            "pass a mean accept length from 1 to steps + 1, or per position the share of rounds that accept "
            "it: from 0 to 1, none above the one before.",
        )
