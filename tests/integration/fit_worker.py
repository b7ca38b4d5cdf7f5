"""One process's part of a training run on a tiny target; started by the tests, alone or by torchrun.

    fit_worker.py FOLDER JSON

JSON: "train", changes of the recipe's train section; "sgd", plain gradient steps; "noise", of the head's input;
"sigterm", [process, step] to be signalled; "slow_save", the step whose checkpoint is never done writing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tiny_training as tt
import torch

from drafters.batch import TrainBatch
from drafters.heads.eagle import EagleConfig
from drafters.recipe import TrainSection
from drafters.training import checkpoint


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)

    class Signalled(tt.Rows):
        def window(self, step: int) -> list[TrainBatch]:
            if [self.rank, step] == options.get("sigterm"):
                os.kill(os.getpid(), signal.SIGTERM)
            return super().window(step)

    write = checkpoint.write_manifest

    def write_slowly(path: Path, progress: checkpoint.Progress) -> None:
        if progress.step == options.get("slow_save"):
            (folder / "saving").touch()
            time.sleep(600)
        write(path, progress)

    checkpoint.write_manifest = write_slowly

    def optimizer_for(module: Any, section: TrainSection) -> torch.optim.Optimizer:
        return tt.plain_sgd(module, section) if options.get("sgd") else tt.make_optimizer(module, section)

    def evaluate(drafter: Any) -> dict[str, float]:
        return {"tau": 1.0}

    recipe = tt.make_recipe(folder, EagleConfig(noise=options.get("noise", 0.2)), **options["train"])
    heldout = tuple(tt.make_row(row) for row in (1000, 1001, 1002))
    outcome = tt.train(
        folder, recipe, loader=Signalled, heldout=heldout, optimizer_for=optimizer_for, evaluate=evaluate
    )
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"complete": outcome.complete, "weights": outcome.weights}, folder / "outcome.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
