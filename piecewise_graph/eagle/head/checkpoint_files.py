"""Read config.json and the tensors of a local checkpoint folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import EagleError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        EagleError: the file is missing or holds no JSON object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EagleError.no_checkpoint(file.parent, f"there is no {file.name}") from None
    except (OSError, ValueError) as error:
        raise EagleError.unreadable(file, error) from error
    if not isinstance(found, dict):
        raise EagleError.unreadable(file, "it is not a JSON object")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the CPU, from safetensors or else from pytorch_model.bin.

    Raises:
        EagleError: a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_bin(file)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    for index in (folder / "model.safetensors.index.json", folder / "pytorch_model.bin.index.json"):
        if index.exists():
            return _shards(index)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model.bin"))
    if not files:
        raise EagleError.no_checkpoint(folder, "there are no weights in it")
    return files


def _shards(index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise EagleError.unreadable(index, "it has no weight_map")
    files = [index.parent / name for name in sorted(set(shards.values()))]
    for file in files:
        if not file.exists():
            raise EagleError.no_checkpoint(index.parent, f"{index.name} lists {file.name}, which is missing")
    return files


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise EagleError.unreadable(file, error) from error


def _read_bin(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise EagleError.unreadable(file, str(error).split("\n", 1)[0].rstrip(".")) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise EagleError.unreadable(file, "it is not a dictionary of tensors")
    return found
