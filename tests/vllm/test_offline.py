"""Exported heads in a real vLLM: it loads them, drafts the chains that we draft, and its output stays the target's.

Needs the environment of scripts/vllm_env.sh; see tests/tiny_vllm.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_export as te
from tiny_vllm import LENGTH, TARGETS, TRAINED, K, make_target, need_vllm, prompts_of, save_trained

from drafters.decoding.generate import generate
from drafters.evaluation.serving import ACCEPTED, DRAFTS, Case, decode_with_vllm
from drafters.export.write import export_run
from drafters.heads.base import load_head, save_head
from drafters.heads.eagle import EagleConfig
from drafters.heads.eagle3 import Eagle3Config
from drafters.heads.medusa import MedusaConfig
from drafters.recipe import TreeSection
from drafters.target.hf import HFTarget
from drafters.tree import Drafting, DraftTree

pytestmark = pytest.mark.vllm
RANDOM = {
    "eagle": EagleConfig(),
    "medusa": MedusaConfig(num_heads=K),
}
ON_LLAMA = {
    "eagle_two_layers": EagleConfig(num_layers=2, num_heads=1, num_kv_heads=1, intermediate_size=48),
    "medusa_deep": MedusaConfig(num_heads=4, num_layers=2),
    "medusa_shared": MedusaConfig(num_heads=K, shared_output=True),
}
EAGLE3 = {
    "plain": Eagle3Config(feature_layers=(1, 3, 4), draft_vocab_size=100),
    "whole": Eagle3Config(feature_layers=(1, 3, 4)),
    "last_block": Eagle3Config(feature_layers=(0, 2, -1), draft_vocab_size=100),
    "four": Eagle3Config(feature_layers=(0, 2, 3, 6), draft_vocab_size=100),
    "two_layers": Eagle3Config(feature_layers=(1, 3, 4), num_layers=2, steps=1, draft_vocab_size=100),
    "eagle31": Eagle3Config(feature_layers=(1, 3, 4), feature_norm=True, feed_back_normed=True, draft_vocab_size=100),
}
CASES = [
    *((target, head, "vllm") for target in TARGETS for head in RANDOM),
    *(("llama", head, "vllm") for head in ON_LLAMA),
    *(("qwen3", f"eagle3_{head}", name) for head in EAGLE3 for name in ("vllm", "speculators")),
    ("llama_untied_rope", "trained_eagle", "vllm"),
    ("llama_untied_rope", "trained_medusa", "vllm"),
]
# vLLM gives a head the window of a target whose layers all slide; it drafts otherwise, and the output stays right
WINDOWED = [("short_window", "eagle", "vllm")]
HEADS = {**RANDOM, **ON_LLAMA, **{f"eagle3_{name}": config for name, config in EAGLE3.items()}}


class Recorder:
    """A drafter that notes its chains."""

    def __init__(self, drafter: Drafting) -> None:
        self.drafter, self.chains = drafter, []
        self.start, self.advance, self.keep = drafter.start, drafter.advance, drafter.keep

    @property
    def feature_layers(self) -> Any:
        return self.drafter.feature_layers

    def draft(self, state: Any, budget: Any) -> DraftTree:
        tree = self.drafter.draft(state, budget)
        self.chains.append(tree.tokens_BN[0, 1:].tolist())
        return tree


class Ours:
    """Our side of the cases, and vLLM's results by case."""

    def __init__(self, folder: Path) -> None:
        self.targets: dict[str, HFTarget] = {}
        self.drafters: dict[tuple[str, str, str], Any] = {}
        cases = {}
        for name in dict.fromkeys(target for target, _, _ in CASES):
            self.targets[name] = make_target(folder, name)
            cases[name] = self.case(name, None)
        for case in CASES:
            cases["-".join(case)] = self.case(case[0], self.export(folder, *case))
        self.results = decode_with_vllm(cases)

    def export(self, folder: Path, target: str, head: str, name: str) -> dict[str, Any]:
        run = folder / f"{target}_{head.replace('eagle3', 'three')}_{name}"
        run.mkdir()
        loaded = self.targets[target]
        if head in TRAINED:
            save_trained(run / "head", TRAINED[head], loaded)
        else:
            save_head(te.make_head(HEADS[head], loaded), run / "head")
        done = export_run(run, name, draft_length=K)
        self.drafters[target, head, name] = load_head(run / "head", loaded.info)
        method = "eagle3" if head.startswith("eagle3") else "medusa" if "medusa" in head else "eagle"
        return {"method": method, "model": str(done.folder), "num_speculative_tokens": K}

    def case(self, target: str, speculation: dict[str, Any] | None) -> Case:
        loaded = self.targets[target]
        return Case(loaded.info.path, "float32", speculation, prompts_of(loaded), LENGTH)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    need_vllm()
    return Ours(tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_vllm_drafts_what_we_draft(case: tuple[str, str, str], ours: Ours) -> None:
    found = ours.results["-".join(case)]
    assert "error" not in found, found
    plain = ours.results[case[0]]
    assert found["answers"] == plain["answers"], "speculation changed vLLM's greedy output"
    recorder = Recorder(ours.drafters[case])
    target = ours.targets[case[0]]
    for prompt, answer, drafts in zip(prompts_of(target), found["answers"], found["drafts"], strict=True):
        recorder.chains = []
        chain = TreeSection(kind="chain", depth=K)
        own = generate(target, recorder, [prompt], max_new_tokens=LENGTH, tree=chain, eos_token_ids=())
        assert own.sequences[0] == answer
        if case in WINDOWED:
            continue
        rounds = min(len(drafts), len(recorder.chains))
        assert rounds >= len(recorder.chains) - 1 > 0
        assert drafts[:rounds] == recorder.chains[:rounds]


@pytest.mark.parametrize("head", TRAINED)
def test_acceptance_is_what_we_measure(head: str, ours: Ours) -> None:
    """vLLM counts a round that passes the last token in full; ours ends there, so each prompt may differ by one round."""
    case = ("llama_untied_rope", head, "vllm")
    target, drafter = ours.targets[case[0]], ours.drafters[case]
    chain = TreeSection(kind="chain", depth=K)
    prompts = prompts_of(target)
    own = [
        generate(target, drafter, [p], max_new_tokens=LENGTH, tree=chain, eos_token_ids=()).stats[0] for p in prompts
    ]
    metrics = ours.results["-".join(case)]["metrics"]
    drafts, per_position = metrics[DRAFTS], metrics[ACCEPTED]
    assert drafts == sum(stats.rounds for stats in own)
    for k in range(K):
        accepted = sum(stats.accepted[k] if k < len(stats.accepted) else 0 for stats in own)
        assert accepted <= per_position[k] <= accepted + len(prompts)
    assert 0.4 * drafts < per_position[0] < 0.9 * drafts
