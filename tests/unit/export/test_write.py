"""The folder that is written: its model card, its facts, the serve line; and the scripts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_export as te

from drafters.export.write import export_run
from drafters.heads.base import load_head
from drafters.run import file_hash
from drafters.target.weights import load_target_head

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture
def target(targets: Path) -> Path:
    return te.make_target(targets, "llama")


def write_report(run: Path, *, depth: int, best: int = 0, **changes: Any) -> None:
    """A report as the eval scripts leave it, as far as exports read it."""
    config = json.loads((run / "head" / "config.json").read_text())
    alpha = {
        "tree": {"kind": "chain", "depth": depth},
        "sampling": {"temperature": 0.0},
        "rule": "greedy",
        "max_new_tokens": 64,
        "prompts": 12,
        "alpha": [{"k": 1, "rate": 0.8125, "low": 0.75, "high": 0.875, "accepted": 13, "reached": 16}],
        "tau": {"value": 2.5, "low": 2.25, "high": 2.75, "rounds": 16, "tokens": 40},
    }
    other = {**alpha, "tree": {"kind": "dynamic", "depth": 9}}
    warm = {**alpha, "sampling": {"temperature": 1.0}, "tree": {"kind": "chain", "depth": 8}}
    report = {
        "head": {"weights_hash": file_hash(run / "head" / "model.safetensors")},
        "target": {"weights_hash": config["target"]["weights_hash"]},
        "alpha": {"runs": [other, warm, alpha]},
        "speed": {"runs": [{"cost": {"best_depth": best}}]},
        **changes,
    }
    (run / "report").mkdir()
    (run / "report" / "report.json").write_text(json.dumps(report))


def speculation(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    parsed: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return parsed


@pytest.mark.parametrize(("depth", "best", "expected"), [(5, 0, 5), (5, 2, 2)])
def test_the_serve_line_has_the_reports_draft_length(
    depth: int, best: int, expected: int, target: Path, tmp_path: Path
) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    write_report(run, depth=depth, best=best)
    done = export_run(run, "vllm")
    assert done.command.startswith(f"vllm serve {target} --dtype float32 --speculative-config ")
    assert speculation(done.command) == {
        "method": "eagle",
        "model": str(done.folder),
        "num_speculative_tokens": expected,
    }
    assert done.check.steps == expected


def test_without_a_report_it_is_three(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    assert speculation(export_run(run, "vllm").command)["num_speculative_tokens"] == 3
    assert speculation(export_run(run, "vllm", draft_length=6).command)["num_speculative_tokens"] == 6
    assert "Not measured." in (run / "export" / "vllm" / "README.md").read_text()


def test_medusa_drafts_no_more_than_its_heads(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["medusa_deep"])
    assert speculation(export_run(run, "vllm").command)["num_speculative_tokens"] == 2
    assert speculation(export_run(run, "vllm", draft_length=6).command)["num_speculative_tokens"] == 2
    assert speculation(export_run(run, "vllm", draft_length=1).command)["num_speculative_tokens"] == 1


@pytest.mark.parametrize("part", ["head", "target"])
def test_a_report_on_other_weights_is_not_taken(part: str, target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    write_report(run, depth=5, **{part: {"weights_hash": "other"}})
    done = export_run(run, "vllm")
    assert done.draft_length == 3
    assert "Not measured." in (done.folder / "README.md").read_text()


def test_the_model_card_says_what_was_measured_and_how_to_serve(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    write_report(run, depth=5)
    done = export_run(run, "vllm")
    card = (done.folder / "README.md").read_text()
    assert "| 1 | 0.812 | 0.750 to 0.875 | 16 |" in card
    assert "included: 2.500 (2.250 to 2.750)." in card
    assert "| data hash | abc |" in card
    assert "| steps | 7 |" in card
    assert f"vllm serve {target} --dtype float32" in card
    assert {path.name for path in done.folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "drafters.json",
    }


def test_facts_are_kept(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    write_report(run, depth=5)
    about = json.loads((export_run(run, "vllm").folder / "drafters.json").read_text())
    info = load_target_head(te.section(target)).info
    assert about["target"]["weights_hash"] == info.weights_hash
    assert about["target"]["template_hash"] == info.template_hash
    assert about["facts"]["head_config"]["noise"] == 0.125
    assert about["facts"]["training"] == te.EXTRA
    assert about["facts"]["acceptance"]["tau"]["value"] == 2.5


@pytest.mark.parametrize("word", ["eagle-heads", "Eagle3", "x/dflash", "my_dspark_run"])
def test_vllms_path_trap_is_refused_for_medusa_only(word: str, target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["medusa"])
    with pytest.raises(ValueError, match="vLLM would take the Medusa head in it for another method"):
        export_run(run, "vllm", tmp_path / word)
    other = te.make_run(tmp_path / "other", target, te.HEADS["eagle"])
    assert export_run(other, "vllm", tmp_path / word).folder == tmp_path / word


def test_a_folder_of_something_else_is_not_replaced(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    with pytest.raises(ValueError, match="is not empty and holds no earlier export"):
        export_run(run, "vllm", target)
    assert (target / "tokenizer.json").is_file()
    assert export_run(run, "vllm").folder == export_run(run, "vllm").folder


def test_what_is_not_there_is_said(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a run folder with a finished head"):
        export_run(tmp_path, "vllm")
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    with pytest.raises(
        ValueError, match="there is no export format 'onnx'; there are vllm, speculators, sglang, eagle"
    ):
        export_run(run, "onnx")
    config = json.loads((run / "head" / "config.json").read_text())
    config["target"]["path"] = str(tmp_path / "moved")
    (run / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"moved.+name the target's folder or hub id with --target"):
        export_run(run, "vllm")
    assert str(target) in export_run(run, "vllm", target=str(target)).command


def test_a_target_of_other_weights_is_refused(targets: Path, target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    other = te.make_target(targets, "other_llama")
    with pytest.raises(ValueError, match="is for another target"):
        export_run(run, "vllm", target=str(other))


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )


def test_the_scripts(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    done = script("export_vllm.py", run, "--to", "sglang")
    assert done.returncode == 0, done.stderr
    assert f"wrote {run}/export/sglang\nchecked: draft logits differ by at most" in done.stdout
    assert "--speculative-algorithm EAGLE --speculative-draft-model-path" in done.stdout
    refused = script("export_vllm.py", run, "--to", "speculators")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: the format 'speculators' can't hold this head")
    head = tmp_path / "imported" / "head"
    back = script("import_head.py", run / "export" / "sglang", "--target", target, "--dtype", "float32", "--out", head)
    assert back.returncode == 0, back.stderr
    assert load_head(head, load_target_head(te.section(target)).info).config == te.HEADS["eagle"]
