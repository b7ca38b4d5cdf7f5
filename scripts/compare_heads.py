#!/usr/bin/env python
"""Trains every head on SmolLM2-135M-Instruct with the same rows and the same steps, and writes one table of what they give.

    python scripts/compare_heads.py heads     one run for each head
    python scripts/compare_heads.py losses    EAGLE-3 with each loss
    python scripts/compare_heads.py starts    EAGLE-3 from the target and from random weights, at several numbers of steps

The answers are the target's own, made first. A step is 2 rows of up to 512 tokens. Everything is kept under --folder, and
the same command again does only what is missing. The figures are those of eval/alpha.py and eval/speed.py for a chain of K = 5 on
held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

from safetensors import safe_open

from drafters.log import run_main
from drafters.losses import LossKind

ROOT = Path(__file__).parents[1]
K = 5


@dataclass(frozen=True)
class Variant:
    """A run: a recipe of SmolLM2's, and what it changes."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()


ALL = f"drafter.num_heads={K}"
PLAIN_HYDRA = ("drafter.num_layers=1", "drafter.prefix_attention=false", "drafter.loss=cross_entropy")
HEADS = [
    Variant("Medusa-1", "medusa", (ALL,)),
    Variant("Hydra", "hydra", (ALL, *PLAIN_HYDRA)),
    Variant("Hydra++", "hydra", (ALL,)),
    Variant("EAGLE-1", "eagle"),
    Variant("HASS", "hass"),
    Variant("EAGLE-3", "eagle3"),
    Variant("EAGLE-3.1", "eagle31"),
]
LOSSES = [Variant(kind, "eagle3", (f"drafter.loss={kind}",)) for kind in get_args(LossKind)]


def main() -> None:
    args = parse()
    variants = {"heads": HEADS, "losses": LOSSES}.get(args.what) or [
        Variant(f"{start}, {steps} steps", "eagle3", (f"drafter.initialize={start}", f"train.max_steps={steps}"))
        for steps in args.steps
        for start in ("random", "target")
    ]
    args.folder.mkdir(parents=True, exist_ok=True)
    answers = regenerated(args)
    rows = [result(args, variant, answers) for variant in variants]
    table = "\n".join(lines(rows)) + "\n"
    file = args.folder / f"{args.what}.md"
    file.write_text(table)
    print(f"{table}\n{file}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["heads", "losses", "starts"])
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="%(default)s")
    parser.add_argument("--steps", type=int, nargs="+", default=[200], help="of training (%(default)s)")
    parser.add_argument("--conversations", type=int, default=600, help="to answer (%(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=128, help="most tokens of an answer (%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=16, help="to draft for (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each (%(default)s)")
    args = parser.parse_args()
    if args.what != "starts" and len(args.steps) != 1:
        parser.error("--steps takes several numbers for `starts` only")
    return args


def regenerated(args: argparse.Namespace) -> Path:
    """The questions of ShareGPT answered by the target."""
    run("scripts/prepare_model.py", "smollm2-135m-instruct")
    run("scripts/prepare_data.py", "sharegpt")
    out = args.folder / "answers.jsonl"
    settings = ["--limit", args.conversations, "--max-new-tokens", args.answer_tokens, "--broken-rows", "skip"]
    target = [".cache/models/smollm2-135m-instruct", "--dtype", "float32"]
    run("scripts/regenerate.py", ".cache/data/sharegpt.jsonl", out, "--target", *target, *settings)
    return out


def result(args: argparse.Namespace, variant: Variant, answers: Path) -> dict[str, Any]:
    """Trains and measures a variant, where that has not been done."""
    slug = "".join(c if c.isalnum() else "_" for c in variant.name.lower())
    folder = args.folder / f"{slug}_{args.steps[0]}" if args.what != "starts" else args.folder / f"start_{slug}"
    file = folder / "result.json"
    if not file.is_file():
        overrides = [
            f"output.folder={folder}",
            f"data.train=[{answers}]",
            f"train.max_steps={args.steps[0]}",
            "train.eval_every=0",
            "train.save_every=0",
            f"eval.tree.depth={K}",
        ]
        launch = ["-m", "accelerate.commands.launch", "--quiet", ROOT / "train/head.py"]
        recipe = ROOT / f"recipes/smollm2_135m_{variant.recipe}.yaml"
        peak = run(*launch, recipe, *overrides, *variant.changes)
        prompts = ["--num-prompts", args.num_prompts, "--max-new-tokens", args.max_new_tokens, "--depth", K]
        run("eval/alpha.py", folder, *prompts, "--temperature", 0, 1)
        run("eval/speed.py", folder, *prompts[2:], "--num-prompts", 4, "--repeats", 2)
        file.write_text(json.dumps({"name": variant.name, "peak_gib": peak, **figures(folder)}))
    return dict(json.loads(file.read_text()))


def run(*command: Any) -> float:
    """Runs a script; returns the largest resident size of its processes, in GiB.

    Raises:
        ValueError: it failed.
    """
    first = str(command[0])
    head = [sys.executable] if first.startswith("-") else [sys.executable, str(ROOT / first)]
    words = [*head, *map(str, command if first.startswith("-") else command[1:])]
    print("$", " ".join(words), file=sys.stderr, flush=True)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"{' '.join(words)} failed; its own message stands above, and the same command again goes on")
    return usage.ru_maxrss / 2**20


def figures(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report/report.json").read_text())
    by_temperature = {run["sampling"]["temperature"]: run for run in report["alpha"]["runs"]}
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/tokens_per_second"] for line in logged if "train/tokens_per_second" in line]
    with safe_open(folder / "head/model.safetensors", framework="pt") as stream:
        parameters = sum(prod(stream.get_slice(name).get_shape()) for name in stream.keys())  # noqa: SIM118
    speed = report["speed"]["runs"][0]
    return {
        "alpha": [entry["rate"] for entry in by_temperature[0.0]["alpha"]],
        "interval": [by_temperature[0.0]["alpha"][0][end] for end in ("low", "high")],
        "tau": {f"{t:g}": run["tau"]["value"] for t, run in by_temperature.items()},
        "speed": speed["methods"],
        "parameters": parameters,
        "train_tokens_per_second": statistics.median(rates),
    }


def lines(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    alphas = " | ".join(f"alpha({k})" for k in range(1, K + 1))
    rates = "tokens/s | against plain | parameters | training tokens/s | peak GiB"
    yield f"| | {alphas} | alpha(1), 95% | tau, greedy | tau, T=1 | {rates} |"
    yield "|---" * (K + 9) + "|"
    for row in rows:
        alpha = " | ".join(f"{rate:.2f}" for rate in row["alpha"] + [float("nan")] * (K - len(row["alpha"])))
        low, high = row["interval"]
        speculative = row["speed"]["speculative"]
        yield (
            f"| {row['name']} | {alpha} | {low:.2f}-{high:.2f} | {row['tau']['0']:.2f} | {row['tau']['1']:.2f} | "
            f"{middle(speculative['tokens_per_second']):.1f} | {middle(speculative['ratio_to_plain']):.2f} | "
            f"{row['parameters'] / 1e6:.1f}M | {row['train_tokens_per_second']:.0f} | {row['peak_gib']:.2f} |"
        )


def middle(spread: dict[str, float]) -> float:
    return spread["median"]


if __name__ == "__main__":
    run_main(main)
