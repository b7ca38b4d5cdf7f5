"""A number that is a sum over a count, divided once, at the very end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """A sum and the count it is over.

    Sums and counts of several batches, steps and processes are added up before the one division, so
    that no batch weighs more than its positions. Both are 0-dimensional float32 tensors.
    """

    sum: Tensor
    count: Tensor

    @staticmethod
    def zero(device: torch.device | str = "cpu") -> Ratio:
        return Ratio(torch.zeros((), device=device), torch.zeros((), device=device))

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.sum + other.sum, self.count + other.count)

    def detach(self) -> Ratio:
        return Ratio(self.sum.detach().float(), self.count.detach().float())

    def value(self) -> Tensor:
        """sum / count; NaN where nothing was counted, so that an empty metric can't look like a good one."""
        return self.sum / self.count
