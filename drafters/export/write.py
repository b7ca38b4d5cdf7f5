"""From a run folder to a folder that an engine serves, checked before it appears."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from drafters.export.about import ABOUT_FILE, DEFAULT_DRAFT_LENGTH, Facts, about, gather_facts, model_card
from drafters.export.check import CheckResult, check_export
from drafters.export.files import WEIGHTS, read_json
from drafters.export.formats import find_format
from drafters.export.layout import Format
from drafters.export.spec import ExportHead, MedusaSpec, export_head
from drafters.export.vllm import PATH_TRAPS, path_trap
from drafters.heads.base import CONFIG_FILE, Drafter, load_head
from drafters.recipe import TargetSection
from drafters.run import RunFolder, atomic_folder
from drafters.target.adapter import TargetHead
from drafters.target.weights import load_target_head


@dataclass(frozen=True)
class Exported:
    """A folder that was written and checked, and how to serve the target with it."""

    folder: Path
    command: str
    draft_length: int
    check: CheckResult


def export_run(run: Path, to: str, out: Path | None = None, *, target: str = "", draft_length: int = 0) -> Exported:
    """Writes the head of a run in a serving format and checks what was written.

    Args:
        run: a run folder, or a head folder.
        to: the format.
        out: the folder to write; by default export/FORMAT beside the head.
        target: the target's folder or hub id, where it is not the one that the head was trained on any more.
        draft_length: K of the serve command; 0 takes the report's.

    Raises:
        ValueError: no head there, a format that can't hold it, a target that does not fit, a path that misleads the engine, or an
            export that fails its check; then nothing is written.
    """
    head_folder = find_head(run)
    config = read_json(head_folder / CONFIG_FILE)
    drafter, vocabulary = _load(head_folder, config, target)
    head = export_head(drafter, vocabulary, config["target"]["dtype"])
    chosen = find_format(to, head)
    facts = gather_facts(head_folder)
    K = _draft_length(head, draft_length or facts.draft_length)
    out = (out or head_folder.parent / "export" / to).resolve()
    _check_out(out, head)
    with atomic_folder(out) as temporary:
        write_folder(temporary, head, chosen, facts, K, name=out.name)
        try:
            check = check_export(temporary, to, copy.deepcopy(drafter).float(), vocabulary, steps=K)
        except ValueError as error:
            raise ValueError(str(error).replace(str(temporary), str(out))) from error
    return Exported(out, chosen.serve(head, out, K), K, check)


def write_folder(folder: Path, head: ExportHead, chosen: Format, facts: Facts, draft_length: int, *, name: str) -> None:
    """Writes weights, config, model card and facts; `name` is what the card calls the folder."""
    layout = chosen.lay_out(head, draft_length)
    save_file(layout.tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(layout.config, indent=2) + "\n")
    described = about(facts, head.info, chosen.name, head.spec.kind)
    (folder / ABOUT_FILE).write_text(json.dumps(described, indent=2) + "\n")
    command = chosen.serve(head, Path(name), draft_length)
    (folder / "README.md").write_text(model_card(facts, head.info, chosen.name, head.spec.kind, command))


def find_head(run: Path) -> Path:
    """The head folder of a run folder, or the folder itself where it is one.

    Raises:
        ValueError: there is none.
    """
    for folder in (RunFolder(run).head, run):
        if (folder / CONFIG_FILE).is_file():
            return folder.resolve()
    raise ValueError(
        f"{run} is neither a run folder with a finished head (head/) nor a head folder; train it to the end first"
    )


def target_section(saved: dict[str, Any], path: str) -> TargetSection:
    """The target to compare with, in float32; at the revision the head was trained on, unless another path is given."""
    revision = saved["revision"] or TargetSection(path="").revision
    if path:
        return TargetSection(path, dtype="float32")
    return TargetSection(saved["path"], revision=revision, dtype="float32")


def _load(head_folder: Path, config: dict[str, Any], target: str) -> tuple[Drafter, TargetHead]:
    try:
        vocabulary = load_target_head(target_section(config["target"], target))
    except ValueError as error:
        raise ValueError(f"{error}; name the target's folder or hub id with --target") from error
    return load_head(head_folder, vocabulary.info), vocabulary


def _draft_length(head: ExportHead, wanted: int) -> int:
    most = head.spec.num_heads if isinstance(head.spec, MedusaSpec) else wanted
    if not wanted:
        return min(DEFAULT_DRAFT_LENGTH, most or DEFAULT_DRAFT_LENGTH)
    return min(wanted, most)


def _check_out(out: Path, head: ExportHead) -> None:
    if out.exists() and any(out.iterdir()) and not (out / ABOUT_FILE).is_file():
        raise ValueError(f"{out} is not empty and holds no earlier export; name another folder with --out")
    trap = path_trap(out) if isinstance(head.spec, MedusaSpec) else ""
    if trap:
        raise ValueError(
            f"the path {out} contains {trap!r}: vLLM would take the Medusa head in it for another method, whatever its "
            f"config says; name a folder with --out whose path has none of {', '.join(PATH_TRAPS)}"
        )
