"""Does vLLM accept what our loop accepts? The same head, prompts, K and precision in both, decoded greedily."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafters.decoding.stats import AcceptanceStats, wilson
from drafters.evaluation.measure import AlphaRun

WORKER = Path(__file__).with_name("vllm_worker.py")
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Case:
    """Prompts to decode in a vLLM engine of their own, one by one and greedily.

    Attributes:
        target: folder of the target.
        dtype: precision of target and head.
        speculation: vLLM's speculative_config; None decodes plainly.
        prompts: token ids.
        max_tokens: of each answer.
        max_model_len: room for a prompt and its answer.
        stop_token_ids: end an answer; the config's own end tokens are not used.
    """

    target: str
    dtype: str
    speculation: dict[str, Any] | None
    prompts: Sequence[list[int]]
    max_tokens: int
    max_model_len: int = 256
    stop_token_ids: Sequence[int] = ()


def vllm_python() -> Path:
    """The Python that has vLLM: DRAFTERS_VLLM_PYTHON, or .venv-vllm/bin/python."""
    return Path(os.environ.get("DRAFTERS_VLLM_PYTHON", ".venv-vllm/bin/python"))


def decode_with_vllm(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Decodes every case.

    Returns:
        for each case: answers (token ids by prompt), drafts (the chains proposed, by prompt), seconds (all prompts, engine
        start and warm-up not counted) and metrics (vLLM's own counters); or error, a text, where its engine failed.

    Raises:
        ValueError: there is no vLLM, or its process died; the message ends with what it printed.
    """
    python = vllm_python()
    if not python.is_file():
        raise ValueError(
            f"there is no vLLM: {python} does not exist; run scripts/vllm_env.sh, or name a Python that has vLLM in "
            "DRAFTERS_VLLM_PYTHON"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "cases.json").write_text(json.dumps({name: vars(case) for name, case in cases.items()}))
        # -P: the worker's own folder is no place to import from.
        command = [str(python), "-P", str(WORKER), str(folder / "cases.json"), str(folder / "results.json")]
        with (folder / "log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env={**SETTINGS, **os.environ, "PYTHONPATH": ""})
        if done.returncode:
            raise ValueError(f"{python} ended with status {done.returncode}: {(folder / 'log').read_text()[-2000:]}")
        results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


def vllm_stats(metrics: Mapping[str, Any]) -> AcceptanceStats:
    """vLLM's counters, DRAFTS and ACCEPTED, as ours. It counts a round that an end of sequence cut in full."""
    rounds, accepted = int(metrics[DRAFTS]), [int(count) for count in metrics[ACCEPTED]]
    return AcceptanceStats([rounds, *accepted[:-1]], accepted, rounds, rounds + sum(accepted))


@dataclass(frozen=True)
class ServingRun:
    """Our loop's acceptance beside vLLM's, and vLLM with the head beside vLLM without."""

    ours: AlphaRun
    plain: dict[str, Any]
    speculative: dict[str, Any]

    @property
    def stats(self) -> AcceptanceStats:
        return vllm_stats(self.speculative["metrics"])

    @property
    def agrees(self) -> bool:
        """Whether the intervals of every alpha(k) overlap."""
        pairs = zip(self.ours.stats.alpha_interval(), self.stats.alpha_interval(), strict=False)
        return all(low <= other_high and other_low <= high for (low, high), (other_low, other_high) in pairs)

    def to_json(self) -> dict[str, Any]:
        ours, vllm = self.ours.stats, self.stats
        answers, reference = self.speculative["answers"], self.plain["answers"]
        return {
            "tree": {"kind": "chain", "depth": len(vllm.reached)},
            "prompts": len(answers),
            "max_new_tokens": self.ours.section.max_new_tokens,
            "positions": [
                {"k": k + 1, "ours": _position(ours, k), "vllm": _position(vllm, k)} for k in range(len(vllm.reached))
            ],
            "tau": {"ours": ours.tau(), "vllm": vllm.tau()},
            "rounds": {"ours": ours.rounds, "vllm": vllm.rounds},
            "agrees": self.agrees,
            "same_output_as_plain_vllm": _same(answers, reference),
            "same_output_as_ours": _same(answers, self.ours.decoded.sequences),
            "tokens_per_second": {
                name: sum(map(len, result["answers"])) / result["seconds"]
                for name, result in (("plain", self.plain), ("speculative", self.speculative))
            },
        }


def compare_serving(ours: AlphaRun, case: Case) -> ServingRun:
    """Decodes in vLLM, with the head and without, what our loop has decoded.

    Args:
        ours: greedy, a chain of K.
        case: the same in vLLM.

    Raises:
        ValueError: vLLM is missing or refuses the target or the head.
    """
    results = decode_with_vllm({"plain": replace(case, speculation=None), "speculative": case})
    for name, result in results.items():
        if "error" in result:
            raise ValueError(f"vLLM failed to decode ({name}, {case.target}): {result['error']}")
    return ServingRun(ours, results["plain"], results["speculative"])


def _position(stats: AcceptanceStats, k: int) -> dict[str, float]:
    reached, accepted = (stats.reached[k], stats.accepted[k]) if k < len(stats.reached) else (0, 0)
    low, high = wilson(accepted, reached)
    return {"rate": accepted / max(1, reached), "low": low, "high": high, "accepted": accepted, "reached": reached}


def _same(answers: Sequence[list[int]], reference: Sequence[list[int]]) -> int:
    return sum(answer == other for answer, other in zip(answers, reference, strict=True))
