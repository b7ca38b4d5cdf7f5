"""Acceptance rules: which path of the draft tree is kept, and the token that follows it.

p is the target's law and q the draft law, both under the user's sampling settings and in float32. Every rule
here leaves the output law exactly as the target alone would have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from drafters.decoding.sampling import check_sampling, law, sample
from drafters.recipe import Sampling, TreeSection
from drafters.tree import DraftTree

LEAST_MASS = 1e-9


@dataclass(frozen=True)
class Acceptance:
    """What a rule decided.

    Attributes:
        path_BP: node indices, root first; 0 past counts_B. P = the tree's max_depth + 1.
        counts_B: length of each row's path, root included: accepted tokens + 1.
        next_B: the token that follows the path, chosen by the target: the next root.
    """

    path_BP: Tensor
    counts_B: Tensor
    next_B: Tensor


class AcceptanceRule(ABC):
    """Decides what is kept of a tree.

    Attributes:
        lossless: whether the output law is the target's own.
        draws: how the tree's children must be chosen ("sample" rules take deterministic trees, q None, too).
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    draws: ClassVar[Literal["top", "sample"]]

    @abstractmethod
    def accept(
        self, tree: DraftTree, logits_BNV: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Acceptance:
        """Judges one tree a row, from the target's logits at each node."""


class Greedy(AcceptanceRule):
    """A node is right if it is the argmax at its parent; the longest right path is kept."""

    name = "greedy"
    draws = "top"

    def accept(
        self, tree: DraftTree, logits_BNV: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Acceptance:
        _no_draft_law(tree, self.name)
        best_BN = logits_BNV.argmax(-1)
        return _follow(tree, lambda node_B: best_BN.gather(1, node_B[:, None])[:, 0])


class PointMass(AcceptanceRule):
    """Samples y from p and goes to the child that holds y, if there is one.

    The same law as accepting each child x with probability r(x) and removing it from r on a rejection.
    """

    name = "point_mass"
    draws = "top"

    def accept(
        self, tree: DraftTree, logits_BNV: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Acceptance:
        _no_draft_law(tree, self.name)
        row_B = torch.arange(len(logits_BNV), device=logits_BNV.device)
        return _follow(tree, lambda node_B: sample(law(logits_BNV[row_B, node_B], sampling), generator))


class Token(AcceptanceRule):
    """Token-level rejection on a chain: x is kept with probability min(1, p(x)/q(x)) (arXiv 2211.17192, 2302.01318)."""

    name = "token"
    draws = "sample"

    def accept(
        self, tree: DraftTree, logits_BNV: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Acceptance:
        B, N = tree.tokens_BN.shape
        if tree.max_depth != N - 1:
            raise ValueError(
                f'rule "token" takes chains, got a tree of {N} nodes and depth {tree.max_depth}; use "recursive"'
            )
        p_BNV = law(logits_BNV, sampling)
        q_BNV = _draft_laws(tree, logits_BNV.shape[-1])
        # node j of the chain is judged by the laws at node j - 1
        node_N = torch.arange(N, device=p_BNV.device)
        tried_BK = (tree.valid_BN & (tree.parents_BN == node_N - 1))[:, 1:]
        x_BK1 = tree.tokens_BN[:, 1:, None]
        p_BK, q_BK = p_BNV[:, :-1].gather(2, x_BK1)[..., 0], q_BNV[:, :-1].gather(2, x_BK1)[..., 0]
        accepted_BK = tried_BK & _coin(p_BK, q_BK, generator)
        accepted_B = accepted_BK.long().cumprod(1).sum(1)
        refused_B = torch.cat([tried_BK, tried_BK.new_zeros(B, 1)], 1).gather(1, accepted_B[:, None])
        row_B = torch.arange(B, device=p_BNV.device)
        p_BV, q_BV = p_BNV[row_B, accepted_B], q_BNV[row_B, accepted_B]
        next_B = sample(torch.where(refused_B, residual(p_BV, q_BV), p_BV), generator)
        path_BP = node_N.where(node_N <= accepted_B[:, None], 0)
        return Acceptance(path_BP, accepted_B + 1, next_B)


class Recursive(AcceptanceRule):
    """Rejection over children drawn without replacement (EAGLE-1; RSD, arXiv 2402.14160).

    Child i in draw order is kept with probability min(1, r(x)/q_i(x)), where r starts as p and q_i is q without the
    earlier siblings; a rejection turns r into norm(max(r - q_i, 0)). Where no child was kept, r gives the next token.
    Equals `Token` on a chain.
    """

    name = "recursive"
    draws = "sample"

    def accept(
        self, tree: DraftTree, logits_BNV: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Acceptance:
        p_BNV = law(logits_BNV, sampling)
        q_BV = None if tree.q_BNV is None else _draft_laws(tree, logits_BNV.shape[-1])[:, 0]
        r_BV = p_BNV[:, 0]
        node_B = torch.zeros_like(tree.tokens_BN[:, 0])
        kept_BN = torch.zeros_like(tree.valid_BN)
        kept_BN[:, 0] = True
        # Parents and earlier siblings have lower indices, so one pass in index order meets every node in its turn.
        for node in range(1, tree.tokens_BN.shape[1]):
            x_B1 = tree.tokens_BN[:, node, None]
            proposal_BV = _point(x_B1[:, 0], r_BV.shape[-1]) if q_BV is None else q_BV
            tried_B1 = (tree.valid_BN[:, node] & (tree.parents_BN[:, node] == node_B))[:, None]
            kept_B1 = tried_B1 & _coin(r_BV.gather(1, x_B1), proposal_BV.gather(1, x_B1), generator)
            refused_B1 = tried_B1 & ~kept_B1
            r_BV = torch.where(refused_B1, residual(r_BV, proposal_BV), r_BV)
            r_BV = torch.where(kept_B1, p_BNV[:, node], r_BV)
            if q_BV is not None and tree.q_BNV is not None:
                q_BV = torch.where(refused_B1, without(q_BV, x_B1), q_BV)
                q_BV = torch.where(kept_B1, tree.q_BNV[:, node], q_BV)
            node_B = torch.where(kept_B1[:, 0], node, node_B)
            kept_BN[:, node] = kept_B1[:, 0]
        return Acceptance(_path(kept_BN, tree.max_depth), kept_BN.sum(1), sample(r_BV, generator))


RULES: dict[str, type[AcceptanceRule]] = {rule.name: rule for rule in (Greedy, Token, Recursive, PointMass)}


def make_rule(name: str, sampling: Sampling, section: TreeSection) -> AcceptanceRule:
    """The rule of that name, checked against the sampling settings and the tree.

    Args:
        name: "greedy", "token", "recursive", "point_mass", or "auto": greedy at temperature 0, point_mass on dynamic
            trees, else recursive.

    Raises:
        ValueError: no such rule, settings out of range, or a combination that is not lossless or makes no sense.
    """
    check_sampling(sampling)
    if name == "auto":
        name = "greedy" if sampling.temperature == 0 else "point_mass" if section.kind == "dynamic" else "recursive"
    if name not in RULES:
        raise ValueError(f'there is no rule "{name}"; expected auto, {", ".join(RULES)}')
    if name == "greedy" and sampling.temperature > 0:
        raise ValueError(f'rule "greedy" needs temperature 0, got {sampling.temperature}; use "auto"')
    if name == "token" and section.kind != "chain":
        raise ValueError(f'rule "token" takes chains, got a {section.kind} tree; use "auto"')
    if name == "recursive" and section.kind == "dynamic":
        raise ValueError('rule "recursive" needs sampled children, which a dynamic tree can\'t have; use "point_mass"')
    return RULES[name]()


def residual(r_BV: Tensor, q_BV: Tensor) -> Tensor:
    """norm(max(r - q, 0)); r itself where less than 1e-9 is left, since then a rejection is a rounding error."""
    left_BV = (r_BV - q_BV).clamp_min(0)
    mass_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 < LEAST_MASS, r_BV, left_BV / mass_B1.clamp_min(LEAST_MASS))


def without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """q without token x, renormalized; zeros where nothing else was left."""
    left_BV = q_BV.scatter(-1, x_B1, 0.0)
    return left_BV / left_BV.sum(-1, keepdim=True).clamp_min(torch.finfo(q_BV.dtype).tiny)


def _coin(p: Tensor, q: Tensor, generator: torch.Generator | None) -> Tensor:
    """True with probability min(1, p/q); false where either is 0."""
    u = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=generator)
    return u * q < torch.where(q > 0, p, 0.0)


def _follow(tree: DraftTree, choose: Callable[[Tensor], Tensor]) -> Acceptance:
    """Walks down from the root: `choose` names a token at each node, and a child that holds it is the next node."""
    node_B = torch.zeros_like(tree.tokens_BN[:, 0])
    walking_B = torch.ones_like(tree.valid_BN[:, 0])
    path, chosen_B = [node_B], choose(node_B)
    counts_B = torch.ones_like(node_B)
    for _ in range(tree.max_depth):
        child_BN = tree.valid_BN & (tree.parents_BN == node_B[:, None])
        match_BN = child_BN & (tree.tokens_BN == chosen_B[:, None])
        walking_B = walking_B & match_BN.any(1)
        node_B = torch.where(walking_B, match_BN.long().argmax(1), node_B)
        path.append(node_B.where(walking_B, 0))
        counts_B = counts_B + walking_B
        chosen_B = torch.where(walking_B, choose(node_B), chosen_B)
    return Acceptance(torch.stack(path, 1), counts_B, chosen_B)


def _path(kept_BN: Tensor, max_depth: int) -> Tensor:
    """Indices of the kept nodes in increasing order, which is root first, filled up with 0."""
    N = kept_BN.shape[1]
    node_N = torch.arange(N, device=kept_BN.device)
    first_BP = node_N.where(kept_BN, N).sort(1).values[:, : max_depth + 1]
    return first_BP.where(first_BP < N, 0)


def _point(x: Tensor, size: int) -> Tensor:
    return one_hot(x, size).float()


def _draft_laws(tree: DraftTree, V: int) -> Tensor:
    """q at every node; a deterministic tree puts all mass on the (last) child."""
    if tree.q_BNV is None:
        following_BN = tree.tokens_BN.roll(-1, 1)
        return _point(following_BN, V)
    if tree.q_BNV.shape[-1] != V:
        raise ValueError(
            f"the draft law has {tree.q_BNV.shape[-1]} tokens, the target {V}; q must be in the target's vocabulary"
        )
    return tree.q_BNV


def _no_draft_law(tree: DraftTree, name: str) -> None:
    if tree.q_BNV is not None:
        raise ValueError(
            f'rule "{name}" accepts exact matches only, but the drafter drew its tokens by sampling (the tree has a '
            'draft law); draw "top", or use the rule "recursive"'
        )
