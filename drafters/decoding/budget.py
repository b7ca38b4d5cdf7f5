"""Tree shapes: which nodes the logits of a drafter become.

A chain is the static tree of its only path. Children are either the best tokens by rank ("top"), a deterministic
function of the context, or drawn without replacement from the draft law under the sampling settings ("sample"), in
draw order. The rule that judges the tree says which (`AcceptanceRule.draws`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from drafters.decoding.growers import Draws, DynamicGrower, Paths, Picker, StaticGrower
from drafters.recipe import Sampling, TreeSection


def make_budget(
    section: TreeSection,
    sampling: Sampling,
    draws: Draws,
    generator: torch.Generator | None = None,
    vocab_size: int = 0,
) -> StaticBudget | DynamicBudget:
    """The budget that a recipe's tree section describes.

    Args:
        section: kind and size of the tree.
        sampling: settings under which children are drawn; unused with draws "top".
        draws: how children are chosen.
        generator: randomness of the draws, on the device of the logits.
        vocab_size: V; needed by sampled trees of drafters with a vocabulary of their own.

    Raises:
        ValueError: the tree is empty or broken, or a dynamic tree is asked for sampled children.
    """
    picker = Picker(draws, sampling, vocab_size, generator)
    if section.kind == "static":
        return StaticBudget(_checked(section.paths), picker)
    _at_least_one(section, "depth")
    if section.kind == "chain":
        paths = tuple((0,) * depth for depth in range(1, section.depth + 1))
        return StaticBudget(paths, picker)
    _at_least_one(section, "width")
    _at_least_one(section, "nodes")
    if draws == "sample":
        # Which nodes survive depends on the tokens drawn, so the survivors no longer follow the draft law.
        raise ValueError(
            "a dynamic tree chooses its nodes after looking at them, which is not lossless for children drawn by "
            'sampling; use the rule "point_mass" with it, or a chain or static tree'
        )
    return DynamicBudget(section.depth, section.width, section.nodes, picker)


@dataclass(frozen=True)
class StaticBudget:
    """The same shape every round: path (r1, r2, ..) is the child of rank r1 of the root, then its child of rank r2.

    Where children are sampled, the n-th child of a node is its n-th draw, whatever its rank is called.
    """

    paths: Paths
    picker: Picker

    @property
    def max_depth(self) -> int:
        return len(self.paths[-1])

    @property
    def max_nodes(self) -> int:
        return len(self.paths) + 1

    def start(self, root_B: Tensor) -> StaticGrower:
        return StaticGrower(self.paths, self.picker, root_B)


@dataclass(frozen=True)
class DynamicBudget:
    """EAGLE-2's tree: each level expands the `width` likeliest nodes of the level before into `width` children each.

    Of all nodes seen, the `nodes` likeliest are kept (the root not counted); a node's score is the log-probability of
    its path, ties go to the older node, so a kept node's parent is always kept (arXiv 2406.16858).
    """

    depth: int
    width: int
    nodes: int
    picker: Picker

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def max_nodes(self) -> int:
        return min(self.nodes, self.width + (self.depth - 1) * self.width**2) + 1

    def start(self, root_B: Tensor) -> DynamicGrower:
        return DynamicGrower(self.depth, self.width, self.nodes, self.picker, root_B)


def _checked(paths: Paths) -> Paths:
    """The paths, shorter ones first.

    Raises:
        ValueError: none, a repeated one, a negative rank, or one whose parent is missing.
    """
    ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    if not ordered:
        raise ValueError("a static tree needs paths, such as [[0], [1], [0, 0]]; got none")
    known: set[tuple[int, ...]] = {()}
    for path in ordered:
        if not path or min(path) < 0:
            raise ValueError(f"path {list(path)} of the static tree must hold ranks from 0 on, at least one")
        if path[:-1] not in known:
            raise ValueError(f"path {list(path)} of the static tree has no parent: add {list(path[:-1])}")
        known.add(path)
    for path, following in pairwise(ordered):
        if path == following:
            raise ValueError(f"path {list(path)} of the static tree is there twice")
    return tuple(ordered)


def _at_least_one(section: TreeSection, name: str) -> None:
    value = {"depth": section.depth, "width": section.width, "nodes": section.nodes}[name]
    if value < 1:
        raise ValueError(f"{name} of a {section.kind} tree is {value}; expected at least 1")
