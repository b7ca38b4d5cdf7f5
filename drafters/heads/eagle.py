"""EAGLE-1: one decoder layer that continues the target's features (Li et al. 2024, arXiv 2401.15077).

index t     input: e_{t+1}, the embedding of x_{t+1}, and h_t, the target's hidden state after the final norm
            output: an estimate of h_{t+1}, which the target's output matrix turns into the law of x_{t+2}

The output at t is the feature of the next entry, (e_{t+2}, estimate of h_{t+1}), and so on down the draft tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafters.batch import TrainBatch
from drafters.heads.autoregressive import AutoregressiveHead
from drafters.heads.base import HeadOutput
from drafters.heads.blocks import Attend, DecoderLayer, LayerShape, document_mask, rope_parameters, target_dtype
from drafters.losses import chunk_rows, distillation, smooth_l1
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo

NOISE_LENGTH = 512


@dataclass(frozen=True)
class EagleConfig:
    """Settings of an EAGLE-1 head; sizes of 0 are the target's.

    fc_bias: serving engines drop it. noise: width of the uniform noise on the input features in training (not on
    what is to be predicted), centred on zero. noise_by_length: the width is noise * 512 / length of the document, as in
    the released trainer; otherwise it is the same for all. feature_weight, token_weight: the loss is feature_weight *
    smooth L1 to h_{t+1} + token_weight * soft cross-entropy to the target's law of x_{t+2}. initialize: "identity"
    starts as "the next feature is nearly this one".
    """

    type: str = "eagle"
    num_layers: int = 1
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    fc_bias: bool = False
    noise: float = 0.2
    noise_by_length: bool = True
    feature_weight: float = 1.0
    token_weight: float = 0.1
    initialize: Literal["random", "identity"] = "random"

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; it must be at least 1")


class Eagle(AutoregressiveHead):
    """See the module. Tensor names are those of EAGLE's checkpoints.

    The first layer has no input norm, since h is normed already, and no norm follows the last: its output stands for h.
    """

    Config = EagleConfig

    def __init__(self, config: EagleConfig, info: TargetInfo) -> None:
        shape = LayerShape.of(
            info,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )
        super().__init__(config, info, shape, config.num_layers)
        self.fc = nn.Linear(2 * info.hidden_size, info.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=i > 0) for i in range(config.num_layers))

    @property
    def feature_layers(self) -> Sequence[int]:
        return (-1,)

    def init_from(self, target: TargetHead) -> None:
        if self.config.initialize == "random":
            return
        D = self.info.hidden_size
        with torch.no_grad():
            self.fc.weight[:, :D] *= 0.1
            self.fc.weight[:, D:].copy_(torch.eye(D))
            for layer in self.layers:
                assert isinstance(layer, DecoderLayer)
                layer.self_attn.o_proj.weight *= 0.1
                layer.mlp.down_proj.weight *= 0.1

    def supervised(self, batch: TrainBatch) -> Tensor:
        """B x T: where the head is to learn.

        index t              last of prompt   A1        ..   An-2
        embedded, x_{t+1}    A1               A2        ..   An-1
        predicted, x_{t+2}   A2               A3        ..   An = end of turn
        """
        return batch.drafted(1)[0]

    def count(self, batch: TrainBatch) -> Tensor:
        return self.supervised(batch).sum().float()

    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        assert batch.features is not None
        mask = self.supervised(batch)
        predicted_ND = self.predict(batch, target)[mask]
        # index t       is compared with h_{t+1}
        wanted_ND = self.fuse(torch.roll(batch.features.last_BTD, -1, dims=1)[mask], target)
        feature = smooth_l1(predicted_ND, wanted_ND)
        token, right = distillation(
            "soft_cross_entropy",
            predicted_ND,
            lambda hidden: self.draft_logits(hidden, target),
            lambda start, stop: target.unembed(wanted_ND[start:stop]),
            rows=chunk_rows(self.info.vocab_size, predicted_ND.device),
        )
        total = self.config.feature_weight * feature.sum + self.config.token_weight * token.sum
        metrics = {"top1": right, "feature_loss": feature.detach(), "token_loss": token.detach()}
        return HeadOutput(Ratio(total, feature.count), metrics)

    def predict(self, batch: TrainBatch, target: TargetHead) -> Tensor:
        """The output at every index, B x T x D, from the target's own features."""
        assert batch.features is not None
        # index t       x_{t+1}, h_t, at position t
        following_BT = torch.roll(batch.input_ids_BT, -1, dims=1)
        feature = self.fuse(batch.features.captured_BTF, target)
        noise = self._noise(batch)
        if noise is not None:
            feature = feature + noise.to(feature.dtype)
        cos, sin = self.rope(batch.position_BT)
        attend = Attend(cos, sin, document_mask(batch.document_BT))
        return self.network(self.entries(following_BT, feature, target), attend)

    def export_spec(self) -> dict[str, Any]:
        return {
            "kind": "eagle",
            "num_layers": self.config.num_layers,
            "intermediate_size": self.shape.intermediate_size,
            "num_heads": self.shape.num_heads,
            "num_kv_heads": self.shape.num_kv_heads,
            "head_dim": self.shape.head_dim,
            "rms_norm_eps": self.shape.rms_norm_eps,
            "rope_parameters": rope_parameters(self.info),
            "fc_bias": self.config.fc_bias,
        }

    def fuse(self, captured: Tensor, target: TargetHead) -> Tensor:
        """The normed hidden state, from layer -1."""
        return target.final_norm(captured.to(target_dtype(target)))

    def entries(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> Tensor:
        """Embedding first, feature second, in the head's own type."""
        dtype = self.fc.weight.dtype
        return torch.cat([target.embed(tokens).to(dtype), feature.to(dtype)], dim=-1)

    def network(self, entries_BNI: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.fc(entries_BNI)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, attend, index)
        return hidden

    def draft_logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        return target.unembed(hidden.to(target_dtype(target)))

    def _noise(self, batch: TrainBatch) -> Tensor | None:
        """B x T x D, uniform around zero; none outside training."""
        assert batch.features is not None
        if not self.training or self.config.noise == 0:
            return None
        noise = torch.rand_like(batch.features.last_BTD) - 0.5
        width: Tensor | float = self.config.noise
        if self.config.noise_by_length:
            width = self.config.noise * NOISE_LENGTH / document_lengths(batch.document_BT)[..., None]
        return noise * width


def document_lengths(document_BT: Tensor) -> Tensor:
    """B x T: how many tokens the document of each token has; 1 in padding where the row holds none."""
    index = document_BT.clamp_min(0)
    counts = torch.zeros_like(document_BT).scatter_add(1, index, (document_BT >= 0).long())
    return counts.gather(1, index).clamp_min(1)
