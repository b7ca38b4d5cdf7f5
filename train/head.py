#!/usr/bin/env python
"""Trains a head of any kind on a frozen target, also one from outside (drafter.type: package.module).

accelerate launch train/head.py RECIPE [key=value ...]
accelerate launch --config_file recipes/accelerate/ddp.yaml train/head.py RECIPE [key=value ...]

The same command again goes on from the newest checkpoint.
"""

import sys
from dataclasses import asdict

from drafters import log
from drafters.data.dataset import load_rows
from drafters.data.loader import StepLoader, in_batches
from drafters.data.vocab import count_tokens
from drafters.evaluation.measure import loop_metrics
from drafters.evaluation.prompts import load_prompts
from drafters.features.source import OnlineFeatures
from drafters.recipe_file import load_recipe
from drafters.target.hf import load_target
from drafters.target.info import load_tokenizer
from drafters.training.fit import fit
from drafters.training.launch import announce, make_accelerator, make_drafter, open_run
from drafters.training.optim import make_optimizer
from drafters.training.wrapping import LossModule, save_trained


def main() -> None:
    recipe = load_recipe(sys.argv[1:])
    accelerator = make_accelerator(recipe.train)
    run = open_run(recipe, accelerator, sys.argv)

    tokenizer = load_tokenizer(recipe.target)
    data = load_rows(recipe.data, tokenizer)
    target = load_target(recipe.target, accelerator.device)
    counts_V = count_tokens(data.train.documents, target.info.vocab_size)
    drafter = make_drafter(recipe, target, accelerator.device, counts_V)
    source = OnlineFeatures(target, drafter.feature_layers)
    loader = StepLoader(data.train, recipe.train, rank=accelerator.process_index, world=accelerator.num_processes)
    heldout = in_batches(data.heldout, recipe.train.micro_batch_size, recipe.eval.num_rows)
    prompts = load_prompts(recipe.eval, data.heldout_conversations, tokenizer, max_tokens=recipe.data.max_length)

    module = LossModule(drafter, recompute=recipe.train.gradient_checkpointing)
    model, optimizer = accelerator.prepare(module, make_optimizer(module, recipe.train))
    if accelerator.is_main_process:
        run.record(data=data.key, target=asdict(target.info), processes=accelerator.num_processes)
    complete = fit(
        recipe, accelerator, run, model, optimizer, target, source, loader, heldout,
        evaluate=lambda head: loop_metrics(target, head, [prompt.ids for prompt in prompts], recipe.eval),
    )  # fmt: skip
    if complete:
        save_trained(accelerator, model, run.head, extra={"data": data.key, "run": run.path.name})
        announce(accelerator, run)


if __name__ == "__main__":
    log.run_main(main)
