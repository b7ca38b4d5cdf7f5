"""From chats to a report with the commands that users type, on a tiny target."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import commands
import pytest
import tiny
import yaml
from safetensors.torch import load_file

from drafters.training.checkpoint import complete_steps

KINDS = {"eagle": "recipes/tiny_eagle.yaml", "medusa": "recipes/tiny_medusa.yaml"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    commands.make_inputs(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path, str]:
    """A kind of head, its run folder and what its training printed."""
    kind = request.param
    arguments = [KINDS[kind], *commands.overrides(folder, kind, output__wandb="offline")]
    return kind, folder / kind, commands.run(commands.launched(f"train/{kind}.py", *arguments))


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_training_leaves_a_head_metrics_and_where_they_come_from(trained: tuple[str, Path, str]) -> None:
    kind, run, printed = trained
    assert f"python eval/alpha.py {run}" in printed
    assert json.loads((run / "head/config.json").read_text())["type"] == kind
    lines = metrics(run)
    assert [line["step"] for line in lines] == [5, 10, 10, 15, 20, 20]
    learnt = [line["train/loss"] for line in lines if "train/loss" in line]
    assert learnt[-1] < 0.8 * learnt[0]
    # The loop's metrics and the cheap ones have names of their own.
    assert {"eval/alpha_1", "eval/tau", "heldout/loss"} <= lines[-1].keys()
    assert not any(name.startswith(("train/alpha", "heldout/alpha", "heldout/tau")) for line in lines for name in line)
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["git_revision"] and provenance["data"]
    assert provenance["target"]["weights_hash"] and provenance["target"]["tokenizer_hash"]
    assert provenance["argv"][1] == KINDS[kind]
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["betas"] == [0.9, 0.95]
    assert list((run / "wandb").glob("offline-run-*"))


def test_the_same_command_again_trains_nothing(trained: tuple[str, Path, str], folder: Path) -> None:
    kind, run, _ = trained
    before = load_file(run / "head/model.safetensors"), metrics(run)
    commands.run(commands.launched(f"train/{kind}.py", str(run / "recipe.yaml")))
    after = load_file(run / "head/model.safetensors"), metrics(run)
    assert before[1] == after[1]
    assert all((before[0][name] == after[0][name]).all() for name in before[0])


def test_evaluation_measures_and_reports(trained: tuple[str, Path, str]) -> None:
    _, run, _ = trained
    few = ("--num-prompts", "2", "--max-new-tokens", "12")
    alpha = commands.run(commands.python("eval/alpha.py", str(run), *few, "--temperature", "0", "1"))
    assert "alpha" in alpha and "tau" in alpha
    lossless = commands.run(commands.python("eval/lossless.py", str(run), *few, "--tree", "chain", "dynamic", "static"))
    assert lossless.count("greedy output identical: 2 of 2") >= 3
    speed = commands.run(commands.python("eval/speed.py", str(run), *few, "--repeats", "1", "--best"))
    assert "tokens/s" in speed
    report = json.loads((run / "report/report.json").read_text())
    assert [row["sampling"]["temperature"] for row in report["alpha"]["runs"]] == [0.0, 1.0]
    for row in report["alpha"]["runs"]:
        for entry in row["alpha"]:
            assert 0 <= entry["low"] <= entry["rate"] <= entry["high"] <= 1 and entry["reached"] > 0
    assert report["alpha"]["provenance"]["versions"]["transformers"] and report["alpha"]["settings"]["prompts"]["hash"]
    assert {"alpha", "lossless", "speed"} <= report.keys()
    first, *others = report["speed"]["runs"]
    best, depth = first["cost"]["best_depth"], first["tree"]["depth"]
    assert [other["tree"]["depth"] for other in others] == ([best] if best not in (0, depth) else [])
    assert (run / "report/alpha.svg").read_text().lstrip().startswith("<?xml")
    assert "alpha(k)" in (run / "report/report.md").read_text()


def test_a_head_for_another_target_is_refused_by_name(trained: tuple[str, Path, str], tmp_path: Path) -> None:
    _, run, _ = trained
    tiny.save_target(tmp_path / "wide", hidden_size=96)
    printed = commands.run(commands.python("eval/alpha.py", str(run), "--target", str(tmp_path / "wide")), status=2)
    assert "hidden size 64" in printed and "hidden size 96" in printed and "Traceback" not in printed


@pytest.mark.dist
def test_two_processes_train_as_one(trained: tuple[str, Path, str], folder: Path) -> None:
    kind, run, _ = trained
    arguments = [KINDS[kind], *commands.overrides(folder, f"{kind}_two")]
    commands.run(commands.launched(f"train/{kind}.py", *arguments, processes=2))
    one, two = metrics(run), metrics(folder / f"{kind}_two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for first, second in zip(one, two, strict=True):
        for name in ("train/loss", "heldout/loss", "eval/tau"):
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=2e-3), name


def test_sigterm_is_answered_with_a_checkpoint_and_going_on_gives_the_same_head(folder: Path) -> None:
    long = {"train__max_steps": 120, "train__log_every": 1, "train__eval_every": 0, "train__save_every": 0}
    recipe = KINDS["eagle"]
    whole, stopped = (
        commands.python("train/head.py", recipe, *commands.overrides(folder, run, **long))
        for run in ("whole", "stopped")
    )
    commands.run(whole)
    with commands.started(stopped) as process:
        deadline = time.monotonic() + commands.LIMIT_S
        lines = folder / "stopped/metrics.jsonl"
        while not (lines.exists() and lines.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    (saved,) = complete_steps(folder / "stopped/checkpoints")
    assert saved.name != "step-000120", "the signal came in the middle"
    (folder / "stopped/checkpoints/.tmp-1-step-000500").mkdir()
    commands.run(stopped)
    assert not (folder / "stopped/checkpoints/.tmp-1-step-000500").exists(), "what killed writers left is swept"
    first, second = (load_file(folder / run / "head/model.safetensors") for run in ("whole", "stopped"))
    assert all((first[name] == second[name]).all() for name in first)


def test_a_damaged_checkpoint_is_named(trained: tuple[str, Path, str], tmp_path: Path) -> None:
    kind, run, _ = trained
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (weights,) = (copy / "checkpoints/step-000020").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    printed = commands.run(
        commands.python(f"train/{kind}.py", str(copy / "recipe.yaml"), f"output.folder={copy}"), status=2
    )
    assert "is damaged" in printed and weights.name in printed and "delete the folder" in printed


FAULTS = {
    "data": ("data.train", "[{folder}/none.jsonl]", "none.jsonl"),
    "target": ("target.path", "{folder}/nowhere", "nowhere"),
    "field": ("train.learning_rat", "1", "learning_rate"),
    "depth": ("eval.tree.depth", "0", "at least 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_one_message_without_a_traceback(folder: Path, fault: str) -> None:
    name, value, said = FAULTS[fault]
    arguments = commands.overrides(folder, f"fault_{fault}", **{name.replace(".", "__"): value.format(folder=folder)})
    printed = commands.run(commands.python("train/eagle.py", KINDS["eagle"], *arguments), status=2)
    assert said in printed and "Traceback" not in printed


def test_data_with_nothing_to_learn_or_a_broken_row_is_refused_by_row(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    rows = (folder / "chats.jsonl").read_text().splitlines()
    (tmp_path / "broken.jsonl").write_text("\n".join([*rows[:3], '{"messages": [', *rows[3:]]) + "\n")
    for file, said in (("empty.jsonl", "empty.jsonl"), ("broken.jsonl", "broken.jsonl row 4")):
        arguments = commands.overrides(folder, file, data__train=f"[{tmp_path / file}]")
        printed = commands.run(commands.python("train/eagle.py", KINDS["eagle"], *arguments), status=2)
        assert said in printed and "Traceback" not in printed
    skipping = commands.overrides(
        folder, "skipping", data__train=f"[{tmp_path / 'broken.jsonl'}]", data__broken_rows="skip", train__max_steps=1
    )
    assert "skipped 1" in commands.run(commands.python("train/eagle.py", KINDS["eagle"], *skipping))


def test_a_script_names_the_one_for_another_kind_and_a_tree_too_deep_is_refused_at_once(folder: Path) -> None:
    arguments = commands.overrides(folder, "wrong")
    printed = commands.run(commands.python("train/eagle.py", KINDS["medusa"], *arguments), status=2)
    assert "run train/medusa.py" in printed
    printed = commands.run(
        commands.python("train/medusa.py", KINDS["medusa"], *arguments, "eval.tree.depth=4"), status=2
    )
    assert "eval.tree is 4 deep" in printed and "no deeper than 3" in printed
