"""Decoding with a transformers model: one KV cache for rows of different lengths, trees by 4D masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.target.adapter import TargetStep
from drafters.target.cache import KVStore, RowLengths, path_slots
from drafters.tree import DraftTree

if TYPE_CHECKING:
    from drafters.target.hf import HFTarget

PREFILL_CHUNK = 1024


class _ModelCache:
    """What transformers' attention modules call with new keys and values: `update`, and nothing else."""

    is_compileable = False

    def __init__(self, capacity: int, rows: int) -> None:
        self.stores: dict[int, KVStore] = {}
        self.start = 0
        self._capacity = capacity
        self._rows = rows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        store = self.stores.get(layer_idx)
        if store is None:  # at the first prefill, on the device where the layer lives
            store = KVStore(self._rows, keys.shape[1], keys.shape[3], self._capacity, keys.dtype, keys.device)
            self.stores[layer_idx] = store
        store.write(self.start, keys, values)
        return store.view(self.start + keys.shape[2])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start


class HFSession:
    """Implements `drafters.target.adapter.DecodingSession`."""

    def __init__(self, target: HFTarget, layers: Sequence[int], rows: int, capacity: int) -> None:
        self._target = target
        self._layers = list(layers)
        self._lengths = RowLengths(rows, target.device)
        self._cache = _ModelCache(capacity, rows)
        self._windows = _windows(target.model.config.get_text_config())

    @property
    def lengths_B(self) -> Tensor:
        return self._lengths.tensor_B

    @torch.no_grad()
    def prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> TargetStep:
        B, T = ids_BT.shape
        device = self._target.device
        ids_BT, lengths_B = ids_BT.to(device), lengths_B.to(device)
        features, last = [], []
        for start in range(0, T, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, T)
            query = torch.arange(start, end, device=device)
            key = torch.arange(end, device=device)
            seen = (key <= query[:, None]).expand(B, -1, -1)
            hidden, normed = self._forward(
                ids_BT[:, start:end], query.expand(B, -1), key.expand(B, -1), seen, start=start
            )
            features.append(hidden)
            last.append(normed)
        final = torch.cat(last, 1)[torch.arange(B, device=device), lengths_B - 1]
        self._lengths.add(lengths_B)
        return TargetStep(self._target.unembed(final[:, None]), torch.cat(features, 1))

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> TargetStep:
        lengths = self._lengths.tensor_B
        start = self._lengths.longest
        slot = torch.arange(start, device=lengths.device)
        position = lengths[:, None] + tree.depth_BN()
        # key     prefix slot 0 .. start-1 (real below the row's length)  |  tree nodes
        # at      position = slot                                         |  length + depth
        prefix = (slot < lengths[:, None])[:, None].expand(-1, tree.tokens_BN.shape[1], -1)
        seen = torch.cat([prefix, tree.ancestors_BNN()], dim=-1)
        key_position = torch.cat([slot.expand(len(lengths), -1), position], dim=-1)
        hidden, normed = self._forward(tree.tokens_BN, position, key_position, seen, start=start)
        return TargetStep(self._target.unembed(normed), hidden)

    def commit(self, path_BP: Tensor, counts_B: Tensor) -> None:
        source, destination = path_slots(path_BP, counts_B, self._lengths.tensor_B, self._lengths.longest)
        for store in self._cache.stores.values():
            device = store.view(0)[0].device
            store.move(source.to(device), destination.to(device))
        self._lengths.add(counts_B)

    def keep(self, rows: Tensor) -> None:
        kept = rows.tolist()
        for store in self._cache.stores.values():
            store.keep(kept)
        self._lengths.keep(rows)

    def _forward(
        self, ids_BN: Tensor, position_BN: Tensor, key_position_BM: Tensor, seen_BNM: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        """Features and normed last hidden states of N tokens written at slot `start`."""
        self._cache.start = start
        mask = self._masks(position_BN, key_position_BM, seen_BNM)
        with self._target.captured(self._layers) as hidden:
            output = self._target.decoder(
                input_ids=ids_BN, attention_mask=mask, position_ids=position_BN, cache=self._cache, use_cache=True
            )
        features = [hidden[layer].to(ids_BN.device) for layer in self._layers]
        joined = torch.cat(features, -1) if features else ids_BN.new_zeros(*ids_BN.shape, 0)
        return joined, output.last_hidden_state.to(ids_BN.device)

    def _masks(self, position_BN: Tensor, key_position_BM: Tensor, seen_BNM: Tensor) -> Any:
        """Additive masks (valid for eager and SDPA alike), one per kind of layer where a model has several."""
        distance = position_BN[:, :, None] - key_position_BM[:, None]
        masks = {}
        for kind, window in self._windows.items():
            allowed = seen_BNM if window is None else seen_BNM & (distance < window)
            mask = torch.zeros(allowed.shape, dtype=self._target.dtype, device=allowed.device)
            masks[kind] = mask.masked_fill_(~allowed, torch.finfo(self._target.dtype).min)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _windows(config: Any) -> dict[str, int | None]:
    """The attention window of each kind of layer; None where a layer sees everything.

    Raises:
        ValueError: a kind of layer that keeps no keys and values.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"layers of kind {', '.join(sorted(unknown))} are not supported: expected full or sliding attention"
        )
    if not kinds:
        kinds = {"sliding_attention" if window else "full_attention"}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
