"""A whole training run on a tiny target, without files of data: for tests of the loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.features.source import OnlineFeatures
from drafters.heads.base import Drafter
from drafters.heads.eagle import EagleConfig
from drafters.recipe import DataSection, EvalSection, OutputSection, Recipe, TargetSection, TrainSection, TreeSection
from drafters.run import RunFolder
from drafters.target.hf import HFTarget
from drafters.target.info import make_info
from drafters.training.fit import fit
from drafters.training.launch import make_accelerator, make_drafter
from drafters.training.optim import make_optimizer
from drafters.training.wrapping import LossModule, gathered_state

LENGTH = 12


def make_target(**changes: Any) -> HFTarget:
    model = tiny.make_model("llama", num_hidden_layers=2, **changes)
    return HFTarget(
        model, make_info(TargetSection(path="tiny", dtype="float32"), model.config, None, folder=None, revision="")
    )


def make_row(index: int, *, learn: bool = True) -> TrainBatch:
    """A row of its own for each index, of its own length, so that shares of positions are unequal."""
    generator = torch.Generator().manual_seed(index)
    length = LENGTH - index % 5
    position = torch.arange(LENGTH)[None]
    mask = (position >= 2 + index % 3) & (position < length) & learn
    document = torch.where(position < length, 0, -1)
    ids = torch.randint(3, tiny.VOCAB, (1, LENGTH), generator=generator)
    return TrainBatch(ids, mask, document, position.where(document == 0, position - length))


def stack(rows: list[TrainBatch]) -> TrainBatch:
    return TrainBatch(
        *(
            torch.cat([getattr(row, name) for row in rows])
            for name in ("input_ids_BT", "loss_mask_BT", "document_BT", "position_BT")
        )
    )


@dataclass
class Rows:
    """A loader over `make_row`: step s takes rows s * batch_size onwards, each process a run of them."""

    section: TrainSection
    rank: int = 0
    world: int = 1
    empty_steps: tuple[int, ...] = ()
    steps_per_epoch: int = 4
    asked: list[int] = field(default_factory=list)

    def window(self, step: int) -> list[TrainBatch]:
        self.asked.append(step)
        share = self.section.batch_size // self.world
        first = step * self.section.batch_size + self.rank * share
        rows = [make_row(first + i, learn=step not in self.empty_steps) for i in range(share)]
        size = self.section.micro_batch_size
        return [stack(rows[i : i + size]) for i in range(0, share, size)]


def make_recipe(folder: Path, drafter: Any = None, **train: Any) -> Recipe:
    defaults: dict[str, Any] = dict(
        max_steps=4, batch_size=4, micro_batch_size=4, learning_rate=3e-3, log_every=2, eval_every=0, save_every=0
    )
    return Recipe(
        target=TargetSection(path="tiny", dtype="float32"),
        drafter=drafter or EagleConfig(noise=0.2),
        data=DataSection(train=()),
        output=OutputSection(folder=str(folder)),
        train=TrainSection(**{**defaults, **train}),
        eval=EvalSection(tree=TreeSection(depth=2)),
    )


def make_run(folder: Path) -> RunFolder:
    folder.mkdir(parents=True, exist_ok=True)
    return RunFolder(folder)


@dataclass
class Outcome:
    """What a run left."""

    complete: bool
    weights: dict[str, Tensor]
    lines: list[dict[str, Any]]
    drafter: Drafter
    optimizer: Any

    def deterministic_lines(self) -> list[dict[str, Any]]:
        """The metrics without what depends on the machine's speed."""
        timing = ("time/", "train/tokens_per_second")
        return [{k: v for k, v in line.items() if not k.startswith(timing)} for line in self.lines]


def train(
    folder: Path,
    recipe: Recipe,
    *,
    loader: Callable[[TrainSection, int, int], Any] = Rows,
    heldout: tuple[TrainBatch, ...] = (),
    evaluate: Callable[[Drafter], Mapping[str, float]] = lambda drafter: {},
    target: Any = None,
    change: Callable[[Drafter], None] = lambda drafter: None,
    optimizer_for: Callable[[Any, TrainSection], torch.optim.Optimizer] = make_optimizer,
) -> Outcome:
    """One run of `fit` in this process, or this process's part of one."""
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    GradientState._reset_state()
    accelerator = make_accelerator(recipe.train)
    target = target or make_target()
    drafter = make_drafter(recipe, target, accelerator.device)
    change(drafter)
    module = LossModule(drafter, recompute=recipe.train.gradient_checkpointing)
    model, optimizer = accelerator.prepare(module, optimizer_for(module, recipe.train))
    run = make_run(folder)
    complete = fit(
        recipe,
        accelerator,
        run,
        model,
        optimizer,
        target,
        OnlineFeatures(target, drafter.feature_layers),
        loader(recipe.train, accelerator.process_index, accelerator.num_processes),
        heldout,
        evaluate,
    )
    weights = {name: tensor.clone() for name, tensor in gathered_state(accelerator, model).items()}
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return Outcome(complete, weights, lines, drafter, optimizer)


def plain_sgd(module: torch.nn.Module, section: TrainSection) -> torch.optim.Optimizer:
    """Steps that are proportional to the gradient, so that equal weights mean equal gradients."""
    return torch.optim.SGD(module.parameters(), lr=section.learning_rate)


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert first.keys() == second.keys()
    found = max(float((first[name] - second[name]).abs().max()) for name in first)
    assert math.isfinite(found)
    return found


def with_train(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **changes))
