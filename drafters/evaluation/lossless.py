"""Is greedy speculative output the target's own? Compared with transformers' `generate` and with plain decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from tqdm import tqdm

from drafters.evaluation.measure import decode
from drafters.evaluation.stock import stock_generate
from drafters.recipe import EvalSection, Sampling
from drafters.target.hf import HFTarget
from drafters.tree import Drafting

Kind = Literal["identical", "tie", "different"]
# A tie: both tokens' logits are this many rounding steps of the largest logit, or less, below the best one.
TIE_STEPS = {torch.float32: 64.0, torch.bfloat16: 4.0}


@dataclass(frozen=True)
class Verdict:
    """How an output compares with its reference.

    Attributes:
        kind: "tie" where the outputs part at a token that the target's own rounding decides; "different" is a fault.
        position: index of the first different token; None where there is none.
        gap: how far the lower of the two tokens' logits is below the best one there, by the stock model.
        tolerance: the largest gap that counts as a tie.
    """

    kind: Kind
    position: int | None = None
    gap: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class LosslessRun:
    """Verdicts of each prompt: against transformers' generate, and against plain decoding in our loop."""

    section: EvalSection
    dtype: str
    against_generate: list[Verdict]
    against_plain: list[Verdict]
    tokens: int

    @property
    def faults(self) -> int:
        """Outputs that differ by more than rounding."""
        return sum(verdict.kind == "different" for verdict in [*self.against_generate, *self.against_plain])

    def to_json(self) -> dict[str, Any]:
        return {
            "tree": asdict(self.section.tree),
            "dtype": self.dtype,
            "rule": "greedy",
            "prompts": len(self.against_generate),
            "tokens": self.tokens,
            "max_new_tokens": self.section.max_new_tokens,
            "batch_size": self.section.batch_size,
            "identical": sum(verdict.kind == "identical" for verdict in self.against_generate),
            "against_generate": _summary(self.against_generate),
            "against_plain": _summary(self.against_plain),
        }


def check_lossless(
    target: HFTarget,
    drafter: Drafting,
    prompts: Sequence[list[int]],
    sections: Sequence[EvalSection],
    *,
    progress: bool = False,
) -> list[LosslessRun]:
    """Decodes greedily three ways and compares token for token.

    Args:
        sections: one for each tree; their sampling settings are replaced by greedy ones.
        progress: shows progress bars.
    """
    greedy = [replace(section, sampling=Sampling(), rule="auto") for section in sections]
    length = greedy[0].max_new_tokens
    stock = [
        stock_generate(target, prompt, max_new_tokens=length, sampling=Sampling()).tokens
        for prompt in tqdm(prompts, desc="transformers generate", unit="prompt", disable=not progress)
    ]
    plain = decode(target, None, prompts, greedy[0], progress="plain decoding" if progress else "").sequences
    runs = []
    for section in greedy:
        label = f"speculative, {section.tree.kind}" if progress else ""
        found = decode(target, drafter, prompts, section, progress=label).sequences
        runs.append(
            LosslessRun(
                section,
                str(target.dtype).removeprefix("torch."),
                [judge(target, *case) for case in zip(prompts, stock, found, strict=True)],
                [judge(target, *case) for case in zip(prompts, plain, found, strict=True)],
                sum(map(len, found)),
            )
        )
    return runs


@torch.no_grad()
def judge(target: HFTarget, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> Verdict:
    """Compares an output with its reference.

    An output that only ends elsewhere is different: ends are exact in any precision.
    """
    position = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if position is None:
        if len(expected) == len(found):
            return Verdict("identical")
        return Verdict("different", min(len(expected), len(found)))
    ids = torch.tensor([[*prompt, *expected[:position]]], device=target.device)
    logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    best = float(logits.max())
    gap = best - min(float(logits[expected[position]]), float(logits[found[position]]))
    tolerance = TIE_STEPS[target.dtype] * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return Verdict("tie" if gap <= tolerance else "different", position, gap, tolerance)


def _summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    kinds = Counter(verdict.kind for verdict in verdicts)
    return {
        **{kind: kinds.get(kind, 0) for kind in ("identical", "tie", "different")},
        "first_differences": [
            {"prompt": index, **asdict(verdict)}
            for index, verdict in enumerate(verdicts)
            if verdict.kind != "identical"
        ],
    }
