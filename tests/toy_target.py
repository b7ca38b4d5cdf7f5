"""Tiny targets, batches of documents, and training on one batch, for the tests of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import tiny
import torch
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.features.source import OnlineFeatures
from drafters.heads.base import Drafter
from drafters.recipe import TargetSection
from drafters.target.hf import HFTarget
from drafters.target.info import make_info


@dataclass(frozen=True)
class Document:
    """Tokens and which of them are an answer's."""

    ids: list[int]
    mask: list[bool]


@cache
def make_target(family: str = "llama", **changes: Any) -> HFTarget:
    model = tiny.make_model(family, **{"scale": 10.0, **changes})  # so peaked that its answers hardly repeat a token
    section = TargetSection(path="tiny", dtype="float32")
    return HFTarget(model, make_info(section, model.config, tiny.make_tokenizer(), folder=None, revision=""))


def random_document(length: int, prompt: int, seed: int) -> Document:
    ids = torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Document(ids, [i >= prompt for i in range(length)])


def answered(target: HFTarget, prompt: Sequence[int], length: int) -> Document:
    """The prompt and the target's own greedy answer of `length` tokens."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return Document(ids, [i >= len(prompt) for i in range(len(ids))])


def pack(rows: Sequence[Sequence[Document]], padding: int = 0, pad_id: int = 0) -> TrainBatch:
    """A batch of rows of documents, each row padded to the longest one and `padding` more."""
    width = max(sum(len(d.ids) for d in row) for row in rows) + padding
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    document = torch.full((len(rows), width), -1)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        start = 0
        for number, item in enumerate(row):
            end = start + len(item.ids)
            ids[b, start:end] = torch.tensor(item.ids)
            mask[b, start:end] = torch.tensor(item.mask)
            document[b, start:end] = number
            position[b, start:end] = torch.arange(len(item.ids))
            start = end
        position[b, start:] = torch.arange(width - start)
    return TrainBatch(ids, mask, document, position)


def with_features(target: HFTarget, batch: TrainBatch, drafter: Drafter) -> TrainBatch:
    return OnlineFeatures(target, drafter.feature_layers).attach(batch)


def without_noise(drafter_class: type[Drafter]) -> Any:
    """The default config, without randomness in training."""
    config = drafter_class.Config()
    return replace(config, noise=0.0) if hasattr(config, "noise") else config


def make_head(drafter_class: type[Drafter], target: HFTarget, seed: int = 0, **changes: Any) -> Drafter:
    torch.manual_seed(seed)
    drafter = drafter_class(replace(without_noise(drafter_class), **changes), target.info)
    drafter.init_from(target)
    return drafter


def loss_value(drafter: Drafter, batch: TrainBatch, target: HFTarget) -> Tensor:
    loss: Tensor = drafter(batch, target).loss.value()
    return loss


def overfit(drafter: Drafter, batch: TrainBatch, target: HFTarget, steps: int, learning_rate: float) -> list[float]:
    """Trains on one batch; the loss of each step."""
    optimizer = torch.optim.Adam(drafter.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    drafter.train()
    losses = []
    for _ in range(steps):
        loss = loss_value(drafter, batch, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    drafter.eval()
    return losses
