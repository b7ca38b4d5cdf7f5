"""Medusa-1: K independent heads on one hidden state of a frozen target (Cai et al. 2024, arXiv 2401.10774).

index t          hidden state h_t, after the final norm; it has seen x_0 .. x_t
the target       predicts x_{t+1}, the root of the draft tree
head k = 1..K    predicts x_{t+1+k}, the tree's depth k, from h_t alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.batch import TrainBatch
from drafters.heads.base import Drafter, HeadOutput
from drafters.heads.blocks import target_dtype
from drafters.heads.teacher import Teacher
from drafters.losses import LossKind, chunk_rows, token_loss
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftBudget, DraftTree


@dataclass(frozen=True)
class MedusaConfig:
    """Settings of a Medusa-1 head.

    num_heads: K, the deepest it can draft. num_layers: residual layers of each head. loss: against the text (cross_entropy)
    or the target's law. loss_weight, loss_decay: the loss is loss_weight * sum over k of loss_decay^k * loss of head k.
    shared_output: every head uses the target's frozen output matrix in place of one of its own (V x D trainable weights a
    head).
    """

    type: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    loss: LossKind = "cross_entropy"
    loss_weight: float = 0.2
    loss_decay: float = 0.8
    shared_output: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads {self.num_heads} and num_layers {self.num_layers} must be at least 1")


class ResidualBlock(nn.Module):
    """x + silu(W x + b), `layers` times over; W starts at zero and b small, so the block starts near the identity."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        linears = [nn.Linear(size, size) for _ in range(layers)]
        for linear in linears:
            nn.init.zeros_(linear.weight)
        self.layers = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class OutputMatrix(nn.Module):
    """Weights V x D without values: they come from the target or from a file, and are NaN until then."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((vocab_size, size), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass
class MedusaState:
    """The newest hidden state and root of each row; None before the first `advance`."""

    target: TargetHead
    hidden_BD: Tensor | None = None
    root_B: Tensor | None = None


class Medusa(Drafter):
    """See the module. Tensor names are those of vLLM's Medusa."""

    Config = MedusaConfig

    def __init__(self, config: MedusaConfig, info: TargetInfo) -> None:
        super().__init__(config, info)
        heads = range(config.num_heads)
        self.blocks = nn.ModuleList(ResidualBlock(info.hidden_size, config.num_layers) for _ in heads)
        self.lm_heads = nn.ModuleList(
            OutputMatrix(info.vocab_size, info.hidden_size) for _ in heads if not config.shared_output
        )

    @property
    def feature_layers(self) -> Sequence[int]:
        return (-1,)

    @property
    def max_depth(self) -> int:
        return int(self.config.num_heads)

    def init_from(self, target: TargetHead) -> None:
        """Every head starts as the target's own output."""
        with torch.no_grad():
            ids = torch.arange(self.info.vocab_size)
            for index in range(len(self.lm_heads)):
                self._matrix(index).copy_(target.unembed_rows(ids))

    def count(self, batch: TrainBatch) -> Tensor:
        return batch.drafted(1).sum().float()

    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        assert batch.features is not None
        # index t       head k learns x_{t+1+k}, where x_{t+1} .. x_{t+1+k} are all one answer's
        masks = batch.drafted(self.config.num_heads)
        count = masks[0].sum().float()
        total = torch.zeros((), device=count.device)
        metrics = {}
        rows = chunk_rows(self.info.vocab_size, count.device)
        for k, mask in enumerate(masks, start=1):
            hidden_ND = self._hidden(batch.features.captured_BTF[mask], target)
            weights = [] if self.config.shared_output else [self._matrix(k - 1)]
            unembed = self._shared(target) if self.config.shared_output else F.linear
            # index t       the target's law of x_{t+1+k} is at t+k
            place_N = mask.flatten().nonzero()[:, 0] + k
            teacher = Teacher(self.config.loss, batch, target, place_N)
            loss = token_loss(
                self.config.loss, self.blocks[k - 1](hidden_ND), unembed, teacher, rows=rows, weights=weights
            )
            total = total + self.config.loss_weight * self.config.loss_decay**k * loss.total
            metrics[f"head{k}_top1"] = loss.hits[0]
            metrics[f"head{k}_loss"] = loss.losses[0]
        return HeadOutput(Ratio(total, count), metrics)

    def start(self, target: TargetHead, rows: int, max_tokens: int) -> MedusaState:
        return MedusaState(target)

    @torch.no_grad()
    def advance(self, state: MedusaState, committed: Committed) -> MedusaState:
        last = (committed.counts_B - 1)[:, None, None].expand(-1, -1, committed.features_BPF.shape[-1])
        state.hidden_BD = self._hidden(committed.features_BPF.gather(1, last)[:, 0], state.target)
        state.root_B = committed.root_B
        return state

    @torch.no_grad()
    def draft(self, state: MedusaState, budget: DraftBudget) -> DraftTree:
        if budget.max_depth > self.config.num_heads:
            raise ValueError(
                f"the tree is {budget.max_depth} deep, but this Medusa has {self.config.num_heads} heads and drafts no "
                "deeper; ask for a shallower tree"
            )
        assert state.hidden_BD is not None and state.root_B is not None
        grower = budget.start(state.root_B)
        width = 1
        for k in range(budget.max_depth):
            logits_BV = self._logits(k, state.hidden_BD, state.target)
            level = grower.grow(logits_BV[:, None].expand(-1, width, -1))
            if level is None:
                break
            width = level.tokens_BW.shape[1]
        return grower.tree()

    def keep(self, state: MedusaState, rows: Tensor) -> MedusaState:
        if state.hidden_BD is not None and state.root_B is not None:
            state.hidden_BD, state.root_B = state.hidden_BD[rows], state.root_B[rows]
        return state

    def export_spec(self) -> dict[str, Any]:
        return {
            "kind": "medusa",
            "num_heads": self.config.num_heads,
            "num_layers": self.config.num_layers,
            "shared_output": self.config.shared_output,
        }

    def _hidden(self, last_hidden: Tensor, target: TargetHead) -> Tensor:
        """Normed hidden states in the head's own type."""
        normed = target.final_norm(last_hidden.to(target_dtype(target)))
        return normed.to(next(self.blocks.parameters()).dtype)

    def _matrix(self, index: int) -> Tensor:
        matrix = self.lm_heads[index]
        assert isinstance(matrix, OutputMatrix)
        return matrix.weight

    def _shared(self, target: TargetHead) -> Any:
        return lambda hidden: target.unembed(hidden.to(target_dtype(target)))

    def _logits(self, index: int, hidden: Tensor, target: TargetHead) -> Tensor:
        hidden = self.blocks[index](hidden)
        logits: Tensor = self._shared(target)(hidden) if self.config.shared_output else self.lm_heads[index](hidden)
        return logits
