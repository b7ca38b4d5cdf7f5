"""What a draft length costs and gains: measured times of one round, and the choice of K."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from drafters.decoding.budget import make_budget
from drafters.decoding.growers import root_only
from drafters.decoding.stats import AcceptanceStats
from drafters.evaluation.stock import wait
from drafters.recipe import Sampling, TreeSection
from drafters.target.adapter import TargetModel
from drafters.tree import Committed, Drafting, DraftTree

GREEDY = Sampling()
COMMITTED = 2  # tokens a round commits while the drafter is timed


@dataclass(frozen=True)
class Costs:
    """Median seconds of one round's parts, on this machine.

    Attributes:
        target: plain decoding's forward, one token.
        verify: the target over a chain of K drafted tokens and the root, for K = 1 ..
        draft: the drafter's share of a round with a chain of K, its catching up included, for K = 1 ..
        context: tokens in the cache.
        rows: batch size.
    """

    target: float
    verify: list[float]
    draft: list[float]
    context: int
    rows: int


@dataclass(frozen=True)
class Choice:
    """One draft length.

    Attributes:
        tokens: expected tokens a round, from the measured alpha(k).
        speedup: tokens x target / (draft + verify), all measured.
        independent_tokens, independent_speedup: the same if every position had the mean alpha, and each draft step cost the
            same and verification no more than one token (Leviathan et al., arXiv 2211.17192).
    """

    depth: int
    tokens: float
    speedup: float
    independent_tokens: float
    independent_speedup: float
    verify_seconds: float
    draft_seconds: float


@torch.no_grad()
def measure_costs(
    target: TargetModel, drafter: Drafting, prompt: Sequence[int], depths: int, *, rows: int = 1, repeats: int = 5
) -> Costs:
    """Times `verify` and `draft` for chains of 1 .. depths, in turn, `repeats` times, after a warm-up.

    Args:
        prompt: fills the cache before the timed rounds.
        rows: the prompt is repeated to a batch of this size.
    """
    bench = _Bench(target, drafter, prompt, depths, rows, rounds=depths * (repeats + 1))
    plain: list[float] = []
    verify: list[list[float]] = [[] for _ in range(depths)]
    draft: list[list[float]] = [[] for _ in range(depths)]
    for repeat in range(repeats + 1):
        spent = bench.plain()
        if repeat:
            plain.append(spent)
        for depth in range(1, depths + 1):
            drafting, verifying = bench.round(depth)
            if repeat:
                draft[depth - 1].append(drafting)
                verify[depth - 1].append(verifying)
    return Costs(median(plain), list(map(median, verify)), list(map(median, draft)), len(prompt), rows)


class _Bench:
    """Rounds that leave the target's cache as it is: a tree that is not committed is overwritten by the next one."""

    def __init__(
        self, target: TargetModel, drafter: Drafting, prompt: Sequence[int], depths: int, rows: int, rounds: int
    ) -> None:
        self.drafter = drafter
        self.vocab_size = target.info.vocab_size
        self.session = target.session(drafter.feature_layers, rows, len(prompt) + depths + 1, depths + 1)
        self.device = self.session.lengths_B.device
        ids_BT = torch.tensor([list(prompt)] * rows, device=self.device)
        counts_B = torch.full((rows,), len(prompt), device=self.device)
        step = self.session.prefill(ids_BT, counts_B)
        self.root_B = step.logits_BNV[:, -1].argmax(-1)
        room = len(prompt) + COMMITTED * rounds + depths + 1
        state = drafter.start(target, rows, room)
        self.state = drafter.advance(state, Committed(ids_BT, step.features_BNF, counts_B, self.root_B))

    def plain(self) -> float:
        tree = root_only(self.root_B)
        return self._timed(lambda: self.session.verify(tree))[0]

    def round(self, depth: int) -> tuple[float, float]:
        """Seconds of the drafter and of the target."""
        budget = make_budget(TreeSection(kind="chain", depth=depth), GREEDY, "top", None, self.vocab_size)
        drafting, tree = self._timed(lambda: self.drafter.draft(self.state, budget))
        verifying, step = self._timed(lambda: self.session.verify(tree))
        committed = self._committed(tree, step.features_BNF)
        catching_up, self.state = self._timed(lambda: self.drafter.advance(self.state, committed))
        self.root_B = committed.root_B
        return drafting + catching_up, verifying

    def _committed(self, tree: DraftTree, features_BNF: torch.Tensor) -> Committed:
        tokens_BP = tree.tokens_BN[:, :COMMITTED]
        counts_B = torch.full_like(self.root_B, tokens_BP.shape[1])
        return Committed(tokens_BP, features_BNF[:, :COMMITTED], counts_B, tokens_BP[:, -1])

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        wait(self.device)
        start = time.perf_counter()
        result = run()
        wait(self.device)
        return time.perf_counter() - start, result


def choose_depth(stats: AcceptanceStats, costs: Costs) -> tuple[list[Choice], int]:
    """Expected tokens and speedup for each K that was measured, and the K with the largest speedup (0: plain decoding)."""
    reached, accepted = sum(stats.reached), sum(stats.accepted)
    mean_alpha = accepted / reached if reached else 0.0
    depths = min(len(stats.reached), len(costs.draft))
    step_cost = costs.draft[depths - 1] / depths / costs.target if depths else 0.0
    choices = []
    for depth in range(1, depths + 1):
        verify, draft = costs.verify[depth - 1], costs.draft[depth - 1]
        tokens = AcceptanceStats(stats.reached[:depth], stats.accepted[:depth]).expected_tau()
        independent = sum(mean_alpha**power for power in range(depth + 1))
        choices.append(
            Choice(
                depth=depth,
                tokens=tokens,
                speedup=tokens * costs.target / (draft + verify),
                independent_tokens=independent,
                independent_speedup=independent / (1 + depth * step_cost),
                verify_seconds=verify,
                draft_seconds=draft,
            )
        )
    best = max(choices, key=lambda choice: choice.speedup, default=None)
    return choices, best.depth if best and best.speedup > 1 else 0


def cost_table(stats: AcceptanceStats, costs: Costs) -> dict[str, Any]:
    """`choose_depth` as reports hold it."""
    choices, best = choose_depth(stats, costs)
    return {
        "context": costs.context,
        "rows": costs.rows,
        "target_seconds": costs.target,
        "rows_by_depth": [asdict(choice) for choice in choices],
        "best_depth": best,
    }
