"""Checkpoints: folders that are whole or not there, with a manifest that proves it.

    checkpoints/step-000200/
        manifest.json    step, sums since the last log line, size and sha256 of every other file
        ..               what accelerate saves: weights, optimizer, and shards of them where there are any

A folder without a manifest is not a checkpoint: it was being written or deleted when the run was killed. A folder whose
files differ from its manifest stops the run, with the file's name and what to delete; falling back to an older one in
silence would hide a failing disk. All processes must see the same file system.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from drafters.run import atomic_folder, file_hash

logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{6,})")
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, ValueError)


@dataclass
class Progress:
    """What going on needs beside weights and optimizer; data, noise and learning rate follow from the step.

    Attributes:
        step: steps done.
        sums: (sum, count) of the metrics since the last log line, over all processes.
    """

    step: int = 0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, accelerator: Accelerator, folder: Path, keep: int) -> None:
        self._accelerator = accelerator
        self._folder = folder
        self._keep = max(1, keep)
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint, then deletes those past the newest `keep`.

        Raises:
            ValueError: it could not be written, for want of space say; earlier ones are untouched.
        """
        final = self._folder / step_name(progress.step)
        with ExitStack() as stack:
            temporary = Path(self._on_main(lambda: str(stack.enter_context(atomic_folder(final))), final))
            failure = ""
            try:
                self._accelerator.save_state(str(temporary))
            except WRITE_ERRORS as error:
                failure = str(error) or type(error).__name__
            self._raise_any(gather_object([failure]), final)

            def finish() -> None:
                write_manifest(temporary, progress)
                stack.close()

            self._on_main(finish, final)
        self._on_main(lambda: prune(self._folder, self._keep), final)

    def resume(self) -> Progress | None:
        """Loads the newest checkpoint into what the accelerator prepared; None where there is none.

        Raises:
            ValueError: it is damaged.
        """
        found, failure = None, ""
        if self._accelerator.is_main_process:
            try:
                found = newest(self._folder)
            except ValueError as error:
                failure = str(error)
        found, failure = _broadcast((found, failure))
        if failure:
            raise ValueError(failure)
        if found is None:
            return None
        path, progress = found
        self._accelerator.load_state(str(path))
        logger.info("resumed from %s", path)
        return progress

    def _on_main(self, action: Callable[[], Any], final: Path) -> Any:
        """The result of an action on the main process, or its failure, on all processes."""
        result, failure = None, ""
        if self._accelerator.is_main_process:
            try:
                result = action()
            except WRITE_ERRORS as error:
                failure = str(error) or type(error).__name__
        result, failure = _broadcast((result, failure))
        self._raise_any([failure], final)
        return result

    def _raise_any(self, failures: list[str], final: Path) -> None:
        failures = [failure for failure in failures if failure]
        if not failures:
            return
        complete = complete_steps(self._folder)
        last = f"the last good one is {complete[-1]}" if complete else "there is no earlier one"
        free = shutil.disk_usage(self._folder).free / 2**20
        raise ValueError(
            f"checkpoint {final} could not be written: {'; '.join(failures)}. {last}; the disk has {free:,.0f} MiB free. "
            "Make room and run the same command again to go on from there"
        )


def _broadcast(value: Any) -> Any:
    box = [value]
    broadcast_object_list(box)
    return box[0]


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def complete_steps(folder: Path) -> list[Path]:
    """Checkpoints that were written to the end, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def write_manifest(folder: Path, progress: Progress) -> None:
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"step": progress.step, "sums": progress.sums, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """The newest checkpoint, checked against its manifest; None where there is none.

    Raises:
        ValueError: a file of it is missing or differs.
    """
    complete = complete_steps(folder)
    if not complete:
        return None
    path = complete[-1]
    before = f"to go on from {complete[-2].name}" if len(complete) > 1 else "to start from the beginning"
    advice = f"; delete the folder {path} {before}"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        sums = {name: (float(pair[0]), float(pair[1])) for name, pair in manifest["sums"].items()}
        step, files = int(manifest["step"]), dict(manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error}){advice}") from error
    for name, facts in files.items():
        _check_file(path, name, facts, advice)
    return path, Progress(step, sums)


def _check_file(folder: Path, name: str, facts: dict[str, Any], advice: str) -> None:
    file = folder / name
    if not file.is_file():
        raise ValueError(f"checkpoint {folder} is damaged: {name} is missing{advice}")
    if file.stat().st_size != facts["size"]:
        raise ValueError(
            f"checkpoint {folder} is damaged: {name} has {file.stat().st_size} bytes, the manifest says {facts['size']}{advice}"
        )
    if file_hash(file) != facts["sha256"]:
        raise ValueError(
            f"checkpoint {folder} is damaged: the contents of {name} differ from the manifest's sha256{advice}"
        )


def prune(folder: Path, keep: int) -> None:
    """Deletes the older checkpoints, each manifest first, so that a kill in between leaves no half checkpoint."""
    for path in complete_steps(folder)[:-keep]:
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
