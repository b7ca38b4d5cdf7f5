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

from drafters.heads.base import Drafter
from drafters.heads.blocks import Attend, LayerShape, RoPE
from drafters.heads.rollout import Rollout
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
