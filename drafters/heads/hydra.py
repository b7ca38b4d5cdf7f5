"""Hydra: heads in sequence, each of which reads what was drafted before it (Ankner et al. 2024, arXiv 2402.05109).

index t          hidden state h_t, after the final norm; it has seen x_0 .. x_t
the target       predicts x_{t+1}, the root of the draft tree
head k = 1..K    predicts x_{t+1+k}, the tree's depth k, from h_t and the embeddings e_{t+1} .. e_{t+k}

Hydra++ has deeper heads (`num_layers: 4`), learns the target's law (`loss: soft_cross_entropy`) and reads h_t through a decoder
layer over h_0 .. h_t (`prefix_attention`).
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
from drafters.heads.blocks import Attend, DecoderLayer, LayerShape, RMSNorm, RoPE, document_mask, target_dtype
from drafters.heads.rollout import Rollout
from drafters.heads.teacher import Teacher
from drafters.losses import LossKind, chunk_rows, token_loss
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftBudget, DraftTree


@dataclass(frozen=True)
class HydraConfig:
    """Settings of a Hydra head.

    num_heads: K, the deepest it can draft. num_layers: residual layers of each head. loss: against the text (cross_entropy)
    or the target's law. loss_decay: the loss is the sum over k of loss_decay^(k-1) * loss of head k.
    """

    type: str = "hydra"
    num_heads: int = 4
    num_layers: int = 1
    prefix_attention: bool = False
    loss: LossKind = "cross_entropy"
    loss_decay: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads {self.num_heads} and num_layers {self.num_layers} must be at least 1")


class SequentialHead(nn.Module):
    """Head k: [h, e_1 .. e_k], (k + 1) D wide, to logits.

    The first layer is R x + silu(W x + b) with R picking h, all others x + silu(W x + b); W starts at zero, so that an
    untrained head gives nearly the target's own output. The output matrix comes from the target and is NaN until then.
    """

    def __init__(self, k: int, size: int, layers: int, vocab_size: int) -> None:
        super().__init__()
        width = (k + 1) * size
        self.residual = nn.Linear(width, size, bias=False)
        nn.init.zeros_(self.residual.weight)
        nn.init.eye_(self.residual.weight[:, :size])
        linears = [nn.Linear(size if layer else width, size) for layer in range(layers)]
        for linear in linears:
            nn.init.zeros_(linear.weight)
        self.layers = nn.ModuleList(linears)
        self.output = nn.Linear(size, vocab_size)
        nn.init.constant_(self.output.weight, torch.nan)
        nn.init.zeros_(self.output.bias)

    def hidden(self, inputs: Tensor) -> Tensor:
        """What the output matrix reads; [..., (k + 1) D] -> [..., D]."""
        x = inputs
        for index, layer in enumerate(self.layers):
            x = (x if index else self.residual(x)) + F.silu(layer(x))
        return x

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.output(self.hidden(inputs))
        return logits


class PrefixLayer(nn.Module):
    """A decoder layer over the hidden states, and a norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.layer = DecoderLayer(shape, input_norm=True)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden_BND: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.norm(self.layer(hidden_BND, attend, 0))
        return out


@dataclass
class HydraState:
    """The newest hidden state and root of each row, None before the first `advance`; the prefix layer's cache."""

    target: TargetHead
    rollout: Rollout | None
    hidden_BD: Tensor | None = None
    root_B: Tensor | None = None


class Hydra(Drafter):
    """See the module."""

    Config = HydraConfig

    def __init__(self, config: HydraConfig, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.shape = LayerShape.of(info)
        self.rope = RoPE(info)
        self.prefix = PrefixLayer(self.shape) if config.prefix_attention else None
        self.heads = nn.ModuleList(
            SequentialHead(k, info.hidden_size, config.num_layers, info.vocab_size)
            for k in range(1, config.num_heads + 1)
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
            for k in range(1, self.config.num_heads + 1):
                self._head(k).output.weight.copy_(target.unembed_rows(torch.arange(self.info.vocab_size)))

    def count(self, batch: TrainBatch) -> Tensor:
        return batch.drafted(1).sum().float()

    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        assert batch.features is not None
        masks = batch.drafted(self.config.num_heads)
        hidden_BTD = self._normed(batch.features.captured_BTF, target)
        if self.prefix is not None:
            # index t       sees h_0 .. h_t of its document, at positions 0 .. t
            hidden_BTD = self.prefix(
                hidden_BTD, Attend(*self.rope(batch.position_BT), document_mask(batch.document_BT))
            )
        total = hidden_BTD.new_zeros((), dtype=torch.float32)
        metrics = {}
        for k, mask_BT in enumerate(masks, start=1):
            # index t       h_t, e_{t+1} .. e_{t+k}, to be compared with x_{t+1+k}, whose law the target has at t+k
            following = [torch.roll(batch.input_ids_BT, -j, dims=1)[mask_BT] for j in range(1, k + 1)]
            head = self._head(k)
            loss = token_loss(
                self.config.loss,
                head.hidden(self._inputs(hidden_BTD[mask_BT], torch.stack(following, dim=-1), target)),
                F.linear,
                Teacher(self.config.loss, batch, target, mask_BT.flatten().nonzero()[:, 0] + k),
                rows=chunk_rows(self.info.vocab_size, mask_BT.device),
                weights=[head.output.weight, head.output.bias],
            )
            total = total + self.config.loss_decay ** (k - 1) * loss.total
            metrics[f"head{k}_top1"] = loss.hits[0]
            metrics[f"head{k}_loss"] = loss.losses[0]
        return HeadOutput(Ratio(total, masks[0].sum().float()), metrics)

    def start(self, target: TargetHead, rows: int, max_tokens: int) -> HydraState:
        if self.prefix is None:
            return HydraState(target, None)
        like = self._head(1).output.weight
        return HydraState(
            target,
            Rollout(self.prefix, self.rope, self.shape, layers=1, rows=rows, capacity=max_tokens, like=like),
        )

    @torch.no_grad()
    def advance(self, state: HydraState, committed: Committed) -> HydraState:
        hidden_BPD = self._normed(committed.features_BPF, state.target)
        if state.rollout is not None:
            hidden_BPD = state.rollout.extend(hidden_BPD, committed.counts_B)
        last = (committed.counts_B - 1)[:, None, None].expand(-1, -1, hidden_BPD.shape[-1])
        state.hidden_BD = hidden_BPD.gather(1, last)[:, 0]
        state.root_B = committed.root_B
        return state

    @torch.no_grad()
    def draft(self, state: HydraState, budget: DraftBudget) -> DraftTree:
        if budget.max_depth > self.config.num_heads:
            raise ValueError(
                f"the tree is {budget.max_depth} deep, but this Hydra has {self.config.num_heads} heads and drafts no "
                "deeper; ask for a shallower tree"
            )
        assert state.hidden_BD is not None and state.root_B is not None
        grower = budget.start(state.root_B)
        path_BWk = state.root_B[:, None, None]  # the tokens that lead to each node, its own included
        for k in range(1, budget.max_depth + 1):
            hidden_BWD = state.hidden_BD[:, None].expand(-1, path_BWk.shape[1], -1)
            level = grower.grow(self._head(k)(self._inputs(hidden_BWD, path_BWk, state.target)))
            if level is None:
                break
            parents = path_BWk.gather(1, level.parent_BW[..., None].expand(-1, -1, k))
            path_BWk = torch.cat([parents, level.tokens_BW[..., None]], dim=-1)
        return grower.tree()

    def keep(self, state: HydraState, rows: Tensor) -> HydraState:
        if state.rollout is not None:
            state.rollout.keep(rows)
        if state.hidden_BD is not None and state.root_B is not None:
            state.hidden_BD, state.root_B = state.hidden_BD[rows], state.root_B[rows]
        return state

    def export_spec(self) -> dict[str, Any]:
        """Of a kind that no serving format holds, as `drafters.export` says."""
        return {"kind": "hydra"}

    def _inputs(self, hidden: Tensor, tokens: Tensor, target: TargetHead) -> Tensor:
        """[..., D] and the k tokens after it [..., k] -> [..., (k + 1) D]."""
        return torch.cat([hidden, target.embed(tokens).to(hidden.dtype).flatten(-2)], dim=-1)

    def _normed(self, last_hidden: Tensor, target: TargetHead) -> Tensor:
        """Hidden states after the target's final norm, in the head's own type."""
        return target.final_norm(last_hidden.to(target_dtype(target))).to(self._head(1).output.weight.dtype)

    def _head(self, k: int) -> SequentialHead:
        head = self.heads[k - 1]
        assert isinstance(head, SequentialHead)
        return head
