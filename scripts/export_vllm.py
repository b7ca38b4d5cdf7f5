"""Writes a trained head in a serving format, checks it, and prints how to serve it; `drafters export` runs this.

python scripts/export_vllm.py RUN --to vllm|speculators|sglang|eagle [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drafters.export.formats import FORMATS
from drafters.export.write import export_run
from drafters.log import run_main


def main() -> None:
    parser = argparse.ArgumentParser(prog="drafters export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder, or a head folder")
    parser.add_argument("--to", choices=list(FORMATS), default="vllm", help="the format (vllm)")
    parser.add_argument("--out", type=Path, help="the folder to write (export/FORMAT beside the head)")
    parser.add_argument("--target", default="", help="the target, where it is no longer where it was in training")
    parser.add_argument("--draft-length", type=int, default=0, help="tokens to draft, K (the report's)")
    arguments = parser.parse_args()
    done = export_run(
        arguments.run,
        arguments.to,
        arguments.out,
        target=arguments.target,
        draft_length=arguments.draft_length,
    )
    print(f"wrote {done.folder}")
    print(
        f"checked: draft logits differ by at most {done.check.difference:.1e} of the largest over {done.check.steps} steps"
    )
    print(f"\n{done.command}")


if __name__ == "__main__":
    run_main(main)
