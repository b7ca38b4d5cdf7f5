"""Where metrics go: metrics.jsonl always, wandb when the recipe says so, a progress bar on the main process."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafters.recipe import Recipe
from drafters.run import RunFolder


class Tracker:
    """Writes on the main process, does nothing on the others.

    Args:
        recipe: what to track by and as.
        run: the run's folder.
        main: whether this is the main process.
        start: steps done already; what metrics.jsonl says of later ones is dropped, they are about to come again.
        total: steps of the whole run.
    """

    def __init__(self, recipe: Recipe, run: RunFolder, *, main: bool, start: int, total: int) -> None:
        self._file: Any = None
        self._wandb: Any = None
        self._bar: Any = None
        if not main:
            return
        keep_up_to(run.metrics_file, start)
        self._file = run.metrics_file.open("a", encoding="utf-8")
        if recipe.output.wandb != "off":
            self._wandb = _start_wandb(recipe, run)
        self._bar = tqdm(total=total, initial=start, desc="train", unit="step", dynamic_ncols=True)

    def advance(self, loss: float) -> None:
        """One step done."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of metrics.jsonl: {"step": steps done, name: value}; a number that is not finite is null."""
        if self._file is None:
            return
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._file is not None:
            self._file.close()


def keep_up_to(path: Path, step: int) -> None:
    """Drops the lines of later steps, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["step"] <= step:
            kept.append(line + "\n")
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _start_wandb(recipe: Recipe, run: RunFolder) -> Any:
    """One wandb run for the folder, however often it is resumed."""
    import wandb

    id_file = run.path / "wandb_id.txt"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    return wandb.init(
        project=recipe.output.wandb_project,
        mode="offline" if recipe.output.wandb == "offline" else "online",
        name=run.path.name,
        id=id_file.read_text(),
        resume="allow",
        dir=run.path,
        config=asdict(recipe),
    )
