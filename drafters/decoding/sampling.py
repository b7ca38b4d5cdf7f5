"""From logits to the law that tokens are drawn from, exactly as transformers' `generate` does it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafters.recipe import Sampling


def check_sampling(sampling: Sampling) -> None:
    """Checks the ranges of sampling settings.

    Raises:
        ValueError: a setting is out of its range.
    """
    if sampling.temperature < 0:
        raise ValueError(f"temperature is {sampling.temperature}; expected 0 (greedy) or more")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}; expected 0 (off) or more")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}; expected more than 0 and at most 1 (off)")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p is {sampling.min_p}; expected 0 (off) to 1")


def law(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn from, in float32; at temperature 0 all mass is on the argmax.

    Args:
        logits: [..., V], any float type.
        sampling: temperature, then top-k, top-p and min-p: transformers' order.

    Returns:
        [..., V]; tokens cut off by the settings have probability exactly 0.
    """
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_(-1, best, 1.0)
    scores = logits.float().reshape(-1, logits.shape[-1])
    no_ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)  # unread
    scores = _warpers(sampling)(no_ids, scores)  # type: ignore[arg-type]
    return scores.softmax(-1).view(logits.shape)


def sample(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token from each law; [..., V] -> [...]. Exact, and without a host-device sync (the exponential race)."""
    return race(probs, generator).argmax(-1)


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random keys whose decreasing order is a draw without replacement from each law; zero where the law is zero.

    Token x arrives after an exponential time of rate probs[x]; the key is one over that time. The k largest keys in
    decreasing order are k draws, each from the law without the earlier ones, renormalized.
    """
    waits = torch.empty_like(probs).exponential_(generator=generator)
    return probs / waits.clamp_min_(torch.finfo(probs.dtype).tiny)


@lru_cache
def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
