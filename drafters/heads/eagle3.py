"""EAGLE-3: a decoder layer on features of three target layers, trained on its own rollouts (Li et al. 2025, arXiv 2503.01840).

index t     step 0    e_{t+1} and g_t, the fused features of the target at t        -> a_t, whose law is that of x_{t+2}
            step s    e_{t+1+s} and the step before's a_t                           -> a_t, whose law is that of x_{t+2+s}

Step s of row t is what drafting computes at depth s + 1 after the prefix 0 .. t, with the text's tokens as the draft.
EAGLE-3.1 norms each of the target's features before they are fused (`feature_norm`), and feeds the normed output back
(`feed_back_normed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.batch import TrainBatch
from drafters.data.vocab import draft_vocabulary
from drafters.heads.autoregressive import AutoregressiveHead, check_steps, step_metrics
from drafters.heads.base import HeadOutput
from drafters.heads.blocks import Attend, DecoderLayer, LayerShape, RMSNorm, rope_parameters
from drafters.heads.teacher import Teacher
from drafters.heads.training_time_test import RolloutRows
from drafters.losses import LossKind, chunk_rows, token_loss
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo


@dataclass(frozen=True)
class Eagle3Config:
    """Settings of an EAGLE-3 head; sizes of 0 are the target's.

    steps: of the training-time test; as deep as the head will draft. step_decay: step s weighs step_decay^s.
    draft_vocab_size: the most frequent tokens of the training data's answers that can be drafted. feature_layers: of the
    target, ascending; () = three, chosen by its depth, see `fused_layers`. initialize: "target" starts with the target's
    last block, final norm, rows of its output matrix, and the last of the features passed through.
    """

    type: str = "eagle3"
    steps: int = 7
    step_decay: float = 0.8
    loss: LossKind = "soft_cross_entropy"
    draft_vocab_size: int = 0
    feature_layers: tuple[int, ...] = ()
    feature_norm: bool = False
    feed_back_normed: bool = False
    num_layers: int = 1
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    initialize: Literal["random", "target"] = "random"

    def __post_init__(self) -> None:
        check_steps(self.steps, self.num_layers)


class FusingLayer(DecoderLayer):
    """The first layer: its attention reads the normed embedding beside the normed feature; the feature is its residual."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, input_norm=True, input_size=2 * shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def read(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Embedding first, feature second; [..., D] twice -> [..., 2D]."""
        assert self.input_layernorm is not None
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)


class Eagle3(AutoregressiveHead):
    """See the module. Tensor names are those of vLLM's EAGLE-3.

    Buffers, with a draft vocabulary of its own: `d2t` [U], the target's id of each draft id; `t2d` [V], whether an id of the
    target can be drafted.
    """

    Config = Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, info: TargetInfo) -> None:
        shape = LayerShape.of(
            info,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )
        super().__init__(config, info, shape, config.num_layers)
        D, V = info.hidden_size, info.vocab_size
        self._feature_layers = fused_layers(config.feature_layers, info)
        count = len(self._feature_layers)
        self.vocab_size = config.draft_vocab_size or V
        if not 1 <= self.vocab_size <= V:
            raise ValueError(
                f"drafter.draft_vocab_size is {config.draft_vocab_size}; the target has {V} tokens, so expected 0 (all) to {V}"
            )
        self.own_vocab = self.vocab_size < V
        self.fc = nn.Linear(count * D, D, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(D, info.rms_norm_eps) for _ in range(count * config.feature_norm))
        deeper = (DecoderLayer(shape, input_norm=True) for _ in range(config.num_layers - 1))
        self.layers = nn.ModuleList([FusingLayer(shape), *deeper])
        self.norm = RMSNorm(D, info.rms_norm_eps)
        self.lm_head = nn.Linear(D, self.vocab_size, bias=False)
        if self.own_vocab:
            self.register_buffer("d2t", torch.arange(self.vocab_size))
            self.register_buffer("t2d", torch.arange(V) < self.vocab_size)

    @property
    def feature_layers(self) -> Sequence[int]:
        return self._feature_layers

    def set_vocabulary(self, counts_V: Tensor) -> None:
        if self.own_vocab:
            d2t, t2d = draft_vocabulary(counts_V.cpu(), self.vocab_size)
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)

    def init_from(self, target: TargetHead) -> None:
        if self.config.initialize == "random":
            return
        D = self.info.hidden_size
        with torch.no_grad():
            ids = self.d2t.cpu() if self.own_vocab else torch.arange(self.vocab_size)
            self.lm_head.weight.copy_(target.unembed_rows(ids))
            # A vector of ones has a root mean square of one: an RMS norm returns its weights.
            ones = torch.ones(D, device=self.norm.weight.device, dtype=getattr(torch, target.info.dtype))
            self.norm.weight.copy_(target.final_norm(ones))
            self.fc.weight *= 0.1
            self.fc.weight[:, -D:].copy_(torch.eye(D))
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, DecoderLayer)
                layer.copy_block(target.block_weights(index - len(self.layers)))
            self._fusing.hidden_norm.weight.copy_(target.block_weights(-len(self.layers))["input_layernorm.weight"])

    def count(self, batch: TrainBatch) -> Tensor:
        return batch.drafted(1).sum().float()

    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        assert batch.features is not None
        rows = RolloutRows.of(batch, self.config.steps)
        entry_N, place_N, step_N = rows.trained(batch.input_ids_BT.shape[1])
        outputs_SBRD = self.outputs(batch, target, rows, self.fuse(batch.features.captured_BTF, target))
        loss = token_loss(
            self.config.loss,
            self.norm(outputs_SBRD.flatten(0, 2)[entry_N]),
            F.linear,
            Teacher(self.config.loss, batch, target, place_N, self.token_map()),
            rows=chunk_rows(self.vocab_size, entry_N.device),
            weights=[self.lm_head.weight],
            row_weight_N=self.config.step_decay**step_N,
            group_N=step_N,
            groups=self.config.steps,
        )
        return HeadOutput(Ratio(loss.total, self.count(batch)), step_metrics(loss))

    def fuse(self, captured: Tensor, target: TargetHead) -> Tensor:
        captured = captured.to(self.fc.weight.dtype)
        if self.config.feature_norm:
            parts = captured.chunk(len(self._feature_layers), dim=-1)
            captured = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(captured)
        return fused

    def entries(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> Tensor:
        return torch.cat([target.embed(tokens).to(feature.dtype), feature], dim=-1)

    def prepare(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> tuple[Tensor, Tensor]:
        return self._fusing.read(target.embed(tokens).to(feature.dtype), feature), feature

    def network(self, entries_BNI: Tensor, attend: Attend) -> Tensor:
        embedded, hidden = entries_BNI.chunk(2, dim=-1)
        read = self._fusing.read(embedded, hidden)
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
            "feature_layers": tuple(self._feature_layers),
            "draft_vocab_size": self.vocab_size,
            "feature_norm": self.config.feature_norm,
            "norm_output": self.config.feed_back_normed,
        }

    @property
    def _fusing(self) -> FusingLayer:
        layer = self.layers[0]
        assert isinstance(layer, FusingLayer)
        return layer


def fused_layers(chosen: Sequence[int], info: TargetInfo) -> tuple[int, ...]:
    """The target's layers whose features are fused, counted from 0.

    By default the outputs of blocks 1, L/2 - 1 and L - 4, as in the released heads; with fewer than seven blocks these fall
    together, and an early, a middle and a late one are taken.

    Raises:
        ValueError: no such layer, one twice, not ascending, or a target of fewer than three blocks and none chosen.
    """
    L = info.num_layers
    if chosen:
        layers = tuple(info.layer(index) for index in chosen)
        if any(a >= b for a, b in itertools.pairwise(layers)):
            raise ValueError(
                f"drafter.feature_layers is {list(chosen)}, which are blocks {list(layers)} of the target's {L}; "
                "expected ascending and without duplicates"
            )
        return layers
    if L < 3:
        raise ValueError(f"the target has {L} blocks, too few to take three features from; set drafter.feature_layers")
    if L >= 7:
        return (1, L // 2 - 1, L - 4)
    return (0, 1, 2) if L == 3 else (0, L // 2 - 1, L - 2)
