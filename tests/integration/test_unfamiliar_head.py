"""A head from outside the project (tests/outside/gru.py): trained, decoded with, evaluated; refused by export."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest

RECIPE = """\
target: {path: overridden, dtype: float32}
drafter: {type: outside.gru, steps: 3, loss: kl}
data: {train: [overridden], heldout_fraction: 0.2, max_length: 128}
train: {max_steps: 60, batch_size: 4, micro_batch_size: 4, learning_rate: 5e-3, log_every: 5, eval_every: 30, save_every: 30}
eval: {num_prompts: 3, max_new_tokens: 16, tree: {kind: chain, depth: 3}}
output: {folder: overridden}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfamiliar")
    commands.make_inputs(folder)
    (folder / "gru.yaml").write_text(RECIPE)
    commands.run(
        commands.launched("train/head.py", str(folder / "gru.yaml"), *commands.overrides(folder, "run")),
    )
    return folder / "run"


def test_it_learns(run: Path) -> None:
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in logged if "train/loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert any("tau" in name for line in logged for name in line), "the loop's own metric is there, too"


def test_the_loop_drafts_with_it_and_stays_lossless(run: Path) -> None:
    commands.run(commands.python("eval/lossless.py", str(run), "--num-prompts", "3", "--tree", "chain", "dynamic"))
    commands.run(commands.python("eval/alpha.py", str(run), "--temperature", "0", "1"))
    report = json.loads((run / "report/report.json").read_text())
    assert [len(measured["alpha"]) for measured in report["alpha"]["runs"]] == [3, 3]
    assert report["head"]["type"] == "outside.gru"


def test_no_serving_format_takes_it_and_that_is_said(run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    said = commands.run(commands.python("scripts/export_vllm.py", str(run), "--out", out), status=2)
    assert "no export format holds a head of type 'outside.gru'" in said
