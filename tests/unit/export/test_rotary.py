"""The published formulas against transformers' own tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.export.rotary import config_rope, frequencies

DIM, POSITIONS = 32, 4096
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 8.0, "original_max_position_embeddings": 512}
LONG = {
    "short_factor": [1.0 + i / 9 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
    "original_max_position_embeddings": 512,
    "factor": 8.0,
}


@pytest.mark.parametrize("theta", [10000.0, 5e5])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
        {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        {"rope_type": "yarn", **YARN, "truncate": False},
        {"rope_type": "longrope", **LONG},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [40, 600])
def test_equal_to_transformers(rope: dict[str, Any], theta: float, length: int) -> None:
    rope = {**rope, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=DIM,
        num_attention_heads=1,
        head_dim=DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters=dict(rope),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    angles, scale = frequencies(rope, DIM, length, POSITIONS)
    turns = torch.arange(length, dtype=torch.float64)[:, None] * angles
    assert torch.allclose(cos[0, :, : DIM // 2].double(), turns.cos() * scale, atol=1e-3)
    assert torch.allclose(sin[0, :, : DIM // 2].double(), turns.sin() * scale, atol=1e-3)


def test_old_schema_is_read() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config_rope(old) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert config_rope({"rope_theta": 5e5, "rope_scaling": None}) == {"rope_type": "default", "rope_theta": 5e5}


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'wave' for a text of 8 tokens is not known"):
        frequencies({"rope_type": "wave", "rope_theta": 1e4}, DIM, 8, POSITIONS)
