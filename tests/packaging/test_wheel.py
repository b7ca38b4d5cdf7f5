"""The wheel: what is in it, and that it works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: a build leaves build/ and egg-info beside the sources.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        if Path(name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(Path(name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_only_top_level_name_is_drafters(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"drafters"}


def test_every_script_and_recipe_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [
        *(file for folder in ("train", "eval", "scripts") for file in Path(folder).glob("*.py")),
        *Path("recipes").rglob("*.yaml"),
        Path("recipes/schema.json"),
        Path("eval/prompts.jsonl"),
        *Path("drafters").rglob("*.py"),
    ]
    wanted = {str(file) if file.parts[0] == "drafters" else f"drafters/_bundled/{file}" for file in files}
    assert wanted <= names, wanted - names


def test_an_installed_wheel_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", *arguments] if sys.version_info >= (3, 11) else [sys.executable, *arguments]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import drafters; print(drafters.__file__)").strip() == str(site / "drafters/__init__.py")
    assert "tiny_eagle" in run("-m", "drafters.cli", "recipes")
    assert "RUN" in run("-m", "drafters.cli", "eval", "alpha", "--help").upper()
    assert "usage" in run("-m", "drafters.cli", "export", "--help")


def test_no_script_is_named_like_a_module_that_it_could_hide() -> None:
    scripts = {file.stem for folder in ("train", "eval", "scripts") for file in Path(folder).glob("*.py")}
    installed = {name for name in packages_distributions() if name != "drafters"}
    assert not scripts & (set(sys.stdlib_module_names) | installed)
