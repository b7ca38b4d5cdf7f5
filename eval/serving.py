"""Compares our acceptance with that of a real vLLM, on the same prompts, with the same K and precision, decoded greedily.

    python eval/serving.py runs/smollm2_135m_eagle --depth 3 --dtype float32

Exports the head, starts vLLM (see scripts/vllm_env.sh) with it and without it, and reports alpha(k) by its own
counters. Exit status 1 if the two disagree at some k by more than their intervals allow.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from drafters import log
from drafters.evaluation.job import make_parser, open_job
from drafters.evaluation.measure import measure_alpha
from drafters.evaluation.serving import Case, compare_serving
from drafters.export.write import export_run
from drafters.recipe import TreeSection


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(temperature=[0.0], tree=["chain"])
    args = parser.parse_args()
    if args.temperature != [0.0] or args.tree != ["chain"]:
        parser.error("vLLM drafts chains, and is compared greedily: only --tree chain and --temperature 0 fit")
    job = open_job(args, prompts=Path(__file__).with_name("prompts.jsonl"))
    section = replace(job.sections[0], batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        exported = export_run(
            job.head_folder,
            "vllm",
            Path(folder) / "head",
            target=args.target or "",
            draft_length=section.tree.depth,
        )
        section = replace(section, tree=TreeSection(kind="chain", depth=exported.draft_length))
        words = shlex.split(exported.command)
        case = Case(
            target=job.target.info.path,
            dtype=job.settings["dtype"],
            speculation=json.loads(words[words.index("--speculative-config") + 1]),
            prompts=job.prompt_ids,
            max_tokens=section.max_new_tokens,
            max_model_len=max(map(len, job.prompt_ids)) + section.max_new_tokens + exported.draft_length + 1,
            stop_token_ids=job.target.info.eos_token_ids,
        )
        ours = measure_alpha(job.target, job.drafter, job.prompt_ids, section, progress="our loop")
        print("vLLM, without and with the head ...", file=sys.stderr)
        run = compare_serving(ours, case)
    job.report("serving", [run.to_json()])
    if not run.agrees:
        print("error: vLLM's acceptance is not ours; the report has both", file=sys.stderr)
    return 0 if run.agrees else 1


if __name__ == "__main__":
    log.run_main(main)
