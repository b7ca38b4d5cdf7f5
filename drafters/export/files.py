"""Reads config and weights of a head folder, as whatever kind of file they are there."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS = "model.safetensors"
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file.

    Raises:
        ValueError: no such file, not JSON, not an object.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head folder: one safetensors file, one pickle, or shards that an index names.

    Raises:
        ValueError: there are none, or a file is missing, damaged, cut short or holds anything but tensors.
    """
    if (folder / WEIGHTS).is_file():
        return _safetensors(folder / WEIGHTS)
    for index in INDICES:
        if (folder / index).is_file():
            return _shards(folder / index)
    for name in PICKLES:
        if (folder / name).is_file():
            return _pickle(folder / name)
    raise ValueError(f"{folder} has no weights; looked for {', '.join((WEIGHTS, *INDICES, *PICKLES))}")


def _shards(index: Path) -> dict[str, Tensor]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(f"{index} has no weight_map")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, placed.values()))):
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, a file outside of its folder")
        path = index.parent / name
        tensors |= _safetensors(path) if name.endswith(".safetensors") else _pickle(path)
    missing = sorted(set(placed) - set(tensors))
    if missing:
        raise ValueError(f"{index} promises tensors that its files lack: {', '.join(missing)}")
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error


def _pickle(path: Path) -> dict[str, Tensor]:
    """Tensors only: a pickle from elsewhere may hold code, which `weights_only` does not run."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged, cut short or holds more than tensors: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ValueError(f"{path} is not a dict of tensors by name")
    return {str(name): tensor.contiguous() for name, tensor in loaded.items()}
