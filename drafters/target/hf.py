"""A transformers causal LM as a target: never patched, only observed through hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drafters.batch import TargetFeatures, TrainBatch
from drafters.recipe import TargetSection
from drafters.target.adapter import TargetInfo
from drafters.target.info import load_tokenizer, make_info, resolve_folder, text_config
from drafters.target.session import HFSession
from drafters.target.weights import VocabularyHead, find_parts


class HFTarget(VocabularyHead):
    """Any `AutoModelForCausalLM`; implements `drafters.target.adapter.TargetModel`."""

    def __init__(self, model: Any, info: TargetInfo) -> None:
        model.eval().requires_grad_(False)
        self.model = model
        self.decoder, self.blocks, norm = find_parts(model)
        super().__init__(
            info, text_config(model.config), model.get_input_embeddings(), norm, model.get_output_embeddings()
        )
        self._check_logits()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @contextmanager
    def captured(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collects the outputs of blocks while the body runs; keys are layer indices as given."""
        found: dict[int, Tensor] = {}

        def hook(layer: int) -> Any:
            def store(_module: nn.Module, _inputs: Any, output: Any) -> None:
                found[layer] = output[0] if isinstance(output, tuple) else output

            return store

        handles = [
            self.blocks[self.info.layer(layer)].register_forward_hook(hook(layer)) for layer in dict.fromkeys(layers)
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def features(self, batch: TrainBatch, layers: Sequence[int]) -> TargetFeatures:
        with self.captured([*layers, -1]) as hidden:
            # Positions start again at each document; transformers reads the block-diagonal mask from that.
            self.decoder(
                input_ids=batch.input_ids_BT, attention_mask=None, position_ids=batch.position_BT, use_cache=False
            )
        return TargetFeatures(join(hidden, layers, batch.input_ids_BT.device), hidden[-1].to(batch.input_ids_BT.device))

    def block_weights(self, layer: int) -> dict[str, Tensor]:
        block = self.blocks[self.info.layer(layer)]
        return {name: tensor.detach() for name, tensor in block.state_dict().items()}

    def session(self, layers: Sequence[int], rows: int, max_tokens: int, max_nodes: int) -> HFSession:
        return HFSession(self, layers, rows, max_tokens + max_nodes)

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compares logits computed from features with the stock model's own, once, on four tokens.

        Raises:
            ValueError: they differ, so the architecture does something to its logits that this does not know.
        """
        ids = torch.arange(3, 7, device=self.device)[None] % self.info.vocab_size
        with self.captured([-1]) as hidden:
            stock = self.model(input_ids=ids, use_cache=False).logits.float()
        own = self.logits(hidden[-1]).float().to(stock.device)
        if own.shape != stock.shape or not torch.allclose(own, stock, rtol=1e-3, atol=1e-3 * float(stock.abs().max())):
            raise ValueError(
                f"{self.info.architecture}: logits computed from the last block's output (shape {tuple(own.shape)}) are not the "
                f"model's own (shape {tuple(stock.shape)}); this architecture is not supported"
            )


def join(hidden: dict[int, Tensor], layers: Sequence[int], device: torch.device) -> Tensor:
    """Captured layers side by side; one layer is passed on without a copy."""
    parts = [hidden[layer].to(device) for layer in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def load_target(section: TargetSection, device: torch.device | str = "cpu") -> HFTarget:
    """Loads a target, frozen, in evaluation mode.

    Args:
        section: the recipe's target section.
        device: where it goes; with placement "split", accelerate lays the blocks over the visible GPUs instead.

    Raises:
        ValueError: no such folder or hub id, no tokenizer, or an architecture whose logits can't be recomputed.
    """
    folder, revision = resolve_folder(section)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, section.dtype),
        attn_implementation=section.attention,
        trust_remote_code=section.trust_remote_code,
        device_map="auto" if section.placement == "split" else None,
    )
    if section.placement == "replicate":
        model.to(device)
    info = make_info(section, model.config, load_tokenizer(section), folder=folder, revision=revision)
    return HFTarget(model, info)
