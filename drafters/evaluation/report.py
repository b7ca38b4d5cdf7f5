"""Reports: report.json is the truth; report.md and alpha.svg are drawn from it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafters.evaluation.markdown import render
from drafters.evaluation.plots import save_figure
from drafters.run import write_json_atomic, write_text_atomic

FORMAT = 1
SECTIONS = ("alpha", "lossless", "speed", "serving")
JSON_FILE, MARKDOWN_FILE, FIGURE_FILE = "report.json", "report.md", "alpha.svg"


def update_report(
    folder: Path, section: str, content: dict[str, Any], *, head: dict[str, Any], target: dict[str, Any]
) -> dict[str, Any]:
    """Puts a section into a folder's report, in place of an older one of its name, and draws the report anew.

    Sections that were measured on other weights of the head or of the target are dropped: a report is about one pair.

    Args:
        folder: made if missing.
        section: one of SECTIONS.
        content: what the script measured, with "settings" and "provenance".
        head, target: what was measured; their "weights_hash" tell pairs apart.

    Returns:
        the whole report.
    """
    assert section in SECTIONS
    folder.mkdir(parents=True, exist_ok=True)
    pair = {"head": head, "target": target}
    report: dict[str, Any] = {"format": FORMAT, **pair}
    old = _read(folder / JSON_FILE)
    if all(old.get(part, {}).get("weights_hash") == facts["weights_hash"] for part, facts in pair.items()):
        report.update({name: old[name] for name in SECTIONS if name in old})
    report[section] = content
    report = {name: report[name] for name in ("format", "head", "target", *SECTIONS) if name in report}
    write_json_atomic(folder / JSON_FILE, report)
    draw_report(folder)
    return report


def draw_report(folder: Path) -> None:
    """Writes report.md and alpha.svg from report.json."""
    report = _read(folder / JSON_FILE)
    if "alpha" in report:
        save_figure(report["alpha"]["runs"], folder / FIGURE_FILE)
    write_text_atomic(folder / MARKDOWN_FILE, render(report, FIGURE_FILE if "alpha" in report else ""))


def _read(path: Path) -> dict[str, Any]:
    """A report, empty where there is none or one of another format."""
    if not path.is_file():
        return {}
    try:
        report = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete it and measure again") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        return {}
    return report
