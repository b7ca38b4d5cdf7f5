import json
import math

import pytest

from drafters.decoding.stats import AcceptanceStats, wilson


def test_conditional_alpha_and_tau():
    stats = AcceptanceStats()
    stats.add_round(accepted=3, depth=3, emitted=4)
    stats.add_round(accepted=1, depth=3, emitted=2)
    stats.add_round(accepted=0, depth=3, emitted=1)
    assert stats.reached == [3, 2, 1] and stats.accepted == [2, 1, 1]
    assert stats.alpha() == [2 / 3, 1 / 2, 1.0]
    assert stats.tau() == 7 / 3
    assert math.isclose(stats.expected_tau(), 1 + 2 / 3 + 1 / 3 + 1 / 3)


def test_position_below_a_tree_is_not_reached():
    stats = AcceptanceStats()
    stats.add_round(accepted=1, depth=1, emitted=2)
    stats.add_round(accepted=0, depth=0, emitted=1)
    assert stats.reached == [1] and stats.accepted == [1] and stats.tokens == 3


@pytest.mark.parametrize(
    ("emitted", "reached", "accepted"), [(1, [1], [1]), (2, [1, 1], [1, 1]), (3, [1, 1, 1], [1, 1, 0])]
)
def test_round_cut_by_the_end_counts_what_was_emitted(emitted, reached, accepted):
    stats = AcceptanceStats()
    stats.add_round(accepted=2, depth=4, emitted=emitted)
    assert (stats.reached, stats.accepted, stats.tokens) == (reached, accepted, emitted)


def test_merge_and_json():
    one, two = AcceptanceStats([2, 1], [1, 0], 2, 3), AcceptanceStats([5], [4], 5, 9)
    both = one.merge(two)
    assert both == AcceptanceStats([7, 1], [5, 0], 7, 12)
    assert AcceptanceStats().merge(one, two) == both
    assert one == AcceptanceStats([2, 1], [1, 0], 2, 3)
    assert AcceptanceStats.from_json(json.loads(json.dumps(both.to_json()))) == both


def test_nothing_counted():
    stats = AcceptanceStats()
    assert math.isnan(stats.tau()) and stats.alpha() == [] and stats.expected_tau() == 1.0


def test_wilson():
    low, high = wilson(8, 10)  # the textbook example
    assert math.isclose(low, 0.4902, abs_tol=1e-4) and math.isclose(high, 0.9433, abs_tol=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 5)[0] == 0.0 and math.isclose(wilson(5, 5)[1], 1.0)
