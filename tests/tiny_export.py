"""Tiny saved heads to export, and writers of the layouts of others, after their documented structure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.heads.base import Drafter, save_head
from drafters.heads.eagle import EagleConfig
from drafters.heads.medusa import MedusaConfig
from drafters.recipe import TargetSection, find_drafter
from drafters.target.adapter import TargetHead
from drafters.target.weights import load_target_head

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
# name: family of tests/tiny.py and changes to it
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in tiny.FAMILIES}
TARGETS["yarn"] = ("llama", {"rope_parameters": YARN})
TARGETS["other_llama"] = ("llama", {"seed": 1})
TARGETS["narrow_llama"] = ("llama", {"hidden_size": 32})
HEADS: dict[str, Any] = {
    "eagle": EagleConfig(noise=0.125),
    "eagle_two_layers": EagleConfig(num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=48),
    "eagle_bias": EagleConfig(fc_bias=True),
    "medusa": MedusaConfig(num_heads=3, loss_decay=0.75),
    "medusa_deep": MedusaConfig(num_heads=2, num_layers=2),
    "medusa_shared": MedusaConfig(num_heads=3, shared_output=True),
}
EXTRA = {"steps": 7, "data_hash": "abc"}


def section(folder: Path) -> TargetSection:
    return TargetSection(path=str(folder), dtype="float32")


def make_target(folder: Path, name: str) -> Path:
    """The folder of a target of TARGETS, made once."""
    family, changes = TARGETS[name]
    path = folder / name
    return path if path.exists() else tiny.save_target(path, family, **changes)


def make_head(config: Any, target: TargetHead, dtype: torch.dtype = torch.float32) -> Drafter:
    """A head whose drafts depend on all of its weights."""
    torch.manual_seed(3)
    drafter: Drafter = find_drafter(config.type)(config, target.info)
    drafter.set_vocabulary(torch.arange(target.info.vocab_size) % 7)
    drafter.init_from(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter.to(dtype).eval()


def make_run(folder: Path, target: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    """A run folder with a head in it."""
    folder.mkdir(parents=True)
    served = "bfloat16" if dtype == torch.bfloat16 else "float32"
    head = load_target_head(replace(section(target), dtype=served))
    save_head(make_head(config, head, dtype), folder / "head", EXTRA)
    return folder


def edit(folder: Path, name: str, value: Any) -> None:
    """Sets a key of config.json; a value of None removes it, dots go down."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    *parents, last = name.split(".")
    inner = config
    for parent in parents:
        inner = inner[parent]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(config))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def set_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors of an exported folder; dots of a name are written as __."""
    tensors = tensors_of(folder)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], weights: str = "model.safetensors") -> Path:
    """A folder of config.json and one weights file, safetensors or a pickle by its name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights.endswith(".safetensors"):
        save_file(tensors, folder / weights)
    else:
        torch.save(tensors, folder / weights)
    return folder


def medusa_v1(drafter: Drafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """FasterDecoding's: {head}.{layer}.linear.*, {head}.{layers}.weight; a config that has the number of heads wrong."""
    layers = drafter.config.num_layers
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        parts = name.split(".")
        own = f"{parts[1]}.{parts[3]}.linear.{parts[4]}" if parts[0] == "blocks" else f"{parts[1]}.{layers}.weight"
        tensors[own] = tensor.clone()
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "somewhere"}, tensors


def eagle_v1(drafter: Drafter, target: TargetHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SafeAILab's EAGLE-1: a Llama config without rotary settings, a copy of the embedding, an old buffer."""
    info, shape = target.info, drafter.export_spec()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": info.hidden_size,
        "intermediate_size": shape["intermediate_size"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": shape["rms_norm_eps"],
        "vocab_size": info.vocab_size,
        **({} if shape["fc_bias"] else {"bias": False}),
    }
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    tensors["embed_tokens.weight"] = target.embed(torch.arange(info.vocab_size)).clone()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(info.head_dim // 2)
    return config, tensors
