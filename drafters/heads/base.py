"""The contract of a learned drafter, and head folders: config.json and model.safetensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from drafters.batch import TrainBatch
from drafters.metrics import Ratio
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftBudget, DraftTree


@dataclass(frozen=True)
class HeadOutput:
    """The loss of a batch as sum and count, and metrics by name (teacher-forced: never called alpha or tau)."""

    loss: Ratio
    metrics: dict[str, Ratio] = field(default_factory=dict)


class Drafter(nn.Module, ABC):
    """A head: network, loss, drafting and export in one class, in one file.

    A subclass has a nested frozen dataclass `Config` (its whole recipe section; its first field is `type: str`). The loop and
    the trainer know only the methods below.
    """

    Config: ClassVar[type]

    def __init__(self, config: Any, info: TargetInfo) -> None:
        super().__init__()
        self.config = config
        self.info = info

    @property
    @abstractmethod
    def feature_layers(self) -> Sequence[int]:
        """Layers of the target whose hidden states the head reads, in the numbering of `target.adapter`."""

    def init_from(self, target: TargetHead) -> None:
        """Sets the weights that start as something of the target's; called once, before training."""

    @abstractmethod
    def count(self, batch: TrainBatch) -> Tensor:
        """The count of forward's loss, from the masks alone: the trainer needs it before the first forward of a step."""

    @abstractmethod
    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        """Loss and metrics of a batch that has features."""

    @abstractmethod
    def start(self, target: TargetHead, rows: int, max_tokens: int) -> Any:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def advance(self, state: Any, committed: Committed) -> Any:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def draft(self, state: Any, budget: DraftBudget) -> DraftTree:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def keep(self, state: Any, rows: Tensor) -> Any:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def export_spec(self) -> dict[str, Any]:
        """What serving formats need to know of the head beyond its weights; read by `drafters.export`."""
