"""An EAGLE-3 network without training: what exports of EAGLE-3 are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.batch import TrainBatch
from drafters.data.vocab import draft_vocabulary
from drafters.heads.autoregressive import AutoregressiveHead
from drafters.heads.base import HeadOutput
from drafters.heads.blocks import Attend, DecoderLayer, LayerShape, RMSNorm, rope_parameters
from drafters.target.adapter import TargetHead, TargetInfo


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of 0 are the target's."""

    type: str = "eagle3"
    steps: int = 7
    num_layers: int = 1
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    draft_vocab_size: int = 0
    feature_layers: tuple[int, ...] = (0, 1, 2)
    feature_norm: bool = False
    feed_back_normed: bool = False


class Eagle3(AutoregressiveHead):
    """See the module."""

    Config = Eagle3Config

    def __init__(self, config: Eagle3Config, info: TargetInfo) -> None:
        sizes = {name: getattr(config, name) for name in ("intermediate_size", "num_heads", "num_kv_heads")}
        shape = LayerShape.of(info, **sizes)
        super().__init__(config, info, shape, config.num_layers)
        D, V, count = info.hidden_size, info.vocab_size, len(config.feature_layers)
        self.own_vocab = config.draft_vocab_size not in (0, V)
        self.vocab_size = config.draft_vocab_size or V
        self.fc = nn.Linear(count * D, D, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(D, info.rms_norm_eps) for _ in range(count * config.feature_norm))
        self.layers = nn.ModuleList(
            DecoderLayer(shape, input_norm=True, input_size=D if i else 2 * D) for i in range(config.num_layers)
        )
        self.layers[0].add_module("hidden_norm", RMSNorm(D, info.rms_norm_eps))
        self.norm = RMSNorm(D, info.rms_norm_eps)
        self.lm_head = nn.Linear(D, self.vocab_size, bias=False)
        if self.own_vocab:
            self.register_buffer("d2t", torch.arange(self.vocab_size))
            self.register_buffer("t2d", torch.arange(V) < self.vocab_size)

    @property
    def feature_layers(self) -> Sequence[int]:
        layers: tuple[int, ...] = self.config.feature_layers
        return layers

    def set_vocabulary(self, counts_V: Tensor) -> None:
        if self.own_vocab:
            self.d2t, self.t2d = draft_vocabulary(counts_V, self.vocab_size)

    def fuse(self, captured: Tensor, target: TargetHead) -> Tensor:
        parts = list(captured.to(self.fc.weight.dtype).chunk(len(self.feature_layers), -1))
        parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)] if len(self.fc_norm) else parts
        fused: Tensor = self.fc(torch.cat(parts, -1))
        return fused

    def entries(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> Tensor:
        return torch.cat([target.embed(tokens).to(feature.dtype), feature], -1)

    def network(self, entries_BNI: Tensor, attend: Attend) -> Tensor:
        embedded, hidden = entries_BNI.chunk(2, -1)
        first: Any = self.layers[0]
        read = torch.cat([first.input_layernorm(embedded), first.hidden_norm(hidden)], -1)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, attend, index, None if index else read)
        return hidden

    def draft_logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def feedback(self, hidden: Tensor) -> Tensor:
        fed: Tensor = self.norm(hidden) if self.config.feed_back_normed else hidden
        return fed

    def token_map(self) -> Tensor | None:
        return self.d2t if self.own_vocab else None

    def count(self, batch: TrainBatch) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        raise NotImplementedError

    def export_spec(self) -> dict[str, Any]:
        return {
            "kind": "eagle3",
            "num_layers": self.config.num_layers,
            "intermediate_size": self.shape.intermediate_size,
            "num_heads": self.shape.num_heads,
            "num_kv_heads": self.shape.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "rms_norm_eps": self.shape.rms_norm_eps,
            "rope_parameters": rope_parameters(self.info),
            "feature_layers": tuple(self.feature_layers),
            "draft_vocab_size": self.vocab_size,
            "feature_norm": self.config.feature_norm,
            "norm_output": self.config.feed_back_normed,
        }
