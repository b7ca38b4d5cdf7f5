"""EAGLE-1: one decoder layer that continues the target's features (Li et al. 2024, arXiv 2401.15077), and HASS.

index t     input: e_{t+1}, the embedding of x_{t+1}, and h_t, the target's hidden state after the final norm
            output: an estimate of h_{t+1}, which the target's output matrix turns into the law of x_{t+2}

The output at t is the feature of the next entry, (e_{t+2}, estimate of h_{t+1}), and so on down the draft tree.

HASS (Zhang et al. 2024, arXiv 2408.15766) trains that too: `steps` aligned forwards, each fed the last one's outputs
without gradient, and a loss on the target's most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafters.batch import TrainBatch
from drafters.heads.autoregressive import AutoregressiveHead, check_steps, step_metrics
from drafters.heads.base import HeadOutput
from drafters.heads.blocks import Attend, DecoderLayer, LayerShape, rope_parameters, target_dtype
from drafters.heads.teacher import Teacher
from drafters.heads.training_time_test import RolloutRows
from drafters.losses import LossKind, chunk_rows, smooth_l1, token_loss
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo

NOISE_LENGTH = 512


@dataclass(frozen=True)
class EagleConfig:
    """Settings of an EAGLE-1 head; sizes of 0 are the target's.

    fc_bias: serving engines drop it. noise: width of the uniform noise on the input features in training (not on
    what is to be predicted), centred on zero. noise_by_length: the width is noise * 512 / length of the document, as in
    the released trainer; otherwise it is the same for all. feature_weight, token_weight: the loss is feature_weight *
    smooth L1 to h_{t+1} + token_weight * loss against the target's law of x_{t+2} + top_k_weight * soft cross-entropy over
    its top_k tokens. steps: aligned forwards; HASS has 3, with top_k_weight 1. initialize: "identity" starts as "the next
    feature is nearly this one".
    """

    type: str = "eagle"
    num_layers: int = 1
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    fc_bias: bool = False
    noise: float = 0.2
    noise_by_length: bool = True
    loss: LossKind = "soft_cross_entropy"
    feature_weight: float = 1.0
    token_weight: float = 0.1
    top_k: int = 10
    top_k_weight: float = 0.0
    steps: int = 1
    initialize: Literal["random", "identity"] = "random"

    def __post_init__(self) -> None:
        check_steps(self.steps, self.num_layers)


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
        rows = RolloutRows.of(batch, self.config.steps)
        feature_BTD = self.fuse(batch.features.captured_BTF, target)
        noise = self._noise(batch)
        if noise is not None:
            feature_BTD = feature_BTD + noise.to(feature_BTD.dtype)
        entry_N, place_N, step_N = rows.trained(batch.input_ids_BT.shape[1])
        predicted_ND = self.outputs(batch, target, rows, feature_BTD, detach=True).flatten(0, 2)[entry_N]
        wanted_ND = self.fuse(batch.features.last_BTD.flatten(0, 1)[place_N], target)
        feature = smooth_l1(predicted_ND, wanted_ND)
        token = token_loss(
            self.config.loss,
            predicted_ND,
            lambda hidden: self.draft_logits(hidden, target),
            Teacher(self.config.loss, batch, target, place_N),
            rows=chunk_rows(self.info.vocab_size, predicted_ND.device),
            weight=self.config.token_weight,
            group_N=step_N,
            groups=self.config.steps,
            top_k=self.config.top_k,
            top_k_weight=self.config.top_k_weight,
        )
        total = self.config.feature_weight * feature.sum + token.total
        return HeadOutput(Ratio(total, self.count(batch)), {"feature_loss": feature.detach(), **step_metrics(token)})

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

    def prepare(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self.fc(self.entries(tokens, feature, target))
        return hidden, hidden

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
