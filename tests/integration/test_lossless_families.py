"""Greedy output is transformers' own, token for token: each target family, both kinds of heads, chain and trees.

The slow test is the whole claim, 100 prompts of 64 tokens; the other a sample of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import tiny
import toy_target as toy

from drafters.decoding.stats import AcceptanceStats
from drafters.evaluation.job import STATIC_PATHS
from drafters.evaluation.lossless import check_lossless
from drafters.evaluation.measure import decode
from drafters.heads.base import Drafter
from drafters.recipe import EvalSection, TreeSection, find_drafter

K = 4
TREES = (
    TreeSection(kind="chain", depth=K),
    TreeSection(kind="static", depth=K, paths=STATIC_PATHS),
    TreeSection(kind="dynamic", depth=3, width=3, nodes=12),
)
CHANGES: dict[str, dict[str, Any]] = {"eagle": {}, "medusa": {"num_heads": K}}
# "mistral" and "gemma3" have windows that prompts and answers run through.
FAMILIES = sorted(tiny.FAMILIES)


@dataclass(frozen=True)
class Size:
    prompts: int
    tokens: int


def prompts_of(count: int) -> list[list[int]]:
    return [toy.random_document(4 + seed % 17, 1, seed).ids for seed in range(count)]


@cache
def make_drafter(family: str, kind: str, trained: bool) -> Drafter:
    target = toy.make_target(family)
    drafter = toy.make_head(find_drafter(kind), target, **CHANGES[kind])
    if trained:
        documents = [toy.answered(target, prompt, 32) for prompt in prompts_of(8)]
        batch = toy.with_features(target, toy.pack([[document] for document in documents]), drafter)
        toy.overfit(drafter, batch, target, steps=100, learning_rate=3e-3)
    return drafter.eval()


def check(family: str, kind: str, trained: bool, size: Size) -> None:
    target, drafter, prompts = toy.make_target(family), make_drafter(family, kind, trained), prompts_of(size.prompts)
    section = EvalSection(max_new_tokens=size.tokens, batch_size=5)
    runs = check_lossless(target, drafter, prompts, [replace(section, tree=tree) for tree in TREES])
    for run in runs:
        found = run.to_json()
        assert found["identical"] == size.prompts, (found["tree"]["kind"], found["against_generate"])
        assert found["against_plain"]["identical"] == size.prompts, (found["tree"]["kind"], found["against_plain"])
    if trained:
        seen = decode(target, drafter, prompts[:8], replace(section, tree=TREES[0])).stats
        assert AcceptanceStats().merge(*seen).accepted[0] > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_some_prompts(family: str, kind: str, trained: bool) -> None:
    check(family, kind, trained, Size(5, 24))


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_prompts(family: str, kind: str, trained: bool) -> None:
    check(family, kind, trained, Size(100, 64))
