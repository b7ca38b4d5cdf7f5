#!/usr/bin/env python
"""Writes recipes/schema.json, by which editors complete and check recipes: python scripts/make_schema.py"""

from __future__ import annotations

import json
from pathlib import Path

from drafters.log import run_main
from drafters.recipe_file import recipe_schema


def main() -> None:
    file = Path(__file__).parents[1] / "recipes/schema.json"
    file.write_text(json.dumps(recipe_schema(), indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    run_main(main)
