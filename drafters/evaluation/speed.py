"""Tokens per second: plain decoding, transformers' `generate` and the speculative loop, in turn, on the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from tqdm import tqdm

from drafters.decoding.accept import make_rule
from drafters.decoding.stats import AcceptanceStats
from drafters.evaluation.measure import decode
from drafters.evaluation.stock import stock_generate
from drafters.recipe import EvalSection
from drafters.target.hf import HFTarget
from drafters.tree import Drafting

PLAIN, STOCK, LOOKUP, SPECULATIVE = "plain", "transformers", "prompt lookup", "speculative"
PHASES = ("draft", "verify", "accept", "commit", "rest")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Timed:
    """One pass over all prompts, or one prompt's part of it.

    Attributes:
        tokens: new tokens after those that the prefill gave; the token that ends an answer counts.
        prefill: seconds until the first tokens of each answer.
        decode: seconds after them.
        sequences: the answers.
        stats: of the loop; empty for transformers.
        phases: seconds of the loop's parts, and "rounds".
    """

    tokens: int = 0
    prefill: float = 0.0
    decode: float = 0.0
    sequences: list[list[int]] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    phases: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Timed) -> Timed:
        return Timed(
            self.tokens + other.tokens,
            self.prefill + other.prefill,
            self.decode + other.decode,
            self.sequences + other.sequences,
            self.stats.merge(other.stats),
            dict(Counter(self.phases) + Counter(other.phases)),
        )

    @property
    def rate(self) -> float:
        """Tokens per second, prefill apart."""
        return self.tokens / self.decode if self.decode else 0.0


Method = Callable[[list[list[int]], EvalSection], Timed]


@dataclass(frozen=True)
class SpeedRun:
    """All methods' passes, under one tree and one set of sampling settings."""

    section: EvalSection
    rule: str
    lossless: bool
    prompts: int
    passes: dict[str, list[Timed]]

    @property
    def stats(self) -> AcceptanceStats:
        """The speculative loop's counts; repeats of one prompt are the same rounds again, so one pass."""
        return self.passes[SPECULATIVE][0].stats

    def ratios(self, name: str) -> list[float]:
        """Tokens per second over plain decoding's, repeat by repeat."""
        return [mine.rate / plain.rate for mine, plain in zip(self.passes[name], self.passes[PLAIN], strict=True)]

    def to_json(self) -> dict[str, Any]:
        same = zip(self.passes[PLAIN][0].sequences, self.passes[SPECULATIVE][0].sequences, strict=True)
        return {
            "tree": asdict(self.section.tree),
            "sampling": asdict(self.section.sampling),
            "rule": self.rule,
            "lossless": self.lossless,
            "bonus_token_counted": True,
            "batch_size": self.section.batch_size,
            "max_new_tokens": self.section.max_new_tokens,
            "prompts": self.prompts,
            "repeats": len(self.passes[PLAIN]),
            "same_output_as_plain": sum(a == b for a, b in same),
            "methods": {name: self._method(name) for name in self.passes},
            "tau": self.stats.tau(),
            "counts": self.stats.to_json(),
            "round_ms": {name: self._round_ms(name) for name in (PLAIN, SPECULATIVE)},
            "model": self._model(),
        }

    def _method(self, name: str) -> dict[str, Any]:
        passes = self.passes[name]
        return {
            "tokens_per_second": _spread([each.rate for each in passes]),
            "ratio_to_plain": _spread(self.ratios(name)),
            "passes": [{"tokens": t.tokens, "prefill_seconds": t.prefill, "decode_seconds": t.decode} for t in passes],
        }

    def _round_ms(self, name: str) -> dict[str, float]:
        total: Counter[str] = Counter()
        for each in self.passes[name]:
            total.update(each.phases)
        return {phase: 1000 * total[phase] / total["rounds"] for phase in PHASES} if total["rounds"] else {}

    def _model(self) -> dict[str, float | None]:
        """tau x T(1) / (T_draft + T_verify(N)), from the times of these very passes, beside what was measured."""
        plain, ours = self._round_ms(PLAIN), self._round_ms(SPECULATIVE)
        if not plain or not ours:
            return {"speedup": None, "measured": None, "share": None}
        modelled = self.stats.tau() * plain["verify"] / (ours["draft"] + ours["verify"])
        measured = median(self.ratios(SPECULATIVE))
        return {"speedup": modelled, "measured": measured, "share": measured / modelled}


def measure_speed(
    target: HFTarget,
    drafter: Drafting,
    prompts: Sequence[list[int]],
    section: EvalSection,
    *,
    repeats: int = 3,
    prompt_lookup: int = 0,
    progress: str = "",
) -> SpeedRun:
    """Times all methods in turn, prompt by prompt, `repeats` times, after a short warm-up of each.

    Args:
        section: batch_size rows are decoded together by the loop; transformers gets them one by one.
        prompt_lookup: tokens that transformers' prompt lookup proposes each round; 0 leaves it out.
        progress: the name of the progress bar; "" for none.

    Raises:
        ValueError: the settings do not go together, or no answer has a second token.
    """
    rule = make_rule(section.rule, section.sampling, section.tree)
    methods = _methods(target, drafter, prompt_lookup)
    batches = [list(prompts[i : i + section.batch_size]) for i in range(0, len(prompts), section.batch_size)]
    short = replace(section, max_new_tokens=min(WARM_UP_TOKENS, section.max_new_tokens))
    for method in methods.values():
        method(batches[0], short)
    passes = {name: [Timed() for _ in range(repeats)] for name in methods}
    with tqdm(total=repeats * len(batches), desc=progress, unit="batch", disable=not progress) as bar:
        for repeat in range(repeats):
            for batch in batches:
                for name, method in methods.items():
                    passes[name][repeat] += method(batch, section)
                bar.update()
    if not all(each.tokens for each in passes[PLAIN]):
        raise ValueError(
            "every answer ended with its first token, so there is nothing to time; use other prompts or a larger max_new_tokens"
        )
    return SpeedRun(section, rule.name, rule.lossless, len(prompts), passes)


def _methods(target: HFTarget, drafter: Drafting, prompt_lookup: int) -> dict[str, Method]:
    methods: dict[str, Method] = {
        PLAIN: lambda prompts, section: _loop(target, None, prompts, section),
        STOCK: lambda prompts, section: _stock(target, prompts, section, 0),
        SPECULATIVE: lambda prompts, section: _loop(target, drafter, prompts, section),
    }
    if prompt_lookup:
        methods[LOOKUP] = lambda prompts, section: _stock(target, prompts, section, prompt_lookup)
    return methods


def _loop(target: HFTarget, drafter: Drafting | None, prompts: list[list[int]], section: EvalSection) -> Timed:
    done = decode(target, drafter, prompts, section)
    prefill = done.timings["prefill"]
    return Timed(
        tokens=sum(len(sequence) - 1 for sequence in done.sequences),
        prefill=prefill,
        decode=done.timings["total"] - prefill,
        sequences=done.sequences,
        stats=AcceptanceStats().merge(*done.stats),
        phases=done.timings,
    )


def _stock(target: HFTarget, prompts: list[list[int]], section: EvalSection, prompt_lookup: int) -> Timed:
    total = Timed()
    for prompt in prompts:
        result = stock_generate(
            target,
            prompt,
            max_new_tokens=section.max_new_tokens,
            sampling=section.sampling,
            seed=section.seed,
            prompt_lookup=prompt_lookup,
        )
        count = len(result.tokens) - result.first_count
        total += Timed(count, result.prefill_seconds, result.decode_seconds, [result.tokens])
    return total


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}
