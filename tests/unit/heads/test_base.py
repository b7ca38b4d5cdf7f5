"""Head folders: what is saved, and every way in which loading must refuse or warn."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_target as toy
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import __version__
from drafters.heads.base import load_head, save_head
from drafters.heads.eagle import Eagle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(toy.make_head(Eagle, toy.make_target()), tmp_path / "head", {"steps": 3})
    return tmp_path / "head"


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_what_a_folder_holds(folder: Path) -> None:
    info = toy.make_target().info
    saved = json.loads((folder / "config.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["head"]
    assert saved["format"] == 1 and saved["type"] == "eagle" and saved["extra"] == {"steps": 3}
    assert saved["config"] == asdict(replace(Eagle.Config(), noise=0.0)) and saved["drafters_version"] == __version__
    assert saved["target"] == {**asdict(info), "eos_token_ids": list(info.eos_token_ids)}


def test_saving_again_replaces_the_folder(folder: Path) -> None:
    other: Any = toy.make_head(Eagle, toy.make_target(), seed=1)
    save_head(other, folder)
    assert torch.equal(load_head(folder, toy.make_target().info).state_dict()["fc.weight"], other.fc.weight)


def test_a_head_in_half_precision_stays_so(tmp_path: Path) -> None:
    head = toy.make_head(Eagle, toy.make_target()).bfloat16()
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head", toy.make_target().info)
    assert all(tensor.dtype == torch.bfloat16 for tensor in loaded.state_dict().values())


def test_gathered_tensors_are_saved_in_place_of_the_heads_own(tmp_path: Path) -> None:
    head = toy.make_head(Eagle, toy.make_target())
    gathered = {name: torch.ones_like(tensor) for name, tensor in head.state_dict().items()}
    save_head(head, tmp_path / "head", state=gathered)
    assert all((tensor == 1).all() for tensor in load_head(tmp_path / "head", head.info).state_dict().values())


def test_the_head_keeps_the_positions_it_was_trained_with(folder: Path) -> None:
    info = toy.make_target().info
    moved = replace(
        info, path="elsewhere", dtype="bfloat16", rope={"rope_type": "default", "rope_theta": 77.0}, num_heads=8
    )
    loaded = load_head(folder, moved)
    assert loaded.info == replace(info, path="elsewhere", dtype="bfloat16")


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_file_cut_short(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_head(folder, toy.make_target().info)


def test_all_wrong_tensors_are_named(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["fc.weight"]
        tensors["lm_head.weight"] = torch.zeros(2, 2)
        tensors["layers.0.mlp.up_proj.weight"] = torch.zeros(3, 64)

    edit_tensors(folder, change)
    with pytest.raises(ValueError) as caught:
        load_head(folder, toy.make_target().info)
    message = str(caught.value)
    assert "missing: fc.weight (64, 128)" in message and "unexpected: lm_head.weight (2, 2)" in message
    assert "shape of layers.0.mlp.up_proj.weight: (3, 64) in the file, (96, 64) by the config" in message


def test_nan_is_not_loaded(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"][3, 5] = torch.nan

    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=r"NaN in fc\.weight"):
        load_head(folder, toy.make_target().info)


def test_another_dimension_or_vocabulary_is_refused_with_both_numbers(folder: Path) -> None:
    info = toy.make_target().info
    with pytest.raises(ValueError, match="hidden size 64, but other has hidden size 80"):
        load_head(folder, replace(info, path="other", hidden_size=80))
    with pytest.raises(ValueError, match="vocabulary size 320, but other has vocabulary size 384"):
        load_head(folder, replace(info, path="other", vocab_size=384))


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ("template_hash", "chat template"),
        ("tokenizer_hash", "tokenizer"),
        ("weights_hash", "weights"),
        ("revision", "revision"),
    ],
)
def test_another_version_of_the_target_is_warned_of_by_name(
    tmp_path: Path, field: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = toy.make_head(Eagle, toy.make_target())
    head.info = replace(head.info, weights_hash="w", tokenizer_hash="k", template_hash="t", revision="r")
    save_head(head, tmp_path / "head")
    with caplog.at_level(logging.WARNING):
        load_head(tmp_path / "head", head.info)
        changed: dict[str, Any] = {field: "new"}
        assert not caplog.records
        load_head(tmp_path / "head", replace(head.info, **changed))
    assert [f"trained on another {word}:" in record.getMessage() for record in caplog.records] == [True]


def test_folders_that_are_none(tmp_path: Path, folder: Path) -> None:
    info = toy.make_target().info
    with pytest.raises(ValueError, match=r"is not a head folder: it has no config\.json"):
        load_head(tmp_path / "nowhere", info)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_head(folder, info)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.update(format=2), "has format 2"),
        (lambda config: config.pop("target"), "lacks target"),
        (lambda config: config["target"].pop("rope"), "see rope"),
        (lambda config: config["config"].update(num_layers="many"), "num_layers"),
    ],
)
def test_configs_that_are_none(folder: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    edit_config(folder, change)
    with pytest.raises(ValueError, match=words):
        load_head(folder, toy.make_target().info)


def test_a_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"format": 1,')
    with pytest.raises(ValueError, match="is damaged"):
        load_head(folder, toy.make_target().info)
