"""Where a training batch gets the target's hidden states from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from drafters.batch import TrainBatch
from drafters.target.adapter import TargetModel


class FeatureSource(Protocol):
    """Gives a batch its features."""

    def attach(self, batch: TrainBatch) -> TrainBatch: ...


class OnlineFeatures:
    """Runs the target for each batch."""

    def __init__(self, target: TargetModel, layers: Sequence[int]) -> None:
        self._target = target
        self._layers = list(layers)

    def attach(self, batch: TrainBatch) -> TrainBatch:
        return replace(batch, features=self._target.features(batch, self._layers))
