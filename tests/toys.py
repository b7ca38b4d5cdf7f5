"""A toy target and toy drafters: plain tables over a few tokens, so that exact laws can be enumerated.

The law of the next token depends on the last two tokens. The "feature" of a token is the token itself, so
that a drafter can check what it is handed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.decoding.accept import AcceptanceRule
from drafters.decoding.budget import make_budget
from drafters.recipe import Sampling, TreeSection
from drafters.target.adapter import TargetInfo, TargetStep
from drafters.tree import Committed, DraftBudget, DraftTree


def toy_info(vocab_size: int, eos: tuple[int, ...] = (), positions: int = 4096) -> TargetInfo:
    return TargetInfo(
        path="toy", revision="", architecture="Toy", hidden_size=1, num_layers=1, vocab_size=vocab_size, num_heads=1,
        num_kv_heads=1, head_dim=1, intermediate_size=1, rms_norm_eps=1e-6, rope={}, max_position_embeddings=positions,
        tied_embeddings=False, dtype="float32", eos_token_ids=eos, weights_hash="", tokenizer_hash="", template_hash="",
    )  # fmt: skip


def random_table(vocab_size: int, seed: int, spread: float = 1.5, columns: int | None = None) -> Tensor:
    """Logits [V, V, U]: of the next token after (last but one, last)."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab_size, vocab_size, columns or vocab_size, generator=generator)


class ToyTarget:
    """Implements what the loop uses of `TargetModel`."""

    def __init__(self, table: Tensor, eos: tuple[int, ...] = (), positions: int = 4096) -> None:
        self.table = table
        self.info = toy_info(table.shape[-1], eos, positions)

    def session(self, layers: Sequence[int], rows: int, max_tokens: int, max_nodes: int) -> ToySession:
        return ToySession(self.table, rows, max_tokens, max_nodes)


class ToySession:
    """The cache is the list of each row's tokens; a prefix of 0 stands before the first."""

    def __init__(self, table: Tensor, rows: int, max_tokens: int, max_nodes: int) -> None:
        self._table = table
        self._tokens_BM = torch.zeros(rows, max_tokens, dtype=torch.long)
        self._max_nodes = max_nodes
        self._tree: DraftTree | None = None
        self.lengths_B = torch.zeros(rows, dtype=torch.long)

    def prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> TargetStep:
        self._tokens_BM[:, : ids_BT.shape[1]] = ids_BT
        self.lengths_B = lengths_B.clone()
        return TargetStep(self._table[self._last(2), self._last(1)][:, None], ids_BT[..., None].float())

    def verify(self, tree: DraftTree) -> TargetStep:
        assert tree.tokens_BN.shape[1] <= self._max_nodes
        self._tree = tree
        before_BN = tokens_before(tree, self._last(1))
        return TargetStep(self._table[before_BN, tree.tokens_BN], tree.tokens_BN[..., None].float())

    def commit(self, path_BP: Tensor, counts_B: Tensor) -> None:
        assert self._tree is not None and (path_BP[:, 0] == 0).all() and (counts_B >= 1).all()
        for p in range(int(counts_B.max())):
            real_B = p < counts_B
            if p:
                parent_B = self._tree.parents_BN.gather(1, path_BP[:, p, None])[:, 0]
                assert (parent_B == path_BP[:, p - 1])[real_B].all()
            token_B = self._tree.tokens_BN.gather(1, path_BP[:, p, None])[:, 0]
            self._tokens_BM[real_B, (self.lengths_B + p)[real_B]] = token_B[real_B]
        self.lengths_B = self.lengths_B + counts_B
        self._tree = None

    def keep(self, rows: Tensor) -> None:
        self._tokens_BM, self.lengths_B = self._tokens_BM[rows], self.lengths_B[rows]

    def _last(self, back: int) -> Tensor:
        """The token `back` places from the end; 0 before the beginning."""
        index_B = self.lengths_B - back
        token_B = self._tokens_BM.gather(1, index_B.clamp_min(0)[:, None])[:, 0]
        return token_B.where(index_B >= 0, 0)


def tokens_before(tree: DraftTree, last_B: Tensor) -> Tensor:
    """The token before each node's: its parent's, and for the root the last one in the cache."""
    before_BN = tree.tokens_BN.gather(1, tree.parents_BN.clamp_min(0))
    before_BN[:, 0] = last_B
    return before_BN


@dataclass(frozen=True)
class ToyState:
    last_B: Tensor
    root_B: Tensor


class _ToyDrafter:
    feature_layers: Sequence[int] = (0,)

    def start(self, target: Any, rows: int, max_tokens: int) -> ToyState:
        nothing = torch.full((rows,), -1)
        return ToyState(nothing, nothing)

    def advance(self, state: ToyState, committed: Committed) -> ToyState:
        assert len(committed.root_B) == len(state.root_B)
        assert (committed.features_BPF[..., 0] == committed.tokens_BP).all()
        first_B = committed.tokens_BP[:, 0]
        assert ((state.root_B == first_B) | (state.root_B < 0)).all(), "the last root must be the first token committed"
        last_B = committed.tokens_BP.gather(1, committed.counts_B[:, None] - 1)[:, 0]
        return ToyState(last_B, committed.root_B)

    def keep(self, state: ToyState, rows: Tensor) -> ToyState:
        return ToyState(state.last_B[rows], state.root_B[rows])


class TableDrafter(_ToyDrafter):
    """Logits from a table [V, V, U]; stops after `levels` levels, where given."""

    def __init__(self, table: Tensor, token_map_U: Tensor | None = None, levels: int | None = None) -> None:
        self.table, self.token_map_U, self.levels = table, token_map_U, levels

    def draft(self, state: ToyState, budget: DraftBudget) -> DraftTree:
        grower = budget.start(state.root_B)
        before_BW, tokens_BW = state.last_B[:, None], state.root_B[:, None]
        depth = 0
        while depth != self.levels:
            level = grower.grow(self.table[before_BW, tokens_BW], self.token_map_U)
            depth += 1
            if level is None:
                break
            before_BW, tokens_BW = tokens_BW.gather(1, level.parent_BW), level.tokens_BW
        return grower.tree()


class RateDrafter(_ToyDrafter):
    """A chain handed over directly: position k is the target's argmax with probability rates[k], else wrong."""

    def __init__(self, table: Tensor, rates: Sequence[float], seed: int = 0) -> None:
        self.table, self.rates = table, rates
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, state: ToyState, budget: DraftBudget) -> DraftTree:
        before_B, token_B, tokens = state.last_B, state.root_B, [state.root_B]
        for rate in self.rates:
            right_B = self.table[before_B, token_B].argmax(-1)
            hit_B = torch.rand(right_B.shape, generator=self.generator) < rate
            before_B, token_B = token_B, torch.where(hit_B, right_B, (right_B + 1) % self.table.shape[-1])
            tokens.append(token_B)
        return chain_tree(torch.stack(tokens, 1))


def chain_tree(tokens_BN: Tensor) -> DraftTree:
    """A deterministic chain, as a drafter without a network makes it."""
    B, N = tokens_BN.shape
    return DraftTree(
        tokens_BN=tokens_BN,
        parents_BN=torch.arange(-1, N - 1).expand(B, N),
        log_q_BN=torch.zeros(B, N),
        valid_BN=torch.ones(B, N, dtype=torch.bool),
        max_depth=N - 1,
    )


def slow_law(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """The law of one token, written out: the reference for `drafters.decoding.sampling.law`."""
    if sampling.temperature == 0:
        return [float(i == max(range(len(logits)), key=lambda j: logits[j])) for i in range(len(logits))]
    scores = [x / sampling.temperature for x in logits]
    if sampling.top_k:
        kept = sorted(scores, reverse=True)[: sampling.top_k]
        scores = [x if x >= kept[-1] else -math.inf for x in scores]
    probs = _softmax(scores)
    rising = sorted(range(len(probs)), key=lambda i: probs[i])
    total = 0.0
    for i in rising[:-1] if sampling.top_p < 1 else []:
        total += probs[i]
        if total <= 1 - sampling.top_p:
            scores[i] = -math.inf
    probs = _softmax(scores)
    return _softmax([x if p >= sampling.min_p * max(probs) else -math.inf for x, p in zip(scores, probs, strict=True)])


def _softmax(scores: Sequence[float]) -> list[float]:
    exps = [math.exp(x - max(scores)) for x in scores]
    return [e / sum(exps) for e in exps]


def exact_law(table: Tensor, prompt: Sequence[int], length: int, sampling: Sampling) -> Tensor:
    """The joint law of the next `length` tokens, by enumeration; [V^length], first token slowest."""

    def spread(before: int, last: int, left: int) -> Iterator[float]:
        probs = slow_law(table[before, last].tolist(), sampling)
        for token, prob in enumerate(probs):
            if left == 1:
                yield prob
            else:
                yield from (prob * rest for rest in spread(last, token, left - 1))

    return torch.tensor(list(spread(prompt[-2], prompt[-1], length)), dtype=torch.float64)


def simulate(
    table: Tensor,
    drafter: Any,
    rule: AcceptanceRule,
    tree: TreeSection,
    sampling: Sampling,
    *,
    rows: int,
    prompt: Sequence[int] = (0, 1),
    length: int = 3,
    seed: int = 0,
    chunk: int = 8192,
) -> Tensor:
    """The first `length` tokens of `rows` answers, [rows, length]: the rounds of the loop without its host side.

    The prompt's last token is the first root, so that every token comes from a round.
    """
    generator = torch.Generator().manual_seed(seed)
    budget = make_budget(tree, sampling, rule.draws, generator, table.shape[-1])
    parts = []
    for start in range(0, rows, chunk):
        B = min(chunk, rows - start)
        session = ToySession(table, B, len(prompt) + length * (budget.max_depth + 1), budget.max_nodes)
        session.prefill(torch.tensor(prompt[:-1]).expand(B, -1), torch.full((B,), len(prompt) - 1))
        state = ToyState(torch.full((B,), prompt[-2]), torch.full((B,), prompt[-1]))
        parts.append(_rounds(session, drafter, rule, budget, sampling, state, length, generator))
    return torch.cat(parts)


def _rounds(
    session: ToySession,
    drafter: Any,
    rule: AcceptanceRule,
    budget: DraftBudget,
    sampling: Sampling,
    state: ToyState,
    length: int,
    generator: torch.Generator,
) -> Tensor:
    B, live_B = len(state.root_B), torch.arange(len(state.root_B))
    text_BT = torch.zeros(B, length + budget.max_depth + 1, dtype=torch.long)
    made_B = torch.zeros(B, dtype=torch.long)
    while len(live_B):
        tree = drafter.draft(state, budget)
        kept = rule.accept(tree, session.verify(tree).logits_BNV, sampling, generator)
        session.commit(kept.path_BP, kept.counts_B)
        tokens_BP = tree.tokens_BN.gather(1, kept.path_BP)
        # a1 .. a_{c-1}, next; what stands behind it is overwritten in the next round
        last_B1 = kept.counts_B[:, None] - 1
        new_BP = torch.cat([tokens_BP[:, 1:], kept.next_B[:, None]], 1).scatter(1, last_B1, kept.next_B[:, None])
        text_BT[live_B[:, None], made_B[:, None] + torch.arange(new_BP.shape[1])] = new_BP
        made_B = made_B + kept.counts_B
        stay = (made_B < length).nonzero()[:, 0]
        session.keep(stay)
        live_B, made_B = live_B[stay], made_B[stay]
        state = ToyState(tokens_BP.gather(1, last_B1)[stay, 0], kept.next_B[stay])
    return text_BT[:, :length]


def chi_square_p(text_BT: Tensor, expected: Tensor) -> float:
    """P(a difference from the law at least this large by chance); rare outcomes are counted as one."""
    size = round(len(expected) ** (1 / text_BT.shape[1]))
    cell_B = torch.zeros(len(text_BT), dtype=torch.long)
    for t in range(text_BT.shape[1]):
        cell_B = cell_B * size + text_BT[:, t]
    counts = torch.bincount(cell_B, minlength=len(expected)).double()
    if counts[expected == 0].any():
        return 0.0
    mean = expected * len(text_BT)
    often = mean >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([mean[often], mean[~often].sum()[None]])
    if wanted[-1] < 5:  # too rare even together: part of the rarest of the others
        observed, wanted = _fold_last(observed), _fold_last(wanted)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic / 2))


def _fold_last(cells: Tensor) -> Tensor:
    return torch.cat([cells[:-2], cells[-2:].sum()[None]])
