"""Measures how many drafted tokens a target accepts: alpha(k) and tau, with intervals.

python eval/alpha.py runs/smollm2_135m_eagle --temperature 0 1 --tree chain dynamic
"""

from __future__ import annotations

from pathlib import Path

from drafters import log
from drafters.evaluation.job import make_parser, open_job
from drafters.evaluation.measure import measure_alpha


def main() -> int:
    args = make_parser(__doc__).parse_args()
    job = open_job(args, prompts=Path(__file__).with_name("prompts.jsonl"))
    runs = []
    for section in job.sections:
        run = measure_alpha(job.target, job.drafter, job.prompt_ids, section, progress="drafting")
        runs.append(run.to_json())
    job.report("alpha", runs)
    return 0


if __name__ == "__main__":
    log.run_main(main)
