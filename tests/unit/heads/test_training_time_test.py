"""Rollout attention against one dense mask over all steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.heads import training_time_test
from drafters.heads.training_time_test import RolloutRows, prefix_mask, rollout_attention


def make_batch() -> TrainBatch:
    """Row 0: documents of 5 and 4 tokens and a pad; row 1: one document of 10."""
    document = torch.tensor([[0] * 5 + [1] * 4 + [-1], [0] * 10])
    position = torch.tensor([[*range(5), *range(4), 0], [*range(10)]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    return TrainBatch(torch.arange(20).view(2, 10), mask, document, position)


def test_rows_are_those_whose_whole_draft_is_learned() -> None:
    rows = RolloutRows.of(make_batch(), steps=3)
    found = [
        [
            (int(index), int(steps))
            for index, steps in zip(rows.index_BR[b], rows.live_SBR[:, b].sum(0), strict=True)
            if steps > 0
        ]
        for b in range(2)
    ]
    # Row 0 learns tokens 1-4 and 7-8, row 1 learns 3-5 and 8-9; index t needs t+1 and t+2 learned at step 0.
    assert found == [[(0, 3), (1, 2), (2, 1), (6, 1)], [(2, 2), (3, 1), (7, 1)]]


def dense_reference(q: list[Tensor], k: list[Tensor], v: list[Tensor], batch: TrainBatch) -> list[Tensor]:
    """Every step at every index over the keys of all steps, by one (S*T) x (S*T) mask."""
    steps, T = len(q), q[0].shape[2]
    same = (batch.document_BT[:, :, None] == batch.document_BT[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    own = torch.eye(T, dtype=torch.bool).expand_as(same)
    blocks = [
        [same if j == 0 else own if j <= s else torch.zeros_like(same) for j in range(steps)] for s in range(steps)
    ]
    mask = torch.cat([torch.cat(row, 2) for row in blocks], 1)[:, None]
    groups = q[0].shape[1] // k[0].shape[1]
    keys, values = (torch.cat(x, 2).repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.cat(q, 2) @ keys.transpose(2, 3) * q[0].shape[-1] ** -0.5
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
    return list(out.split(T, 2))


@pytest.mark.parametrize("limit", [10**9, 50])
def test_equals_the_dense_mask_with_gradients(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_time_test, "SCORES_LIMIT", limit)
    torch.manual_seed(0)
    batch, steps = make_batch(), 3
    rows = RolloutRows.of(batch, steps)
    q = [torch.randn(2, 4, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
    k = [torch.randn(2, 2, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
    v = [torch.randn(2, 2, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(steps)]

    def at_rows(x: Tensor) -> Tensor:
        return rows.gather(x.transpose(1, 2)).transpose(1, 2)

    seen = prefix_mask(batch, rows)
    leaves = [*q, *k, *v]
    own = [
        rollout_attention(at_rows(q[s]), (k[0], v[0]), [(at_rows(k[j]), at_rows(v[j])) for j in range(1, s + 1)], seen)
        for s in range(steps)
    ]
    reference = [at_rows(x) for x in dense_reference(q, k, v, batch)]
    weight = torch.randn_like(own[0])
    for s in range(steps):
        live = rows.live_SBR[s][:, None, :, None]
        assert torch.allclose(own[s] * live, reference[s] * live, atol=1e-12)
    gradients = [
        torch.autograd.grad(
            sum((x * weight * rows.live_SBR[s][:, None, :, None]).sum() for s, x in enumerate(out)), leaves
        )
        for out in (own, reference)
    ]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-10)
