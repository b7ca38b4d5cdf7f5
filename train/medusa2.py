#!/usr/bin/env python
"""Trains Medusa heads and the target together (Medusa-2). The target changes: a new one is written beside the heads.

accelerate launch train/medusa2.py RECIPE [key=value ...]
accelerate launch --config_file recipes/accelerate/ddp.yaml train/medusa2.py RECIPE [key=value ...]

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
from drafters.recipe_file import load_recipe
from drafters.target.info import load_tokenizer
from drafters.training.fit import fit
from drafters.training.launch import make_accelerator, make_drafter, open_run, require_kind
from drafters.training.optim import total_steps
from drafters.training.tuned import Bare, TunedModule, load_tuned_target, make_tuned_optimizer, save_tuned


def main() -> None:
    recipe = load_recipe(sys.argv[1:])
    require_kind(recipe, "medusa")
    accelerator = make_accelerator(recipe.train)
    run = open_run(recipe, accelerator, sys.argv, tunes=True)

    tokenizer = load_tokenizer(recipe.target)
    data = load_rows(recipe.data, tokenizer)
    target = load_tuned_target(recipe.target, recipe.tune, accelerator.device, recipe.train.seed)
    counts_V = count_tokens(data.train.documents, target.info.vocab_size)
    drafter = make_drafter(recipe, target, accelerator.device, counts_V)
    loader = StepLoader(data.train, recipe.train, rank=accelerator.process_index, world=accelerator.num_processes)
    heldout = in_batches(data.heldout, recipe.train.micro_batch_size, recipe.eval.num_rows)
    prompts = load_prompts(recipe.eval, data.heldout_conversations, tokenizer, max_tokens=recipe.data.max_length)

    section = recipe.train
    calls_per_step = section.batch_size // (section.micro_batch_size * accelerator.num_processes)
    ramp_calls = total_steps(section, loader.steps_per_epoch) * calls_per_step
    module = TunedModule(drafter, target, recipe.tune, ramp_calls)
    model, optimizer = accelerator.prepare(module, make_tuned_optimizer(module, section, recipe.tune))
    if accelerator.is_main_process:
        run.record(data=data.key, target=asdict(target.info), processes=accelerator.num_processes)
    complete = fit(
        recipe, accelerator, run, model, optimizer, target, Bare(), loader, heldout,
        evaluate=lambda head: loop_metrics(target, head, [prompt.ids for prompt in prompts], recipe.eval),
    )  # fmt: skip
    if complete:
        extra = {"data": data.key, "run": run.path.name}
        save_tuned(accelerator, module, target, tokenizer, recipe, run.path, extra)
        accelerator.print(
            f"\nThe target has changed: the new one is {run.path / 'target'}, its heads are in {run.head}. Next:"
        )
        accelerator.print(f"  python eval/alpha.py {run.path} --target {run.path / 'target'}")


if __name__ == "__main__":
    log.run_main(main)
