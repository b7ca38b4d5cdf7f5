"""A real vLLM to test exports with: the environment of scripts/vllm_env.sh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_export as te
import toy_target as toy

from drafters.evaluation.serving import vllm_python
from drafters.heads.base import save_head
from drafters.heads.eagle import EagleConfig
from drafters.heads.medusa import MedusaConfig
from drafters.recipe import find_drafter
from drafters.target.hf import HFTarget, load_target

K, LENGTH = 3, 32
# vLLM's attention on CPU wants heads of at least 32
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama_untied_rope": ("llama_untied_rope", {"head_dim": 32, "scale": 10.0}),
    "yarn": ("llama", {"head_dim": 32, "rope_parameters": te.YARN}),
    "qwen2": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"num_hidden_layers": 8}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": 256}),
    "gemma3": ("gemma3", {"head_dim": 32}),
    "padded_vocab": ("padded_vocab", {"head_dim": 32}),
    "short_window": ("mistral", {"head_dim": 32}),
}
TRAINED = {"trained_eagle": EagleConfig(noise=0.0), "trained_medusa": MedusaConfig(num_heads=K)}


def need_vllm() -> None:
    """Skips where there is none, and says how to get it."""
    if not vllm_python().is_file():
        pytest.skip(f"no vLLM at {vllm_python()}; run scripts/vllm_env.sh, or set DRAFTERS_VLLM_PYTHON")


def make_target(folder: Path, name: str) -> HFTarget:
    family, changes = TARGETS[name]
    return load_target(te.section(tiny.save_target(folder / name, family, **changes)))


def prompts_of(target: HFTarget) -> list[list[int]]:
    return [toy.random_document(12, 1, seed).ids for seed in range(6)]


def save_trained(folder: Path, config: Any, target: HFTarget) -> None:
    """A head that has half learned the target's answers to all prompts but one."""
    documents = [toy.answered(target, prompt, LENGTH + K) for prompt in prompts_of(target)[:5]]
    drafter = toy.make_head(find_drafter(config.type), target, **vars(config))
    batch = toy.with_features(target, toy.pack([[document] for document in documents]), drafter)
    toy.overfit(drafter, batch, target, steps=60, learning_rate=3e-3)
    save_head(drafter, folder)
