"""Acceptance on prompts: alpha(k) and tau, with their intervals, by decoding without a teacher."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from drafters.decoding.accept import make_rule
from drafters.decoding.generate import generate
from drafters.decoding.stats import AcceptanceStats
from drafters.recipe import EvalSection
from drafters.target.adapter import TargetModel
from drafters.tree import Drafting

RESAMPLES = 1000
IDENTITY_TOLERANCE = 0.03


@dataclass(frozen=True)
class Decoded:
    """Answers to all prompts, in their order; timings are summed over batches."""

    sequences: list[list[int]]
    stats: list[AcceptanceStats]
    timings: dict[str, float]


def decode(
    target: TargetModel,
    drafter: Drafting | None,
    prompts: Sequence[list[int]],
    section: EvalSection,
    *,
    progress: str = "",
) -> Decoded:
    """Decodes prompts in batches of `section.batch_size`.

    Args:
        drafter: None decodes plainly.
        progress: the name of a progress bar; "" for none.
    """
    sequences: list[list[int]] = []
    stats: list[AcceptanceStats] = []
    timings: Counter[str] = Counter()
    with tqdm(total=len(prompts), desc=progress, unit="prompt", disable=not progress) as bar:
        for start in range(0, len(prompts), section.batch_size):
            batch = prompts[start : start + section.batch_size]
            result = generate(
                target,
                drafter,
                batch,
                max_new_tokens=section.max_new_tokens,
                sampling=section.sampling,
                tree=section.tree,
                rule=section.rule,
                seed=section.seed + start,
            )
            sequences += result.sequences
            stats += result.stats
            timings.update(result.timings)
            bar.update(len(batch))
    return Decoded(sequences, stats, dict(timings))


def loop_metrics(
    target: TargetModel, drafter: Drafting, prompts: Sequence[list[int]], section: EvalSection
) -> dict[str, float]:
    """What training logs of the decoding loop: alpha_1 .. alpha_K and tau over all rounds; nothing without prompts."""
    if not prompts:
        return {}
    stats = AcceptanceStats().merge(*decode(target, drafter, prompts, section).stats)
    return {**{f"alpha_{k}": alpha for k, alpha in enumerate(stats.alpha(), start=1)}, "tau": stats.tau()}


@dataclass(frozen=True)
class AlphaRun:
    """Acceptance under one tree and one set of sampling settings."""

    section: EvalSection
    rule: str
    lossless: bool
    decoded: Decoded

    @property
    def stats(self) -> AcceptanceStats:
        """The counts of all prompts."""
        return AcceptanceStats().merge(*self.decoded.stats)

    def to_json(self) -> dict[str, Any]:
        """Counts, rates and intervals, as reports hold them."""
        stats, per_prompt = self.stats, self.decoded.stats
        resamples = bootstrap(per_prompt)
        rates = zip(stats.alpha(), stats.alpha_interval(), stats.accepted, stats.reached, strict=True)
        return {
            "tree": asdict(self.section.tree),
            "sampling": asdict(self.section.sampling),
            "rule": self.rule,
            "lossless": self.lossless,
            "bonus_token_counted": True,
            "batch_size": self.section.batch_size,
            "max_new_tokens": self.section.max_new_tokens,
            "seed": self.section.seed,
            "prompts": len(per_prompt),
            "alpha": [
                {
                    "k": k,
                    "rate": rate,
                    "low": interval[0],
                    "high": interval[1],
                    "accepted": accepted,
                    "reached": reached,
                }
                for k, (rate, interval, accepted, reached) in enumerate(rates, start=1)
            ],
            "tau": {
                **estimate(stats, resamples, AcceptanceStats.tau),
                "rounds": stats.rounds,
                "tokens": stats.tokens,
            },
            "tau_by_depth": [
                {"depth": depth, **estimate(stats, resamples, partial(expected_tau_at, depth=depth))}
                for depth in range(1, len(stats.reached) + 1)
            ],
            "identity": identity(stats),
            "per_prompt": [each.to_json() for each in per_prompt],
            "seconds": self.decoded.timings,
        }


def measure_alpha(
    target: TargetModel, drafter: Drafting, prompts: Sequence[list[int]], section: EvalSection, *, progress: str = ""
) -> AlphaRun:
    """Decodes the prompts and counts what is accepted.

    Raises:
        ValueError: the rule, the tree and the sampling settings do not go together, or a prompt is too long.
    """
    rule = make_rule(section.rule, section.sampling, section.tree)
    return AlphaRun(section, rule.name, rule.lossless, decode(target, drafter, prompts, section, progress=progress))


def bootstrap(
    per_prompt: Sequence[AcceptanceStats], resamples: int = RESAMPLES, seed: int = 0
) -> list[AcceptanceStats]:
    """Summed counts of prompts drawn with replacement: rounds of one prompt are alike, so prompts are what varies."""
    draw = random.Random(seed)
    return [AcceptanceStats().merge(*draw.choices(per_prompt, k=len(per_prompt))) for _ in range(resamples)]


def estimate(
    stats: AcceptanceStats, resamples: Sequence[AcceptanceStats], statistic: Callable[[AcceptanceStats], float]
) -> dict[str, float | None]:
    """A statistic of the counts, with the middle 95% of its values over the resamples."""
    values = sorted(value for value in map(statistic, resamples) if not math.isnan(value))
    value = statistic(stats)
    if not values or math.isnan(value):
        return {"value": None, "low": None, "high": None}
    last = len(values) - 1
    return {"value": value, "low": values[round(0.025 * last)], "high": values[round(0.975 * last)]}


def first(stats: AcceptanceStats, depth: int) -> AcceptanceStats:
    """The counts of positions 1 .. depth only: what a shorter chain would be accepted at."""
    return AcceptanceStats(stats.reached[:depth], stats.accepted[:depth], stats.rounds, stats.tokens)


def expected_tau_at(stats: AcceptanceStats, depth: int) -> float:
    """tau of a chain of `depth`, from the rates of a longer one."""
    return first(stats, depth).expected_tau()


def identity(stats: AcceptanceStats) -> dict[str, Any]:
    """Checks that 1 + sum of products of alpha gives the measured tau, within 3%.

    A round that an end of sequence cut lacks at least the bonus token and at most all K + 1; tau lies between the two.
    """
    if not stats.rounds:
        return {"from_alpha": None, "measured": None, "rounds_cut": 0, "difference": None, "holds": None}
    cut = stats.rounds + sum(stats.accepted) - stats.tokens
    least = (stats.tokens + cut) / stats.rounds
    most = least + cut * len(stats.reached) / stats.rounds
    expected = stats.expected_tau()
    difference = expected / min(max(expected, least), most) - 1
    return {
        "from_alpha": expected,
        "measured": stats.tau(),
        "rounds_cut": cut,
        "difference": difference,
        "holds": abs(difference) <= IDENTITY_TOLERANCE,
    }
