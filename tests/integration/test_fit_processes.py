"""The training loop in processes of their own: two equal one, kills lose nothing, SIGTERM ends all of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import commands
import pytest
import tiny_training as tt
import torch

from drafters.training.checkpoint import complete_steps

pytestmark = pytest.mark.dist
WORKER = "tests/integration/fit_worker.py"
TRAIN = {"max_steps": 6, "batch_size": 4, "micro_batch_size": 2, "save_every": 2, "log_every": 2}


def command(folder: Path, options: dict[str, Any], *, processes: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (str(folder), json.dumps({"train": TRAIN, **options}))
    if processes == 1:
        return commands.python(WORKER, *arguments)
    return commands.launched(WORKER, *arguments, processes=processes)


def outcome(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "outcome.pt", weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    commands.run(command(folder, {}, processes=1))
    return folder


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    # Without noise, which each process draws for itself, and with plain gradient steps, which hide no factor.
    for processes in (1, 2):
        commands.run(command(tmp_path / str(processes), {"sgd": True, "noise": 0.0}, processes=processes))
    one, two = (outcome(tmp_path / name) for name in ("1", "2"))
    assert tt.distance(one["weights"], two["weights"]) < 1e-6
    lines = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("1", "2")]
    assert len(lines[0]) == len(lines[1])
    for first, second in zip(*lines, strict=True):
        for name in first:
            if not name.startswith(("time/", "train/tokens_per_second")):
                assert second[name] == pytest.approx(first[name], rel=1e-4), name


def test_a_kill_in_mid_save_loses_only_what_was_not_saved(tmp_path: Path, whole: Path) -> None:
    with commands.started(command(tmp_path, {"slow_save": 4}, processes=1)) as process:
        wait_for(tmp_path / "saving")
        os.kill(process.pid, signal.SIGKILL)
    checkpoints = tmp_path / "checkpoints"
    assert [path.name for path in complete_steps(checkpoints)] == ["step-000002"]
    assert any(path.name.startswith(".tmp-") for path in checkpoints.iterdir()), "the half-written one is there"
    commands.run(command(tmp_path, {}, processes=1))
    assert tt.same(outcome(tmp_path)["weights"], outcome(whole)["weights"])


def test_sigterm_to_one_of_two_processes_stops_both_after_the_same_step(tmp_path: Path) -> None:
    commands.run(command(tmp_path / "whole", {}, processes=2))
    stopped = tmp_path / "stopped"
    commands.run(command(stopped, {"sigterm": [1, 3]}, processes=2))
    assert not outcome(stopped)["complete"]
    (last,) = complete_steps(stopped / "checkpoints")[-1:]
    assert last.name in ("step-000003", "step-000004")
    commands.run(command(stopped, {}, processes=2))
    assert outcome(stopped)["complete"]
    assert tt.same(outcome(stopped)["weights"], outcome(tmp_path / "whole")["weights"])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + commands.LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)
