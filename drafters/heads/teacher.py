"""What heads learn from: the target's law, or the text's tokens, at given places of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.heads.blocks import target_dtype
from drafters.losses import Lesson, LossKind
from drafters.target.adapter import TargetHead


class Teacher:
    """Lessons of rows, made chunk by chunk.

    index t of the batch     h_t, the target's hidden state, whose law is that of x_{t+1}; or x_{t+1} itself

    Args:
        kind: of the loss; `cross_entropy` learns the text, all others the target's law.
        batch: with features.
        index_N: the place t of each row, counted through the B x T places of the batch. Rows of the same place that
            stand side by side share the work.
        d2t_U: the target's id of each draft id; None where the draft vocabulary is the target's.
    """

    def __init__(
        self, kind: LossKind, batch: TrainBatch, target: TargetHead, index_N: Tensor, d2t_U: Tensor | None = None
    ) -> None:
        assert batch.features is not None
        self._kind = kind
        self._last_ND = batch.features.last_BTD.flatten(0, 1)
        self._following_N = torch.roll(batch.input_ids_BT, -1, dims=1).flatten()
        self._target = target
        self._index_N = index_N
        self._d2t_U = d2t_U
        self._t2d_V: Tensor | None = None
        if d2t_U is not None:
            self._t2d_V = torch.full((target.info.vocab_size,), -1, device=d2t_U.device)
            self._t2d_V[d2t_U] = torch.arange(len(d2t_U), device=d2t_U.device)

    def __call__(self, start: int, stop: int) -> Lesson:
        index = self._index_N[start:stop]
        if self._kind == "cross_entropy":
            return Lesson(self._draft_ids(self._following_N[index]))
        places, row = torch.unique_consecutive(index, return_inverse=True)
        logits = self._target.logits(self._last_ND[places].to(target_dtype(self._target)))
        best = self._draft_ids(logits.argmax(-1))
        if self._d2t_U is not None:
            logits = logits[:, self._d2t_U]
        probs = torch.softmax(logits.float(), dim=-1)
        if len(places) == len(index):
            return Lesson(best, probs)
        return Lesson(best[row], probs[row])

    def _draft_ids(self, ids: Tensor) -> Tensor:
        return ids if self._t2d_V is None else self._t2d_V[ids]
