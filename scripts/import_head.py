"""Turns a head from elsewhere into a head folder: EAGLE's and Medusa's own layouts, SpecForge's, speculators' and vLLM's.

python scripts/import_head.py FOLDER --target TARGET --out HEAD_FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drafters.export.importing import import_folder
from drafters.export.reader import LAYOUTS
from drafters.log import run_main
from drafters.recipe import TargetSection


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="config.json and weights")
    parser.add_argument("--target", required=True, help="folder or hub id of the target it drafts for")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="precision of the target")
    parser.add_argument("--out", type=Path, required=True, help="the head folder to write")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="", help="by default what the folder looks like")
    arguments = parser.parse_args()
    target = TargetSection(arguments.target, dtype=arguments.dtype)
    result = import_folder(arguments.folder, target, arguments.out, arguments.layout)
    print(f"wrote {arguments.out}; its draft logits and those of {arguments.folder} differ by {result.difference:.1e}")


if __name__ == "__main__":
    run_main(main)
