"""Growers: turn a drafter's logits into the nodes of one tree, level by level, all rows at once, without a sync."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from drafters.decoding.sampling import law, race
from drafters.recipe import Sampling
from drafters.tree import DraftTree, Level

Draws = Literal["top", "sample"]
Paths = tuple[tuple[int, ...], ...]


def root_only(root_B: Tensor) -> DraftTree:
    """The tree of plain decoding."""
    root_BN = root_B[:, None]
    return DraftTree(
        tokens_BN=root_BN,
        parents_BN=torch.full_like(root_BN, -1),
        log_q_BN=torch.zeros_like(root_BN, dtype=torch.float32),
        valid_BN=torch.ones_like(root_BN, dtype=torch.bool),
        max_depth=0,
    )


@dataclass(frozen=True)
class _Picked:
    tokens_BWC: Tensor
    log_q_BWC: Tensor
    q_BWV: Tensor | None


@dataclass(frozen=True)
class Picker:
    """Chooses children from logits."""

    draws: Draws
    sampling: Sampling
    vocab_size: int
    generator: torch.Generator | None = None

    def pick(self, logits_BWU: Tensor, token_map_U: Tensor | None, count: int) -> _Picked:
        """`count` children of each node, as target ids; log q is -inf for a child that must not be used."""
        U = logits_BWU.shape[-1]
        if count > U:
            raise ValueError(
                f"the tree asks for {count} children of a node but the drafter has {U} tokens; use a narrower tree"
            )
        if self.draws == "top":
            log_q, ids = logits_BWU.float().log_softmax(-1).topk(count)
            q = None
        else:
            q = law(logits_BWU, self.sampling)
            ids = race(q, self.generator).topk(count).indices
            log_q = q.gather(-1, ids).log()
            q = self._in_target_vocabulary(q, token_map_U)
        log_q = log_q.clamp_max(0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return _Picked(ids if token_map_U is None else token_map_U[ids], log_q, q)

    def _in_target_vocabulary(self, q_BWU: Tensor, token_map_U: Tensor | None) -> Tensor:
        B, W, U = q_BWU.shape
        V = self.vocab_size or U
        if token_map_U is None and V == U:
            return q_BWU
        if token_map_U is not None and not self.vocab_size:
            raise ValueError(
                "sampled children of a drafter with its own vocabulary need vocab_size, the target's; got 0"
            )
        if V < U:
            raise ValueError(f"the drafter has {U} tokens but the target has {V}; they don't belong together")
        ids = torch.arange(U, device=q_BWU.device) if token_map_U is None else token_map_U
        return q_BWU.new_zeros(B, W, V).index_copy_(2, ids, q_BWU)


@dataclass(frozen=True)
class _Step:
    """One level of a static tree, as index tensors. Its nodes lie side by side in the tree, from `first` on.

    place = where in the level of expanded parents; S nodes in this level, W of them have children.
    """

    picks: int
    parent_place_S: Tensor
    pick_S: Tensor
    parent_node_S: Tensor
    expanded_W: Tensor
    expanded_node_W: Tensor


class StaticGrower:
    """Implements `drafters.tree.TreeGrower` for a fixed shape."""

    def __init__(self, paths: Paths, picker: Picker, root_B: Tensor) -> None:
        self._picker = picker
        self._steps = _steps(paths, picker.draws, root_B.device)
        self._grown = 0
        self._levels = [root_only(root_B)]
        self._valid_BW = self._levels[0].valid_BN
        self._expanded_node_W = torch.zeros(1, dtype=torch.long, device=root_B.device)
        self._q: list[tuple[Tensor, Tensor]] = []

    def grow(self, logits_BWU: Tensor, token_map_U: Tensor | None = None) -> Level | None:
        step = self._steps[self._grown]
        picked = self._picker.pick(logits_BWU, token_map_U, step.picks)
        where_S = step.parent_place_S * step.picks + step.pick_S
        tokens_BS, log_q_BS = picked.tokens_BWC.flatten(1)[:, where_S], picked.log_q_BWC.flatten(1)[:, where_S]
        valid_BS = self._valid_BW[:, step.parent_place_S] & (log_q_BS > -torch.inf)
        if picked.q_BWV is not None:
            self._q.append((self._expanded_node_W, picked.q_BWV))
        self._levels.append(_nodes(tokens_BS, step.parent_node_S.expand_as(tokens_BS), log_q_BS, valid_BS))
        self._grown += 1
        if self._grown == len(self._steps):
            return None
        self._valid_BW, self._expanded_node_W = valid_BS[:, step.expanded_W], step.expanded_node_W
        parent_W = step.parent_place_S[step.expanded_W]
        return Level(tokens_BS[:, step.expanded_W], parent_W.expand(len(tokens_BS), -1))

    def tree(self) -> DraftTree:
        tokens_BN = torch.cat([level.tokens_BN for level in self._levels], 1)
        return DraftTree(
            tokens_BN=tokens_BN,
            parents_BN=torch.cat([level.parents_BN for level in self._levels], 1),
            log_q_BN=torch.cat([level.log_q_BN for level in self._levels], 1),
            valid_BN=torch.cat([level.valid_BN for level in self._levels], 1),
            max_depth=self._grown,
            q_BNV=self._joined_q(tokens_BN.shape) if self._q else None,
        )

    def _joined_q(self, shape: torch.Size) -> Tensor:
        q_BNV = self._q[0][1].new_zeros(*shape, self._q[0][1].shape[-1])
        for node_W, q_BWV in self._q:
            q_BNV.index_copy_(1, node_W, q_BWV)
        return q_BNV


class DynamicGrower:
    """Implements `drafters.tree.TreeGrower` for EAGLE-2's tree.

    Candidates are numbered as they are made: the root is 0, its children 1 .. width, and so on.
    """

    def __init__(self, depth: int, width: int, nodes: int, picker: Picker, root_B: Tensor) -> None:
        self._depth, self._width, self._nodes = depth, width, nodes
        self._picker = picker
        self._levels = [root_only(root_B)]
        self._scores = [self._levels[0].log_q_BN]
        self._expanded_BW = torch.zeros_like(root_B)[:, None]
        self._score_BW = self._scores[0]
        self._made = 1

    def grow(self, logits_BWU: Tensor, token_map_U: Tensor | None = None) -> Level | None:
        width = self._width
        picked = self._picker.pick(logits_BWU, token_map_U, width)
        tokens_BS, log_q_BS = picked.tokens_BWC.flatten(1), picked.log_q_BWC.flatten(1)
        score_BS = self._score_BW.repeat_interleave(width, 1) + log_q_BS
        parents_BS = self._expanded_BW.repeat_interleave(width, 1)
        self._levels.append(_nodes(tokens_BS, parents_BS, log_q_BS, score_BS > -torch.inf))
        self._scores.append(score_BS)
        if len(self._levels) > self._depth:
            return None
        best_BW = _best(score_BS, width)
        self._expanded_BW, self._score_BW = best_BW + self._made, score_BS.gather(1, best_BW)
        self._made += tokens_BS.shape[1]
        return Level(tokens_BS.gather(1, best_BW), best_BW // width)

    def tree(self) -> DraftTree:
        tokens_BM = torch.cat([level.tokens_BN for level in self._levels], 1)
        kept_BN = _best(torch.cat(self._scores, 1), min(self._nodes + 1, tokens_BM.shape[1])).sort(1).values
        index_N = torch.arange(kept_BN.shape[1], device=kept_BN.device).expand_as(kept_BN)
        new_index_BM = torch.full_like(tokens_BM, -1).scatter_(1, kept_BN, index_N)
        parents_BN = torch.cat([level.parents_BN for level in self._levels], 1).gather(1, kept_BN)
        return DraftTree(
            tokens_BN=tokens_BM.gather(1, kept_BN),
            parents_BN=torch.where(parents_BN < 0, parents_BN, new_index_BM.gather(1, parents_BN.clamp_min(0))),
            log_q_BN=torch.cat([level.log_q_BN for level in self._levels], 1).gather(1, kept_BN),
            valid_BN=torch.cat([level.valid_BN for level in self._levels], 1).gather(1, kept_BN),
            max_depth=len(self._levels) - 1,
        )


def _nodes(tokens_BS: Tensor, parents_BS: Tensor, log_q_BS: Tensor, valid_BS: Tensor) -> DraftTree:
    """Some nodes of a tree, those that must not be used marked."""
    return DraftTree(tokens_BS, parents_BS.where(valid_BS, -1), log_q_BS.where(valid_BS, 0.0), valid_BS, max_depth=0)


def _best(score_BS: Tensor, count: int) -> Tensor:
    """Indices of the highest scores; ties go to the lower index."""
    return score_BS.sort(dim=1, descending=True, stable=True).indices[:, :count]


@lru_cache
def _steps(paths: Paths, draws: Draws, device: torch.device) -> tuple[_Step, ...]:
    """The levels of a static tree; made once for a shape and a device, so that a round copies nothing there."""
    node_of = {path: node for node, path in enumerate(((), *paths))}
    inner = {path[:-1] for path in paths}
    parents: list[tuple[int, ...]] = [()]
    steps = []
    for depth in range(1, len(paths[-1]) + 1):
        level = [path for path in paths if len(path) == depth]
        pick = [path[-1] if draws == "top" else _birth(path, level) for path in level]
        expanded = [path for path in level if path in inner]
        index_lists = (
            [parents.index(path[:-1]) for path in level],
            pick,
            [node_of[path[:-1]] for path in level],
            [level.index(path) for path in expanded],
            [node_of[path] for path in expanded],
        )
        tensors = (torch.tensor(each, dtype=torch.long, device=device) for each in index_lists)
        steps.append(_Step(max(pick) + 1, *tensors))
        parents = expanded
    return tuple(steps)


def _birth(path: tuple[int, ...], level: list[tuple[int, ...]]) -> int:
    """How many siblings come before this one."""
    return sum(other[:-1] == path[:-1] and other[-1] < path[-1] for other in level)
