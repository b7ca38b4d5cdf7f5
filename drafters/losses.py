"""Losses of a draft distribution, summed in float32.

`row_losses` works on logits. `token_loss` goes from hidden states to the loss in chunks of rows: each chunk's logits
and their gradient live only while that chunk is worked on, so N x V logits are never held, and nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.metrics import Ratio

LossKind = Literal["cross_entropy", "soft_cross_entropy", "kl", "tv", "lk", "lk_mixture"]
Unembed = Callable[..., Tensor]
ChunkLoss = Callable[..., tuple[Tensor, Tensor]]

# Logits per chunk: small enough for the processor's cache on a CPU, large enough to fill a GPU.
CHUNK_LOGITS_CPU = 2**22
CHUNK_LOGITS_GPU = 2**26
TINY = 1e-20


@dataclass(frozen=True)
class Lesson:
    """What some rows are to learn.

    Attributes:
        best_N: the token that counts as right, as an id of the draft vocabulary; -1 where that lacks it, and the row
            then adds nothing to the loss and counts as a miss.
        probs_NU: the target's law over the draft vocabulary, float32; None for `cross_entropy`, which learns best_N.
    """

    best_N: Tensor
    probs_NU: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """Sums over rows.

    Attributes:
        total: each row's loss times its weight; the only one with a gradient.
        losses: for each group of rows, the plain sum of losses, and its rows.
        hits: for each group of rows, how often the most likely draft token is the right one, and its rows.
    """

    total: Tensor
    losses: list[Ratio]
    hits: list[Ratio]


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits to hold at once."""
    budget = CHUNK_LOGITS_CPU if device.type == "cpu" else CHUNK_LOGITS_GPU
    return max(16, budget // vocab_size)


def row_losses(kind: LossKind, draft_logits: Tensor, lesson: Lesson, *, top_k: int = 0) -> Tensor:
    """The loss of each row, computed in float32 whatever the logits are in.

    With p the target's law, q the draft's and alpha = sum min(p, q), the chance that a token drawn from q is accepted:

    - cross_entropy: -log q(right token).
    - soft_cross_entropy: -sum p log q.
    - kl: sum p log(p / q), the same gradient, zero at p = q.
    - tv: 1 - alpha, the total variation distance.
    - lk: -log alpha.
    - lk_mixture: w * kl + (1 - w) * tv with w = exp(-3 alpha), held constant in the gradient: the KL leads while
      the laws are far apart, where total variation has hardly any gradient.

    Args:
        draft_logits: [..., U].
        lesson: of the same rows; its best_N must be an id.
        top_k: soft_cross_entropy over the k most likely tokens of p only, not renormalised; 0 = over all.

    Returns:
        [...], float32.
    """
    log_q = F.log_softmax(draft_logits.float(), dim=-1)
    if kind == "cross_entropy":
        return -log_q.gather(-1, lesson.best_N[..., None])[..., 0]
    p = lesson.probs_NU
    assert p is not None
    if kind == "soft_cross_entropy":
        if not top_k:
            return -(p * log_q).sum(-1)
        likely = p.topk(min(top_k, p.shape[-1]), dim=-1)
        return -(likely.values * log_q.gather(-1, likely.indices)).sum(-1)
    if kind == "kl":
        return _kl(p, log_q)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - alpha
    if kind == "lk":
        return -alpha.clamp_min(TINY).log()
    weight = torch.exp(-3 * alpha.detach())
    return weight * _kl(p, log_q) + (1 - weight) * (1 - alpha)


def _kl(probs: Tensor, log_q: Tensor) -> Tensor:
    return (torch.xlogy(probs, probs) - probs * log_q).sum(-1)


def smooth_l1(predicted_ND: Tensor, wanted_ND: Tensor) -> Ratio:
    """Smooth L1 (beta = 1), the mean over D of each row, summed over rows."""
    per_row = F.smooth_l1_loss(predicted_ND.float(), wanted_ND.float(), reduction="none").mean(-1)
    return Ratio(per_row.sum(), torch.tensor(float(len(predicted_ND)), device=predicted_ND.device))


def token_loss(
    kind: LossKind,
    hidden_ND: Tensor,
    unembed: Unembed,
    teacher: Callable[[int, int], Lesson],
    *,
    rows: int,
    weights: Sequence[Tensor] = (),
    weight: float = 1.0,
    row_weight_N: Tensor | None = None,
    group_N: Tensor | None = None,
    groups: int = 1,
    top_k: int = 0,
    top_k_weight: float = 0.0,
) -> TokenLoss:
    """The loss of rows of hidden states.

    Args:
        kind: see `row_losses`.
        hidden_ND: what the draft logits are computed from.
        unembed: draft logits from (hidden, *weights).
        teacher: the lesson of rows start .. stop - 1; made chunk by chunk as well.
        rows: rows per chunk, see `chunk_rows`.
        weights: tensors that `unembed` uses and that are trained; others would get no gradient.
        weight: of the loss in the total.
        row_weight_N: of each row in the total; 1 by default.
        group_N: the group of each row, 0 .. groups - 1; one group by default.
        top_k, top_k_weight: adds top_k_weight * the soft cross-entropy over the target's top_k tokens, as HASS does.
    """
    device = hidden_ND.device
    row_weight_N = torch.ones(len(hidden_ND), device=device) if row_weight_N is None else row_weight_N
    group_N = torch.zeros(len(hidden_ND), dtype=torch.long, device=device) if group_N is None else group_N

    def loss(hidden: Tensor, start: int, *parts: Tensor) -> tuple[Tensor, Tensor]:
        chunk = slice(start, start + len(hidden))
        with torch.no_grad():
            lesson = teacher(start, start + len(hidden))
        known = lesson.best_N >= 0
        logits = unembed(hidden, *parts)
        hits = (logits.argmax(-1) == lesson.best_N).float()
        lesson = Lesson(lesson.best_N.clamp_min(0), lesson.probs_NU)
        plain = torch.where(known, row_losses(kind, logits, lesson), 0.0)
        weighted = weight * plain
        if top_k_weight:
            likely = row_losses("soft_cross_entropy", logits, lesson, top_k=top_k)
            weighted = weighted + top_k_weight * torch.where(known, likely, 0.0)
        facts = torch.stack([plain.detach(), hits, torch.ones_like(hits)])
        sums = torch.zeros(3, groups, device=device).index_add_(1, group_N[chunk], facts)
        return (weighted * row_weight_N[chunk]).sum(), sums

    total, sums = _Chunked.apply(loss, rows, groups, hidden_ND, *weights)
    losses, hits, counts = sums
    return TokenLoss(
        total,
        [Ratio(losses[group], counts[group]) for group in range(groups)],
        [Ratio(hits[group], counts[group]) for group in range(groups)],
    )


class _Chunked(torch.autograd.Function):
    """Sums a loss over chunks of rows and takes its gradient in the same pass, while the chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, loss: ChunkLoss, rows: int, groups: int, hidden_ND: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[3:]
        sources = [
            source.detach().requires_grad_(want) for source, want in zip((hidden_ND, *weights), wanted, strict=True)
        ]
        gradients = [
            torch.zeros_like(source, dtype=source.dtype if index == 0 else torch.float32) if want else None
            for index, (source, want) in enumerate(zip(sources, wanted, strict=True))
        ]
        total = torch.zeros((), device=hidden_ND.device)
        sums = torch.zeros(3, groups, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), rows):
            with torch.set_grad_enabled(any(wanted)):
                part = sources[0][start : start + rows].detach().requires_grad_(wanted[0])
                value, more = loss(part, start, *sources[1:])
            total += value.detach()
            sums += more
            if any(wanted):
                _add_gradients(value, [part, *sources[1:]], gradients, start)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.wanted = wanted
        ctx.dtypes = [source.dtype for source in sources]
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        gradients = [
            (next(saved) * grad_outputs[0]).to(dtype) if want else None
            for want, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
        ]
        return (None, None, None, *gradients)


def _add_gradients(value: Tensor, sources: list[Tensor], gradients: list[Tensor | None], start: int) -> None:
    """Adds the gradient of one chunk's loss: its own rows of the hidden states', and all of the weights'."""
    wanted = [source for source in sources if source.requires_grad]
    found = iter(torch.autograd.grad(value, wanted))
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        part = next(found)
        (gradient[start : start + len(part)] if index == 0 else gradient).add_(part)
