"""What is measured now and then during training, on data that is not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import nn

from drafters.batch import TrainBatch
from drafters.features.source import FeatureSource
from drafters.heads.base import Drafter
from drafters.target.adapter import TargetHead
from drafters.training.step import Sums, add_sums, reduce_sums
from drafters.training.wrapping import whole_drafter

Evaluate = Callable[[Drafter], Mapping[str, float]]


def evaluation_metrics(
    accelerator: Accelerator,
    model: nn.Module,
    target: TargetHead,
    source: FeatureSource,
    batches: Sequence[TrainBatch],
    evaluate: Evaluate,
) -> dict[str, float]:
    """Held-out metrics, and the loop's from drafting without a teacher; the head is back in training mode after it.

    Args:
        batches: see `heldout_metrics`.
        evaluate: see `fit`.
    """
    model.eval()
    try:
        metrics = heldout_metrics(accelerator, model, target, source, batches)
        drafter = whole_drafter(accelerator, model)
        if drafter is not None:
            metrics.update({f"eval/{name}": value for name, value in evaluate(drafter.eval()).items()})
        accelerator.wait_for_everyone()
    finally:
        model.train()
    return metrics


@torch.no_grad()
def heldout_metrics(
    accelerator: Accelerator,
    model: nn.Module,
    target: TargetHead,
    source: FeatureSource,
    batches: Sequence[TrainBatch],
) -> dict[str, float]:
    """Teacher-forced means over all positions of the batches, cheap and no measure of acceptance; empty without batches.

    Args:
        model: the wrapped head, in evaluation mode.
        batches: all of them, on every process; each works on its share. All processes run the model equally often, as sharded
            weights need it: one without a batch left runs one whose loss mask is empty.
    """
    sums: Sums = {}
    world, rank = accelerator.num_processes, accelerator.process_index
    for turn in range(math.ceil(len(batches) / world)):
        index = turn * world + rank
        batch = batches[min(index, len(batches) - 1)]
        if index >= len(batches):
            batch = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
        output = model(source.attach(batch.to(accelerator.device)), target)
        sums = add_sums(sums, reduce_sums(accelerator, [output]))
    return {f"heldout/{name}": mean(pair) for name, pair in sums.items()}


def mean(pair: tuple[float, float]) -> float:
    """sum / count; NaN where nothing was counted."""
    return pair[0] / pair[1] if pair[1] else math.nan
