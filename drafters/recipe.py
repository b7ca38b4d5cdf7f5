"""A run's recipe: every setting as a frozen dataclass, read from YAML, validated once."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


class RecipeError(ValueError):
    """A recipe with faults; the message lists all of them."""


@dataclass(frozen=True)
class TargetSection:
    """The frozen LLM.

    path: a folder, or a hub id. placement: "replicate" gives each process a whole copy, "split" lays the
    blocks of one copy over the GPUs that the process sees.
    """

    path: str
    revision: str = "main"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["sdpa", "eager"] = "sdpa"
    placement: Literal["replicate", "split"] = "replicate"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class DataSection:
    """Conversations and how they become rows.

    train, heldout: JSON or JSONL files, folders of them, saved datasets, or hub ids of datasets. Where heldout is empty,
    heldout_fraction of the conversations of train is kept apart. limit: most conversations to read, 0 for all.
    """

    train: tuple[str, ...]
    heldout: tuple[str, ...] = ()
    heldout_fraction: float = 0.02
    max_length: int = 2048
    too_long: Literal["truncate", "drop", "stop"] = "truncate"
    broken_rows: Literal["stop", "skip"] = "stop"
    packing: bool = True
    limit: int = 0
    seed: int = 0
    cache_folder: str = ".cache/datasets"


@dataclass(frozen=True)
class TrainSection:
    """The optimizer and the loop.

    batch_size: rows per optimizer step over all processes; micro_batch_size: rows per forward of one process; what
    lies between is accumulated, so the same recipe gives the same steps on any number of processes.
    max_steps: ends the run early and sets the schedule's length; 0 leaves both to epochs. eval_every, save_every: steps
    between evaluations and between checkpoints; 0 evaluates never and saves at the end only.
    """

    epochs: float = 1.0
    max_steps: int = 0
    batch_size: int = 8
    micro_batch_size: int = 1
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.2
    final_learning_rate_fraction: float = 0.1
    clip_norm: float = 0.5
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    warm_start: str = ""
    seed: int = 0
    log_every: int = 10
    eval_every: int = 200
    save_every: int = 200
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class TuneSection:
    """Medusa-2: the target learns together with its heads, and is another model afterwards; train/medusa2.py only.

    lora_rank: of the adapters; 0 leaves the target as it is. layers: names of the linear layers that get one. rate: learning
    rate of the adapters, as a share of the heads'. ramp: how drafter.loss_weight grows over the run; "constant" after the
    heads were trained alone (train.warm_start), "sine" for both at once.
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.05
    layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    rate: float = 0.25
    ramp: Literal["constant", "sine"] = "constant"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the meaning and the order of transformers' `generate`. temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class TreeSection:
    """The draft tree.

    kind: "chain" of `depth` nodes; "static", the listed paths of ranks, such as [[0], [1], [0, 0]]; "dynamic" (EAGLE-2), `depth`
    levels that each expand the `width` best nodes, of which the `nodes` best are kept.
    """

    kind: Literal["chain", "static", "dynamic"] = "chain"
    depth: int = 4
    width: int = 4
    nodes: int = 16
    paths: tuple[tuple[int, ...], ...] = ()

    def max_depth(self) -> int:
        """The deepest level of a tree of this kind."""
        return max(map(len, self.paths), default=0) if self.kind == "static" else self.depth


@dataclass(frozen=True)
class EvalSection:
    """Evaluation on prompts, in training and after it.

    prompts: a file of prompts in the Spec-Bench form (question_id, category, turns), or "" for the first turns of the held-out
    conversations. num_rows: held-out rows that the cheap metrics during training are over. rule: how drafted tokens are
    accepted; "auto" is greedy at temperature 0 and lossless rejection above.
    """

    prompts: str = ""
    num_prompts: int = 16
    num_rows: int = 32
    max_new_tokens: int = 64
    batch_size: int = 1
    tree: TreeSection = field(default_factory=TreeSection)
    sampling: Sampling = field(default_factory=Sampling)
    rule: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class OutputSection:
    """Where the run goes. wandb: "off", or the mode to log with."""

    folder: str
    wandb: Literal["off", "online", "offline"] = "off"
    wandb_project: str = "drafters"


@dataclass(frozen=True)
class Recipe:
    """One run. `drafter` is the `Config` of the class that `drafter.type` names."""

    target: TargetSection
    drafter: Any
    data: DataSection
    output: OutputSection
    train: TrainSection = field(default_factory=TrainSection)
    eval: EvalSection = field(default_factory=EvalSection)
    tune: TuneSection = field(default_factory=TuneSection)


def dump_recipe(recipe: Recipe, path: Path | str) -> None:
    """Writes the whole recipe, defaults included, as YAML that loads to the same recipe."""
    Path(path).write_text(yaml.safe_dump(_plain(asdict(recipe)), sort_keys=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def find_drafter(type_name: str) -> Any:
    """The drafter class of a type: of `drafters.heads.NAME`, or of a dotted module anywhere.

    Raises:
        ValueError: no such module, or not exactly one drafter class in it.
    """
    module_name = type_name if "." in type_name else f"drafters.heads.{type_name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        close = difflib.get_close_matches(type_name, drafter_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(drafter_names())}, or a dotted module"
        raise ValueError(f"unknown drafter type {type_name!r}; {hint}") from error
    classes = _drafter_classes(module)
    if len(classes) != 1:
        found = ", ".join(kind.__name__ for kind in classes) or "none"
        raise ValueError(
            f"drafter type {type_name!r}: {module_name} must define one drafter class with a Config, found {found}"
        )
    return classes[0]


def drafter_names() -> list[str]:
    """The types of the heads folder: its modules that define a drafter class."""
    heads = importlib.import_module("drafters.heads")
    names = [module.name for module in pkgutil.iter_modules(heads.__path__)]
    return sorted(name for name in names if _drafter_classes(importlib.import_module(f"drafters.heads.{name}")))


def _drafter_classes(module: Any) -> list[type]:
    """Concrete classes with a Config of their own that the module itself defines."""
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and "Config" in vars(kind) and not inspect.isabstract(kind)
    ]
