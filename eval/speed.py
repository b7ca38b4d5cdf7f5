"""Measures tokens per second: plain decoding, transformers' generate and the speculative loop, in turn.

    python eval/speed.py runs/smollm2_135m_eagle --repeats 3 --prompt-lookup 4

Ends with the times of one round by draft length, and the length with the largest expected speedup; --best measures a
chain of that length too.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafters import log
from drafters.evaluation.cost import cost_table, measure_costs
from drafters.evaluation.job import Job, make_parser, open_job
from drafters.evaluation.speed import measure_speed
from drafters.recipe import EvalSection


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="passes over the prompts (default: 3)")
    parser.add_argument(
        "--prompt-lookup", type=int, default=0, metavar="N", help="also time transformers' prompt lookup"
    )
    parser.add_argument(
        "--best", action="store_true", help="also measure a chain of the length with the largest expected speedup"
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    job = open_job(args, prompts=Path(__file__).with_name("prompts.jsonl"))
    runs = []
    for section in job.sections:
        result = measure(job, section, args)
        runs.append(result)
        best = result.get("cost", {}).get("best_depth", 0)
        if args.best and best not in (0, section.tree.depth):
            runs.append(measure(job, replace(section, tree=replace(section.tree, depth=best)), args))
    job.report("speed", runs)
    return 0


def measure(job: Job, section: EvalSection, args: argparse.Namespace) -> dict[str, Any]:
    """Speeds under one tree and one temperature; for a chain also what each draft length costs."""
    run = measure_speed(
        job.target,
        job.drafter,
        job.prompt_ids,
        section,
        repeats=args.repeats,
        prompt_lookup=args.prompt_lookup,
        progress="timing",
    )
    result = run.to_json()
    if section.tree.kind == "chain" and run.stats.reached:
        costs = measure_costs(
            job.target, job.drafter, job.prompt_ids[0], len(run.stats.reached), rows=section.batch_size
        )
        result["cost"] = cost_table(run.stats, costs)
    return result


if __name__ == "__main__":
    log.run_main(main)
