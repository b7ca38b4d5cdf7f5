"""The figure of a report: alpha against k, tau against K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8d5a97", "#b08900", "#555555")


def save_figure(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the runs of a report's alpha section as SVG; the same runs give the same bytes."""
    figure = draw(runs)
    with mpl.rc_context({"svg.hashsalt": "drafters", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Two panels; bars are 95% intervals."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, run in enumerate(runs):
        style = {"color": COLOURS[index % len(COLOURS)], "label": label(run)}
        _points(left, [(e["k"], e["rate"], e["low"], e["high"]) for e in run["alpha"]], style)
        if run["tree"]["kind"] == "chain":
            _points(right, [(e["depth"], e["value"], e["low"], e["high"]) for e in run["tau_by_depth"]], style)
        deepest = len(run["alpha"])
        measured = run["tau"]
        _points(right, [(deepest, measured["value"], measured["low"], measured["high"])], style, marker="D")
    _axes(left, "position k", "alpha(k): accepted, given those before", (0.0, 1.02))
    _axes(right, "draft length K", "tau: tokens a round", None)
    if runs:
        left.legend(frameon=False, fontsize=8)
        right.set_title("line: from alpha(k), diamond: measured", fontsize=8, loc="left")
    return figure


def label(run: dict[str, Any]) -> str:
    """A run in a few words: its tree and its sampling settings."""
    return f"{tree_label(run['tree'])}, {sampling_label(run['sampling'])}"


def tree_label(tree: dict[str, Any]) -> str:
    if tree["kind"] == "chain":
        return f"chain of {tree['depth']}"
    if tree["kind"] == "static":
        return f"static tree, {len(tree['paths'])} nodes"
    return f"dynamic tree, {tree['nodes']} nodes, depth {tree['depth']}"


def sampling_label(sampling: dict[str, Any]) -> str:
    if sampling["temperature"] == 0:
        return "greedy"
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    parts = [f"{name} {sampling[name]}" for name, value in off.items() if sampling[name] != value]
    return ", ".join([f"temperature {sampling['temperature']:g}", *parts])


def _points(axes: Axes, points: list[tuple[float, ...]], style: dict[str, Any], marker: str = "o") -> None:
    known = [point for point in points if None not in point]
    if not known:
        return
    x, y, low, high = (list(column) for column in zip(*known, strict=True))
    spread = [
        [max(0.0, b - a) for a, b in zip(low, y, strict=True)],
        [max(0.0, b - a) for a, b in zip(y, high, strict=True)],
    ]
    axes.errorbar(x, y, yerr=spread, marker=marker, markersize=5, capsize=3, linewidth=1.3, **style)


def _axes(axes: Axes, x: str, y: str, limits: tuple[float, float] | None) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if limits:
        axes.set_ylim(*limits)
