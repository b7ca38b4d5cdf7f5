"""Acceptance counts of decoding, and what is reported of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Z95 = 1.959963984540054


@dataclass
class AcceptanceStats:
    """Counts over rounds. Position k = 1 .. K is index k - 1.

    Attributes:
        reached: rounds in which position k was judged: positions 1 .. k-1 were accepted and the tree was k deep.
        accepted: rounds in which position k was accepted.
        rounds: target forwards after the prefill.
        tokens: tokens that rounds emitted, bonus token included. The prefill's token belongs to no round.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rounds: int = 0
    tokens: int = 0

    def add_round(self, accepted: int, depth: int, emitted: int) -> None:
        """Counts one round of one row.

        Args:
            accepted: drafted tokens that were accepted.
            depth: depth of the row's tree.
            emitted: accepted + 1, or less where an end of sequence cut the round; what lies behind it is not counted.
        """
        reached = min(accepted + 1, depth, emitted)
        self._lengthen(reached)
        for k in range(reached):
            self.reached[k] += 1
        for k in range(min(accepted, emitted)):
            self.accepted[k] += 1
        self.rounds += 1
        self.tokens += emitted

    def alpha(self) -> list[float]:
        """P(position k accepted, given that positions 1 .. k-1 were), for k = 1 ..; NaN where never reached."""
        return [_ratio(a, n) for a, n in zip(self.accepted, self.reached, strict=True)]

    def alpha_interval(self) -> list[tuple[float, float]]:
        """The 95% Wilson interval of each alpha; (0, 1) where never reached."""
        return [wilson(a, n) for a, n in zip(self.accepted, self.reached, strict=True)]

    def tau(self) -> float:
        """Mean tokens emitted per round; NaN without rounds."""
        return _ratio(self.tokens, self.rounds)

    def expected_tau(self) -> float:
        """1 + sum over k of alpha(1) .. alpha(k): what a chain with these alphas emits per round."""
        total, product = 1.0, 1.0
        for alpha in self.alpha():
            if math.isnan(alpha):
                break
            product *= alpha
            total += product
        return total

    def merge(self, *others: AcceptanceStats) -> AcceptanceStats:
        """The counts of all together; `AcceptanceStats().merge(*per_prompt)` sums up a run."""
        parts = (self, *others)
        return AcceptanceStats(
            reached=_sum([part.reached for part in parts]),
            accepted=_sum([part.accepted for part in parts]),
            rounds=sum(part.rounds for part in parts),
            tokens=sum(part.tokens for part in parts),
        )

    def to_json(self) -> dict[str, Any]:
        """The counts alone: everything else follows from them."""
        return {"reached": self.reached, "accepted": self.accepted, "rounds": self.rounds, "tokens": self.tokens}

    @staticmethod
    def from_json(data: dict[str, Any]) -> AcceptanceStats:
        return AcceptanceStats(list(data["reached"]), list(data["accepted"]), data["rounds"], data["tokens"])

    def _lengthen(self, length: int) -> None:
        missing = length - len(self.reached)
        if missing > 0:
            self.reached += [0] * missing
            self.accepted += [0] * missing


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a rate; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _ratio(count: int, total: int) -> float:
    return count / total if total else math.nan


def _sum(lists: Sequence[list[int]]) -> list[int]:
    length = max(len(each) for each in lists)
    return [sum(each[k] for each in lists if k < len(each)) for k in range(length)]
