"""The choice of K."""

from __future__ import annotations

import time
from typing import Any

import pytest
from toys import TableDrafter, ToySession, ToyTarget, random_table

from drafters.decoding.stats import AcceptanceStats
from drafters.evaluation.cost import Costs, choose_depth, cost_table, measure_costs


def constant(alpha: float, depth: int) -> AcceptanceStats:
    """Counts whose alpha(k) is the same everywhere."""
    reached = [int(10**6 * alpha**k) for k in range(depth)]
    return AcceptanceStats(reached, [int(n * alpha) for n in reached], 10**6, 0)


def test_the_independent_model_gives_its_published_example() -> None:
    costs = Costs(target=1.0, verify=[1.0] * 5, draft=[0.1 * k for k in range(1, 6)], context=10, rows=1)
    choices, _ = choose_depth(constant(0.7, 5), costs)
    assert choices[4].independent_tokens == pytest.approx(2.94, abs=0.005)
    assert choices[4].independent_speedup == pytest.approx(1.96, abs=0.005)
    assert choices[4].tokens == pytest.approx(2.94, abs=0.005)
    assert choices[4].speedup == pytest.approx(2.94 / 1.5, abs=0.005)


def test_the_best_depth_is_the_fastest_and_not_the_one_with_most_tokens() -> None:
    stats = AcceptanceStats([100, 80, 60, 40, 20], [80, 60, 40, 20, 10], 100, 310)
    costs = Costs(target=1.0, verify=[1.0, 1.0, 1.3, 1.6, 1.9], draft=[0.1, 0.2, 0.3, 0.4, 0.5], context=10, rows=1)
    choices, best = choose_depth(stats, costs)
    assert [choice.tokens for choice in choices] == pytest.approx([1.8, 2.4, 2.8, 3.0, 3.1])
    assert [choice.speedup for choice in choices] == pytest.approx(
        [1.8 / 1.1, 2.4 / 1.2, 2.8 / 1.6, 3.0 / 2.0, 3.1 / 2.4]
    )
    assert best == 2


def test_no_depth_is_best_where_all_lose() -> None:
    costs = Costs(target=1.0, verify=[1.5, 1.6], draft=[0.5, 1.0], context=10, rows=1)
    assert choose_depth(AcceptanceStats([10, 2], [2, 1], 10, 13), costs)[1] == 0
    assert choose_depth(AcceptanceStats(), costs) == ([], 0)
    table = cost_table(AcceptanceStats([10, 2], [2, 1], 10, 13), costs)
    assert table["best_depth"] == 0 and len(table["rows_by_depth"]) == 2


class SlowTarget(ToyTarget):
    """A token costs a millisecond, and each further one half of that."""

    def session(self, layers: Any, rows: int, max_tokens: int, max_nodes: int) -> ToySession:
        session = super().session(layers, rows, max_tokens, max_nodes)
        verify = session.verify

        def slow(tree: Any) -> Any:
            time.sleep(0.01 + 0.005 * (tree.tokens_BN.shape[1] - 1))
            return verify(tree)

        session.verify = slow  # type: ignore[method-assign]
        return session


class SlowDrafter(TableDrafter):
    def draft(self, state: Any, budget: Any) -> Any:
        time.sleep(0.003 * budget.max_depth)
        return super().draft(state, budget)


def test_times_are_of_the_sizes_asked_for() -> None:
    table = random_table(8, seed=0)
    costs = measure_costs(SlowTarget(table), SlowDrafter(table), [1, 2, 3], 3, rows=2, repeats=3)
    assert (costs.context, costs.rows) == (3, 2)
    # Sleeps are never shorter than asked for; a busy machine makes them longer.
    assert costs.target >= 0.01
    assert all(found >= 0.01 + 0.005 * k for k, found in enumerate(costs.verify, start=1))
    assert all(found >= 0.003 * k for k, found in enumerate(costs.draft, start=1))
    assert len(costs.verify) == len(costs.draft) == 3
