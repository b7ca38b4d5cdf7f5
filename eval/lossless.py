"""Checks that greedy speculative output is the target's own, token for token.

    python eval/lossless.py runs/smollm2_135m_eagle --tree chain dynamic

In float32, the default here, outputs are identical. In bfloat16 an output may part from its reference where the
target's own rounding decides between two tokens; that is counted as a tie. Exit status 1 if any output differs by more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drafters import log
from drafters.evaluation.job import make_parser, open_job
from drafters.evaluation.lossless import check_lossless


def main() -> int:
    parser = make_parser(__doc__)
    parser.set_defaults(dtype="float32", temperature=[0.0])
    args = parser.parse_args()
    if args.temperature != [0.0]:
        parser.error("outputs are compared token for token, which only greedy decoding (temperature 0) allows")
    job = open_job(args, prompts=Path(__file__).with_name("prompts.jsonl"))
    runs = check_lossless(job.target, job.drafter, job.prompt_ids, job.sections, progress=True)
    job.report("lossless", [run.to_json() for run in runs])
    for run in runs:
        print(
            f"greedy output identical: {sum(v.kind == 'identical' for v in run.against_generate)} of {len(job.prompts)}"
        )
    faults = sum(run.faults for run in runs)
    if faults:
        print(f"error: {faults} outputs differ by more than rounding", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    log.run_main(main)
