"""What can go wrong in speculative decoding: what happened, where, what to do.

Most errors are data: `name = _Message(what, remedy)` makes `Error.name(value, ...)` a constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from piecewise_graph.errors import PiecewiseError


class _Message:
    """A named constructor of an error class.

    It takes one value per field of the two texts, in the order in which they first name the fields.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        named = (field for _, field, _, _ in Formatter().parse(what + remedy) if field)
        self.fields = tuple(dict.fromkeys(named))

    def __get__(self, _: object, error: type[PiecewiseError]) -> Callable[..., Any]:
        def make(*values: object) -> PiecewiseError:
            plain = (tuple(value) if isinstance(value, tuple) else value for value in values)  # torch.Size
            found = dict(zip(self.fields, plain, strict=True))
            return error(self.what.format(**found), self.remedy.format(**found))

        return make


_OFFSETS = (
    "d2t holds offsets, not ids: target id = draft id + d2t[draft id]. Use the d2t that the head was "
    "trained with, for this target's vocabulary."
)
_OTHER_TARGET = "load the head that was trained for this model."
_OTHER_DRAFT = "use the draft with the target that it was trained for."
_RATES = (
    "pass a mean accept length from 1 to steps + 1, or one acceptance rate per position: from 0 to 1, none "
    "above the one before."
)
_SAMPLING = {  # field of Sampling -> what it takes
    "temperature": "pass a number: 0 for greedy, or more.",
    "top_k": "pass how many tokens to keep; 0 = all.",
    "top_p": "pass a probability above 0 and up to 1; 1 = all.",
    "seed": "pass a whole number from 0 to 2**62 - 1.",
}


class EagleError(PiecewiseError, ValueError):
    """A draft head, or its use, that does not fit the target model or the checkpoint."""

    bad_config = _Message("DraftConfig({field}={value!r}) cannot work.", "pass {expected}.")
    missing_fields = _Message(
        "{config} does not say what a draft head's layers, which are Llama's, take as {fields}.",
        "pass it beside the target's config, as in DraftConfig.for_target(config, kind, rms_norm_eps=1e-5).",
    )
    wrong_module = _Message(
        "{name} to be shared has a weight of shape {found}, the draft needs {expected}.",
        "pass the target's module of the same vocabulary and hidden size, or {name}=None: the draft then "
        "makes its own.",
    )
    no_mapping = _Message(
        "the draft has {draft_vocabulary} tokens and the target {vocabulary}, and no d2t maps them.",
        "pass d2t, int64, target id minus draft id of every draft token.",
    )
    wrong_d2t_tensor = _Message(
        "d2t cannot be right: {dtype} of shape {shape}, not torch.int64 of ({tokens},).", _OFFSETS
    )
    wrong_d2t_offset = _Message(
        "d2t cannot be right: it maps draft token {draft} to target token {id}, of {vocabulary}.", _OFFSETS
    )
    repeated_d2t = _Message(
        "d2t cannot be right: it maps draft tokens {one} and {other} to the same target token, {id}.",
        _OFFSETS,
    )
    no_head = _Message(
        "{target} has no embedding and lm_head, which a draft head shares.",
        "pass the whole causal LM, as AutoModelForCausalLM loads it, and not its decoder alone.",
    )
    no_checkpoint = _Message(
        "{folder} holds no draft head: {missing}.",
        "pass a local folder with config.json and model.safetensors, or shards and their index, or "
        "pytorch_model.bin; huggingface_hub.snapshot_download(name) makes one and returns it.",
    )
    unreadable = _Message(
        "{file} cannot be read: {why}.", "it is cut off or damaged; download or write it again."
    )
    bad_checkpoint_config = _Message(
        "{folder}/config.json describes no draft head: {what}.", "correct config.json, or download it again."
    )
    unsupported_head = _Message(
        "the draft head in {folder} is of a kind that is not supported: {what}.",
        "use an EAGLE, EAGLE-2 or EAGLE-3 head whose layers are Llama's or Qwen's, without quantisation.",
    )
    other_target = _Message(
        "the draft head in {folder} is for a target with {what} {head}, this one has {target}.", _OTHER_TARGET
    )
    wrong_feature_layer = _Message(
        "{folder}/config.json: {field} names layer {layer}, but the target has {layers} layers.",
        "that field goes from {first} to {last}; " + _OTHER_TARGET,
    )
    wrong_tensor_shape = _Message(
        "the draft head in {folder}: {name} has shape {found}, not {expected}.",
        "config.json is of another head, or the head is of another target model.",
    )
    own_lm_head = _Message(
        "an EAGLE-1 head has no lm_head of its own in any checkpoint layout, but this one has.",
        "make it with lm_head=target_model.get_output_embeddings(), as load_draft does.",
    )

    @classmethod
    def missing_tensor(cls, folder: Path, name: str, shape: Sequence[int], others: int) -> EagleError:
        more = f", nor {others} more" if others else ""
        bias = ' A head that was trained without this bias says so in config.json, as "bias": false.'
        return cls(
            f"the draft head in {folder} has no tensor {name}, of shape {tuple(shape)}{more}.",
            "the checkpoint is incomplete, or config.json is of another head." + bias * (name == "fc.bias"),
        )

    @classmethod
    def unexpected_tensors(cls, folder: Path, names: Sequence[str]) -> EagleError:
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return cls(
            f"the draft head in {folder} has tensors that its config.json does not account for: {shown}.",
            "without them the head would not compute what it was trained to. Correct config.json if it "
            "belongs to another head; heads with such weights are not supported.",
        )


class SpeculatorError(PiecewiseError, ValueError):
    """A request, a draft shape or a model that the loop cannot serve."""

    # Target and draft.
    no_output = _Message(
        "{target} has no lm_head, which turns hidden states to logits.",
        "pass the whole causal LM, as AutoModelForCausalLM loads it, and not its decoder alone.",
    )
    not_a_draft = _Message(
        "the draft is a {kind}, which is no draft head.",
        "pass what load_draft(folder, target) returns, or None with shapes=[0], which is plain decoding.",
    )
    no_layer = _Message(
        "the draft reads the input of target layer {index}; the target has layers 0 to {last}.", _OTHER_DRAFT
    )
    no_layers = _Message(
        "{model} has no list of its {layers} decoder layers, so features cannot be taken between them.",
        "use a draft that reads the last hidden state (EAGLE-1), or a model with a list of layers.",
    )
    no_decoder = _Message(
        "{model} has no decoder of its own (`get_decoder`), so logits cannot be computed for some rows only.",
        "use a causal LM of transformers that holds its decoder as a submodule.",
    )
    no_parts = _Message(
        "{model} cannot run as its text decoder, and then its head on some rows only: {why}.",
        "load its text model alone, as AutoModelForCausalLM does where there is one.",
    )
    resized = _Message(
        "the target has {found} tokens now; the speculator was made for {vocabulary}.",
        "make a new Speculator after the vocabulary was resized.",
    )
    wrong_attention = _Message(
        "the target's attention is {found!r}, which does not read the paged KV cache.",
        'call pg.register_attention(), and load the model with attn_implementation="piecewise".',
    )
    unlike = _Message(
        "the draft's {what} is {draft}, the target's {target}.",
        _OTHER_DRAFT + " load_draft(path, target) gives it the target's dtype and device.",
    )
    no_draft = _Message("{shape} needs a draft model and there is none.", "pass draft=, or DraftShape(0).")

    # Draft shapes.
    no_shapes = _Message(
        "no round can have this shape: shapes={shapes!r}.", "pass a list, such as [3, 0]; 0 = plain decoding."
    )
    not_a_shape = _Message(
        "no round can have this shape: {shape!r} is no shape.",
        'pass a DraftShape or a number of steps; "auto" is for shape= of generate and engine.',
    )
    not_whole = _Message("no round can have this shape: {name}={value!r}.", "pass a whole number.")
    bad_depth = _Message(
        "no round can have this shape: {steps} steps with top-k {topk}.",
        "pass steps=0 for plain decoding, else 1 or more; topk=1 for a chain, more for a tree.",
    )
    bad_draft_tokens = _Message(
        "no round can have this shape: {nodes} draft tokens of {steps} steps with top-k {topk}.",
        "pass num_draft_tokens={wanted}, the root included.",
    )
    too_deep = _Message(
        "no round can have this shape: {nodes} draft tokens of {steps} steps with top-k {topk}.",
        "draft at most {max} tokens.",
    )
    tree_on_pages = _Message(
        "no round can have this shape: {shape}, with pages of {page_size} tokens.",
        "pass page_size=1: a tree's commit reorders slots, not pages.",
    )
    too_many_branches = _Message(
        "no round can have this shape: top-k {topk} of a draft with {vocabulary} tokens.",
        "choose a smaller topk.",
    )

    # Settings of a speculator.
    too_small = _Message(
        "a speculator cannot be made with {name}={value!r}.", "pass a whole number, {minimum} or more."
    )
    bad_batch_sizes = _Message(
        "a speculator cannot be made with max_requests={max_requests!r}, batch_sizes={sizes!r}.",
        "serve at least one request at a time: a whole number, and a list of such.",
    )
    changed = _Message(
        "graphs of {module} were captured with {attribute} = {was}; it is {found} now, and a replay "
        "would go on with what it was.",
        "change it back, or call torch._dynamo.reset(), so that the next calls trace and capture again.",
    )
    too_few_positions = _Message(
        "a speculator cannot be made with max_seq_len={asked} and a target of {positions} positions.",
        "lower it; a model with more positions says so in config.max_position_embeddings.",
    )
    rope_of_the_longest = _Message(
        "a speculator cannot be made with max_seq_len={asked} and this target: beyond {limit} tokens of one "
        "request its RoPE (longrope, dynamic) is another one for all requests of a batch.",
        "pass max_seq_len={limit} or less.",
    )
    bad_rules = _Message(
        "a speculator cannot be prepared for rules={rules!r}.", "pass a list of some of {known}."
    )
    prefill_is_fixed = _Message(
        "graphs={{'prefill': {asked!r}}} of a generation; this speculator runs prompts {fixed!r}.",
        "pass it when the speculator is made: Speculator(..., graphs={{'prefill': ...}}).",
    )
    no_graphs = _Message(
        "graphs={graphs!r} names no graph mode.", "pass one for all phases, or a dict of phases and modes."
    )
    bad_graphs = _Message(
        "graphs={{{phase!r}: {mode!r}}} names no phase, or no graph mode.",
        "phases are {phases}; graph modes are {modes}; prefill is never 'full'.",
    )
    no_options = _Message(
        "the options of pg.compile are {options!r}.", "pass a dict of their names and values, or None."
    )
    fixed_option = _Message(
        "the speculator sets the option {name!r} itself.",
        "leave it out; sizes, pool and outputs follow from shapes=, batch_sizes= and graphs=.",
    )
    capture_failed = _Message(
        "the graph of phase {phase!r} cannot be captured: {why}",
        "name fewer batch_sizes= or shapes=, or pass graphs={{{phase!r}: 'piecewise'}}.",
    )

    # Synthetic acceptance.
    bad_mean = _Message("these are no acceptance rates: a mean of {mean} tokens from {steps} steps.", _RATES)
    too_few_rates = _Message("these are no acceptance rates: {rates} rates for {steps} steps.", _RATES)
    bad_rates = _Message("these are no acceptance rates: {rates}.", _RATES)

    # Requests.
    engine_open = _Message(
        "another engine of this speculator has {unfinished} unfinished requests.",
        "step it until nothing is unfinished, or close it: engine.close(), or speculator.close().",
    )
    foreign_request = _Message(
        "request {index} is none of this engine's.", "abort it where add_request was called for it."
    )
    wrong_count = _Message(
        "nothing can be generated from {values} values of {name} for {prompts} prompts.",
        "pass one for all, or one per prompt.",
    )
    no_token_ids = _Message(
        "request {index} cannot be served: its {what} is {given!r}.",
        "pass a sequence of token ids (of prompts: a list of such).",
    )
    empty_prompt = _Message(
        "request {index} cannot be served: its prompt is empty.", "pass at least one token."
    )
    unknown_token = _Message(
        "request {index} cannot be served: token {token} of its {where} is none of the target's {size}.",
        "encode text with the target's tokenizer.",
    )
    bad_max_new_tokens = _Message(
        "request {index} cannot be served: max_new_tokens is {given!r}.",
        "ask for at least one token, a whole number of them.",
    )
    no_sampling = _Message(
        "request {index} cannot be served: its sampling is {given!r}.",
        "pass Sampling(...), or None = greedy.",
    )
    request_too_long = _Message(
        "request {index} cannot be served: {prompt} prompt tokens and {new} new ones are {total}.",
        "keep to {max_seq_len}, or raise max_seq_len= of the speculator.",
    )

    @classmethod
    def bad_sampling(cls, name: str, value: object) -> SpeculatorError:
        return cls(f"nothing can be sampled like this: {name}={value!r}.", _SAMPLING[name])

    @classmethod
    def unprepared(cls, shape: object, known: Iterable[object]) -> SpeculatorError:
        return cls(
            f"{shape} was not named when the speculator was made, which has {', '.join(map(str, known))}.",
            "name it in shapes= there: buffers and graphs are made before serving.",
        )
