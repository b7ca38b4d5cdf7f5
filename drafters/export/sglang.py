"""The format of SGLang and SpecForge. Layer ids count outputs of blocks there, one less than in vLLM."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from drafters.export.layout import Format, Layout, llama_config, to_ids
from drafters.export.spec import Eagle3Spec, EagleSpec, ExportHead, LayerSpec

FIRST_LAYER = "layers.0."
SGLANG_FIRST_LAYER = "midlayer."


def refusal(head: ExportHead) -> str:
    spec = head.spec
    if isinstance(spec, EagleSpec):
        return ""
    if not isinstance(spec, Eagle3Spec):
        return f"SGLang serves no head of kind {spec.kind!r}"
    layers = [head.info.layer(layer) for layer in spec.feature_layers]
    if plain := not_plain(spec):
        return f"SGLang's EAGLE-3 {plain}"
    if layers != sorted(set(layers)) or layers[-1] == head.info.num_layers - 1:
        return f"SGLang feeds features in ascending order and none of the last block, the head reads blocks {layers}"
    return ""


def not_plain(spec: Eagle3Spec) -> str:
    """What the head has beyond EAGLE-3 as published, or ""."""
    if spec.num_layers != 1:
        return f"has one layer, the head {spec.num_layers}"
    if len(spec.feature_layers) != 3:
        return f"reads three features, the head {len(spec.feature_layers)}"
    if spec.feature_norm or spec.norm_output:
        return "has no norm before fc or on what is fed back (EAGLE-3.1), the head has"
    return ""


def lay_out(head: ExportHead, draft_length: int) -> Layout:
    spec = head.spec
    assert isinstance(spec, LayerSpec)
    config = {"architectures": ["LlamaForCausalLMEagle"], **llama_config(spec, head.info, head.dtype)}
    tensors = dict(head.tensors)
    if isinstance(spec, EagleSpec):  # its fc always has a bias, of random values where the file has none
        tensors.setdefault("fc.bias", torch.zeros(head.info.hidden_size, dtype=head.dtype))
        return Layout(config, tensors)
    assert isinstance(spec, Eagle3Spec)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": head.info.hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": to_ids(spec.feature_layers, head.info, "outputs"),
            "use_aux_hidden_state": True,
        },
    }
    return Layout(config, {midlayer(name): tensor for name, tensor in tensors.items()})


def midlayer(name: str) -> str:
    """The name of a tensor where the first layer is called midlayer."""
    return SGLANG_FIRST_LAYER + name.removeprefix(FIRST_LAYER) if name.startswith(FIRST_LAYER) else name


def serve(head: ExportHead, folder: Path, draft_length: int) -> str:
    algorithm = "EAGLE3" if isinstance(head.spec, Eagle3Spec) else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(head.info.path)} --dtype {head.info.dtype} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(str(folder))} "
        f"--speculative-num-steps {draft_length} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {draft_length + 1}"
    )


FORMAT = Format("sglang", refusal, lay_out, serve)
