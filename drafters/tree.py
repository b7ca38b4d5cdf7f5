"""The draft tree and the three-part conversation that grows it.

A drafter computes logits; a budget decides which nodes they become. For each round the loop calls
`drafter.draft(state, budget)`, the drafter asks the budget for a grower, hands it the logits level by
level, and gets back the nodes to expand next. So a drafter knows nothing of chains, static or dynamic
trees, of sampling or of temperature, and a tree shape knows nothing of networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Candidate tokens of one round. Node 0 is the root: the newest token, already certain.

    Parents come before their children. Rows may hold fewer real nodes than N.

    Attributes:
        tokens_BN: token of each node, in the target's vocabulary.
        parents_BN: index of each node's parent; -1 for the root and for unused nodes.
        log_q_BN: log of the draft probability of the node given its parent; 0 for the root.
        valid_BN: false for unused nodes, which no rule may accept.
        max_depth: depth of the deepest node any row may hold (root = 0); a Python int, so no sync.
        q_BNV: at node n, the draft law (after the sampling settings) that n's children were drawn from, in
            draw order = index order and without replacement; zeros at nodes without children. None where the
            children are a deterministic function of the context (top-k): then q is one-hot.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    log_q_BN: Tensor
    valid_BN: Tensor
    max_depth: int
    q_BNV: Tensor | None = None

    def depth_BN(self) -> Tensor:
        """Distance of each node from the root; unused nodes 0."""
        return self.ancestors_BNN().sum(-1) - 1

    def ancestors_BNN(self) -> Tensor:
        """Bool; [b, i, j] is true where node j is i itself or one of its ancestors."""
        B, N = self.parents_BN.shape
        own = torch.eye(N, dtype=torch.bool, device=self.parents_BN.device).expand(B, N, N)
        parent = self.parents_BN.clamp_min(0)[..., None].expand(B, N, N)
        has_parent = (self.parents_BN >= 0)[..., None]
        reach = own
        for _ in range(self.max_depth):
            reach = own | (reach.gather(1, parent) & has_parent)
        return reach


@dataclass(frozen=True)
class Committed:
    """Tokens that the target has newly taken into its cache, after a prefill or after a round.

    index   0        1        ..  P_b-1          P_b
    token   x_n      x_{n+1}  ..  x_{n+P_b-1}    root (not in the cache yet)
    feature f_n      f_{n+1}  ..  f_{n+P_b-1}

    Attributes:
        tokens_BP: the tokens, padded on the right.
        features_BPF: the captured features at those tokens.
        counts_B: P_b, how many of them are real, at least 1.
        root_B: the newest token, chosen by the target and not yet in its cache: the next tree's root.
    """

    tokens_BP: Tensor
    features_BPF: Tensor
    counts_B: Tensor
    root_B: Tensor

    def following_BP(self) -> Tensor:
        """The token that follows each one: x_{n+1} .. root; what EAGLE pairs with the feature at x_n."""
        shifted = torch.roll(self.tokens_BP, -1, dims=1)
        return shifted.scatter(1, (self.counts_B - 1)[:, None], self.root_B[:, None])


@dataclass(frozen=True)
class Level:
    """The nodes to expand next.

    Attributes:
        tokens_BW: their tokens.
        parent_BW: for each, the place of its parent in the level before (0 at depth 1: the root).
    """

    tokens_BW: Tensor
    parent_BW: Tensor


class TreeGrower(Protocol):
    """Builds one tree from the logits of a drafter."""

    def grow(self, logits_BWU: Tensor, token_map_U: Tensor | None = None) -> Level | None:
        """Adds the children of the level returned last (at first of the root, W = 1).

        Args:
            logits_BWU: the draft logits at each node of that level.
            token_map_U: the target's id of each draft id, where the drafter has a vocabulary of its own.

        Returns:
            the nodes whose children are wanted next, or None when the tree is complete.
        """

    def tree(self) -> DraftTree:
        """The finished tree."""


class DraftBudget(Protocol):
    """What a tree may cost: its shape, its depth and how its children are chosen."""

    @property
    def max_depth(self) -> int: ...

    @property
    def max_nodes(self) -> int:
        """Most nodes of a tree, root included."""

    def start(self, root_B: Tensor) -> TreeGrower: ...


class Drafting(Protocol):
    """What the loop asks of a drafter, learned or not. `state` is the drafter's own; the loop only carries it.

    `target` is a `drafters.target.adapter.TargetHead`; typed loosely, since it sits above this module.
    """

    @property
    def feature_layers(self) -> Sequence[int]:
        """Layers whose hidden states the drafter wants (see `drafters.target.adapter` for the numbering)."""

    def start(self, target: Any, rows: int, max_tokens: int) -> Any:
        """An empty state for `rows` sequences of at most `max_tokens` tokens, draft nodes included."""

    def advance(self, state: Any, committed: Committed) -> Any:
        """The state after the target has taken in more tokens; called with the prompt first."""

    def draft(self, state: Any, budget: DraftBudget) -> DraftTree:
        """One tree for every row, on top of what `advance` has seen."""

    def keep(self, state: Any, rows: Tensor) -> Any:
        """The state of the given rows only (indices, increasing); used when rows of a batch have finished."""
