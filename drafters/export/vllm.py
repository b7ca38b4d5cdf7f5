"""vLLM's own format: config.json with a method's architecture, tensors without a prefix.

vLLM leaves a tensor that a file lacks uninitialized, and drops some that it does not know, without an error, so that what is
written here has to be exact. Checked against vLLM 0.32.

Where all layers of a target have a sliding window, vLLM gives it to the head's attention too: past the window the head
drafts otherwise than it was trained to, and less of it is accepted.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch

from drafters.export.layout import Format, Layout, llama_config, to_ids
from drafters.export.spec import Eagle3Spec, EagleSpec, ExportHead, LayerSpec, MedusaSpec

# vLLM takes a head for one of these when its path holds the word, whatever its config says.
PATH_TRAPS = ("eagle-", "eagle3", "dflash", "dspark")
FEATURES_ASSUMED = 3


def refusal(head: ExportHead) -> str:
    spec = head.spec
    if isinstance(spec, EagleSpec) and spec.fc_bias:
        return "vLLM's EAGLE-1 has no bias in fc and would drop the head's"
    if isinstance(spec, Eagle3Spec):
        return unordered(spec, head)
    return ""


def unordered(spec: Eagle3Spec, head: ExportHead) -> str:
    """vLLM sorts the layer ids, so that fc must read its features in that order."""
    layers = [head.info.layer(layer) for layer in spec.feature_layers]
    if layers != sorted(set(layers)):
        return f"vLLM feeds features in ascending order of their layers, the head reads {layers}"
    return ""


def lay_out(head: ExportHead, draft_length: int) -> Layout:
    spec = head.spec
    if isinstance(spec, MedusaSpec):
        return _medusa(head, spec)
    assert isinstance(spec, LayerSpec)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **llama_config(spec, head.info, head.dtype)}
    if isinstance(spec, Eagle3Spec):
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **eagle3_fields(spec, head), **aux_count(spec)}
    return Layout(config, dict(head.tensors))


def eagle3_fields(spec: Eagle3Spec, head: ExportHead) -> dict[str, Any]:
    """Fields that vLLM and speculators share."""
    return {
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": head.info.hidden_size,
        "eagle_aux_hidden_state_layer_ids": to_ids(spec.feature_layers, head.info, "inputs"),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": spec.feature_norm,
        "norm_output": spec.norm_output,
    }


def aux_count(spec: Eagle3Spec) -> dict[str, Any]:
    """vLLM's Llama class does not count the ids; it assumes three."""
    count = len(spec.feature_layers)
    return {} if count == FEATURES_ASSUMED else {"num_aux_hidden_states": count}


def _medusa(head: ExportHead, spec: MedusaSpec) -> Layout:
    """Nothing more in the config: vLLM renames any key with "num" and "heads" or "layers" in it onto its own."""
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.info.hidden_size,
        "vocab_size": head.info.vocab_size,
        "num_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": spec.shared_output,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    tensors = dict(head.tensors)
    if spec.shared_output:  # vLLM shares no matrix of the target with Medusa
        rows = head.target.unembed_rows(torch.arange(head.info.vocab_size))
        tensors["lm_head.weight"] = rows.to("cpu", head.dtype).contiguous()
    return Layout(config, tensors)


def serve(head: ExportHead, folder: Path, draft_length: int) -> str:
    speculation = {"method": head.spec.kind, "model": str(folder), "num_speculative_tokens": draft_length}
    return (
        f"vllm serve {shlex.quote(head.info.path)} --dtype {head.info.dtype} "
        f"--speculative-config {shlex.quote(json.dumps(speculation))}"
    )


def path_trap(path: Path) -> str:
    """The part of a path that makes vLLM take a Medusa head in it for another method, or ""."""
    return next((word for word in PATH_TRAPS if word in str(path).lower()), "")


FORMAT = Format("vllm", refusal, lay_out, serve)
