"""transformers' own `generate`, as the reference for tokens and for time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, set_seed
from transformers.generation.streamers import BaseStreamer

from drafters.recipe import Sampling
from drafters.target.hf import HFTarget


@dataclass
class _FirstToken(BaseStreamer):
    """Notes when the first new tokens come: the end of the prefill."""

    calls: list[tuple[float, int]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        self.calls.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass

    def first(self) -> tuple[float, int]:
        return self.calls[1]  # the first call hands over the prompt


@dataclass(frozen=True)
class StockResult:
    """New tokens, and seconds until the first ones and after them."""

    tokens: list[int]
    first_count: int
    prefill_seconds: float
    decode_seconds: float


@torch.no_grad()
def stock_generate(
    target: HFTarget,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    prompt_lookup: int = 0,
) -> StockResult:
    """One prompt through `model.generate`, with the model's own generation settings neutralized.

    Args:
        sampling: temperature 0 is greedy.
        prompt_lookup: tokens that transformers' prompt lookup proposes each round; 0 for none.
    """
    ids = torch.tensor([list(prompt)], device=target.device)
    streamer = _FirstToken()
    config = _config(target.info.eos_token_ids, max_new_tokens, sampling, prompt_lookup)
    if sampling.temperature > 0:
        set_seed(seed)
    wait(target.device)
    start = time.perf_counter()
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer
    )
    wait(target.device)
    end = time.perf_counter()
    first, count = streamer.first()
    return StockResult(output[0, ids.shape[1] :].tolist(), count, first - start, end - first)


def wait(device: torch.device) -> None:
    """Until the device is done, so that a clock on the host tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _config(eos: Sequence[int], max_new_tokens: int, sampling: Sampling, prompt_lookup: int) -> GenerationConfig:
    """Every setting is given: what is left out would be taken from the model's folder (penalties, top-k 50)."""
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens,
        do_sample=sampling.temperature > 0,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
        use_cache=True,
    )
    if sampling.temperature > 0:
        settings.update(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=1.0,
        )
    if prompt_lookup:
        settings["prompt_lookup_num_tokens"] = prompt_lookup
    return GenerationConfig(**settings)
