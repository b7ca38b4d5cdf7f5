"""The run folder, what it records of where a run came from, and writes that are whole or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drafters.recipe import Recipe, dump_recipe

TEMPORARY = ".tmp-"
PACKAGES = (
    "drafters",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "safetensors",
    "tokenizers",
    "wandb",
)


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it makes.

    recipe.yaml, provenance.json, metrics.jsonl, checkpoints/step-N, head/ (the trained head) and report/.
    """

    path: Path

    @staticmethod
    def open(recipe: Recipe, argv: Sequence[str]) -> RunFolder:
        """Makes or reopens the run's folder, sweeps what killed writers left, and records recipe and provenance.

        Raises:
            ValueError: the folder holds a run of another target, drafter or data, which this one must not continue.
        """
        run = RunFolder(Path(recipe.output.folder))
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        for folder in (run.path, run.checkpoints):
            sweep(folder)
        run._refuse_other_run(recipe)
        dump_recipe(recipe, run.recipe_file)
        run.record(argv=list(argv))
        return run

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def provenance_file(self) -> Path:
        return self.path / "provenance.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def head(self) -> Path:
        return self.path / "head"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def record(self, **facts: Any) -> None:
        """Adds facts to provenance.json, beside versions, machine and git revision."""
        file = self.provenance_file
        known = json.loads(file.read_text()) if file.is_file() else {}
        write_json_atomic(file, {**known, **provenance(), **facts})

    def _refuse_other_run(self, recipe: Recipe) -> None:
        if not self.recipe_file.is_file():
            return
        mine = self.path / f"{TEMPORARY}recipe.yaml"
        dump_recipe(recipe, mine)
        old, new = (_sections(file.read_text()) for file in (self.recipe_file, mine))
        mine.unlink()
        changed = [name for name in ("target", "drafter", "data") if old.get(name) != new.get(name)]
        if changed and any(self.checkpoints.iterdir()):
            raise ValueError(
                f"{self.path} holds checkpoints of a run whose {' and '.join(changed)} section differs from this recipe's; "
                "name another output.folder, or delete that one to start again"
            )


def _sections(text: str) -> dict[str, str]:
    """The lines of each top-level section of a dumped recipe."""
    sections: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            name = line.split(":")[0]
        sections[name] = sections.get(name, "") + line + "\n"
    return sections


def provenance() -> dict[str, Any]:
    """Versions, machine and git revision of this process."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "python": sys.version.split()[0],
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git_revision": git_revision(),
    }


def git_revision() -> str:
    """The revision of the checkout this code is in, "-dirty" where it has changes; "" outside of one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        revision = git("rev-parse", "HEAD")
        return f"{revision}-dirty" if revision and git("status", "--porcelain", "--untracked-files=no") else revision
    except OSError:
        return ""


def file_hash(path: Path | str) -> str:
    """sha256 of a file."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if sys.version_info >= (3, 11) else _digest(stream)


def _digest(stream: Any) -> str:
    digest = hashlib.sha256()
    while piece := stream.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text_atomic(path, json.dumps(value, indent=2) + "\n")


def write_text_atomic(path: Path | str, text: str) -> None:
    """Writes a text file whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with _clear_disk_errors(path):
        with temporary.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)


def sweep(folder: Path) -> None:
    """Removes what writers that were killed left in a folder."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the body is through, and vanishes when it fails.

    A folder of that name stays untouched until the new one is safely on disk.

    Raises:
        ValueError: the disk is full; the message gives the free space.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _clear_disk_errors(path):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _sync(file)
            _replace_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


def _replace_folder(new: Path, path: Path) -> None:
    """Puts a folder in the place of another; the old one is set aside first and removed last."""
    old = path.with_name(f"{TEMPORARY}old-{os.getpid()}-{path.name}")
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _clear_disk_errors(path: Path) -> Iterator[None]:
    """Turns "no space left" of any writer into one message that says what to do."""
    try:
        yield
    except Exception as error:
        if not disk_full(error):
            raise
        free = shutil.disk_usage(path.parent).free // 2**20
        raise ValueError(
            f"no space left to write {path}: {free} MiB are free there; nothing was changed, free some space and run the same "
            "command again"
        ) from error


def disk_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a full disk; writers in native code only say so in their message."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
