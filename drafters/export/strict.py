"""A head as a file has it, and what is wrong with one: engines check little of this, and draft junk without a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

LAYER_TENSORS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "post_attention_layernorm",
)  # fmt: skip
LAYER_SIZES = (
    "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True)
class ReadHead:
    """A head as its file describes it.

    Attributes:
        method: "medusa", "eagle" or "eagle3".
        layers: transformer layers, or residual layers of each Medusa head.
        heads: Medusa heads, otherwise 0.
        config: the Llama part of the config (all of it for Medusa).
        tensors: by name, as vLLM names them.
        streams: which residual streams of the target it reads: i = what enters block i (L = what leaves the last). For EAGLE-1 and
            Medusa L, through the final norm.
        fc_norm, norm_output: of EAGLE-3.1.
    """

    method: str
    layers: int
    heads: int
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    streams: tuple[int, ...]
    fc_norm: bool = False
    norm_output: bool = False


def find_faults(head: ReadHead, layout: str) -> list[str]:
    """One line for each tensor that is missing or left over, and each setting that an engine would misread."""
    return [*_name_faults(head), *_config_faults(head, layout)]


def _name_faults(head: ReadHead) -> list[str]:
    wanted, allowed = _wanted(head)
    missing = [f"missing: {name}" for name in sorted(wanted) if name not in head.tensors]
    extra = [f"left over: {name}" for name in sorted(head.tensors) if name not in wanted | allowed]
    return missing + extra


def _wanted(head: ReadHead) -> tuple[set[str], set[str]]:
    """Tensors that must be there, and tensors that may be."""
    if head.method == "medusa":
        own = {f"lm_heads.{i}.weight" for i in range(head.heads)}
        linear = {f"blocks.{i}.layers.{j}." for i in range(head.heads) for j in range(head.layers)}
        names = {f"{prefix}weight" for prefix in linear}
        if head.config.get("medusa_fc_bias"):
            names |= {f"{prefix}bias" for prefix in linear}
        return names | ({"lm_head.weight"} if head.config.get("original_lm_head") else own), set()
    names = {f"layers.{i}.{part}.weight" for i in range(head.layers) for part in LAYER_TENSORS} | {"fc.weight"}
    names |= {f"layers.{i}.input_layernorm.weight" for i in range(head.method == "eagle", head.layers)}
    if head.method == "eagle":
        return names, {"fc.bias", "embed_tokens.weight"}
    names |= {"norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight"}
    if head.fc_norm:
        names |= {f"fc_norm.{i}.weight" for i in range(len(head.streams))}
    if head.config["draft_vocab_size"] == head.config["vocab_size"]:
        return names, {"embed_tokens.weight"}  # vLLM refuses a d2t here
    return names | {"d2t"}, {"t2d", "embed_tokens.weight"}


def _config_faults(head: ReadHead, layout: str) -> list[str]:
    """Settings that an engine takes without a word and drafts junk with, and those that heads of this package can't have."""
    if head.method == "medusa":
        biases = any(name.endswith(".bias") for name in head.tensors)
        dropped = biases and not head.config.get("medusa_fc_bias")
        return ["medusa_fc_bias is not true, and the biases would be dropped"] if dropped else []
    absent = [f"config.json has no {key!r}" for key in LAYER_SIZES if key not in head.config]
    if absent:
        return absent
    faults = _eagle1_faults(head, layout) if head.method == "eagle" else _eagle3_faults(head, layout)
    if head.config.get("attention_bias") or (layout != "eagle" and head.config.get("bias")):
        faults.append("config says bias or attention_bias, and the attention has none in the file")
    return faults


def _eagle1_faults(head: ReadHead, layout: str) -> list[str]:
    has_bias, says_bias = "fc.bias" in head.tensors, head.config.get("bias", True)
    if layout == "vllm" and has_bias:
        return ["fc.bias is in the file, and vLLM drops it"]
    if layout == "sglang" and not has_bias:
        return ["fc.bias is not in the file, and SGLang would draw one at random"]
    if layout == "eagle" and has_bias != says_bias:
        return [f"fc.bias in the file: {has_bias}; bias in the config: {says_bias}"]
    return []


def _eagle3_faults(head: ReadHead, layout: str) -> list[str]:
    config, streams, faults = head.config, list(head.streams), []
    for flag in ("norm_before_residual", "norm_before_fc"):
        if config.get(flag):
            faults.append(f"{flag} is true, which no head here has")
    if config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        faults.append(
            "target_hidden_size is not hidden_size: a head of another width than its target's is not supported"
        )
    counted = config.get("num_aux_hidden_states", 3)
    if layout in ("vllm", "speculators") and counted != len(streams):
        faults.append(f"{len(streams)} layer ids, but num_aux_hidden_states is {counted}")
    if streams != sorted(set(streams)):
        faults.append(f"layer ids {streams} are not ascending; the engine sorts them")
    return faults
