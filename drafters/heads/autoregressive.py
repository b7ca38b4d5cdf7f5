"""Drafting with a head that continues features: one entry (token, feature) in, the next feature out.

committed   (x_1, f_0) (x_2, f_1) .. (root, f_n)      true features of the target
drafted     (child, own output at its parent) ..      the head's own outputs, thrown away each round
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.batch import TrainBatch
from drafters.heads.base import Drafter
from drafters.heads.blocks import Attend, Attention, DecoderLayer, LayerShape, RoPE, document_mask
from drafters.heads.rollout import Rollout
from drafters.heads.training_time_test import RolloutRows, rollout
from drafters.losses import TokenLoss
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftBudget, DraftTree


@dataclass
class AutoregressiveState:
    """Caches of the layers, the newest output and the root of each row; None before the first `advance`."""

    target: TargetHead
    rollout: Rollout
    hidden_BD: Tensor | None = None
    root_B: Tensor | None = None


class AutoregressiveHead(Drafter):
    """A head with layers, rotary positions and a cache; subclasses say what an entry is and what is read off an output."""

    fc: nn.Linear
    layers: nn.ModuleList

    def __init__(self, config: Any, info: TargetInfo, shape: LayerShape, num_layers: int) -> None:
        super().__init__(config, info)
        self.shape = shape
        self.num_layers = num_layers
        self.rope = RoPE(info)

    @abstractmethod
    def fuse(self, captured: Tensor, target: TargetHead) -> Tensor:
        """The feature of an entry from what the target captured; [..., F] -> [..., D]."""

    @abstractmethod
    def entries(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> Tensor:
        """Inputs of the network; tokens [...] and features [..., D] -> [..., I]."""

    @abstractmethod
    def network(self, entries_BNI: Tensor, attend: Attend) -> Tensor:
        """The layers, B x N x I -> B x N x D."""

    @abstractmethod
    def draft_logits(self, hidden: Tensor, target: TargetHead) -> Tensor:
        """Logits over the draft vocabulary; [..., D] -> [..., U]."""

    @property
    def attention(self) -> Attention:
        """Of the first layer."""
        return self._first.self_attn

    @property
    def _first(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    @abstractmethod
    def prepare(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> tuple[Tensor, Tensor]:
        """See `RolloutHead`."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """See `RolloutHead`."""
        return self._first.finish(residual + attended)

    def outputs(
        self, batch: TrainBatch, target: TargetHead, rows: RolloutRows, feature_BTD: Tensor, *, detach: bool = False
    ) -> Tensor:
        """Outputs of every step at the rows, S x B x R x D; see `rollout`. A head of several layers takes one step only."""
        if self.num_layers == 1:
            return rollout(self, batch, target, rows, feature_BTD, detach=detach)
        # index t       x_{t+1}, the feature at t, at position t
        following_BT = torch.roll(batch.input_ids_BT, -1, dims=1)
        attend = Attend(*self.rope(batch.position_BT), document_mask(batch.document_BT))
        return rows.gather(self.network(self.entries(following_BT, feature_BTD, target), attend))[None]

    def feedback(self, hidden: Tensor) -> Tensor:
        """The feature of the next entry, from the output at its parent."""
        return hidden

    def token_map(self) -> Tensor | None:
        """The target's id of each draft id, where the head has a vocabulary of its own."""
        return None

    def start(self, target: TargetHead, rows: int, max_tokens: int) -> AutoregressiveState:
        rollout = Rollout(
            self.network,
            self.rope,
            self.shape,
            layers=self.num_layers,
            rows=rows,
            capacity=max_tokens,
            like=self.fc.weight,
        )
        return AutoregressiveState(target, rollout)

    @torch.no_grad()
    def advance(self, state: AutoregressiveState, committed: Committed) -> AutoregressiveState:
        feature = self.fuse(committed.features_BPF, state.target)
        entries = self.entries(committed.following_BP(), feature, state.target)
        hidden_BPD = state.rollout.extend(entries, committed.counts_B)
        last = (committed.counts_B - 1)[:, None, None].expand(-1, -1, hidden_BPD.shape[-1])
        state.hidden_BD = hidden_BPD.gather(1, last)[:, 0]
        state.root_B = committed.root_B
        return state

    @torch.no_grad()
    def draft(self, state: AutoregressiveState, budget: DraftBudget) -> DraftTree:
        assert state.hidden_BD is not None and state.root_B is not None
        token_map = self.token_map()
        grower = budget.start(state.root_B)
        state.rollout.open_tree()
        hidden_BWD = state.hidden_BD[:, None]
        level = grower.grow(self.draft_logits(hidden_BWD, state.target), token_map)
        while level is not None:
            parent = level.parent_BW[..., None].expand(-1, -1, hidden_BWD.shape[-1])
            feature = self.feedback(hidden_BWD.gather(1, parent))
            hidden_BWD = state.rollout.level(self.entries(level.tokens_BW, feature, state.target), level.parent_BW)
            level = grower.grow(self.draft_logits(hidden_BWD, state.target), token_map)
        return grower.tree()

    def keep(self, state: AutoregressiveState, rows: Tensor) -> AutoregressiveState:
        state.rollout.keep(rows)
        if state.hidden_BD is not None and state.root_B is not None:
            state.hidden_BD, state.root_B = state.hidden_BD[rows], state.root_B[rows]
        return state


def step_metrics(loss: TokenLoss) -> dict[str, Ratio]:
    """Teacher-forced metrics of each step, from 1; a single step has no number."""
    names = [""] if len(loss.hits) == 1 else [f"step{step}_" for step in range(1, len(loss.hits) + 1)]
    top1 = {f"{name}top1": hits for name, hits in zip(names, loss.hits, strict=True)}
    return {**top1, **{f"{name}token_loss": losses for name, losses in zip(names, loss.losses, strict=True)}}


def check_steps(steps: int, num_layers: int) -> None:
    """Refuses settings that cannot be trained."""
    if steps < 1 or num_layers < 1:
        raise ValueError(f"steps {steps} and num_layers {num_layers} must be at least 1")
    if steps > 1 and num_layers > 1:
        raise ValueError(f"a head of {num_layers} layers trains with steps: 1, got {steps}")
