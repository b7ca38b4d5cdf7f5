"""metrics.jsonl, and wandb without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_training as tt

from drafters.training.tracking import Tracker, keep_up_to


def test_lines_are_json_and_later_ones_are_dropped_on_resume(tmp_path: Path) -> None:
    run, recipe = tt.make_run(tmp_path), tt.make_recipe(tmp_path)
    tracker = Tracker(recipe, run, main=True, start=0, total=4)
    for step in (1, 2, 3):
        tracker.log(step, {"a": step / 2, "b": float("nan")})
        assert len(run.metrics_file.read_text().splitlines()) == step, "each line is written at once"
    tracker.close()
    with run.metrics_file.open("a") as stream:
        stream.write('{"step": 4, "a"')
    tracker = Tracker(recipe, run, main=True, start=2, total=4)
    tracker.log(3, {"a": 9.0})
    tracker.close()
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert lines == [{"step": 1, "a": 0.5, "b": None}, {"step": 2, "a": 1.0, "b": None}, {"step": 3, "a": 9.0}]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    run = tt.make_run(tmp_path)
    tracker = Tracker(tt.make_recipe(tmp_path), run, main=False, start=0, total=4)
    tracker.log(1, {"a": 1.0})
    tracker.advance(1.0)
    tracker.close()
    assert not run.metrics_file.exists()


def test_no_metrics_yet(tmp_path: Path) -> None:
    keep_up_to(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_used_when_the_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = tt.make_recipe(tmp_path)
    recipe = replace(recipe, output=replace(recipe.output, wandb="offline"))
    run = tt.make_run(tmp_path)
    ids = []
    for start in (0, 1):
        tracker = Tracker(recipe, run, main=True, start=start, total=2)
        tracker.log(start + 1, {"train/loss": 1.0})
        tracker.close()
        ids.append((tmp_path / "wandb_id.txt").read_text())
    assert ids[0] == ids[1]
    assert list((tmp_path / "wandb").glob(f"offline-run-*{ids[0]}/*.wandb"))
