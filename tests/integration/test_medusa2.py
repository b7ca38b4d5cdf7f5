"""train/medusa2.py as users run it: a new target and heads for it, and a run in two parts that equals a run in one."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

RECIPE = str(commands.ROOT / "recipes/tiny_medusa2.yaml")
STEADY = {"train__schedule": "constant", "train__warmup_fraction": 0.0, "train__eval_every": 0, "drafter__num_heads": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa2")
    commands.make_inputs(folder)
    train(folder, "run", train__max_steps=6)
    return folder


def train(folder: Path, run: str, *, script: str = "train/medusa2.py", status: int = 0, **changes: object) -> str:
    settings = commands.overrides(folder, run, **{**STEADY, **changes}, eval__tree__depth=3)
    return commands.run(commands.launched(script, RECIPE, *settings), status=status)


def test_the_new_target_is_a_stock_model_that_differs_and_its_heads_are_for_it(folder: Path) -> None:
    run = folder / "run"
    new, old = (AutoModelForCausalLM.from_pretrained(path) for path in (run / "target", folder / "target"))
    assert new.state_dict().keys() == old.state_dict().keys()
    changed = {name for name, tensor in new.state_dict().items() if not torch.equal(tensor, old.state_dict()[name])}
    assert len(changed) == 2 * 7 and all("_proj" in name for name in changed)
    head = json.loads((run / "head/config.json").read_text())
    assert head["type"] == "medusa" and head["target"]["path"] == str(run / "target")
    said = commands.run(
        commands.python("eval/lossless.py", str(run), "--target", str(run / "target"), "--num-prompts", "2")
    )
    assert "identical: 2 of 2" in said and "was trained on another" not in said
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/kl_to_original"] >= -1e-4 for line in logged if "train/loss" in line)


def test_a_run_in_two_parts_equals_one_in_one(folder: Path) -> None:
    train(folder, "parts", train__max_steps=3)
    train(folder, "parts", train__max_steps=6)
    for file in ("head/model.safetensors", "target/model.safetensors"):
        whole, parts = (load_file(folder / run / file) for run in ("run", "parts"))
        assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items()), file


def test_scripts_that_leave_the_target_alone_refuse_the_recipe_and_the_reverse(folder: Path) -> None:
    for script, rank in (("train/medusa.py", 4), ("train/head.py", 4), ("train/medusa2.py", 0)):
        said = train(folder, "refused", script=script, status=1, tune__lora_rank=rank)
        assert f"tune.lora_rank is {rank}; train/medusa2.py tunes the target" in said
