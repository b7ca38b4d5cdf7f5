"""Reloads an exported folder with a strict reader and compares what it drafts with the head it came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from drafters.export.about import read_about
from drafters.export.forward import draft_logits
from drafters.export.reader import read_folder
from drafters.export.rotary import config_rope
from drafters.export.spec import LayerSpec, read_spec, serving_tensors
from drafters.export.strict import ReadHead
from drafters.heads.base import Drafter
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftTree, Level

TOLERANCE = 1e-3
TOKENS = 48


@dataclass(frozen=True)
class CheckResult:
    """Largest difference of draft logits, relative to the largest logit, over `steps` draft steps."""

    difference: float
    steps: int


@torch.no_grad()
def check_export(
    folder: Path, format_name: str, drafter: Drafter, target: TargetHead, *, steps: int = 3, seed: int = 0
) -> CheckResult:
    """Compares draft logits of the folder's head with the drafter's own, on random tokens and hidden states.

    Args:
        folder: the export.
        format_name: its format.
        drafter: the head it was made from, in float32.
        target: the target that it will be served with, in float32.
        steps: how many tokens of a chain to draft.
        seed: of the random inputs.

    Raises:
        ValueError: the folder is incomplete or damaged, is for another target, reads other layers or another vocabulary, turns by
            other angles, or drafts something else; the message says which.
    """
    read = read_folder(folder, format_name, target.info.num_layers)
    check_target(read, folder, target)
    _check_positions(read, folder, target.info)
    _check_layers(read, folder, drafter, format_name)
    _check_rope(read, folder, drafter)
    _check_tensors(read, folder, drafter)
    return compare_drafts(read, folder, drafter, target, steps=steps, seed=seed)


@torch.no_grad()
def compare_drafts(
    read: ReadHead, folder: Path, drafter: Drafter, target: TargetHead, *, steps: int, seed: int = 0
) -> CheckResult:
    """The part of `check_export` that compares logits; the head's shapes are known to be right.

    Raises:
        ValueError: they differ.
    """
    inputs = _random_inputs(target.info, seed)
    ours = own_logits(drafter, target, inputs.tokens_T, inputs.streams_LTD, steps)
    drafted_K = torch.stack([logits.argmax() for logits in ours])
    theirs = draft_logits(read, target, inputs.tokens_T[1:], inputs.streams_LTD, drafted_K)
    return CheckResult(_compare(ours, theirs, folder), steps)


@dataclass(frozen=True)
class _Inputs:
    """T + 1 tokens, the last one being the root, and L + 1 residual streams at the first T."""

    tokens_T: Tensor
    streams_LTD: Tensor


def _random_inputs(info: TargetInfo, seed: int) -> _Inputs:
    generator = torch.Generator().manual_seed(seed)
    length = min(TOKENS, info.max_position_embeddings // 2)
    tokens = torch.randint(info.vocab_size, (length + 1,), generator=generator)
    return _Inputs(tokens, torch.randn(info.num_layers + 1, length, info.hidden_size, generator=generator))


def own_logits(drafter: Drafter, target: TargetHead, tokens_T: Tensor, streams_LTD: Tensor, steps: int) -> list[Tensor]:
    """Logits over the target's vocabulary of each step of a greedy chain, by the drafter's own drafting."""
    info = target.info
    captured_TF = torch.cat([streams_LTD[info.layer(layer) + 1] for layer in drafter.feature_layers], -1)
    state = drafter.start(target, 1, len(tokens_T) + steps)
    committed = Committed(tokens_T[None, :-1], captured_TF[None], torch.tensor([len(tokens_T) - 1]), tokens_T[None, -1])
    state = drafter.advance(state, committed)
    budget = _ListeningBudget(steps, info.vocab_size)
    drafter.draft(state, budget)
    return budget.logits


@dataclass
class _ListeningBudget:
    """A greedy chain that keeps the logits; both budget and grower."""

    max_depth: int
    vocab_size: int
    logits: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)

    @property
    def max_nodes(self) -> int:
        return self.max_depth + 1

    def start(self, root_B: Tensor) -> _ListeningBudget:
        self.logits, self.tokens = [], [root_B]
        return self

    def grow(self, logits_BWU: Tensor, token_map_U: Tensor | None = None) -> Level | None:
        own_U = logits_BWU[0, 0].float()
        full_V = own_U
        if token_map_U is not None:
            full_V = own_U.new_full((self.vocab_size,), -math.inf)
            full_V[token_map_U] = own_U
        self.logits.append(full_V)
        self.tokens.append(full_V.argmax()[None])
        if len(self.logits) == self.max_depth:
            return None
        return Level(self.tokens[-1][None], torch.zeros(1, 1, dtype=torch.long))

    def tree(self) -> DraftTree:
        tokens = torch.stack(self.tokens, 1)
        return DraftTree(
            tokens,
            torch.arange(-1, tokens.shape[1] - 1)[None],
            torch.zeros(tokens.shape),
            torch.ones_like(tokens, dtype=torch.bool),
            self.max_depth,
        )


def check_target(read: ReadHead, folder: Path, target: TargetHead) -> None:
    """Whether the head is for the target: sizes, fingerprint, copies of the target's matrices.

    Raises:
        ValueError: it is for another.
    """
    info, config = target.info, read.config
    for key, word, own in (
        ("hidden_size", "hidden size", info.hidden_size),
        ("vocab_size", "vocabulary size", info.vocab_size),
    ):
        if config.get(key) != own:
            raise ValueError(
                f"{folder} is for another target: its {word} is {config.get(key)}, that of {info.path} is {own}"
            )
    made_for = read_about(folder).get("target", {})
    if made_for.get("weights_hash") and info.weights_hash and made_for["weights_hash"] != info.weights_hash:
        raise ValueError(
            f"{folder} is for another target: it was made for weights {made_for['weights_hash']} of {made_for['path']}, "
            f"those of {info.path} are {info.weights_hash}"
        )
    _check_copies(read, folder, target)


def _check_positions(read: ReadHead, folder: Path, info: TargetInfo) -> None:
    positions = read.config.get("max_position_embeddings", info.max_position_embeddings)
    if positions != info.max_position_embeddings:
        raise ValueError(
            f"{folder}: max_position_embeddings is {positions}, the target's is {info.max_position_embeddings}; a server "
            "drafts nothing past the head's limit"
        )


def _check_copies(read: ReadHead, folder: Path, target: TargetHead) -> None:
    ids = torch.arange(target.info.vocab_size)
    copies = {"embed_tokens.weight": target.embed}
    if read.config.get("original_lm_head"):
        copies["lm_head.weight"] = target.unembed_rows
    for name, rows in copies.items():
        found = read.tensors.get(name)
        if found is not None and not torch.equal(found, rows(ids).to("cpu", found.dtype)):
            raise ValueError(
                f"{folder} is for another target: its {name} is not the matrix of {target.info.path}, of which it must be a copy"
            )


def _check_layers(read: ReadHead, folder: Path, drafter: Drafter, format_name: str) -> None:
    trained = [drafter.info.layer(layer) for layer in drafter.feature_layers]
    reads = [stream - 1 for stream in read.streams]
    if reads != trained:
        convention = "outputs" if format_name == "sglang" else "inputs"
        expected = [layer + (convention == "inputs") for layer in trained]
        raise ValueError(
            f"{folder}: wrong layers: read as {format_name} (ids count {convention} of blocks), its ids make the head read the "
            f"outputs of blocks {reads}, but it was trained on those of blocks {trained}; the ids must be {expected}"
        )


def _check_tensors(read: ReadHead, folder: Path, drafter: Drafter) -> None:
    """Shapes and finiteness; what the file has beyond the head's own tensors was looked at before."""
    own = serving_tensors(read_spec(drafter), drafter)
    faults = []
    for name, tensor in read.tensors.items():
        if name in own and own[name].shape != tensor.shape:
            faults.append(f"shape of {name}: {tuple(tensor.shape)}, the head's is {tuple(own[name].shape)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(f"not finite: {name}")
    if faults:
        raise ValueError(f"{folder} does not hold the head's tensors:\n  " + "\n  ".join(faults))


def _compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], folder: Path) -> float:
    worst = 0.0
    for step, (own, read) in enumerate(zip(ours, theirs, strict=True), start=1):
        if not torch.equal(own.isinf(), read.isinf()):
            wrong = int((own.isinf() != read.isinf()).sum())
            raise ValueError(
                f"{folder}: its d2t gives another draft vocabulary than the head's: {wrong} of {len(own)} tokens can be drafted by "
                "one and not by the other; d2t must hold offsets, target id - draft id"
            )
        real = ~own.isinf()
        scale = float(own[real].abs().max()) or 1.0
        difference = float((own[real] - read[real]).abs().max()) / scale
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{folder} drafts something else than the head it was made from: at draft step {step} the logits differ by "
                f"{difference:.2g} of the largest (allowed {TOLERANCE:g})"
            )
        worst = max(worst, difference)
    return worst


def _check_rope(read: ReadHead, folder: Path, drafter: Drafter) -> None:
    """Rotary settings, both schemas, against the head's: a short text would not show them all."""
    spec = read_spec(drafter)
    if not isinstance(spec, LayerSpec):
        return
    found, expected = config_rope(read.config), spec.rope_parameters
    differ = sorted(key for key in set(found) | set(expected) if found.get(key) != expected.get(key))
    if differ:
        raise ValueError(
            f"{folder}: rotary settings of config.json are not the head's: "
            + ", ".join(f"{key} {found.get(key)!r} instead of {expected.get(key)!r}" for key in differ)
        )
