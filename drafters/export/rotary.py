"""Rotary frequencies by the published formulas, apart from transformers: what `check` holds an exported config against.

Linear: arXiv 2306.15595. YaRN: arXiv 2309.00071. llama3: Llama 3.1's published scaling. LongRoPE: arXiv 2402.13753.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def config_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config in the new schema.

    Raises:
        ValueError: there are none, or the old schema beside the new one says something else.
    """
    new = config.get("rope_parameters")
    old = old_rope(config)
    if new is None and old is None:
        raise ValueError("config.json has neither rope_theta nor rope_parameters; readers would assume 10000")
    if new is not None and old is not None:
        differ = sorted(key for key in old if new.get(key) != old[key])
        if differ:
            raise ValueError(
                f"rope_parameters and rope_theta/rope_scaling of config.json differ in {', '.join(differ)}"
            )
    return dict(new or old or {})


def old_rope(config: dict[str, Any]) -> dict[str, Any] | None:
    """rope_theta and rope_scaling as one dict, where there are any."""
    if "rope_theta" not in config and not config.get("rope_scaling"):
        return None
    scaling = dict(config.get("rope_scaling") or {"rope_type": "default"})
    legacy = scaling.pop("type", None)
    scaling.setdefault("rope_type", legacy)
    return {"rope_theta": config.get("rope_theta", 10000.0), **scaling}


def frequencies(rope: dict[str, Any], dim: int, length: int, max_positions: int) -> tuple[Tensor, float]:
    """Angles per position [dim / 2], float64, and the factor on cosines and sines, for a text of this length.

    Raises:
        ValueError: a type of scaling that is not known here.
    """
    kind = rope["rope_type"]
    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    original = rope.get("original_max_position_embeddings") or max_positions
    if kind == "default" or (kind == "dynamic" and length <= original):
        return base, 1.0
    if kind == "linear":
        return base / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(base, rope), 1.0
    if kind == "yarn":
        return _yarn(base, rope, dim, original, max_positions)
    if kind == "longrope":
        return _longrope(base, rope, length, original, max_positions)
    raise ValueError(f"rotary scaling {kind!r} for a text of {length} tokens is not known to export.check")


def _llama3(base: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long waves are slowed by the factor, short ones left, those between mixed."""
    turns = rope["original_max_position_embeddings"] * base / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * base + (1 - kept) * base / rope["factor"]


def _yarn(base: Tensor, rope: dict[str, Any], dim: int, original: int, max_positions: int) -> tuple[Tensor, float]:
    factor = rope.get("factor") or max_positions / original
    theta = rope["rope_theta"]

    def place(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    slowed = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return slowed * base / factor + (1 - slowed) * base, _yarn_attention(rope, factor)


def _yarn_attention(rope: dict[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _longrope(
    base: Tensor, rope: dict[str, Any], length: int, original: int, max_positions: int
) -> tuple[Tensor, float]:
    divisors = rope["long_factor"] if length > original else rope["short_factor"]
    stretch = rope.get("factor") or max_positions / original
    scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return base / torch.tensor(divisors, dtype=torch.float64), float(rope.get("attention_factor") or scale)
