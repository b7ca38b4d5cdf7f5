"""What the serving formats share: their shape to the rest of this package, layer numbers, and the Llama part of a config.

Layer numbers of other tools, and ours:

ours     i = the residual stream after block i
inputs   i = what enters block i, which is what left block i - 1 (0 = the embeddings): vLLM, speculators, transformers
outputs  i = what left block i: SGLang, SpecForge
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drafters.export.spec import ExportHead, LayerSpec
from drafters.target.adapter import TargetInfo

Convention = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class Layout:
    """A head in one format: config.json and the tensors of model.safetensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: as in `--to`.
        refusal: why it can't hold a head, or "" when it can.
        lay_out: the head in the format; only of heads that it can hold. The second argument is K, tokens to draft.
        serve: a command or a piece of Python that serves the target with the folder; the third argument is K.
    """

    name: str
    refusal: Callable[[ExportHead], str]
    lay_out: Callable[[ExportHead, int], Layout]
    serve: Callable[[ExportHead, Path, int], str]


def to_ids(layers: Sequence[int], info: TargetInfo, convention: Convention) -> list[int]:
    """Our layers in another convention, e.g. 1 -> 2 in "inputs"; -1, the last block, counted out."""
    shift = 1 if convention == "inputs" else 0
    return [info.layer(layer) + shift for layer in layers]


def from_ids(ids: Sequence[int], info: TargetInfo, convention: Convention) -> tuple[int, ...]:
    """Another convention's ids as our layers.

    Raises:
        ValueError: an id that no block of the target stands behind.
    """
    shift = 1 if convention == "inputs" else 0
    layers = tuple(index - shift for index in ids)
    for index, layer in zip(ids, layers, strict=True):
        if not 0 <= layer < info.num_layers:
            means = f"counts the {convention} of blocks, {shift} to {info.num_layers - 1 + shift}"
            raise ValueError(
                f"layer id {index} is out of range: the format {means} for a target of {info.num_layers} blocks"
            )
    return layers


def eagle_layers(info: TargetInfo) -> tuple[int, ...]:
    """The three layers that EAGLE-3's own code reads, whatever a config says: the inputs of blocks 2, L // 2 and L - 3."""
    blocks = info.num_layers
    return (1, blocks // 2 - 1, blocks - 4)


def llama_config(spec: LayerSpec, info: TargetInfo, dtype: torch.dtype) -> dict[str, Any]:
    """A Llama config of the head's layers.

    The positions are the target's: a server stops drafting past the head's own limit. No key `bias`: in EAGLE's configs it
    means that of fc, and vLLM would give the attention uninitialized biases.
    """
    eos = list(info.eos_token_ids)
    return {
        "model_type": "llama",
        "vocab_size": info.vocab_size,
        "hidden_size": info.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": info.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        **rope_config(spec.rope_parameters),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def rope_config(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in the old schema (rope_theta, rope_scaling) and in the new one (rope_parameters)."""
    rest = {key: value for key, value in parameters.items() if key != "rope_theta"}
    scaling = None if parameters["rope_type"] == "default" else rest
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling, "rope_parameters": dict(parameters)}
