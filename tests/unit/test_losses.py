"""Losses against float64, whole against chunked, and what is held in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.losses import TokenLoss, chunk_rows, cross_entropy, distillation, smooth_l1, token_loss

KINDS = get_args(TokenLoss)


def logits(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def reference(kind: str, z: Tensor, p: Tensor) -> Tensor:
    """The definitions, row by row, in the type of z."""
    q = torch.softmax(z, -1)
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
def test_token_loss_and_its_gradient_against_float64_on_bfloat16_logits(kind: TokenLoss) -> None:
    z = logits(6, 50).bfloat16()
    p = torch.softmax(logits(6, 50, seed=1), -1)
    exact_z = z.double().requires_grad_()
    exact = reference(kind, exact_z, p.double())
    (exact_gradient,) = torch.autograd.grad(exact.sum(), exact_z)
    own_z = z.clone().requires_grad_()
    own = token_loss(kind, own_z, p)
    (gradient,) = torch.autograd.grad(own.sum(), own_z)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own.double(), exact, rtol=1e-5, atol=1e-6)
    assert (gradient.double() - exact_gradient).norm() < 0.02 * exact_gradient.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_token_loss_is_finite_at_extremes(kind: TokenLoss) -> None:
    z = torch.tensor([[200.0, 0.0, -200.0], [0.0, 0.0, 0.0]], requires_grad=True)
    p = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    loss = token_loss(kind, z, p)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_distances_are_zero_between_equal_laws() -> None:
    z = logits(4, 30)
    for kind in ("kl", "tv", "lk", "lk_mixture"):
        torch.testing.assert_close(token_loss(kind, z, torch.softmax(z, -1)), torch.zeros(4), atol=1e-5, rtol=0)


def test_smooth_l1_is_a_mean_over_width_and_a_sum_over_rows() -> None:
    predicted, wanted = torch.tensor([[0.0, 3.0], [1.0, 1.0]]), torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    loss = smooth_l1(predicted, wanted)
    torch.testing.assert_close(loss.sum, torch.tensor((0.5 * 0.25 + 2.5) / 2))
    assert loss.count == 2


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_chunks_change_neither_loss_nor_gradients(rows: int) -> None:
    hidden, matrix = logits(23, 8, spread=1).requires_grad_(), logits(40, 8, seed=1, spread=1).requires_grad_()
    labels = torch.arange(23)
    loss, right = cross_entropy(hidden, F.linear, labels, rows=rows, weights=(matrix,))
    whole = F.cross_entropy(hidden @ matrix.T, labels, reduction="sum")
    torch.testing.assert_close(loss.sum, whole)
    torch.testing.assert_close(
        torch.autograd.grad(3 * loss.sum, [hidden, matrix]), torch.autograd.grad(3 * whole, [hidden, matrix])
    )
    assert right.sum == ((hidden @ matrix.T).argmax(-1) == labels).sum()
    assert loss.count == right.count == 23


@pytest.mark.parametrize("kind", KINDS)
def test_distillation_in_chunks_equals_the_loss_on_all_logits(kind: TokenLoss) -> None:
    matrix = logits(40, 8, seed=1, spread=1)
    hidden, teacher = logits(23, 8, spread=1).requires_grad_(), logits(23, 8, seed=2, spread=1)

    def teach(start: int, stop: int) -> Tensor:
        return teacher[start:stop] @ matrix.T

    loss, right = distillation(kind, hidden, lambda h: h @ matrix.T, teach, rows=5)
    whole = token_loss(kind, hidden @ matrix.T, torch.softmax(teacher @ matrix.T, -1)).sum()
    torch.testing.assert_close(loss.sum, whole)
    torch.testing.assert_close(torch.autograd.grad(loss.sum, hidden), torch.autograd.grad(whole, hidden))
    assert right.sum == ((hidden @ matrix.T).argmax(-1) == (teacher @ matrix.T).argmax(-1)).sum()


def counting(calls: list[int], matrix: Tensor) -> Callable[[Tensor], Tensor]:
    def unembed(hidden: Tensor) -> Tensor:
        calls.append(len(hidden))
        return hidden @ matrix.T

    return unembed


def test_no_more_logits_than_a_chunk_and_each_computed_once() -> None:
    calls: list[int] = []
    hidden = logits(23, 8).requires_grad_()
    loss, _ = cross_entropy(hidden, counting(calls, logits(40, 8)), torch.arange(23), rows=5)
    loss.sum.backward()
    assert calls == [5, 5, 5, 5, 3]


def test_no_rows_give_a_zero_loss_and_zero_gradients() -> None:
    hidden, matrix = torch.zeros(0, 8, requires_grad=True), logits(40, 8).requires_grad_()
    loss, right = cross_entropy(hidden, F.linear, torch.zeros(0, dtype=torch.long), rows=5, weights=(matrix,))
    loss.sum.backward()
    assert loss.sum == 0 and loss.count == 0 and right.count == 0
    assert matrix.grad is not None and not matrix.grad.any()


def test_without_gradients() -> None:
    with torch.no_grad():
        loss, _ = cross_entropy(logits(9, 8), lambda h: h @ logits(40, 8).T, torch.arange(9), rows=4)
    assert not loss.sum.requires_grad and loss.sum > 0


def test_under_autocast() -> None:
    hidden, matrix = logits(23, 8, spread=1).requires_grad_(), logits(40, 8, seed=1, spread=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = cross_entropy(hidden, F.linear, torch.arange(23), rows=5, weights=(matrix,))
    whole = F.cross_entropy(hidden @ matrix.T, torch.arange(23), reduction="sum")
    assert loss.sum.dtype == torch.float32
    torch.testing.assert_close(loss.sum, whole, rtol=0.02, atol=0)
    for own, exact in zip(
        torch.autograd.grad(loss.sum, [hidden, matrix]), torch.autograd.grad(whole, [hidden, matrix]), strict=True
    ):
        assert own.dtype == torch.float32
        assert (own - exact).norm() < 0.02 * exact.norm()


def test_chunk_rows_bounds_the_logits() -> None:
    assert chunk_rows(49152, torch.device("cpu")) * 49152 <= 2**22
    assert chunk_rows(10**9, torch.device("cpu")) >= 1
