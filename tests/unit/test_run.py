"""The run folder: whole writes, provenance, and runs that must not be mixed."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from drafters.heads.medusa import MedusaConfig
from drafters.recipe import DataSection, OutputSection, Recipe, TargetSection
from drafters.run import RunFolder, atomic_folder, disk_full, file_hash, write_json_atomic


def recipe(folder: Path) -> Recipe:
    return Recipe(
        TargetSection("somewhere"), MedusaConfig(), DataSection(("chats.jsonl",)), OutputSection(str(folder / "run"))
    )


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    write_json_atomic(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [file]


def test_a_folder_that_fails_halfway_leaves_the_old_one_whole(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "head") as folder:
        (folder / "a").write_text("first")
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "head") as folder:
        (folder / "a").rename(folder / "missing/a")
    assert (tmp_path / "head/a").read_text() == "first" and [path.name for path in tmp_path.iterdir()] == ["head"]
    with atomic_folder(tmp_path / "head") as folder:
        (folder / "b").write_text("third")
    assert [path.name for path in (tmp_path / "head").iterdir()] == ["b"], "a folder is replaced, not merged"


def test_a_full_disk_is_said_with_what_to_do(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"no space left to write .*head: \d+ MiB are free"),
        atomic_folder(tmp_path / "head"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not (tmp_path / "head").exists()
    assert disk_full(RuntimeError("write failed: No space left on device")) and not disk_full(OSError(errno.EACCES, ""))


def test_opening_sweeps_what_killed_writers_left_and_records_where_the_run_came_from(tmp_path: Path) -> None:
    run = RunFolder.open(recipe(tmp_path), ["r.yaml"])
    (run.checkpoints / ".tmp-77-step-5").mkdir()
    (run.path / ".tmp-77-facts.json").write_text("half")
    RunFolder.open(recipe(tmp_path), ["r.yaml", "train.epochs=2"])
    assert not list(run.path.rglob(".tmp-*"))
    facts = json.loads(run.provenance_file.read_text())
    assert facts["argv"] == ["r.yaml", "train.epochs=2"]
    assert {"torch", "transformers", "drafters"} <= set(facts["versions"]) and facts["python"]
    run.record(data_hash="abc")
    assert {"argv", "data_hash"} <= set(json.loads(run.provenance_file.read_text())), "facts are added"


def test_a_run_of_another_drafter_is_refused_once_there_are_checkpoints(tmp_path: Path) -> None:
    first = recipe(tmp_path)
    other = replace(first, drafter=MedusaConfig(num_heads=2))
    run = RunFolder.open(first, [])
    RunFolder.open(other, [])
    (run.checkpoints / "step-5").mkdir()
    with pytest.raises(ValueError, match="whose drafter section differs"):
        RunFolder.open(first, [])
    longer = replace(other, train=replace(other.train, epochs=7.0))
    RunFolder.open(longer, [])


def test_file_hash_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_hash(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
