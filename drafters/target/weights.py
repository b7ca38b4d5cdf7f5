"""The target's vocabulary matrices and final norm: from a whole model, or alone from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.recipe import TargetSection
from drafters.target.adapter import TargetInfo
from drafters.target.info import load_tokenizer, make_info, resolve_folder, text_config

# Names that files hold where transformers' own modules are named otherwise.
FILE_NAMES = {"lm_head.weight": "embed_out.weight"}
NORM_NAMES = ("norm", "final_layer_norm", "final_layernorm", "ln_f")


class VocabularyHead:
    """Embedding, final norm and output projection of a target; a `TargetHead`."""

    def __init__(self, info: TargetInfo, config: Any, embedding: Any, norm: nn.Module, output: Any) -> None:
        self.info = info
        self._embedding = embedding
        self._norm = norm
        self._output = output
        self._softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def embed(self, ids: Tensor) -> Tensor:
        weight = self._embedding.weight
        return F.embedding(ids.to(weight.device), weight).to(ids.device)

    def final_norm(self, last_hidden: Tensor) -> Tensor:
        return self._norm(last_hidden)

    def unembed(self, normed: Tensor) -> Tensor:
        logits = self._output(normed)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def logits(self, last_hidden: Tensor) -> Tensor:
        return self.unembed(self.final_norm(last_hidden))

    def unembed_rows(self, ids: Tensor) -> Tensor:
        weight = self._output.weight
        return weight.detach()[ids.to(weight.device)].clone()

    def block_weights(self, layer: int) -> dict[str, Tensor]:
        raise ValueError(
            f"block {self.info.layer(layer)} was not loaded, only the target's vocabulary matrices were: set features.source to "
            "online, or drafter.initialize to random"
        )


def find_parts(model: Any) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The decoder of a causal LM, its blocks and its final norm, by what transformers gives every architecture.

    Raises:
        ValueError: the architecture is laid out in a way this does not know.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    count = text_config(model.config).num_hidden_layers
    blocks = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    norms = [child for name, child in decoder.named_children() if name in NORM_NAMES]
    if len(blocks) != 1 or len(norms) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected one list of {count} blocks and one final norm ({', '.join(NORM_NAMES)}) in "
            f"{type(decoder).__name__}, found {len(blocks)} and {len(norms)}; this architecture is not supported"
        )
    return decoder, blocks[0], norms[0]


def load_target_head(section: TargetSection, device: torch.device | str = "cpu") -> VocabularyHead:
    """Reads two matrices and a norm from a target's safetensors; the blocks are never loaded.

    Raises:
        ValueError: the folder lacks safetensors or one of the tensors.
    """
    folder, revision = resolve_folder(section)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code)
    _, _, norm = find_parts(model)
    parts = {"embedding": model.get_input_embeddings(), "norm": norm, "output": model.get_output_embeddings()}
    names = {id(module): name for name, module in model.named_modules()}
    files = _tensor_files(folder)
    tied = text_config(config).tie_word_embeddings
    for part, module in parts.items():
        source = names[id(parts["embedding"])] if part == "output" and tied else names[id(module)]
        module.to_empty(device=device)
        for key, parameter in module.named_parameters():
            parameter.data = _read_tensor(files, f"{source}.{key}").to(device, getattr(torch, section.dtype))
            parameter.requires_grad_(False)
    info = make_info(section, config, load_tokenizer(section), folder=folder, revision=revision)
    return VocabularyHead(info, text_config(config), **parts)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stream:
            found.update(dict.fromkeys(stream.keys(), path))
    if not found:
        raise ValueError(
            f"{folder} has no .safetensors files; cached features need them to read the target's output matrices"
        )
    return found


def _read_tensor(files: dict[str, Path], name: str) -> Tensor:
    if name not in files:
        name = FILE_NAMES.get(name, name)
    if name not in files:
        raise ValueError(f"the target's files hold no tensor {name!r} (they hold {len(files)} others)")
    with safe_open(files[name], framework="pt") as stream:
        return stream.get_tensor(name)
