"""The layout of EAGLE's own repository (SafeAILab): what its released checkpoints look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafters.export.layout import Format, Layout, eagle_layers, llama_config
from drafters.export.sglang import midlayer, not_plain
from drafters.export.spec import Eagle3Spec, EagleSpec, ExportHead, LayerSpec

SCALINGS = ("linear", "dynamic")


def refusal(head: ExportHead) -> str:
    spec = head.spec
    if not isinstance(spec, LayerSpec):
        return f"EAGLE's repository has no head of kind {spec.kind!r}"
    rope = spec.rope_parameters["rope_type"]
    if rope not in ("default", *SCALINGS):
        return f"EAGLE's code knows linear and dynamic rotary scaling, the head has {rope!r}"
    if isinstance(spec, EagleSpec):
        return "" if spec.num_layers == 1 else f"EAGLE's code has one layer, the head {spec.num_layers}"
    assert isinstance(spec, Eagle3Spec)
    if plain := not_plain(spec):
        return f"EAGLE's code {plain}"
    layers, fixed = tuple(head.info.layer(layer) for layer in spec.feature_layers), eagle_layers(head.info)
    return (
        "" if layers == fixed else f"EAGLE's code always reads the outputs of blocks {fixed}, the head reads {layers}"
    )


def lay_out(head: ExportHead, draft_length: int) -> Layout:
    spec = head.spec
    assert isinstance(spec, LayerSpec)
    config = {"architectures": ["LlamaForCausalLM"], **llama_config(spec, head.info, head.dtype)}
    config["rope_scaling"] = _scaling(spec.rope_parameters)
    tensors = dict(head.tensors)
    if isinstance(spec, EagleSpec):
        if not spec.fc_bias:  # a config without this key means that fc has one
            config["bias"] = False
        rows = head.target.embed(torch.arange(head.info.vocab_size))
        tensors["embed_tokens.weight"] = rows.detach().to("cpu", head.dtype).contiguous()
        return Layout(config, tensors)
    assert isinstance(spec, Eagle3Spec)
    config["draft_vocab_size"] = spec.draft_vocab_size
    return Layout(config, {midlayer(name): tensor for name, tensor in tensors.items()})


def _scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """Exactly the two keys that EAGLE's config takes."""
    return {"type": rope["rope_type"], "factor": float(rope["factor"])} if rope["rope_type"] in SCALINGS else None


def serve(head: ExportHead, folder: Path, draft_length: int) -> str:
    use_eagle3 = ", use_eagle3=True" if isinstance(head.spec, Eagle3Spec) else ", use_eagle3=False"
    return (
        f'EaModel.from_pretrained(base_model_path="{head.info.path}", ea_model_path="{folder}", '
        f"depth={draft_length}{use_eagle3})"
    )


FORMAT = Format("eagle", refusal, lay_out, serve)
