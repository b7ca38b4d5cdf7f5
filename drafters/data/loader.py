"""Which rows a step trains on: a pure function of the step, so that resuming needs no state of a loader."""

from __future__ import annotations

import numpy as np

from drafters.batch import TrainBatch
from drafters.data.dataset import Rows
from drafters.recipe import TrainSection


class StepLoader:
    """This process's micro-batches of each step; the global batch is the same for any number of processes.

    Every epoch goes once over all rows in an order of its own; what is left over when a batch no longer fills is left out of
    that epoch. Fewer rows than one batch are repeated to fill it.

    Raises:
        ValueError: the batch cannot be shared evenly by the processes, or there are no rows.
    """

    def __init__(self, rows: Rows, section: TrainSection, *, rank: int = 0, world: int = 1) -> None:
        if section.batch_size % world:
            raise ValueError(
                f"train.batch_size is {section.batch_size} rows, which {world} processes cannot share evenly; "
                f"make it a multiple of {world}"
            )
        if not len(rows):
            raise ValueError("there are no rows to train on")
        self._rows = rows
        self._section = section
        self._rank = rank
        self._share = section.batch_size // world

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self._rows) // self._section.batch_size)

    def window(self, step: int) -> list[TrainBatch]:
        """The micro-batches of a step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self._section.seed, epoch]).permutation(len(self._rows))
        first = place * self._section.batch_size + self._rank * self._share
        mine = [int(order[index % len(order)]) for index in range(first, first + self._share)]
        size = self._section.micro_batch_size
        return [self._rows.batch(mine[start : start + size]) for start in range(0, len(mine), size)]


def in_batches(rows: Rows, size: int, limit: int) -> list[TrainBatch]:
    """The first `limit` rows, `size` at a time, the same on every process."""
    count = min(len(rows), limit)
    return [rows.batch(range(start, min(start + size, count))) for start in range(0, count, size)]
