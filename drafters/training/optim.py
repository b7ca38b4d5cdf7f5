"""AdamW, and the learning rate as a pure function of the step, so that resuming needs no scheduler's state."""

from __future__ import annotations

import math

import torch
from torch import nn

from drafters.recipe import TrainSection


def total_steps(section: TrainSection, steps_per_epoch: int) -> int:
    """How many steps the run has: max_steps where given, else the epochs' (at least one)."""
    return section.max_steps or max(1, math.ceil(section.epochs * steps_per_epoch))


def make_optimizer(module: nn.Module, section: TrainSection) -> torch.optim.AdamW:
    """AdamW over what is trained; weight decay on matrices only (Loshchilov and Hutter 2019)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=section.learning_rate, betas=section.betas
    )


def learning_rate(section: TrainSection, step: int, total: int) -> float:
    """The rate of a step, counted from 0.

    It rises linearly over the warm-up, then falls to final_learning_rate_fraction of the peak, which the last step has:
    by a half cosine, on a line, or ("wsd", Hu et al. 2024) on a line over the last decay_fraction of the run only.
    """
    warmup = round(section.warmup_fraction * total)
    if step < warmup:
        return section.learning_rate * (step + 1) / warmup
    start = max(warmup, total - round(section.decay_fraction * total)) if section.schedule == "wsd" else warmup
    done = min(1.0, max(0, step - start) / max(1, total - 1 - start))
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": 1 - done,
        "constant": 1.0,
    }[section.schedule]
    final = section.final_learning_rate_fraction
    return section.learning_rate * (final + (1 - final) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate; a group with a "share" gets that share of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)
