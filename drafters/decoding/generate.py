"""The decoding loop: draft, verify, accept, commit, once a round, for a batch of prompts.

    draft    the drafter grows a tree on the root, the newest token of each row
    verify   the target looks at all of the tree in one forward
    accept   a rule keeps one path and names the token that follows it, the next root
    commit   the target's cache takes in the path, the drafter hears of it

Plain decoding is the same loop with a tree that is only a root. The host waits for the device once a round, to read
what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafters.decoding.accept import Acceptance, AcceptanceRule, make_rule
from drafters.decoding.budget import DynamicBudget, StaticBudget, make_budget
from drafters.decoding.clock import Clock
from drafters.decoding.growers import root_only
from drafters.decoding.sampling import law, sample
from drafters.decoding.stats import AcceptanceStats
from drafters.decoding.stopping import Answer, Emitter, OnTokens, Stopping
from drafters.recipe import Sampling, TreeSection
from drafters.target.adapter import TargetInfo, TargetModel
from drafters.tree import Committed, Drafting, DraftTree

GREEDY = Sampling()
CHAIN = TreeSection()


@dataclass(frozen=True)
class GenerateResult:
    """What a batch of prompts became.

    Attributes:
        sequences: the new tokens of each prompt, the token that ended it included.
        stats: acceptance counts of each prompt.
        timings: seconds in prefill (the drafter's included), draft, verify, accept, commit and rest, their sum "total",
            and "rounds", the target forwards after the prefill.
    """

    sequences: list[list[int]]
    stats: list[AcceptanceStats]
    timings: dict[str, float]


@torch.no_grad()
def generate(
    target: TargetModel,
    drafter: Drafting | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    tree: TreeSection = CHAIN,
    rule: str = "auto",
    eos_token_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> GenerateResult:
    """Continues prompts; the output has the law of the target alone under the same sampling settings.

    Args:
        target: the frozen LLM.
        drafter: what proposes tokens; None decodes plainly.
        prompts: token ids, at least one a prompt; decoded as one batch.
        max_new_tokens: most tokens of each answer.
        sampling: temperature 0 is greedy.
        tree: shape of the draft tree.
        rule: acceptance rule, see `make_rule`.
        eos_token_ids: ids that end an answer; None takes the target's.
        stop_strings: texts that end an answer, the token that completes one included; needs the tokenizer.
        seed: of all randomness. Rows of a batch share it, so a sampled answer depends on its batch (its law does not).
        on_tokens: called with a prompt's index and tokens as soon as they are certain.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, an answer that may pass the target's last position,
            sampling settings out of range, or a rule and a tree that don't go together.
    """
    acceptance = make_rule(rule, sampling, tree)
    _check(prompts, max_new_tokens, target.info)
    stopping = Stopping(target.info.eos_token_ids if eos_token_ids is None else eos_token_ids, stop_strings, tokenizer)
    rows = [Answer(index) for index in range(len(prompts))]
    if not rows:
        return GenerateResult([], [], Clock(torch.device("cpu")).seconds())
    emitter = Emitter(stopping, max_new_tokens, on_tokens)
    budget = None if drafter is None else make_budget(tree, sampling, acceptance.draws, None, target.info.vocab_size)
    room = max(map(len, prompts)) + max_new_tokens
    loop = _Loop(target, drafter, budget, acceptance, sampling, emitter, rows, room, seed)
    loop.prefill(prompts)
    while loop.rows:
        loop.round()
    return GenerateResult([row.tokens for row in rows], [row.stats for row in rows], loop.clock.seconds())


class _Loop:
    """A batch on its way. Row i of every tensor belongs to `rows[i]`; finished rows leave."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafting | None,
        budget: StaticBudget | DynamicBudget | None,
        rule: AcceptanceRule,
        sampling: Sampling,
        emitter: Emitter,
        rows: list[Answer],
        room: int,
        seed: int,
    ) -> None:
        max_depth, max_nodes = (budget.max_depth, budget.max_nodes) if budget else (0, 1)
        layers = drafter.feature_layers if drafter is not None else ()
        # A row that reaches its last token inside a path commits up to max_depth tokens too many before it leaves.
        self.session = target.session(layers, len(rows), room + max_depth, max_nodes)
        device = self.session.lengths_B.device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.budget = replace(budget, picker=replace(budget.picker, generator=self.generator)) if budget else None
        self.drafter = drafter
        self.state = None if drafter is None else drafter.start(target, len(rows), room + max_depth + max_nodes)
        self.rule = rule
        self.sampling = sampling
        self.emitter = emitter
        self.rows = rows
        self.root_B = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.clock = Clock(device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Takes in the prompts; the first token of each answer is the target's and becomes the first root."""
        device = self.root_B.device
        counts = [len(prompt) for prompt in prompts]
        longest = max(counts)
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        ids_BT, counts_B = torch.tensor(padded, device=device), torch.tensor(counts, device=device)
        with self.clock.phase("prefill"):
            step = self.session.prefill(ids_BT, counts_B)
            self.root_B = sample(law(step.logits_BNV[:, -1], self.sampling), self.generator)
            roots = self.root_B.tolist()
        for row, root in zip(self.rows, roots, strict=True):
            self.emitter.emit(row, [root])
        self._settle(Committed(ids_BT, step.features_BNF, counts_B, self.root_B), "prefill")

    def round(self) -> None:
        with self.clock.phase("draft"):
            tree = self._draft()
        with self.clock.phase("verify"):
            step = self.session.verify(tree)
        with self.clock.phase("accept"):
            acceptance = self.rule.accept(tree, step.logits_BNV, self.sampling, self.generator)
            counts, depths, tokens = _read(tree, acceptance)
        for row, count, depth, path in zip(self.rows, counts, depths, tokens, strict=True):
            whole = self.emitter.emit(row, path[:count])
            row.stats.add_round(accepted=count - 1, depth=depth, emitted=whole)
        self.clock.rounds += 1
        if all(row.finished for row in self.rows):
            self.rows = []
            return
        with self.clock.phase("commit"):
            self.session.commit(acceptance.path_BP, acceptance.counts_B)
            committed = _committed(tree, step.features_BNF, acceptance, max(counts))
        self._settle(committed, "draft")

    def _draft(self) -> DraftTree:
        if self.drafter is None or self.budget is None:
            return root_only(self.root_B)
        tree = self.drafter.draft(self.state, self.budget)
        nodes, depth = tree.tokens_BN.shape[1], tree.max_depth
        if nodes > self.budget.max_nodes or depth > self.budget.max_depth:
            raise ValueError(
                f"the drafter's tree has {nodes} nodes and depth {depth}; "
                f"the budget allows {self.budget.max_nodes} and {self.budget.max_depth}"
            )
        return tree

    def _settle(self, committed: Committed, phase: str) -> None:
        """Lets finished rows leave and tells the drafter what the target has taken in."""
        kept = [place for place, row in enumerate(self.rows) if not row.finished]
        if len(kept) < len(self.rows):
            committed = self._leave(committed, kept)
        self.root_B = committed.root_B
        if self.rows and self.drafter is not None:
            with self.clock.phase(phase):
                self.state = self.drafter.advance(self.state, committed)

    def _leave(self, committed: Committed, kept: list[int]) -> Committed:
        self.rows = [self.rows[place] for place in kept]
        if not kept:
            return committed
        with self.clock.phase("commit"):
            kept_B = torch.tensor(kept, device=self.root_B.device)
            self.session.keep(kept_B)
            if self.drafter is not None:
                self.state = self.drafter.keep(self.state, kept_B)
            return Committed(**{name: tensor[kept_B] for name, tensor in vars(committed).items()})


def _read(tree: DraftTree, acceptance: Acceptance) -> tuple[list[int], list[int], list[list[int]]]:
    """Counts, tree depths and new tokens (accepted ones, then the next) of each row: the one sync of a round."""
    depth_B = (tree.depth_BN() * tree.valid_BN).amax(1)
    accepted_BP = tree.tokens_BN.gather(1, acceptance.path_BP)[:, 1:]
    # accepted a1 .. a_{c-1}, then anything, one column wider so that the next token always has a place
    tokens_BP = torch.cat([accepted_BP, acceptance.next_B[:, None]], 1)
    tokens_BP = tokens_BP.scatter(1, acceptance.counts_B[:, None] - 1, acceptance.next_B[:, None])
    packed = torch.cat([acceptance.counts_B[:, None], depth_B[:, None], tokens_BP], 1).tolist()
    return [row[0] for row in packed], [row[1] for row in packed], [row[2:] for row in packed]


def _committed(tree: DraftTree, features_BNF: Tensor, acceptance: Acceptance, longest: int) -> Committed:
    path_BP = acceptance.path_BP[:, :longest]
    features_BPF = features_BNF.gather(1, path_BP[..., None].expand(-1, -1, features_BNF.shape[-1]))
    return Committed(tree.tokens_BN.gather(1, path_BP), features_BPF, acceptance.counts_B, acceptance.next_B)


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, info: TargetInfo) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            raise ValueError(
                f"prompt {index} has token ids {min(prompt)} to {max(prompt)}; "
                f"the target's are 0 to {info.vocab_size - 1}"
            )
        if len(prompt) + max_new_tokens > info.max_position_embeddings:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}: more than the "
                f"{info.max_position_embeddings} positions of the target; shorten one of them"
            )
