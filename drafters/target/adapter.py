"""What the rest of the project sees of the target.

Layer index, the one convention: *i = the residual stream after block i, counted from 0; -1 = after the last
block, before the final norm.* Tools that count layer inputs are converted in `drafters/export`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from drafters.batch import TargetFeatures, TrainBatch
from drafters.tree import DraftTree


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a target, saved with every head trained on it.

    Attributes:
        path: the folder or hub id as given.
        revision: the hub revision, or "" for a folder.
        architecture: class name, such as "LlamaForCausalLM".
        vocab_size: V, rows of the output projection (padding rows included).
        eos_token_ids: every id that ends an answer.
        rope: the `rope_parameters` of the config ({"rope_type", "rope_theta", ...}), as a head rotates.
        weights_hash, tokenizer_hash, template_hash: sha256 prefixes; weights over names, shapes and a sample of values.
    """

    path: str
    revision: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    weights_hash: str
    tokenizer_hash: str
    template_hash: str

    def layer(self, index: int) -> int:
        """The layer index counted from 0, checked.

        Raises:
            ValueError: there is no such layer.
        """
        resolved = index + self.num_layers if index < 0 else index
        if not 0 <= resolved < self.num_layers:
            raise ValueError(
                f"layer {index} does not exist: the target has {self.num_layers} blocks, 0 to {self.num_layers - 1}"
            )
        return resolved


class TargetHead(Protocol):
    """The target's two vocabulary matrices and its final norm: all that a head needs of it in training."""

    @property
    def info(self) -> TargetInfo: ...

    def embed(self, ids: Tensor) -> Tensor:
        """Raw rows of the input embedding, [...] -> [..., D], without any scaling the architecture adds."""

    def final_norm(self, last_hidden: Tensor) -> Tensor:
        """The final norm of hidden states of layer -1; [..., D]."""

    def unembed(self, normed: Tensor) -> Tensor:
        """Logits from normed hidden states, soft-capping and scaling included; [..., D] -> [..., V]."""

    def logits(self, last_hidden: Tensor) -> Tensor:
        """unembed(final_norm(last_hidden)); layer -1 -> [..., V]."""

    def unembed_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output projection, a detached copy; [n] -> [n, D]."""

    def block_weights(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one block by their name inside it, for heads that start as a copy of one."""


@dataclass(frozen=True)
class TargetStep:
    """The target's answer to N tokens a row: their logits and captured features."""

    logits_BNV: Tensor
    features_BNF: Tensor


class DecodingSession(Protocol):
    """The target with a KV cache for a batch; rows advance by different lengths."""

    def prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> TargetStep:
        """Takes in the prompts (right-padded); logits are of the last token of each row only, [B, 1, V]."""

    def verify(self, tree: DraftTree) -> TargetStep:
        """One forward over the tree; the cache is unchanged until `commit`."""

    def commit(self, path_BP: Tensor, counts_B: Tensor) -> None:
        """Keeps the nodes of one path a row (root first; the first counts_B entries), drops the rest."""

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (indices, increasing)."""

    @property
    def lengths_B(self) -> Tensor:
        """Tokens in the cache, per row."""


class TargetModel(TargetHead, Protocol):
    """The whole target."""

    def features(self, batch: TrainBatch, layers: Sequence[int]) -> TargetFeatures:
        """Hidden states of a training batch; no gradients."""

    def session(self, layers: Sequence[int], rows: int, max_tokens: int, max_nodes: int) -> DecodingSession:
        """A fresh cache for `rows` sequences of at most `max_tokens` tokens and trees of `max_nodes` nodes."""
