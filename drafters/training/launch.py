"""What a training script sets up before the loop: processes and precision, the head."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor

from drafters import log
from drafters.heads.base import Drafter, load_head
from drafters.recipe import Recipe, TrainSection, find_drafter
from drafters.run import RunFolder
from drafters.target.adapter import TargetHead

# Kinds of heads with a script of their own; train/head.py takes all.
KINDS = ("eagle", "medusa")
# Other processes wait for the main one while it reads data and drafts on prompts.
TIMEOUT = timedelta(hours=3)


def require_kind(recipe: Recipe, kind: str) -> None:
    """Refuses a recipe whose drafter is not of a script's kind: its type's name must begin with it.

    Raises:
        ValueError: it is not; the message names the script to use.
    """
    name = _name(recipe)
    if name.startswith(kind):
        return
    script = next((known for known in KINDS if name.startswith(known)), "head")
    raise ValueError(
        f"train/{kind}.py trains heads of the kind {kind!r}, but the recipe's drafter.type is {recipe.drafter.type!r}; "
        f"run train/{script}.py with this recipe"
    )


def _name(recipe: Recipe) -> str:
    return str(recipe.drafter.type).rpartition(".")[2]


def make_accelerator(section: TrainSection) -> Accelerator:
    """The processes that the launcher started, in the recipe's precision.

    bfloat16 is autocast over float32 weights. Accumulation is counted by the loop and not by accelerate, since the
    loss is divided by the step's count of positions.
    """
    several = "LOCAL_RANK" in os.environ
    # accelerate chooses the backend, but for DeepSpeed without a GPU.
    backend = "gloo" if several and not torch.accelerator.is_available() else None
    accelerator = Accelerator(
        mixed_precision="bf16" if section.precision == "bfloat16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=TIMEOUT)],
    )
    if accelerator.device.type == "cpu" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        # The launcher gives each process one thread where the user has not said how many.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(torch.get_num_threads(), cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = section.micro_batch_size
        plugin.deepspeed_config["gradient_clipping"] = section.clip_norm
    return accelerator


def open_run(recipe: Recipe, accelerator: Accelerator, argv: Sequence[str], *, tunes: bool = False) -> RunFolder:
    """The run's folder, made or reopened by the main process, which alone shows messages from here on.

    Raises:
        ValueError: the folder holds another run, or the recipe tunes the target and the script does not, or the reverse.
    """
    if tunes != (recipe.tune.lora_rank > 0):
        raise ValueError(
            f"tune.lora_rank is {recipe.tune.lora_rank}; train/medusa2.py tunes the target and wants it above 0, all other "
            "scripts leave the target as it is and want 0"
        )
    log.setup(accelerator.is_main_process)
    if accelerator.is_main_process:
        RunFolder.open(recipe, argv)
    accelerator.wait_for_everyone()
    return RunFolder(Path(recipe.output.folder))


def announce(accelerator: Accelerator, run: RunFolder) -> None:
    """Says where the head is and what one does with it next."""
    accelerator.print(f"\nThe trained head is in {run.head}. Next:")
    accelerator.print(f"  python eval/alpha.py {run.path}      acceptance, alpha(k) and tau, on held-out prompts")
    accelerator.print(
        f"  python eval/speed.py {run.path}      tokens per second against plain decoding, and which K pays"
    )


def make_drafter(
    recipe: Recipe, target: TargetHead, device: torch.device | str, counts_V: Tensor | None = None
) -> Drafter:
    """The recipe's head: new, from the target, or with the weights of train.warm_start.

    Args:
        counts_V: how often each token is to be learned in the training data, for heads with a vocabulary of their own.

    Raises:
        ValueError: the weights to start from are of another target or do not fit the recipe's drafter, or eval.tree is
            deeper than the drafter drafts.
    """
    torch.manual_seed(recipe.train.seed)
    drafter: Drafter = find_drafter(recipe.drafter.type)(recipe.drafter, target.info)
    if 0 < drafter.max_depth < recipe.eval.tree.max_depth():
        raise ValueError(
            f"eval.tree is {recipe.eval.tree.max_depth()} deep, but this {recipe.drafter.type} drafts no deeper than "
            f"{drafter.max_depth}; lower eval.tree.depth"
        )
    if counts_V is not None:
        drafter.set_vocabulary(counts_V)
    drafter.init_from(target)
    if recipe.train.warm_start:
        _start_from(drafter, recipe.train.warm_start)
    return drafter.to(device).train()


def _start_from(drafter: Drafter, folder: str) -> None:
    weights = load_head(folder, drafter.info).state_dict()
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"train.warm_start: the head in {folder} does not fit the recipe's drafter (type {drafter.config.type!r}); give "
            f"the drafter section the sizes of that head: {error}"
        ) from error
