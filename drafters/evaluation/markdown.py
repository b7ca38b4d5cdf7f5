"""A report as Markdown: a pure function of report.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafters.evaluation.plots import label, tree_label

Rows = Sequence[Sequence[str]]


def render(report: dict[str, Any], figure: str = "") -> str:
    """The report's text; `figure` is the picture's file name, "" for none."""
    head, target = report["head"], report["target"]
    parts = [
        f"# {head['type']} head for {target['path']}",
        f"Head `{head['folder']}`, weights {head['weights_hash'][:16]}. "
        f"Target {target['architecture']}, weights {target['weights_hash']}.",
        "Rates stand with their 95% interval: Wilson over rounds for alpha(k), bootstrap over prompts for tau. "
        "tau counts the bonus token.",
        "## Summary",
        table(("", ""), summary(report)),
    ]
    if "alpha" in report:
        parts += ["## Acceptance", *_alpha(report["alpha"])]
        if figure:
            parts.append(f"![alpha against k and tau against K]({figure})")
    if "lossless" in report:
        parts += ["## Losslessness", *_lossless(report["lossless"])]
    if "speed" in report:
        parts += ["## Speed", *_speed(report["speed"])]
    if "serving" in report:
        parts += ["## In vLLM", *_serving(report["serving"])]
    return "\n\n".join(parts) + "\n"


def summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What a reader wants first: alpha(k), tau, speed, losslessness."""
    rows: list[tuple[str, str]] = []
    for run in report.get("alpha", {}).get("runs", []):
        alphas = " ".join(f"{entry['rate']:.2f}" for entry in run["alpha"])
        rows.append((f"alpha(1..{len(run['alpha'])}), {label(run)}", alphas or "no rounds"))
        rows.append((f"tau, {label(run)}", _interval(run["tau"])))
    for run in report.get("speed", {}).get("runs", []):
        plain, ours = (run["methods"][name]["tokens_per_second"]["median"] for name in ("plain", "speculative"))
        ratio = run["methods"]["speculative"]["ratio_to_plain"]
        rows.append(
            (
                f"tokens/s, {label(run)}",
                f"{ours:.1f} against {plain:.1f} plain: {_spread(ratio)}x (min to max of repeats)",
            )
        )
    for run in report.get("lossless", {}).get("runs", []):
        rows.append(
            (
                f"{tree_label(run['tree'])}, {run['dtype']}",
                f"greedy output identical: {run['identical']} of {run['prompts']}",
            )
        )
    return rows


def table(header: Sequence[str], rows: Rows) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _alpha(section: dict[str, Any]) -> list[str]:
    parts = [_settings(section)]
    for run in section["runs"]:
        measured = run["tau"]
        check = run["identity"]
        parts += [
            f"### {label(run)}",
            f"Rule {run['rule']} ({_lossless_word(run)}), {run['prompts']} prompts, {measured['tokens']} tokens in "
            f"{measured['rounds']} rounds, batch size {run['batch_size']}.",
            table(
                ("k", "alpha(k)", "95% interval", "accepted / reached", "tau of a chain of k, from alpha"),
                [
                    (
                        str(entry["k"]),
                        f"{entry['rate']:.3f}",
                        f"{entry['low']:.3f} to {entry['high']:.3f}",
                        f"{entry['accepted']} / {entry['reached']}",
                        _interval(depth) if run["tree"]["kind"] == "chain" else "",
                    )
                    for entry, depth in zip(run["alpha"], run["tau_by_depth"], strict=True)
                ],
            ),
            f"Measured tau {_interval(measured)}{_identity(check)}",
        ]
    return parts


def _identity(check: dict[str, Any]) -> str:
    if check["holds"] is None:
        return "."
    word = "within" if check["holds"] else "NOT within"
    return (
        f"; from alpha(k) {check['from_alpha']:.3f}, {check['difference']:+.1%} ({word} 3%; "
        f"{check['rounds_cut']} rounds that an end of sequence cut counted whole for this check)."
    )


def _lossless(section: dict[str, Any]) -> list[str]:
    rows = []
    for run in section["runs"]:
        for name, reference in (
            ("against_generate", "transformers' generate"),
            ("against_plain", "plain decoding here"),
        ):
            counts = run[name]
            rows.append(
                (
                    tree_label(run["tree"]),
                    run["dtype"],
                    reference,
                    f"{counts['identical']} of {run['prompts']}",
                    str(counts["tie"]),
                    str(counts["different"]),
                )
            )
    text = (
        "Greedy outputs, token for token. A tie parts from its reference where both tokens' logits are within rounding of the "
        "best one; anything else is a fault."
    )
    return [_settings(section), text, table(("tree", "precision", "against", "identical", "ties", "different"), rows)]


def _speed(section: dict[str, Any]) -> list[str]:
    parts = [_settings(section)]
    for run in section["runs"]:
        methods = [
            (name, _spread(m["tokens_per_second"], ".1f"), _spread(m["ratio_to_plain"]), _prefill(m, run["prompts"]))
            for name, m in run["methods"].items()
        ]
        model, ours = run["model"], run["round_ms"]["speculative"]
        parts += [
            f"### {label(run)}",
            f"Rule {run['rule']} ({_lossless_word(run)}), {run['prompts']} prompts, {run['repeats']} repeats in turn, batch size "
            f"{run['batch_size']}, up to {run['max_new_tokens']} new tokens, tau {run['tau']:.2f}; "
            f"{run['same_output_as_plain']} outputs equal to plain decoding's.",
            table(("method", "tokens/s (min to max)", "ratio to plain (min to max)", "prefill, ms a prompt"), methods),
            "One speculative round, ms: " + ", ".join(f"{name} {ours[name]:.1f}" for name in ours) + ".",
        ]
        if model["speedup"] is not None:
            parts.append(
                f"Model speedup tau x T(1) / (T_draft + T_verify) = {model['speedup']:.2f}, measured {model['measured']:.2f} "
                f"({model['share']:.0%} of it)."
            )
        if "cost" in run:
            parts += _cost(run["cost"])
    return parts


def _serving(section: dict[str, Any]) -> list[str]:
    parts = [_settings(section)]
    for run in section["runs"]:
        rows = [
            (str(each["k"]), *(cell for side in ("ours", "vllm") for cell in _position(each[side])))
            for each in run["positions"]
        ]
        rate = run["tokens_per_second"]
        parts += [
            f"Greedy, chain of {run['tree']['depth']}, {run['prompts']} prompts one by one; "
            f"{run['same_output_as_plain_vllm']} outputs of vLLM equal to vLLM's without the head, "
            f"{run['same_output_as_ours']} to our loop's.",
            table(("k", "alpha(k), here", "accepted / reached", "alpha(k), vLLM", "accepted / reached"), rows),
            f"The intervals {'overlap at every k' if run['agrees'] else 'do NOT overlap at every k'}. "
            f"tau {run['tau']['ours']:.2f} here, {run['tau']['vllm']:.2f} in vLLM. vLLM's tokens/s: "
            f"{rate['speculative']:.1f} with the head, {rate['plain']:.1f} without, one pass each.",
        ]
    return parts


def _position(side: dict[str, Any]) -> tuple[str, str]:
    interval = f"{side['rate']:.3f} ({side['low']:.3f} to {side['high']:.3f})"
    return interval, f"{side['accepted']} / {side['reached']}"


def _cost(cost: dict[str, Any]) -> list[str]:
    rows = [
        (
            str(row["depth"]),
            f"{row['tokens']:.2f}",
            f"{1000 * row['draft_seconds']:.1f}",
            f"{1000 * row['verify_seconds']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['independent_speedup']:.2f}",
        )
        for row in cost["rows_by_depth"]
    ]
    best = cost["best_depth"]
    advice = f"best draft length K = {best}" if best else "no draft length pays: plain decoding is fastest"
    return [
        f"Choice of K, chains, batch size {cost['rows']}, {cost['context']} tokens in the cache, one token costs the target "
        f"{1000 * cost['target_seconds']:.1f} ms: **{advice}**.",
        table(("K", "expected tokens", "draft ms", "verify ms", "expected speedup", "if alpha were constant"), rows),
    ]


def _settings(section: dict[str, Any]) -> str:
    settings, origin = section["settings"], section["provenance"]
    prompts = settings["prompts"]
    template = settings["template_hash"] or "none: plain text"
    return (
        f"Prompts: {prompts['source']} ({prompts['count']}, hash {prompts['hash'][:12]}), chat template {template}. "
        f"Target in {settings['dtype']}, {settings['device']}, {settings['threads']} threads, "
        f"torch {origin['versions'].get('torch', '?')}, "
        f"transformers {origin['versions'].get('transformers', '?')}, revision {origin['git_revision'][:12] or 'none'}."
    )


def _lossless_word(run: dict[str, Any]) -> str:
    return "lossless" if run["lossless"] else "NOT lossless"


def _prefill(method: dict[str, Any], prompts: int) -> str:
    passes = method["passes"]
    return f"{1000 * sum(each['prefill_seconds'] for each in passes) / (len(passes) * prompts):.0f}"


def _interval(estimate: dict[str, Any]) -> str:
    if estimate["value"] is None:
        return "none"
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def _spread(values: dict[str, float], form: str = ".2f") -> str:
    return f"{values['median']:{form}} ({values['low']:{form}} to {values['high']:{form}})"
