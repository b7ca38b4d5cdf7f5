"""The training loop: evaluation, checkpoints and clean stops around `Stepper.run`."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import nn

from drafters.batch import TrainBatch
from drafters.features.source import FeatureSource
from drafters.recipe import Recipe, TrainSection
from drafters.run import RunFolder
from drafters.target.adapter import TargetHead
from drafters.training.checkpoint import Checkpoints, Progress
from drafters.training.heldout import Evaluate, evaluation_metrics, mean
from drafters.training.optim import learning_rate, total_steps
from drafters.training.step import Agreement, Stepper, Sums, add_sums
from drafters.training.timing import Clock
from drafters.training.tracking import Tracker

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """Micro-batches as a pure function of the step: this process's share of the same global batch at any world size."""

    @property
    def steps_per_epoch(self) -> int: ...

    def window(self, step: int) -> list[TrainBatch]: ...


def fit(
    recipe: Recipe,
    accelerator: Accelerator,
    run: RunFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    target: TargetHead,
    source: FeatureSource,
    loader: Loader,
    heldout: Sequence[TrainBatch],
    evaluate: Evaluate,
) -> bool:
    """Trains from the newest checkpoint of the run, or from the start, to the end.

    Args:
        recipe: what to do.
        accelerator: the processes.
        run: where checkpoints and metrics go.
        model: a `LossModule`, prepared by the accelerator, as is the optimizer.
        optimizer: see `make_optimizer`.
        target: the frozen target or its vocabulary matrices.
        source: gives batches their features.
        loader: the training data.
        heldout: micro-batches of held-out rows, the same on every process.
        evaluate: drafts with the head it is given, in evaluation mode, and returns alpha_1 .., tau, ..; called on the main process.

    Returns:
        whether the run is complete; false after a SIGTERM, which is answered with a checkpoint.

    Raises:
        ValueError: a damaged checkpoint, no space for one, or a loss that is not finite.
    """
    section = recipe.train
    clock = Clock(accelerator.device)
    checkpoints = Checkpoints(accelerator, run.checkpoints, section.keep_checkpoints)
    resumed = checkpoints.resume()
    progress = resumed or Progress()
    total = total_steps(section, loader.steps_per_epoch)
    tracker = Tracker(recipe, run, main=accelerator.is_main_process, start=progress.step, total=total)
    loop = _Loop(
        section=section,
        stepper=Stepper(accelerator, model, optimizer, target, source, section, clock),
        clock=clock,
        batches=lambda step: [batch.to(accelerator.device) for batch in loader.window(step)],
        evaluation=lambda: evaluation_metrics(accelerator, model, target, source, heldout, evaluate),
        checkpoints=checkpoints,
        tracker=tracker,
        progress=progress,
        total=total,
        saved=resumed.step if resumed else -1,
    )
    model.train()
    with closing(tracker), _sigterm() as received:
        return loop.run(received)


@dataclass
class _Loop:
    """The order of things. `saved` is the step of the newest checkpoint, -1 where there is none."""

    section: TrainSection
    stepper: Stepper
    clock: Clock
    batches: Callable[[int], list[TrainBatch]]
    evaluation: Callable[[], dict[str, float]]
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    total: int
    saved: int

    def run(self, received: list[int]) -> bool:
        for step in range(self.progress.step, self.total):
            with self.clock.step():
                window = self.batches(step)
                agreed = self.stepper.agree(window, stop=bool(received))
                if not agreed.stop:
                    self._train(step, window, agreed)
            if agreed.stop:
                self._save()
                logger.warning(
                    "SIGTERM: stopped after step %d of %d; the same command goes on from there", step, self.total
                )
                return False
            self._after(step + 1)
        return True

    def _train(self, step: int, window: list[TrainBatch], agreed: Agreement) -> None:
        if agreed.count == 0:
            self._add({"skipped_steps": (1.0, 1.0)})
            self.tracker.advance(math.nan)
            logger.warning("step %d: none of its rows has a token to learn; the step is skipped", step)
            return
        rate = learning_rate(self.section, step, self.total)
        result = self.stepper.run(step, window, agreed.count, rate)
        self.clock.add_tokens(agreed.tokens)
        self._add({**result.sums, "learning_rate": (rate, 1.0), "gradient_norm": (result.gradient_norm, 1.0)})
        self.tracker.advance(result.loss())

    def _add(self, sums: Sums) -> None:
        self.progress.sums = add_sums(self.progress.sums, sums)

    def _after(self, done: int) -> None:
        """Log line, evaluation and checkpoint, where they are due after `done` steps."""
        self.progress.step = done
        if self._due(self.section.log_every) or done == self.total:
            self._log()
        if self._due(self.section.eval_every):
            self.tracker.log(done, self.evaluation())
        if self._due(self.section.save_every) or done == self.total:
            self._save()

    def _due(self, every: int) -> bool:
        """At each multiple and at the end; never where `every` is 0."""
        done = self.progress.step
        return every > 0 and (done % every == 0 or done == self.total)

    def _log(self) -> None:
        """Means since the last log line."""
        sums = dict(self.progress.sums)
        skipped, _ = sums.pop("skipped_steps", (0.0, 0.0))
        metrics = {f"train/{name}": mean(pair) for name, pair in sums.items()}
        self.tracker.log(self.progress.step, {**metrics, "train/skipped_steps": skipped, **self.clock.read()})
        self.progress.sums = {}

    def _save(self) -> None:
        if self.saved != self.progress.step:
            self.checkpoints.save(self.progress)
            self.saved = self.progress.step


@contextmanager
def _sigterm() -> Iterator[list[int]]:
    """A list that a SIGTERM puts an entry in, in place of killing the process."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
