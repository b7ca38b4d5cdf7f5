"""Reads a head folder as its engine would, but strictly: whatever is missing, left over or contradictory is an error.

Written apart from the writers, from what the engines do, so that a fault of theirs shows here. Layouts:

vllm          vLLM's own: EAGLE-1, EAGLE-3 and Medusa
speculators   the speculators library's EAGLE-3
sglang        SGLang's and SpecForge's EAGLE-1 and EAGLE-3
eagle         EAGLE's repository (SafeAILab): EAGLE-1 and EAGLE-3
medusa        Medusa's repository (FasterDecoding), version 1: medusa_lm_head.pt
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.export.files import read_json, read_weights
from drafters.export.strict import ReadHead, find_faults

MEDUSA_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def read_folder(folder: Path, layout: str, blocks: int) -> ReadHead:
    """The head in a folder of a layout.

    Args:
        folder: config.json and weights.
        layout: one of LAYOUTS.
        blocks: how many the target has.

    Raises:
        ValueError: the folder is not what an engine would load in full; the message names the layout.
    """
    config, tensors = read_json(folder / "config.json"), read_weights(folder)
    try:
        head = LAYOUTS[layout](config, tensors, blocks)
    except KeyError as error:
        raise ValueError(f"{folder} is not a head in {layout}'s layout: config.json has no {error}") from error
    except ValueError as error:
        raise ValueError(f"{folder} is not a head in {layout}'s layout: {error}") from error
    if faults := find_faults(head, layout):
        raise ValueError(f"{folder} is not a whole head in {layout}'s layout:\n  " + "\n  ".join(faults))
    return head


def find_layout(folder: Path) -> str:
    """Which layout a folder is in.

    Raises:
        ValueError: none that is known.
    """
    config, names = read_json(folder / "config.json"), read_weights(folder).keys()
    architecture = _architecture(config)
    if "speculators_model_type" in config:
        return "speculators"
    if any(MEDUSA_LINEAR.search(name) for name in names):
        return "medusa"
    if config.get("model_type") == "medusa" or "eagle_aux_hidden_state_layer_ids" in config:
        return "vllm"
    if architecture == "LlamaForCausalLMEagle" or "eagle_aux_hidden_state_layer_ids" in config.get("eagle_config", {}):
        return "sglang"
    if any(name.startswith("midlayer.") for name in names) or {"fc.bias", "embed_tokens.weight"} & names:
        return "eagle"  # SpecForge without layer ids means the same layers
    if "fc.weight" in names:
        return "vllm"
    some = ", ".join(sorted(names)[:4])
    raise ValueError(
        f"{folder} is in no layout that is known ({', '.join(LAYOUTS)}): architecture {architecture!r}, tensors such as {some}"
    )


def _vllm(config: dict[str, Any], tensors: dict[str, Tensor], blocks: int) -> ReadHead:
    architecture = _architecture(config)
    if config.get("model_type") == "medusa":
        renamed = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
        return ReadHead("medusa", config["num_hidden_layers"], config["num_heads"], config, renamed, (blocks,))
    if architecture in EAGLE3_ARCHITECTURES:
        return _eagle3(config, config, tensors, tuple(config["eagle_aux_hidden_state_layer_ids"]))
    if architecture in ("LlamaForCausalLM", "EagleLlamaForCausalLM"):
        return ReadHead("eagle", config["num_hidden_layers"], 0, config, tensors, (blocks,))
    raise ValueError(f"vLLM has no drafter of architecture {architecture!r}")


def _speculators(config: dict[str, Any], tensors: dict[str, Tensor], blocks: int) -> ReadHead:
    if "model_type" in config or config.get("speculators_model_type") != "eagle3":
        raise ValueError("in config.json speculators_model_type must be eagle3, and model_type absent")
    layer = config["transformer_layer_config"]
    top = {"norm_before_residual": True, **config}  # what the format takes where the key is absent
    return _eagle3(top, layer, tensors, tuple(config["eagle_aux_hidden_state_layer_ids"]))


def _sglang(config: dict[str, Any], tensors: dict[str, Tensor], blocks: int) -> ReadHead:
    renamed = _first_layer(tensors)
    if _architecture(config) == "LlamaForCausalLMEagle":
        return ReadHead("eagle", config["num_hidden_layers"], 0, config, renamed, (blocks,))
    if _architecture(config) == "LlamaForCausalLMEagle3":
        outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return _eagle3(config, config, renamed, tuple(layer + 1 for layer in outputs))
    raise ValueError(f"SGLang has no drafter of architecture {_architecture(config)!r}")


def _eagle(config: dict[str, Any], tensors: dict[str, Tensor], blocks: int) -> ReadHead:
    # what EAGLE's code takes where the config says nothing
    silent = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "num_key_value_heads": config["num_attention_heads"]}
    config = {**silent, **config}
    if any(name.startswith("midlayer.") for name in tensors):
        return _eagle3(config, config, _first_layer(tensors), (2, blocks // 2, blocks - 3))
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    return ReadHead("eagle", 1, 0, config, kept, (blocks,))


def _medusa(config: dict[str, Any], tensors: dict[str, Tensor], blocks: int) -> ReadHead:
    """Numbers of heads and layers come from the tensors: released configs have them wrong."""
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    found = [match for match in map(MEDUSA_LINEAR.fullmatch, tensors) if match]
    if not found:
        raise ValueError("it has no tensors such as 0.0.linear.weight")
    heads = 1 + max(int(match[1]) for match in found)
    layers = 1 + max(int(match[2]) for match in found)
    renamed = {_medusa_name(name, layers): tensor for name, tensor in tensors.items()}
    matrix = renamed.get("lm_heads.0.weight")
    if matrix is None:
        raise ValueError(f"missing: 0.{layers}.weight, the output matrix of the first head")
    sizes = {"vocab_size": matrix.shape[0], "hidden_size": matrix.shape[1]}
    return ReadHead("medusa", layers, heads, {**config, **sizes, "medusa_fc_bias": True}, renamed, (blocks,))


def _medusa_name(name: str, layers: int) -> str:
    """0.0.linear.bias -> blocks.0.layers.0.bias; with one layer, 0.1.weight -> lm_heads.0.weight."""
    linear = MEDUSA_LINEAR.fullmatch(name)
    if linear:
        return f"blocks.{linear[1]}.layers.{linear[2]}.{linear[3]}"
    matrix = re.fullmatch(rf"(\d+)\.{layers}\.weight", name)
    return f"lm_heads.{matrix[1]}.weight" if matrix else name


LAYOUTS: dict[str, Callable[[dict[str, Any], dict[str, Tensor], int], ReadHead]] = {
    "vllm": _vllm,
    "speculators": _speculators,
    "sglang": _sglang,
    "eagle": _eagle,
    "medusa": _medusa,
}


def _first_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()}


def _eagle3(
    top: dict[str, Any], layer: dict[str, Any], tensors: dict[str, Tensor], streams: tuple[int, ...]
) -> ReadHead:
    flags = ("norm_before_residual", "norm_before_fc", "target_hidden_size")
    layer = {**layer, "draft_vocab_size": top.get("draft_vocab_size", layer["vocab_size"])}
    layer |= {name: top[name] for name in flags if name in top}
    variants = {"fc_norm": bool(top.get("fc_norm")), "norm_output": bool(top.get("norm_output"))}
    return ReadHead("eagle3", layer["num_hidden_layers"], 0, layer, tensors, streams, **variants)


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or ["none"])[0])
