"""One optimizer step over the micro-batches of all processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from drafters.batch import TrainBatch
from drafters.features.source import FeatureSource
from drafters.recipe import TrainSection
from drafters.target.adapter import TargetHead
from drafters.training.optim import set_learning_rate
from drafters.training.timing import Clock
from drafters.training.wrapping import Pairs, bare_drafter

Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class StepResult:
    """(sum, count) of the loss and the metrics over all processes, and the gradient's norm before clipping."""

    sums: Sums
    gradient_norm: float

    def loss(self) -> float:
        total, count = self.sums["loss"]
        return total / count


@dataclass(frozen=True)
class Agreement:
    """Over all processes: positions in the step's loss, tokens of its rows, and whether any process was told to stop."""

    count: float
    tokens: float
    stop: bool


class Stepper:
    """Takes steps whose gradient is that of (sum of losses / count of positions) over the whole global batch.

    So the same rows give the same step however they are spread over processes and micro-batches.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        target: TargetHead,
        source: FeatureSource,
        section: TrainSection,
        clock: Clock,
    ) -> None:
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._target = target
        self._source = source
        self._section = section
        self._clock = clock

    def agree(self, window: Sequence[TrainBatch], stop: bool) -> Agreement:
        """What all processes must know alike before a step; its counts come from the masks alone."""
        drafter = bare_drafter(self._accelerator, self._model)
        count = torch.stack([drafter.count(batch) for batch in window]).sum().double()
        tokens = torch.stack([(batch.document_BT >= 0).sum() for batch in window]).sum().double()
        facts = torch.stack([count, tokens, count.new_tensor(float(stop))])
        total, tokens_all, stops = self._accelerator.reduce(facts, "sum").tolist()
        return Agreement(total, tokens_all, stops > 0)

    def run(self, step: int, window: Sequence[TrainBatch], count: float, rate: float) -> StepResult:
        """One step.

        Args:
            step: which, from 0; the noise follows from it.
            window: this process's micro-batches, at least one, on its device.
            count: positions in the loss over all processes, from `agree`; not 0.
            rate: the learning rate.

        Raises:
            ValueError: the loss or the gradient is not finite; the optimizer has not seen it (with DeepSpeed it has).
        """
        set_learning_rate(self._optimizer, rate)
        # DDP and its kin average over processes, what is wanted is the sum.
        scale = self._accelerator.num_processes / count
        outputs = [
            self._micro_step(step, index, batch, scale, last=index == len(window) - 1)
            for index, batch in enumerate(window)
        ]
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._section.clip_norm)
        sums = reduce_sums(self._accelerator, outputs)
        result = StepResult(sums, math.nan if norm is None else float(norm))
        if not math.isfinite(sums["loss"][0]) or (norm is not None and not math.isfinite(result.gradient_norm)):
            raise ValueError(self._not_finite(step, result, outputs))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return result

    def _micro_step(self, step: int, index: int, batch: TrainBatch, scale: float, *, last: bool) -> Pairs:
        accelerator = self._accelerator
        accelerator.sync_gradients = last
        with nullcontext() if last else accelerator.no_sync(self._model):
            with self._clock.section("target"):
                batch = self._source.attach(batch)
            seed_step(self._section.seed, step, accelerator.process_index, index)
            with self._clock.section("forward"):
                output = self._model(batch, self._target)
            with self._clock.section("backward"):
                accelerator.backward(output["loss"][0] * scale)
        return {name: (total.detach(), count.detach()) for name, (total, count) in output.items()}

    def _not_finite(self, step: int, result: StepResult, outputs: Sequence[Pairs]) -> str:
        size = self._section.micro_batch_size
        bad = [index for index, output in enumerate(outputs) if not torch.isfinite(output["loss"][0])]
        rows = ", ".join(f"{index * size} to {index * size + size - 1}" for index in bad)
        where = f"in rows {rows} of the step's rows on this process" if bad else "but not in this process's rows"
        return (
            f"step {step}, process {self._accelerator.process_index}: loss {result.loss()}, gradient norm "
            f"{result.gradient_norm}, {where}; the run is stopped before the weights take it in. Lower "
            "train.learning_rate or train.clip_norm, or look at these rows; the same command goes on from the last checkpoint"
        )


def seed_step(seed: int, step: int, process: int, index: int) -> None:
    """Makes noise a pure function of where in the run it is drawn: resuming needs no generator's state."""
    digest = hashlib.sha256(f"{seed}/{step}/{process}/{index}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def reduce_sums(accelerator: Accelerator, outputs: Sequence[Pairs]) -> Sums:
    """Adds up pairs over micro-batches and processes; waits for the device once."""
    names = list(outputs[0])
    rows = [torch.stack([part for name in names for part in output[name]]).double() for output in outputs]
    totals = accelerator.reduce(torch.stack(rows).sum(0), "sum").tolist()
    return {name: (totals[2 * i], totals[2 * i + 1]) for i, name in enumerate(names)}


def add_sums(first: Sums, second: Sums) -> Sums:
    """Adds pairs by name; a name that only one of them has keeps its pair."""
    joined = dict(first)
    for name, (total, count) in second.items():
        before = first.get(name, (0.0, 0.0))
        joined[name] = (before[0] + total, before[1] + count)
    return joined
