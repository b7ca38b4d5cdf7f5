"""Our acceptance beside vLLM's, with a stand-in for vLLM: the real one is in tests/vllm."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toys import RateDrafter, TableDrafter, ToyTarget, random_table

from drafters.evaluation.markdown import render
from drafters.evaluation.measure import AlphaRun, measure_alpha
from drafters.evaluation.serving import ACCEPTED, DRAFTS, Case, ServingRun, compare_serving, decode_with_vllm
from drafters.recipe import EvalSection, TreeSection

TABLE = random_table(12, seed=1)
PROMPTS = [[i, (5 * i + 1) % 12, 3] for i in range(8)]
SECTION = EvalSection(max_new_tokens=61, batch_size=1, tree=TreeSection(kind="chain", depth=2))
CASE = Case("folder", "float32", {"num_speculative_tokens": 2}, PROMPTS, 61)


def ours(rates: list[float]) -> AlphaRun:
    return measure_alpha(ToyTarget(TABLE), RateDrafter(TABLE, rates), PROMPTS, SECTION)


def vllm_result(run: AlphaRun) -> dict[str, object]:
    """What vLLM would say had it decoded as our loop did."""
    stats = run.stats
    metrics = {DRAFTS: float(stats.rounds), ACCEPTED: stats.accepted}
    return {"answers": run.decoded.sequences, "drafts": [], "seconds": 2.0, "metrics": metrics}


def fake_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A Python named by the environment that runs `body` in place of the worker."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport json, sys\n_, minus_p, worker, cases, results = sys.argv\n{body}\n")
    python.chmod(0o755)
    monkeypatch.setenv("DRAFTERS_VLLM_PYTHON", str(python))


def test_the_same_counts_agree() -> None:
    run = ours([0.7, 0.5])
    result = ServingRun(run, {**vllm_result(run), "seconds": 4.0}, vllm_result(run)).to_json()
    assert result["agrees"] and result["tau"]["ours"] == result["tau"]["vllm"]
    assert all(position["ours"] == position["vllm"] for position in result["positions"])
    assert result["same_output_as_plain_vllm"] == result["same_output_as_ours"] == len(PROMPTS)
    rate = result["tokens_per_second"]
    assert rate["speculative"] == 2 * rate["plain"] == 61 * len(PROMPTS) / 2


def test_other_acceptance_is_seen_at_each_position() -> None:
    for rates in ([0.4, 0.5], [0.7, 0.1]):
        other = vllm_result(ours(rates))
        assert not ServingRun(ours([0.7, 0.5]), other, other).agrees


def test_a_head_that_is_never_accepted_compares() -> None:
    run = measure_alpha(ToyTarget(TABLE), RateDrafter(TABLE, [0.0, 0.0]), PROMPTS, SECTION)
    result = vllm_result(run)
    result["metrics"] = {DRAFTS: float(run.stats.rounds), ACCEPTED: [0.0, 0.0]}
    second = ServingRun(run, result, result).to_json()["positions"][1]
    assert second["vllm"]["reached"] == second["ours"]["reached"] == 0 and second["ours"]["high"] == 1.0


def test_other_output_is_counted() -> None:
    run = ours([0.7, 0.5])
    result = vllm_result(run)
    changed = {**result, "answers": [[0], *run.decoded.sequences[1:]]}
    counted = ServingRun(run, result, changed).to_json()
    assert counted["same_output_as_plain_vllm"] == counted["same_output_as_ours"] == len(PROMPTS) - 1


def test_the_report_shows_both_sides() -> None:
    run = ours([0.7, 0.5])
    settings = {
        "prompts": {"source": "prompts", "count": 8, "hash": "0" * 64},
        "template_hash": "t", "dtype": "float32", "device": "cpu", "threads": 2,
    }  # fmt: skip
    section = {"settings": settings, "provenance": {"versions": {}, "git_revision": ""}}
    report = {
        "head": {"type": "eagle", "folder": "head", "weights_hash": "0" * 64},
        "target": {"path": "target", "architecture": "Toy", "weights_hash": "0"},
    }
    same, other = ServingRun(run, vllm_result(run), vllm_result(run)), vllm_result(ours([0.1, 0.5]))
    text = render({**report, "serving": {**section, "runs": [same.to_json()]}})
    first = same.to_json()["positions"][0]["vllm"]
    assert text.count(f"| {first['rate']:.3f} ({first['low']:.3f} to {first['high']:.3f}) |") == 2
    assert "overlap at every k" in text and "8 outputs of vLLM equal to vLLM's without the head" in text
    other_text = render({**report, "serving": {**section, "runs": [ServingRun(run, other, other).to_json()]}})
    assert "do NOT overlap" in other_text


def test_cases_go_to_the_python_that_has_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "case = json.load(open(cases))['a']\njson.dump({'a': {'answers': case['prompts']}}, open(results, 'w'))"
    fake_vllm(tmp_path, monkeypatch, body)
    assert decode_with_vllm({"a": CASE}) == {"a": {"answers": PROMPTS}}


def test_no_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTERS_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"scripts/vllm_env\.sh"):
        decode_with_vllm({"a": CASE})


def test_a_process_that_dies_shows_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(tmp_path, monkeypatch, "sys.exit('no such instruction')")
    with pytest.raises(ValueError, match="status 1: no such instruction"):
        decode_with_vllm({"a": CASE})


def test_an_engine_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "json.dump({n: {'error': 'no head'} for n in json.load(open(cases))}, open(results, 'w'))"
    fake_vllm(tmp_path, monkeypatch, body)
    with pytest.raises(ValueError, match="no head"):
        compare_serving(ours([0.5, 0.5]), CASE)


def test_the_plain_case_has_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "cases = json.load(open(cases))\n"
        "assert cases['plain']['speculation'] is None and cases['speculative']['speculation']\n"
        "answers = cases['plain']['prompts']\n"
        f"one = {{'answers': answers, 'seconds': 1.0, 'metrics': {{{DRAFTS!r}: 8.0, {ACCEPTED!r}: [4.0, 2.0]}}}}\n"
        "json.dump({'plain': one, 'speculative': one}, open(results, 'w'))"
    )
    fake_vllm(tmp_path, monkeypatch, body)
    run = measure_alpha(ToyTarget(TABLE), TableDrafter(TABLE), PROMPTS, replace(SECTION, max_new_tokens=3))
    assert compare_serving(run, CASE).stats.accepted == [4, 2]
