"""What goes with an exported head beside its weights: where it comes from and what it was measured at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drafters import __version__
from drafters.export.files import read_json
from drafters.heads.base import CONFIG_FILE, WEIGHTS_FILE
from drafters.run import RunFolder, file_hash
from drafters.target.adapter import TargetInfo

ABOUT_FILE = "drafters.json"
DEFAULT_DRAFT_LENGTH = 3


@dataclass(frozen=True)
class Facts:
    """What is known of a head besides its weights; empty where unknown.

    Attributes:
        head_type: `drafter.type` of its recipe.
        head_config: the rest of that section.
        training: what the trainer kept with the head: steps, hash of the data.
        acceptance: a run of report.json on a chain: alpha(k) and tau with their intervals, sampling, prompts.
        draft_length: the K that the report's cost model finds best, else the K it was measured at; 0 without a report.
    """

    head_type: str
    head_config: dict[str, Any]
    training: dict[str, Any]
    acceptance: dict[str, Any]
    draft_length: int


def gather_facts(head_folder: Path) -> Facts:
    """The facts about a head, from its folder's config and the report of its run, where there is one.

    A report on other weights of the head or of its target is not taken.
    """
    saved = read_json(head_folder / CONFIG_FILE)
    extra = dict(saved.get("extra") or {})
    if "facts" in extra:  # the head was imported; what its export knew came along
        return read_facts(extra["facts"], head_folder / CONFIG_FILE)
    report = _report(head_folder, saved["target"]["weights_hash"])
    run = _chain_run(report)
    return Facts(str(saved["type"]), saved["config"], extra, _acceptance(run), _draft_length(report, run))


def read_facts(data: Any, source: Path) -> Facts:
    """Facts as JSON holds them.

    Raises:
        ValueError: they are something else.
    """
    try:
        return TypeAdapter(Facts).validate_python(data)
    except ValidationError as error:
        raise ValueError(f"{source}: its facts about the head are not those of an export: {error}") from error


def _report(head_folder: Path, target_hash: str) -> dict[str, Any]:
    file = RunFolder(head_folder.parent).report / "report.json"
    if not file.is_file():
        return {}
    report = read_json(file)
    measured = [report.get(part, {}).get("weights_hash") for part in ("head", "target")]
    return report if measured == [file_hash(head_folder / WEIGHTS_FILE), target_hash] else {}


def _chain_run(report: dict[str, Any]) -> dict[str, Any]:
    """The acceptance on a chain, greedy if there is one: servers draft chains."""
    runs = [run for run in report.get("alpha", {}).get("runs", []) if run["tree"]["kind"] == "chain"]
    greedy = [run for run in runs if run["sampling"]["temperature"] == 0]
    return dict((greedy or runs or [{}])[0])


def _acceptance(run: dict[str, Any]) -> dict[str, Any]:
    kept = ("alpha", "tau", "sampling", "rule", "prompts", "max_new_tokens")
    return {name: run[name] for name in kept if name in run}


def _draft_length(report: dict[str, Any], run: dict[str, Any]) -> int:
    best = [int(each.get("cost", {}).get("best_depth", 0)) for each in report.get("speed", {}).get("runs", [])]
    return next((depth for depth in best if depth), int(run["tree"]["depth"]) if run else 0)


def about(facts: Facts, info: TargetInfo, format_name: str, method: str) -> dict[str, Any]:
    """The content of drafters.json."""
    target = {
        key: getattr(info, key) for key in ("path", "revision", "weights_hash", "tokenizer_hash", "template_hash")
    }
    return {
        "drafters_version": __version__,
        "format": format_name,
        "method": method,
        "target": target,
        "facts": asdict(facts),
    }


def read_about(folder: Path) -> dict[str, Any]:
    """drafters.json of an exported folder; empty where there is none."""
    path = folder / ABOUT_FILE
    return read_json(path) if path.is_file() else {}


def model_card(facts: Facts, info: TargetInfo, format_name: str, method: str, command: str) -> str:
    """README.md of an exported folder."""
    title = f"{method} drafter for {info.path}"
    target = info.path if Path(info.path).name == info.path or info.path.count("/") == 1 else ""
    front = ["---", *([f"base_model: {target}"] if target else []), "tags: [speculative-decoding]", "---"]
    rows = [
        ("method", method),
        ("format", format_name),
        ("target", f"{info.path} {info.revision}".strip()),
        ("target weights", info.weights_hash),
        ("chat template", info.template_hash or "none"),
        *((key.replace("_", " "), str(value)) for key, value in facts.training.items()),
    ]
    table = ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)]
    fence = "python" if command.startswith("EaModel") else "bash"
    parts = [
        "\n".join(front),
        f"# {title}",
        "A drafter for speculative decoding: it proposes tokens, the target checks them, and the output is the target's own. "
        "It is of use with this target only.",
        "\n".join(table),
        "## Acceptance",
        _acceptance_text(facts),
        "## Serve",
        f"```{fence}\n{command}\n```",
    ]
    if method == "medusa":
        parts.append("vLLM goes by the folder's path: keep `eagle-`, `eagle3`, `dflash` and `dspark` out of it.")
    return "\n\n".join(parts) + "\n"


def _acceptance_text(facts: Facts) -> str:
    run = facts.acceptance
    if not run:
        return "Not measured."
    lines = ["| k | alpha(k) | 95% interval | rounds |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['k']} | {row['rate']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {row['reached']} |"
        for row in run["alpha"]
    ]
    tau = run["tau"]
    spread = f" ({tau['low']:.3f} to {tau['high']:.3f})" if tau.get("low") is not None else ""
    value = "unknown" if tau["value"] is None else f"{tau['value']:.3f}{spread}"
    settings = f"temperature {run['sampling']['temperature']:g}, {run['prompts']} prompts"
    return (
        f"alpha(k) is the rate at which the k-th drafted token is accepted when those before it were; a chain, {settings}.\n\n"
        + "\n".join(lines)
        + f"\n\ntau, mean tokens per forward of the target, its own token included: {value}."
    )
