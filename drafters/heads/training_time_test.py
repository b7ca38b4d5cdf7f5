"""Training-time test: a head's rollouts from all prefixes of a batch at once, and only where something is learned.

Row t is the rollout that starts from the prefix that ends at index t. At step s its query sees

    step 0      keys at indices 0 .. t of its document      (the prefix, true features)
    step 1..s   the keys of its own row t only              (its own drafts)

so a row depends on no other row after step 0, and rows whose loss is masked need nothing but their step-0 key.
Sources: EAGLE-3 (arXiv 2503.01840), training-time test; HASS (arXiv 2408.15766), aligned forwards, which are the same rollouts with
the features detached between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.batch import TrainBatch
from drafters.heads.blocks import Attention, RoPE
from drafters.target.adapter import TargetHead

# Attention scores held at once; beyond it, blocks of rows are recomputed in the backward pass.
SCORES_LIMIT = 32 * 1024 * 1024


@dataclass(frozen=True)
class RolloutRows:
    """The rows that some step trains, gathered.

    Attributes:
        index_BR: their index t; rows short of R repeat index 0.
        live_SBR: true where step s of that row is trained: x_{t+1} .. x_{t+2+s} are all to be learned.
    """

    index_BR: Tensor
    live_SBR: Tensor

    @staticmethod
    def of(batch: TrainBatch, steps: int) -> RolloutRows:
        """The rows of a batch.

        index    t      t+1    t+2 .. t+2+s
        role     prefix root   drafted and compared at steps 0 .. s
        """
        live_SBT = batch.drafted(steps)
        counts_B = live_SBT[0].sum(1)
        R = max(int(counts_B.max()), 1)
        order = torch.sort(live_SBT[0].byte(), dim=1, descending=True, stable=True).indices[:, :R]
        real = torch.arange(R, device=order.device) < counts_B[:, None]
        index = torch.where(real, order, 0)
        return RolloutRows(index, live_SBT.gather(2, order.expand(steps, -1, -1)) & real)

    def trained(self, T: int) -> tuple[Tensor, Tensor, Tensor]:
        """What is compared, in the order of the places it is compared with.

        index t        step s gives the law of x_{t+2+s}; the target's own is at t+1+s

        Args:
            T: tokens of a row of the batch.

        Returns:
            entry_N: through the S x B x R outputs.
            place_N: through the B x T places of the batch, ascending.
            step_N: the step of each.
        """
        _S, B, R = self.live_SBR.shape
        entry = self.live_SBR.flatten().nonzero()[:, 0]
        step = entry // (B * R)
        place = entry // R % B * T + self.index_BR.flatten()[entry % (B * R)] + 1 + step
        order = torch.argsort(place, stable=True)
        return entry[order], place[order], step[order]

    def gather(self, tensor_BTx: Tensor) -> Tensor:
        """[B, T, ...] -> [B, R, ...] at the rows' indices."""
        batch = torch.arange(len(self.index_BR), device=self.index_BR.device)[:, None]
        return tensor_BTx[batch, self.index_BR]


class RolloutHead(Protocol):
    """What `rollout` asks of a head with one attention layer."""

    @property
    def rope(self) -> RoPE: ...

    @property
    def attention(self) -> Attention: ...

    def prepare(self, tokens: Tensor, feature: Tensor, target: TargetHead) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream it is added to; [...] and [..., D] -> [..., I] and [..., D]."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output; [..., D]."""

    def feedback(self, hidden: Tensor) -> Tensor:
        """The feature of the next step, from this step's output."""


def rollout(
    head: RolloutHead,
    batch: TrainBatch,
    target: TargetHead,
    rows: RolloutRows,
    feature_BTD: Tensor,
    *,
    detach: bool = False,
) -> Tensor:
    """Outputs of every step at the gathered rows, S x B x R x D.

    Each equals what drafting gives: the head run from the prefix that ends at the row's index, fed its own outputs and the
    text's tokens.

    Args:
        feature_BTD: the feature of every index at step 0.
        detach: no gradient from one step to the one before.
    """
    seen_BRT = prefix_mask(batch, rows)
    position_BR = rows.gather(batch.position_BT)
    # index t        step 0: e_{t+1}, the target's feature, at position t of the document
    inputs_BTI, residual_BTD = head.prepare(torch.roll(batch.input_ids_BT, -1, dims=1), feature_BTD, target)
    prefix = head.attention.keys_values(inputs_BTI, *head.rope(batch.position_BT))
    inputs_BRI, residual_BRD = rows.gather(inputs_BTI), rows.gather(residual_BTD)
    own: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    for step in range(len(rows.live_SBR)):
        # index t        step s: e_{t+1+s}, the output of step s-1 at t, at position t+s
        turns = head.rope(position_BR + step)
        if step:
            feature_BRD = head.feedback(outputs[-1].detach() if detach else outputs[-1])
            tokens_BR = rows.gather(torch.roll(batch.input_ids_BT, -1 - step, dims=1))
            inputs_BRI, residual_BRD = head.prepare(tokens_BR, feature_BRD, target)
            own.append(head.attention.keys_values(inputs_BRI, *turns))
        mixed = rollout_attention(head.attention.queries(inputs_BRI, *turns), prefix, own, seen_BRT)
        outputs.append(head.finish(residual_BRD, head.attention.output(mixed)))
    return torch.stack(outputs)


def prefix_mask(batch: TrainBatch, rows: RolloutRows) -> Tensor:
    """[B, R, T], true where row t may see index j: j <= t in the same document."""
    document_BR = rows.gather(batch.document_BT)
    index = torch.arange(batch.document_BT.shape[1], device=rows.index_BR.device)
    return (batch.document_BT[:, None] == document_BR[..., None]) & (index <= rows.index_BR[..., None])


def rollout_attention(
    query_BHRd: Tensor, prefix: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], seen_BRT: Tensor
) -> Tensor:
    """Attention of one step's rows over the prefix and their own earlier steps.

    Args:
        query_BHRd: queries of this step.
        prefix: keys and values of step 0 at every index, each [B, G, T, d] with G key-value heads.
        own: keys and values of steps 1 .. s at the rows, each [B, G, R, d].
        seen_BRT: which indices each row sees at step 0.

    Returns:
        [B, H, R, d].
    """
    B, H, R, d = query_BHRd.shape
    G = prefix[0].shape[1]
    query = query_BHRd.reshape(B, G, H // G, R, d) * d**-0.5
    none = query.new_zeros(B, G, R, 0, d)
    own_k = torch.stack([key for key, _ in own], dim=3) if own else none
    own_v = torch.stack([value for _, value in own], dim=3) if own else none
    block = max(1, SCORES_LIMIT // (B * H * seen_BRT.shape[-1]))
    if block >= R:
        return _attend(query, *prefix, own_k, own_v, seen_BRT).reshape(B, H, R, d)
    parts = []
    for start in range(0, R, block):
        rows = slice(start, start + block)
        inputs = (query[:, :, :, rows], *prefix, own_k[:, :, rows], own_v[:, :, rows], seen_BRT[:, rows])
        parts.append(checkpoint(_attend, *inputs, use_reentrant=False))
    return torch.cat(parts, dim=3).reshape(B, H, R, d)


def _attend(
    query_BGhRd: Tensor,
    key_BGTd: Tensor,
    value_BGTd: Tensor,
    own_k_BGRsd: Tensor,
    own_v_BGRsd: Tensor,
    seen_BRT: Tensor,
) -> Tensor:
    """One softmax over T prefix keys and s own keys; the own part is s dot products a row, no matrix."""
    B, G, h, R, d = query_BGhRd.shape
    T = key_BGTd.shape[2]
    scores = (query_BGhRd.reshape(B, G, h * R, d) @ key_BGTd.transpose(2, 3)).view(B, G, h, R, T)
    scores = scores.masked_fill(~seen_BRT[:, None, None], float("-inf"))
    own_scores = (query_BGhRd.transpose(2, 3) @ own_k_BGRsd.transpose(3, 4)).transpose(2, 3)
    precise = torch.promote_types(query_BGhRd.dtype, torch.float32)
    weights = torch.softmax(torch.cat([scores, own_scores], -1), dim=-1, dtype=precise).to(value_BGTd.dtype)
    from_prefix = (weights[..., :T].reshape(B, G, h * R, T) @ value_BGTd).view(B, G, h, R, d)
    from_own = (weights[..., T:].transpose(2, 3) @ own_v_BGRsd).transpose(2, 3)
    return from_prefix + from_own
