"""Facts about a target and where its files are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from drafters.recipe import TargetSection
from drafters.target.adapter import TargetInfo


def resolve_folder(section: TargetSection) -> tuple[Path, str]:
    """The local folder of a target, fetched from the hub where the path is a hub id, and its revision.

    Raises:
        ValueError: no such folder, and not a hub id that can be fetched.
    """
    folder = Path(section.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"target.path: {folder} has no config.json; expected a transformers model folder")
        return folder, ""
    if section.path.count("/") != 1 or section.path.startswith((".", "/", "~")):
        raise ValueError(
            f"target.path: there is no folder {section.path!r}, and it is not a hub id (organisation/name)"
        )
    from huggingface_hub import snapshot_download  # imported here: only a hub id needs the hub

    try:
        snapshot = snapshot_download(section.path, revision=section.revision, ignore_patterns=["*.pth", "original/*"])
    except Exception as error:
        raise ValueError(
            f"target.path: no folder {section.path!r} here, and the hub did not give it at revision "
            f"{section.revision!r}: {error}"
        ) from error
    return Path(snapshot), Path(snapshot).name


def load_tokenizer(section: TargetSection) -> PreTrainedTokenizerBase:
    """The target's own tokenizer.

    Raises:
        ValueError: the folder has none.
    """
    folder, _ = resolve_folder(section)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"target.path: {folder} has no tokenizer that transformers can load: {error}") from error


def text_config(config: Any) -> Any:
    """The language part of a configuration (the whole of it for text-only models)."""
    return config.get_text_config()


def make_info(
    section: TargetSection,
    config: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    folder: Path | None,
    revision: str,
) -> TargetInfo:
    """Gathers what heads, checks and exports need to know of a target."""
    text = text_config(config)
    heads = text.num_attention_heads
    rope = dict(getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    if any(isinstance(value, dict) for value in rope.values()):  # per layer type: a head follows the full layers
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    rope.pop("partial_rotary_factor", None)  # heads are Llama-like and rotate whole heads
    return TargetInfo(
        path=section.path,
        revision=revision,
        architecture=(config.architectures or [type(config).__name__])[0],
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=text.intermediate_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6,
        rope=rope,
        max_position_embeddings=text.max_position_embeddings,
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        dtype=section.dtype,
        eos_token_ids=_eos_ids(config, tokenizer, folder),
        weights_hash=_files_hash(folder) if folder else "",
        tokenizer_hash=_tokenizer_hash(tokenizer),
        template_hash=_short_hash(str(tokenizer.chat_template).encode())
        if tokenizer and tokenizer.chat_template
        else "",
    )


def _eos_ids(config: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path | None) -> tuple[int, ...]:
    """Every id that ends an answer: of the generation config where there is one, else of the config and tokenizer."""
    generation = folder / "generation_config.json" if folder else None
    found: Any = None
    if generation and generation.is_file():
        found = json.loads(generation.read_text()).get("eos_token_id")
    if found is None:
        found = text_config(config).eos_token_id
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    return tuple(ids)


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return ""
    return _short_hash(json.dumps(sorted(tokenizer.get_vocab().items())).encode())


def _files_hash(folder: Path, samples: int = 64, size: int = 4096) -> str:
    """A fingerprint of the weight files: their sizes and evenly spaced pieces of each."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for path in files:
        total = path.stat().st_size
        digest.update(f"{path.name}:{total}".encode())
        with path.open("rb") as stream:
            for index in range(samples):
                stream.seek(total * index // samples)
                digest.update(stream.read(size))
    return digest.hexdigest()[:16] if files else ""
