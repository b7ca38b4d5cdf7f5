"""Every step of training equals drafting after the same prefix, for all heads that train on their own rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy_target as toy
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.heads.autoregressive import AutoregressiveHead
from drafters.heads.eagle import Eagle
from drafters.heads.eagle3 import Eagle3
from drafters.heads.training_time_test import RolloutRows
from drafters.target.hf import HFTarget
from drafters.tree import Committed

STEPS = 4
HEADS: dict[str, Callable[[HFTarget], Any]] = {
    "eagle": lambda target: toy.make_head(Eagle, target),
    "hass": lambda target: toy.make_head(Eagle, target, steps=STEPS, top_k_weight=1.0),
    "eagle3": lambda target: toy.make_head(Eagle3, target, steps=STEPS, draft_vocab_size=100),
    "eagle3.1": lambda target: toy.make_head(Eagle3, target, steps=STEPS, feature_norm=True, feed_back_normed=True),
}
heads = pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)


def training_outputs(head: AutoregressiveHead, batch: TrainBatch, target: HFTarget) -> tuple[RolloutRows, Tensor]:
    rows = RolloutRows.of(batch, head.config.steps)
    assert batch.features is not None
    return rows, head.outputs(batch, target, rows, head.fuse(batch.features.captured_BTF, target))


@torch.no_grad()
def drafted(head: Any, target: HFTarget, ids: Tensor, captured_TF: Tensor, t: int, steps: int) -> list[Tensor]:
    """Outputs of each depth after the entries 0 .. t of a lone document, the draft being the document's own tokens."""
    committed = Committed(ids[None, : t + 1], captured_TF[None, : t + 1], torch.tensor([t + 1]), ids[t + 1 : t + 2])
    state = head.advance(head.start(target, 1, 64), committed)
    outputs = [state.hidden_BD[0]]
    for step in range(1, steps):
        feature = head.feedback(outputs[-1])[None, None]
        entries = head.entries(ids[None, t + 1 + step : t + 2 + step], feature, target)
        outputs.append(state.rollout.level(entries, torch.zeros(1, 1, dtype=torch.long))[0, 0])
    return outputs


@heads
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_each_step_is_what_drafting_computes(make: Callable[[HFTarget], Any], family: str) -> None:
    target = toy.make_target(family)
    head = make(target).eval()
    documents = [toy.random_document(length, 4, length) for length in (14, 11)]
    other = toy.random_document(23, 9, 1)
    batch = toy.with_features(target, toy.pack([documents, [other]], padding=3), head)
    assert batch.features is not None
    rows, outputs_SBRD = training_outputs(head, batch, target)
    compared = 0
    for b, parts in enumerate([documents, [other]]):
        begin = 0
        for document in parts:
            end = begin + len(document.ids)
            captured = batch.features.captured_BTF[b, begin:end]
            for r, index in enumerate(rows.index_BR[b].tolist()):
                live = int(rows.live_SBR[:, b, r].sum())
                if not begin <= index < end or not live:
                    continue
                expected = drafted(head, target, torch.tensor(document.ids), captured, index - begin, live)
                for step in range(live):
                    torch.testing.assert_close(outputs_SBRD[step, b, r], expected[step], rtol=1e-5, atol=1e-5)
                compared += live
            begin = end
    steps = head.config.steps  # every answer of n tokens: n - 1 roots, the last of which draft less deep
    assert compared == sum((10 - 1 - s) + (7 - 1 - s) + (14 - 1 - s) for s in range(steps))


@heads
def test_compared_places_are_those_of_the_tokens_drafted(make: Callable[[HFTarget], Any]) -> None:
    target = toy.make_target()
    head = make(target)
    batch = toy.pack([[toy.random_document(9, 4, 0), toy.random_document(8, 3, 1)], [toy.random_document(12, 7, 2)]])
    rows = RolloutRows.of(batch, head.config.steps)
    T, (_S, B, R) = batch.input_ids_BT.shape[1], rows.live_SBR.shape
    found = set()
    entry_N, place_N, step_N = rows.trained(T)
    for entry, place, step in zip(entry_N.tolist(), place_N.tolist(), step_N.tolist(), strict=True):
        s, b, r = entry // (B * R), entry // R % B, entry % R
        assert s == step and rows.live_SBR[s, b, r]
        t = int(rows.index_BR[b, r])
        assert place == b * T + t + 1 + s  # the target's law at t+1+s is that of x_{t+2+s}
        found.add((b, t, s))
    assert len(found) == len(entry_N) == int(rows.live_SBR.sum())
    assert place_N.tolist() == sorted(place_N.tolist())


@heads
def test_no_step_sees_what_comes_after_its_row(make: Callable[[HFTarget], Any]) -> None:
    """Exactly zero: features after t at every step, and what lies outside the row's document."""
    target = toy.make_target()
    head = make(target).eval()
    documents = [toy.random_document(9, 3, 0), toy.random_document(10, 3, 1)]
    batch = toy.with_features(target, toy.pack([documents], padding=4), head)
    assert batch.features is not None
    captured = batch.features.captured_BTF.clone().requires_grad_()
    rows = RolloutRows.of(batch, head.config.steps)
    outputs_SBRD = head.outputs(batch, target, rows, head.fuse(captured, target))
    for r, t in enumerate(rows.index_BR[0].tolist()):
        begin = 0 if t < 9 else 9
        for step in range(int(rows.live_SBR[:, 0, r].sum())):
            (gradient,) = torch.autograd.grad(outputs_SBRD[step, 0, r].sum(), captured, retain_graph=True)
            assert not gradient[0, t + 1 :].any() and not gradient[0, :begin].any()
            assert gradient[0, begin : t + 1].any(dim=-1).all()


@heads
def test_tokens_after_a_steps_own_change_nothing_to_the_last_bit(make: Callable[[HFTarget], Any]) -> None:
    target = toy.make_target()
    head = make(target).eval()
    batch = toy.with_features(target, toy.pack([[toy.random_document(14, 3, 0)]]), head)
    rows, before_SBRD = training_outputs(head, batch, target)
    for r, t in enumerate(rows.index_BR[0].tolist()):
        for step in range(int(rows.live_SBR[:, 0, r].sum())):
            batch.input_ids_BT[0, t + 2 + step :] += 1
            _, after_SBRD = training_outputs(head, batch, target)
            batch.input_ids_BT[0, t + 2 + step :] -= 1
            assert torch.equal(after_SBRD[: step + 1, 0, r], before_SBRD[: step + 1, 0, r])


@heads
def test_detaching_changes_gradients_and_no_values(make: Callable[[HFTarget], Any]) -> None:
    target = toy.make_target()
    head = make(target)
    batch = toy.with_features(target, toy.pack([[toy.random_document(12, 3, 0)]]), head)
    rows = RolloutRows.of(batch, head.config.steps)
    assert batch.features is not None
    captured = batch.features.captured_BTF.clone().requires_grad_()
    values, gradients = [], []
    for detach in (False, True):
        last = head.outputs(batch, target, rows, head.fuse(captured, target), detach=detach)[-1]
        values.append(last.detach())
        gradients.append(torch.autograd.grad(last.square().sum(), captured)[0])
    assert torch.equal(*values)
    assert torch.equal(*gradients) == (head.config.steps == 1)
