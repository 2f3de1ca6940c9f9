"""What can be wrong with the options of a command: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piecewise_graph.errors import PiecewiseError

_MODEL = "pass the folder of a causal LM with its tokenizer (config.json and safetensors), or its hub id."


class CommandError(PiecewiseError, ValueError):
    """Options that no command can run with."""

    @classmethod
    def no_model_folder(cls, path: str) -> CommandError:
        what = "there is no config.json in it" if Path(path).is_dir() else "there is no such folder"
        return cls(f"the model {path!r} cannot be used: {what}.", _MODEL)

    @classmethod
    def no_model(cls, path: str, error: Exception) -> CommandError:
        where = "" if Path(path).is_dir() else "there is no such folder, and as a hub id: "
        return cls(f"the model {path!r} cannot be loaded: {where}{_first_line(error)}", _MODEL)

    @classmethod
    def incomplete_model(cls, path: str, missing: Sequence[str]) -> CommandError:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return cls(
            f"the model {path!r} cannot be used: its files do not hold {shown}, which would be random.",
            "download it again, or correct config.json if that is of another model.",
        )

    @classmethod
    def no_default_model(cls) -> CommandError:
        return cls(
            "the repository's model (benchmarks/models/byte-llama) is not here.",
            "name one: --model DIR_OR_HUB_ID.",
        )

    @classmethod
    def no_dtype(cls, name: str) -> CommandError:
        return cls(
            f"dtype {name!r} cannot be used: torch has no such floating-point type.",
            "pass float32 or bfloat16.",
        )

    @classmethod
    def no_device(cls, name: str, error: Exception) -> CommandError:
        return cls(
            f"device {name!r} cannot be used: {_first_line(error)}",
            "pass cpu, or cuda where there is a GPU.",
        )

    @classmethod
    def few_gpus(cls, processes: int, gpus: int) -> CommandError:
        return cls(
            f"--tp {processes} needs {processes} GPUs, and torch finds {gpus} on this host.",
            f"pass --tp {gpus}, or look at CUDA_VISIBLE_DEVICES."
            if gpus
            else "pass --device cpu, or leave --device out.",
        )

    @classmethod
    def one_gpu(cls, device: str, processes: int) -> CommandError:
        return cls(
            f"--device {device} names one GPU, and --tp {processes} needs one for each process.",
            "pass --device cuda; CUDA_VISIBLE_DEVICES chooses which GPUs those are.",
        )

    @classmethod
    def hidden_accelerator(cls, device: str, processes: int, accelerator: str) -> CommandError:
        return cls(
            f"--tp {processes} cannot run on {device} here: transformers shards models on {accelerator}.",
            f"pass --device {accelerator}, or hide the accelerators (CUDA_VISIBLE_DEVICES=).",
        )

    @classmethod
    def other_count(cls, asked: int, found: int) -> CommandError:
        return cls(
            f"--tp {asked} cannot run in {found} processes, which is how many were started.",
            f"pass --tp {found}; or leave torchrun out, and the command starts its processes itself.",
        )

    @classmethod
    def no_group(cls, error: Exception) -> CommandError:
        return cls(
            f"LOCAL_RANK is set, so this is one of several processes, but they form no group: "
            f"{_first_line(error)}",
            "start all of them by torchrun; or unset LOCAL_RANK, and the command starts them itself.",
        )

    @classmethod
    def no_folder(cls, option: str, file: Path) -> CommandError:
        return cls(
            f"{option} {file} cannot be written: its folder does not exist.", "make it, or name another file."
        )

    @classmethod
    def unwritable(cls, option: str, file: Path, error: str) -> CommandError:
        return cls(f"{option} {file} cannot be written: {error}.", "name a file that this user may write.")

    @classmethod
    def no_tokenizer(cls, file: str) -> CommandError:
        return cls(
            f"--prompts {file} cannot be encoded: a model with random weights has no tokenizer.",
            "pass --model DIR, or --prompts random.",
        )

    @classmethod
    def no_transformers(cls) -> CommandError:
        what = "This command loads models by transformers, which is not installed."
        return cls(what, "pip install transformers.")

    @classmethod
    def no_server(cls, missing: Sequence[str]) -> CommandError:
        what = f"`serve` runs transformers' server, which needs {' and '.join(missing)}: not installed."
        return cls(what, 'pip install "transformers[serving]".')

    @classmethod
    def no_hook(cls, name: str, version: str) -> CommandError:
        return cls(
            f"transformers {version} has no {name}, through which `serve` gives its server our attention.",
            'install one that has it: pip install "transformers[serving]==5.23.0"; or call generate_batch of '
            "pg.continuous_batching(model), which needs no server.",
        )

    @classmethod
    def unused_hook(cls, name: str, version: str) -> CommandError:
        return cls(
            f"the server of transformers {version} does not load its model with {name}.",
            cls.no_hook(name, version).remedy,
        )


def _first_line(error: Exception) -> str:
    """The first line, or all if that line only announces the others."""
    first, *_ = text = str(error).split("\n")
    return " ".join(" ".join(text).split()) if first.rstrip().endswith(":") else first
