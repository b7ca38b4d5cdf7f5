"""Losses of a draft distribution, as sums and counts in float32.

`token_loss` works on logits. The other functions go from hidden states to the loss in chunks of rows: each chunk's
logits and their gradient live only while that chunk is worked on, so N x V logits are never held, and nothing is
computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.metrics import Ratio

TokenLoss = Literal["soft_cross_entropy", "kl", "tv", "lk", "lk_mixture"]
Unembed = Callable[..., Tensor]
ChunkLoss = Callable[..., tuple[Tensor, Tensor]]

# Logits per chunk: small enough for the processor's cache on a CPU, large enough to fill a GPU.
CHUNK_LOGITS_CPU = 2**22
CHUNK_LOGITS_GPU = 2**26
TINY = 1e-20


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits to hold at once."""
    budget = CHUNK_LOGITS_CPU if device.type == "cpu" else CHUNK_LOGITS_GPU
    return max(16, budget // vocab_size)


def token_loss(kind: TokenLoss, draft_logits: Tensor, teacher_probs: Tensor) -> Tensor:
    """The loss of each row, computed in float32 whatever the logits are in.

    With p the teacher's law, q the draft's and alpha = sum min(p, q), the chance that a token drawn from q is accepted:

    - soft_cross_entropy: -sum p log q.
    - kl: sum p log(p / q), the same gradient, zero at p = q.
    - tv: 1 - alpha, the total variation distance.
    - lk: -log alpha.
    - lk_mixture: w * kl + (1 - w) * tv with w = exp(-3 alpha), held constant in the gradient: the KL leads while
      the laws are far apart, where total variation has hardly any gradient.

    Args:
        draft_logits: [..., V].
        teacher_probs: [..., V], float32.

    Returns:
        [...], float32.
    """
    log_q = F.log_softmax(draft_logits.float(), dim=-1)
    if kind == "soft_cross_entropy":
        return -(teacher_probs * log_q).sum(-1)
    if kind == "kl":
        return _kl(teacher_probs, log_q)
    alpha = torch.minimum(teacher_probs, log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - alpha
    if kind == "lk":
        return -alpha.clamp_min(TINY).log()
    weight = torch.exp(-3 * alpha.detach())
    return weight * _kl(teacher_probs, log_q) + (1 - weight) * (1 - alpha)


def _kl(probs: Tensor, log_q: Tensor) -> Tensor:
    return (torch.xlogy(probs, probs) - probs * log_q).sum(-1)


def smooth_l1(predicted_ND: Tensor, wanted_ND: Tensor) -> Ratio:
    """Smooth L1 (beta = 1), the mean over D of each row, summed over rows."""
    per_row = F.smooth_l1_loss(predicted_ND.float(), wanted_ND.float(), reduction="none").mean(-1)
    return Ratio(per_row.sum(), _count(predicted_ND))


def cross_entropy(
    hidden_ND: Tensor, unembed: Unembed, labels_N: Tensor, *, rows: int, weights: Sequence[Tensor] = ()
) -> tuple[Ratio, Ratio]:
    """Cross-entropy against the labels.

    Args:
        hidden_ND: what the draft logits are computed from.
        unembed: logits from (hidden, *weights).
        labels_N: the right token of each row.
        rows: rows per chunk, see `chunk_rows`.
        weights: tensors that `unembed` uses and that are trained; others would get no gradient.

    Returns:
        the loss, and how often the most likely token is the label.
    """

    def loss(hidden: Tensor, start: int, *parts: Tensor) -> tuple[Tensor, Tensor]:
        logits = unembed(hidden, *parts)
        labels = labels_N[start : start + len(hidden)]
        return F.cross_entropy(logits.float(), labels, reduction="sum"), (logits.argmax(-1) == labels).sum()

    return _over_chunks(loss, hidden_ND, rows, weights)


def distillation(
    kind: TokenLoss,
    hidden_ND: Tensor,
    unembed: Unembed,
    teacher: Callable[[int, int], Tensor],
    *,
    rows: int,
    weights: Sequence[Tensor] = (),
) -> tuple[Ratio, Ratio]:
    """A `token_loss` against the target's law.

    Args:
        kind: which one.
        hidden_ND: what the draft logits are computed from.
        unembed: logits from (hidden, *weights).
        teacher: the target's logits of rows start .. stop - 1; computed chunk by chunk as well.
        rows: rows per chunk, see `chunk_rows`.
        weights: tensors that `unembed` uses and that are trained; others would get no gradient.

    Returns:
        the loss, and how often the most likely token is the target's most likely one.
    """

    def loss(hidden: Tensor, start: int, *parts: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = teacher(start, start + len(hidden))
            best = wanted.argmax(-1)
            probs = torch.softmax(wanted.float(), dim=-1)
        logits = unembed(hidden, *parts)
        return token_loss(kind, logits, probs).sum(), (logits.argmax(-1) == best).sum()

    return _over_chunks(loss, hidden_ND, rows, weights)


def _over_chunks(loss: ChunkLoss, hidden_ND: Tensor, rows: int, weights: Sequence[Tensor]) -> tuple[Ratio, Ratio]:
    total, hits = _Chunked.apply(loss, rows, hidden_ND, *weights)
    return Ratio(total, _count(hidden_ND)), Ratio(hits, _count(hidden_ND))


def _count(hidden_ND: Tensor) -> Tensor:
    return torch.tensor(float(len(hidden_ND)), device=hidden_ND.device)


class _Chunked(torch.autograd.Function):
    """Sums a loss over chunks of rows and takes its gradient in the same pass, while the chunk's logits exist."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkLoss, rows: int, hidden_ND: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[2:]
        sources = [
            source.detach().requires_grad_(want) for source, want in zip((hidden_ND, *weights), wanted, strict=True)
        ]
        gradients = [
            torch.zeros_like(source, dtype=source.dtype if index == 0 else torch.float32) if want else None
            for index, (source, want) in enumerate(zip(sources, wanted, strict=True))
        ]
        total = torch.zeros((), device=hidden_ND.device)
        hits = torch.zeros((), device=hidden_ND.device)
        for start in range(0, len(hidden_ND), rows):
            with torch.set_grad_enabled(any(wanted)):
                part = sources[0][start : start + rows].detach().requires_grad_(wanted[0])
                value, right = loss(part, start, *sources[1:])
            total += value.detach()
            hits += right
            if any(wanted):
                _add_gradients(value, [part, *sources[1:]], gradients, start)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.wanted = wanted
        ctx.dtypes = [source.dtype for source in sources]
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        gradients = [
            (next(saved) * grad_outputs[0]).to(dtype) if want else None
            for want, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
        ]
        return (None, None, *gradients)


def _add_gradients(value: Tensor, sources: list[Tensor], gradients: list[Tensor | None], start: int) -> None:
    """Adds the gradient of one chunk's loss: its own rows of the hidden states', and all of the weights'."""
    wanted = [source for source in sources if source.requires_grad]
    found = iter(torch.autograd.grad(value, wanted))
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        part = next(found)
        (gradient[start : start + len(part)] if index == 0 else gradient).add_(part)
