"""alpha(k) and tau: known answers on a toy target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import RateDrafter, TableDrafter, ToyTarget, random_table

from drafters.decoding.stats import AcceptanceStats
from drafters.evaluation.measure import bootstrap, decode, estimate, first, identity, loop_metrics, measure_alpha
from drafters.recipe import EvalSection, Sampling, TreeSection

TABLE = random_table(12, seed=1)
PROMPTS = [[i, (5 * i + 1) % 12, 3] for i in range(8)]
SECTION = EvalSection(max_new_tokens=61, batch_size=1, tree=TreeSection(depth=4))


def test_a_perfect_drafter_has_alpha_one_and_tau_depth_plus_one() -> None:
    run = measure_alpha(ToyTarget(TABLE), TableDrafter(TABLE), PROMPTS, SECTION)
    result = run.to_json()
    assert [entry["rate"] for entry in result["alpha"]] == [1.0] * 4
    assert result["tau"]["value"] == result["tau"]["low"] == result["tau"]["high"] == 5.0
    assert [entry["value"] for entry in result["tau_by_depth"]] == [2.0, 3.0, 4.0, 5.0]
    assert result["identity"]["difference"] == 0 and result["identity"]["holds"]
    assert result["rule"] == "greedy" and result["lossless"]
    assert loop_metrics(ToyTarget(TABLE), TableDrafter(TABLE), PROMPTS, SECTION) == {
        "alpha_1": 1.0, "alpha_2": 1.0, "alpha_3": 1.0, "alpha_4": 1.0, "tau": 5.0,
    }  # fmt: skip


def test_a_useless_drafter_has_alpha_zero_and_tau_one() -> None:
    run = measure_alpha(ToyTarget(TABLE), RateDrafter(TABLE, [0.0] * 4), PROMPTS, SECTION)
    result = run.to_json()
    assert [(entry["rate"], entry["reached"]) for entry in result["alpha"]] == [(0.0, 60 * 8)]
    assert result["tau"]["value"] == 1.0


def test_known_rates_lie_in_their_intervals_and_tau_follows_from_them() -> None:
    rates = [0.9, 0.6, 0.8, 0.3]
    section = replace(SECTION, max_new_tokens=400)
    result = measure_alpha(ToyTarget(TABLE), RateDrafter(TABLE, rates), PROMPTS * 2, section).to_json()
    for rate, entry in zip(rates, result["alpha"], strict=True):
        assert entry["low"] < rate < entry["high"], entry
        assert entry["high"] - entry["low"] < 0.12
    expected = 1 + 0.9 + 0.9 * 0.6 + 0.9 * 0.6 * 0.8 + 0.9 * 0.6 * 0.8 * 0.3
    assert result["tau"]["low"] < expected < result["tau"]["high"]
    assert abs(result["identity"]["difference"]) < 0.01
    shorter = measure_alpha(
        ToyTarget(TABLE),
        RateDrafter(TABLE, rates[:2], seed=5),
        PROMPTS * 2,
        replace(section, tree=TreeSection(depth=2)),
    )
    assert result["tau_by_depth"][1]["value"] == pytest.approx(shorter.stats.tau(), rel=0.03)


def test_rounds_cut_by_an_end_of_sequence_do_not_break_the_identity() -> None:
    target = ToyTarget(TABLE, eos=(3, 4))
    result = measure_alpha(target, TableDrafter(TABLE), PROMPTS, SECTION).to_json()
    assert result["identity"]["rounds_cut"] > 0
    assert result["tau"]["value"] < 0.97 * 5
    assert result["identity"]["holds"]


def test_a_broken_count_breaks_the_identity() -> None:
    stats = AcceptanceStats([100, 50], [50, 25], rounds=100, tokens=175)
    assert identity(stats)["holds"] and identity(stats)["from_alpha"] == 1.75
    # alpha(2) over all rounds in place of those that reached it
    assert not identity(replace(stats, reached=[100, 100]))["holds"]


def test_batches_change_nothing() -> None:
    target, drafter = ToyTarget(TABLE), TableDrafter(random_table(12, seed=1) + 0.8 * random_table(12, seed=2))
    one = decode(target, drafter, PROMPTS, SECTION)
    three = decode(target, drafter, PROMPTS, replace(SECTION, batch_size=3))
    assert one.sequences == three.sequences
    assert [s.to_json() for s in one.stats] == [s.to_json() for s in three.stats]
    assert one.timings["rounds"] == sum(s.rounds for s in one.stats)


def test_the_report_names_rule_and_settings() -> None:
    section = replace(
        SECTION, sampling=Sampling(temperature=1.0), tree=TreeSection(kind="dynamic", depth=3, width=2, nodes=6)
    )
    result = measure_alpha(ToyTarget(TABLE), TableDrafter(TABLE), PROMPTS[:2], section).to_json()
    assert result["rule"] == "point_mass"
    assert result["sampling"]["temperature"] == 1.0 and result["tree"]["nodes"] == 6
    assert result["bonus_token_counted"] is True and result["prompts"] == 2


def test_the_bootstrap_varies_prompts() -> None:
    alike = [AcceptanceStats([10], [5], 10, 15)] * 6
    assert estimate(alike[0].merge(*alike[1:]), bootstrap(alike), AcceptanceStats.tau) == {
        "value": 1.5,
        "low": 1.5,
        "high": 1.5,
    }
    unlike = [AcceptanceStats([10], [n], 10, 10 + n) for n in (0, 2, 4, 6, 8, 10)]
    merged = AcceptanceStats().merge(*unlike)
    found = estimate(merged, bootstrap(unlike), AcceptanceStats.tau)
    # The mean of 6 draws from 1.0, 1.2 .. 2.0 has standard deviation 0.34 / sqrt(6) = 0.14.
    assert found["value"] == 1.5
    assert found["low"] == pytest.approx(1.5 - 1.96 * 0.14, abs=0.06)
    assert found["high"] == pytest.approx(1.5 + 1.96 * 0.14, abs=0.06)


def test_nothing_decoded_gives_no_rates() -> None:
    empty = AcceptanceStats()
    assert estimate(empty, [empty], AcceptanceStats.tau) == {"value": None, "low": None, "high": None}
    assert identity(empty)["holds"] is None
    assert loop_metrics(ToyTarget(TABLE), TableDrafter(TABLE), [], SECTION) == {}


def test_first_keeps_the_leading_positions() -> None:
    assert first(AcceptanceStats([9, 6, 3], [6, 3, 1], 9, 19), 2).expected_tau() == pytest.approx(
        1 + 6 / 9 + 6 / 9 * 0.5
    )
