"""Checkpoints that are damaged, half written, too many, or do not fit on the disk."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_training as tt
import torch

from drafters.training.checkpoint import MANIFEST, newest


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    tt.train(folder, tt.make_recipe(folder, max_steps=3, save_every=1))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_keeps_the_newest(run: Path) -> None:
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    found = newest(run / "checkpoints")
    assert found is not None and found[1].step == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_damaged_file_is_named_and_the_way_out_given(run: Path, name: str, damage: str) -> None:
    folder = run / "checkpoints" / "step-000003"
    data = bytearray((folder / name).read_bytes())
    if damage == "missing":
        (folder / name).unlink()
    else:
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data[:-1] if damage == "cut" else data)
    with pytest.raises(ValueError, match=f"step-000003 is damaged: .*{name}.*delete the folder .*step-000002"):
        tt.train(run, tt.make_recipe(run, max_steps=4))
    shutil.rmtree(folder)
    assert tt.train(run, tt.make_recipe(run, max_steps=4)).lines[-1]["step"] == 4


@pytest.mark.parametrize("text", ["", "[]", '{"step": 3}', '{"step": 3, "sums": {}, "files": 1}'])
def test_damaged_manifest(run: Path, text: str) -> None:
    (run / "checkpoints" / "step-000003" / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=f"step-000003 is damaged: {MANIFEST}"):
        newest(run / "checkpoints")


def test_folder_without_manifest_is_none(run: Path) -> None:
    (run / "checkpoints" / "step-000003" / MANIFEST).unlink()
    (run / "checkpoints" / "step-notes").mkdir()
    found = newest(run / "checkpoints")
    assert found is not None and found[1].step == 2


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert newest(tmp_path) is None


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes past a size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_space_is_said_and_the_last_good_one_stays(run: Path) -> None:
    with (
        largest_file(100_000),
        pytest.raises(ValueError, match=r"step-000004 could not be written.*step-000003.*MiB free"),
    ):
        tt.train(run, tt.make_recipe(run, max_steps=4))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert tt.train(run, tt.make_recipe(run, max_steps=4)).complete
