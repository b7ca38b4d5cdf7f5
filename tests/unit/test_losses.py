"""Losses against float64, whole against chunked, and what is held in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.losses import Lesson, LossKind, chunk_rows, row_losses, smooth_l1, token_loss

KINDS = get_args(LossKind)


def logits(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def lesson_of(teacher_logits: Tensor) -> Lesson:
    return Lesson(teacher_logits.argmax(-1), torch.softmax(teacher_logits.float(), -1))


def reference(kind: str, z: Tensor, p: Tensor) -> Tensor:
    """The definitions, row by row, in the type of z."""
    q = torch.softmax(z, -1)
    if kind == "cross_entropy":
        return torch.stack([-row.log()[best] for row, best in zip(q, p.argmax(-1), strict=True)])
    overlap = torch.stack(
        [sum((min(a, b) for a, b in zip(pr, qr, strict=True)), z.new_zeros(())) for pr, qr in zip(p, q, strict=True)]
    )
    cross = -(p * q.log()).sum(-1)
    kl = cross + (p * p.log()).sum(-1)
    weight = torch.exp(-3 * overlap).detach()
    return {
        "soft_cross_entropy": cross,
        "kl": kl,
        "tv": 0.5 * (p - q).abs().sum(-1),
        "lk": -overlap.log(),
        "lk_mixture": weight * kl + (1 - weight) * (1 - overlap),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_their_gradients_against_float64_on_bfloat16_logits(kind: LossKind) -> None:
    z = logits(6, 50).bfloat16()
    lesson = lesson_of(logits(6, 50, seed=1))
    p = lesson.probs_NU
    assert p is not None
    exact_z = z.double().requires_grad_()
    exact = reference(kind, exact_z, p.double())
    (exact_gradient,) = torch.autograd.grad(exact.sum(), exact_z)
    own_z = z.clone().requires_grad_()
    own = row_losses(kind, own_z, lesson)
    (gradient,) = torch.autograd.grad(own.sum(), own_z)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own.double(), exact, rtol=1e-5, atol=1e-6)
    assert (gradient.double() - exact_gradient).norm() < 0.02 * exact_gradient.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_finite_at_extremes(kind: LossKind) -> None:
    z = torch.tensor([[200.0, 0.0, -200.0], [0.0, 0.0, 0.0]], requires_grad=True)
    p = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    loss = row_losses(kind, z, Lesson(p.argmax(-1), p))
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_distances_are_zero_between_equal_laws() -> None:
    z = logits(4, 30)
    kinds: list[LossKind] = ["kl", "tv", "lk", "lk_mixture"]
    for kind in kinds:
        torch.testing.assert_close(row_losses(kind, z, lesson_of(z)), torch.zeros(4), atol=1e-5, rtol=0)


def test_top_k_keeps_the_likeliest_tokens_without_renormalising() -> None:
    z, lesson = logits(4, 30), lesson_of(logits(4, 30, seed=1))
    assert lesson.probs_NU is not None
    cut = torch.where(lesson.probs_NU >= lesson.probs_NU.topk(5).values[:, -1:], lesson.probs_NU, 0.0)
    torch.testing.assert_close(row_losses("soft_cross_entropy", z, lesson, top_k=5), -(cut * z.log_softmax(-1)).sum(-1))


def test_smooth_l1_is_a_mean_over_width_and_a_sum_over_rows() -> None:
    predicted, wanted = torch.tensor([[0.0, 3.0], [1.0, 1.0]]), torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    loss = smooth_l1(predicted, wanted)
    torch.testing.assert_close(loss.sum, torch.tensor((0.5 * 0.25 + 2.5) / 2))
    assert loss.count == 2


def learn(labels: Tensor) -> Callable[[int, int], Lesson]:
    """Lessons of fixed labels."""
    return lambda start, stop: Lesson(labels[start:stop])


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_chunks_change_neither_loss_nor_gradients(rows: int) -> None:
    hidden, matrix = logits(23, 8, spread=1).requires_grad_(), logits(40, 8, seed=1, spread=1).requires_grad_()
    labels = torch.arange(23)
    loss = token_loss("cross_entropy", hidden, F.linear, learn(labels), rows=rows, weights=(matrix,))
    whole = F.cross_entropy(hidden @ matrix.T, labels, reduction="sum")
    torch.testing.assert_close(loss.total, whole)
    torch.testing.assert_close(
        torch.autograd.grad(3 * loss.total, [hidden, matrix]), torch.autograd.grad(3 * whole, [hidden, matrix])
    )
    torch.testing.assert_close(loss.losses[0].sum, whole.detach())
    assert loss.hits[0].sum == ((hidden @ matrix.T).argmax(-1) == labels).sum()
    assert loss.losses[0].count == loss.hits[0].count == 23


@pytest.mark.parametrize("kind", KINDS)
def test_distillation_in_chunks_equals_the_loss_on_all_logits(kind: LossKind) -> None:
    matrix = logits(40, 8, seed=1, spread=1)
    hidden, teacher = logits(23, 8, spread=1).requires_grad_(), logits(23, 8, seed=2, spread=1)

    def teach(start: int, stop: int) -> Lesson:
        return lesson_of(teacher[start:stop] @ matrix.T)

    loss = token_loss(kind, hidden, lambda h: h @ matrix.T, teach, rows=5)
    whole = row_losses(kind, hidden @ matrix.T, lesson_of(teacher @ matrix.T)).sum()
    torch.testing.assert_close(loss.total, whole)
    torch.testing.assert_close(torch.autograd.grad(loss.total, hidden), torch.autograd.grad(whole, hidden))
    assert loss.hits[0].sum == ((hidden @ matrix.T).argmax(-1) == (teacher @ matrix.T).argmax(-1)).sum()


@pytest.mark.parametrize("rows", [4, 50])
def test_weights_groups_and_tokens_outside_the_vocabulary(rows: int) -> None:
    matrix, hidden = logits(40, 8, seed=1, spread=1), logits(23, 8, spread=1).requires_grad_()
    law = lesson_of(logits(23, 40, seed=3))
    assert law.probs_NU is not None
    best = law.best_N.clone()
    best[::3] = -1
    group, row_weight = torch.arange(23) % 3, torch.rand(23, generator=torch.Generator().manual_seed(0))

    def teach(start: int, stop: int) -> Lesson:
        assert law.probs_NU is not None
        return Lesson(best[start:stop], law.probs_NU[start:stop])

    loss = token_loss(
        "soft_cross_entropy", hidden, lambda h: h @ matrix.T, teach,
        rows=rows, weight=0.5, row_weight_N=row_weight, group_N=group, groups=3, top_k=4, top_k_weight=2.0,
    )  # fmt: skip
    each = row_losses("soft_cross_entropy", hidden @ matrix.T, law)
    likely = row_losses("soft_cross_entropy", hidden @ matrix.T, law, top_k=4)
    known = best >= 0
    whole = ((0.5 * each + 2.0 * likely) * row_weight * known).sum()
    torch.testing.assert_close(loss.total, whole)
    torch.testing.assert_close(torch.autograd.grad(loss.total, hidden), torch.autograd.grad(whole, hidden))
    for index in range(3):
        mine = group == index
        assert loss.losses[index].count == loss.hits[index].count == mine.sum()
        torch.testing.assert_close(loss.losses[index].sum, (each * known)[mine].sum())
        assert loss.hits[index].sum == ((hidden @ matrix.T).argmax(-1) == best)[mine].sum()


def counting(calls: list[int], matrix: Tensor) -> Callable[[Tensor], Tensor]:
    def unembed(hidden: Tensor) -> Tensor:
        calls.append(len(hidden))
        return hidden @ matrix.T

    return unembed


def test_no_more_logits_than_a_chunk_and_each_computed_once() -> None:
    calls: list[int] = []
    hidden = logits(23, 8).requires_grad_()
    unembed = counting(calls, logits(40, 8))
    token_loss("cross_entropy", hidden, unembed, learn(torch.arange(23)), rows=5).total.backward()
    assert calls == [5, 5, 5, 5, 3]


def test_no_rows_give_a_zero_loss_and_zero_gradients() -> None:
    hidden, matrix = torch.zeros(0, 8, requires_grad=True), logits(40, 8).requires_grad_()
    labels = learn(torch.zeros(0, dtype=torch.long))
    loss = token_loss("cross_entropy", hidden, F.linear, labels, rows=5, weights=(matrix,))
    loss.total.backward()
    assert loss.total == 0 and loss.losses[0].count == 0 and loss.hits[0].count == 0
    assert matrix.grad is not None and not matrix.grad.any()


def test_without_gradients() -> None:
    with torch.no_grad():
        loss = token_loss("cross_entropy", logits(9, 8), lambda h: h @ logits(40, 8).T, learn(torch.arange(9)), rows=4)
    assert not loss.total.requires_grad and loss.total > 0


def test_under_autocast() -> None:
    hidden, matrix = logits(23, 8, spread=1).requires_grad_(), logits(40, 8, seed=1, spread=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = token_loss("cross_entropy", hidden, F.linear, learn(torch.arange(23)), rows=5, weights=(matrix,))
    whole = F.cross_entropy(hidden @ matrix.T, torch.arange(23), reduction="sum")
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total, whole, rtol=0.02, atol=0)
    for own, exact in zip(
        torch.autograd.grad(loss.total, [hidden, matrix]), torch.autograd.grad(whole, [hidden, matrix]), strict=True
    ):
        assert own.dtype == torch.float32
        assert (own - exact).norm() < 0.02 * exact.norm()


def test_chunk_rows_bounds_the_logits() -> None:
    assert chunk_rows(49152, torch.device("cpu")) * 49152 <= 2**22
    assert chunk_rows(10**9, torch.device("cpu")) >= 1
