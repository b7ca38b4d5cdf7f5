"""A drafter that the project knows nothing of: a recurrent network in one file, as a user would write it.

index t     s_0 = GRU(e_{t+1}, h_t) predicts x_{t+2};  s_j = GRU(e_{t+1+j}, s_{j-1}) predicts x_{t+2+j}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.batch import TrainBatch
from drafters.heads.base import Drafter, HeadOutput
from drafters.heads.teacher import Teacher
from drafters.losses import LossKind, token_loss
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftBudget, DraftTree


@dataclass(frozen=True)
class GruConfig:
    """steps: tokens ahead that are learned. loss: see `drafters.losses`."""

    type: str = "outside.gru"
    steps: int = 3
    loss: LossKind = "cross_entropy"


@dataclass
class GruState:
    target: TargetHead
    hidden_BD: Tensor | None = None
    root_B: Tensor | None = None


class Gru(Drafter):
    Config = GruConfig

    def __init__(self, config: GruConfig, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.cell = nn.GRUCell(info.hidden_size, info.hidden_size)
        self.output = nn.Linear(info.hidden_size, info.vocab_size)

    @property
    def feature_layers(self) -> Sequence[int]:
        return (-1,)

    def count(self, batch: TrainBatch) -> Tensor:
        return batch.drafted(1).sum().float()

    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        assert batch.features is not None
        state_ND = target.final_norm(batch.features.captured_BTF).flatten(0, 1).to(self.output.weight.dtype)
        total = torch.zeros(())
        metrics = {}
        for j, mask_BT in enumerate(batch.drafted(self.config.steps)):
            following = torch.roll(batch.input_ids_BT, -1 - j, dims=1).flatten()
            state_ND = self.cell(target.embed(following), state_ND)
            place_N = mask_BT.flatten().nonzero()[:, 0]
            teacher = Teacher(self.config.loss, batch, target, place_N + 1 + j)
            weights = [self.output.weight, self.output.bias]
            loss = token_loss(
                self.config.loss, state_ND[place_N], nn.functional.linear, teacher, rows=512, weights=weights
            )
            total = total + loss.total
            metrics[f"step{j + 1}_top1"] = loss.hits[0]
        return HeadOutput(Ratio(total, self.count(batch)), metrics)

    def start(self, target: TargetHead, rows: int, max_tokens: int) -> GruState:
        return GruState(target)

    @torch.no_grad()
    def advance(self, state: GruState, committed: Committed) -> GruState:
        last = (committed.counts_B - 1)[:, None, None].expand(-1, -1, committed.features_BPF.shape[-1])
        state.hidden_BD = state.target.final_norm(committed.features_BPF.gather(1, last)[:, 0])
        state.root_B = committed.root_B
        return state

    @torch.no_grad()
    def draft(self, state: GruState, budget: DraftBudget) -> DraftTree:
        assert state.hidden_BD is not None and state.root_B is not None
        grower = budget.start(state.root_B)
        hidden_BWD = self._step(state.root_B[:, None], state.hidden_BD[:, None], state.target)
        while (level := grower.grow(self.output(hidden_BWD))) is not None:
            parent = level.parent_BW[..., None].expand(-1, -1, hidden_BWD.shape[-1])
            hidden_BWD = self._step(level.tokens_BW, hidden_BWD.gather(1, parent), state.target)
        return grower.tree()

    def keep(self, state: GruState, rows: Tensor) -> GruState:
        if state.hidden_BD is not None and state.root_B is not None:
            state.hidden_BD, state.root_B = state.hidden_BD[rows], state.root_B[rows]
        return state

    def export_spec(self) -> dict[str, Any]:
        return {"kind": "gru"}

    def _step(self, tokens_BW: Tensor, hidden_BWD: Tensor, target: TargetHead) -> Tensor:
        embedded = target.embed(tokens_BW).to(hidden_BWD.dtype)
        stepped: Tensor = self.cell(embedded.flatten(0, 1), hidden_BWD.flatten(0, 1))
        return stepped.unflatten(0, tokens_BW.shape)
