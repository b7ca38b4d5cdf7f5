#!/usr/bin/env python
"""Times one EAGLE-3 training step, forward and backward, on random features: no target, no data, no optimizer.

    python scripts/bench_train.py
    python scripts/bench_train.py --supervised all --dtype bfloat16

The default is SmolLM2-135M's shape: 2 rows of 256 tokens, 7 steps, vocabulary 49152, draft vocabulary 8192, half of the positions
supervised as one span of each row. The output matrix is trained. The last lines leave out one saving each, to show what it gives.
Times are medians over the repeats, which go round the variants in turn; memory is the largest resident size during a step of a
process of its own, over what it was with the head and the features in place and no gradients.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from drafters.batch import TargetFeatures, TrainBatch
from drafters.heads import eagle3
from drafters.heads.blocks import RMSNorm
from drafters.heads.training_time_test import RolloutRows
from drafters.log import run_main
from drafters.target.adapter import TargetInfo
from drafters.target.weights import VocabularyHead

WARM_UP = 2


@dataclass(frozen=True)
class Times:
    """Of one step, in seconds."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        return self.forward + self.backward


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    variants = list(VARIANTS) if args.variants else ["the step"]
    times = measure(args, variants)
    memory = {name: peak_memory(args, name) for name in variants}
    tokens = args.rows * args.length
    results = {name: summary(times[name], memory[name], tokens) for name in variants}
    print(f"{'':<34}{'ms':>7}{'range':>14}{'forward':>9}{'backward':>9}{'tokens/s':>10}{'MB':>7}")
    for name, facts in results.items():
        spread = f"{facts['fastest_ms']:.0f}-{facts['slowest_ms']:.0f}"
        print(
            f"{name:<34}{facts['step_ms']:>7.0f}{spread:>14}{facts['forward_ms']:>9.0f}{facts['backward_ms']:>9.0f}"
            f"{facts['tokens_per_s']:>10.0f}{facts['peak_mb']:>7.0f}"
        )
    if args.output:
        args.output.write_text(json.dumps({"settings": {**vars(args), "output": None}, "results": results}, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2, help="rows of the batch (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row (%(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="of the training-time test (%(default)s)")
    parser.add_argument("--supervised", choices=["half", "all"], default="half", help="positions (%(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="%(default)s")
    parser.add_argument("--loss", default="soft_cross_entropy", help="%(default)s")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="%(default)s")
    parser.add_argument("--threads", type=int, default=2, help="%(default)s")
    parser.add_argument("--repeats", type=int, default=10, help="%(default)s")
    parser.add_argument("--no-variants", dest="variants", action="store_false", help="time the step as it is only")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    return parser.parse_args()


def measure(args: argparse.Namespace, variants: list[str]) -> dict[str, list[Times]]:
    step = make_step(args)
    times: dict[str, list[Times]] = {name: [] for name in variants}
    for repeat in range(WARM_UP + args.repeats):
        for name in variants:
            with VARIANTS[name]():
                taken = step()
            if repeat >= WARM_UP:
                times[name].append(taken)
    return times


def make_step(args: argparse.Namespace) -> Callable[[], Times]:
    """A head, a target's vocabulary matrices and a batch; calling it takes a step and drops the gradients."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    info = target_info(args.dtype)
    target = vocabulary_head(info, dtype)
    config = eagle3.Eagle3Config(
        steps=args.steps,
        draft_vocab_size=args.draft_vocab % info.vocab_size,
        loss=args.loss,
        feature_layers=(1, 14, 26),
    )
    head = eagle3.Eagle3(config, info).to(dtype)
    batch = make_batch(args, info, dtype)

    def step() -> Times:
        start = time.perf_counter()
        loss = head(batch, target).loss
        middle = time.perf_counter()
        (loss.sum / loss.count).backward()
        end = time.perf_counter()
        head.zero_grad()
        return Times(middle - start, end - middle)

    return step


def target_info(dtype: str) -> TargetInfo:
    return TargetInfo(
        path="",
        revision="",
        architecture="LlamaForCausalLM",
        hidden_size=576,
        num_layers=30,
        vocab_size=49152,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
        tied_embeddings=True,
        dtype=dtype,
        eos_token_ids=(2,),
        weights_hash="",
        tokenizer_hash="",
        template_hash="",
    )


def vocabulary_head(info: TargetInfo, dtype: torch.dtype) -> VocabularyHead:
    embedding = nn.Embedding(info.vocab_size, info.hidden_size, dtype=dtype).requires_grad_(False)
    output = nn.Linear(info.hidden_size, info.vocab_size, bias=False, dtype=dtype).requires_grad_(False)
    norm = RMSNorm(info.hidden_size, info.rms_norm_eps).to(dtype).requires_grad_(False)
    return VocabularyHead(info, SimpleNamespace(), embedding, norm, output)


def make_batch(args: argparse.Namespace, info: TargetInfo, dtype: torch.dtype) -> TrainBatch:
    B, T = args.rows, args.length
    mask = torch.ones(B, T, dtype=torch.bool)
    if args.supervised == "half":
        mask[:, : T // 2] = False
    position = torch.arange(T).expand(B, T)
    features = TargetFeatures(
        torch.randn(B, T, 3 * info.hidden_size, dtype=dtype), torch.randn(B, T, info.hidden_size, dtype=dtype)
    )
    return TrainBatch(
        torch.randint(info.vocab_size, (B, T)), mask, torch.zeros(B, T, dtype=torch.long), position, features
    )


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


@contextmanager
def every_row() -> Iterator[None]:
    """Rows without a loss go through every step too; the losses are the same."""

    def of(batch: TrainBatch, steps: int) -> RolloutRows:
        B, T = batch.input_ids_BT.shape
        return RolloutRows(torch.arange(T).expand(B, T), batch.drafted(steps))

    with patch.object(eagle3.RolloutRows, "of", of):
        yield


@contextmanager
def one_chunk() -> Iterator[None]:
    """All draft logits at once, as one chunk."""
    with patch.object(eagle3, "chunk_rows", lambda *_: 2**31):
        yield


@contextmanager
def teacher_each_step() -> Iterator[None]:
    """The target's law is computed again for each step that compares with it."""

    def apart(values: Tensor, **_: bool) -> tuple[Tensor, Tensor]:
        return values, torch.arange(len(values))

    with patch.object(torch, "unique_consecutive", apart):
        yield


VARIANTS = {
    "the step": as_it_is,
    "unsupervised rows kept": every_row,
    "target's law computed at each step": teacher_each_step,
    "loss not in chunks": one_chunk,
}


def peak_memory(args: argparse.Namespace, variant: str) -> float:
    """Megabytes that a step takes over the head and the features, seen from a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return float(pool.apply(_peak_memory, (args, variant)))


def _peak_memory(args: argparse.Namespace, variant: str) -> float:
    torch.set_num_threads(args.threads)
    step = make_step(args)
    before = resident("VmRSS")
    with VARIANTS[variant]():
        for _ in range(WARM_UP + 1):
            step()
    return (resident("VmHWM") - before) / 1e3


def resident(field: str) -> int:
    """kB, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def summary(times: list[Times], peak_mb: float, tokens: int) -> dict[str, float]:
    steps = [taken.step for taken in times]
    return {
        "step_ms": 1e3 * statistics.median(steps),
        "fastest_ms": 1e3 * min(steps),
        "slowest_ms": 1e3 * max(steps),
        "forward_ms": 1e3 * statistics.median(taken.forward for taken in times),
        "backward_ms": 1e3 * statistics.median(taken.backward for taken in times),
        "tokens_per_s": tokens / statistics.median(steps),
        "peak_mb": peak_mb,
    }


if __name__ == "__main__":
    run_main(main)
