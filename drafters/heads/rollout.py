"""How an autoregressive head drafts: a cache of the committed entries, and tree levels on top of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.heads.blocks import Attend, LayerShape, RoPE
from drafters.target.cache import KVStore, RowLengths, path_slots

Network = Callable[[Tensor, Attend], Tensor]
CHUNK = 1024


class Rollout:
    """Caches of a head's layers for rows that advance by different lengths.

    An entry is one input of the network. Committed entry i of a row has position i and stays; the entries of a tree
    follow them for one round. With n committed entries, the last of them belongs to the root, so

    node of depth   1   2   ..
    position        n   n+1 ..

    Args:
        network: from inputs (B x N x I) and `Attend` to hidden states (B x N x D); runs layers 0 .. layers - 1.
        rope: the head's positions.
        shape: of its layers.
        layers: how many it has.
        rows: sequences.
        capacity: entries a row may reach, the tree's included; more are made room for when needed.
        like: a tensor with the network's dtype and device.
    """

    def __init__(
        self, network: Network, rope: RoPE, shape: LayerShape, *, layers: int, rows: int, capacity: int, like: Tensor
    ) -> None:
        self._network = network
        self._rope = rope
        self._lengths = RowLengths(rows, like.device)
        self._stores = [
            KVStore(rows, shape.num_kv_heads, shape.head_dim, capacity, like.dtype, like.device) for _ in range(layers)
        ]
        self._ancestors_BWM: Tensor | None = None
        self._depth = 0

    @property
    def lengths_B(self) -> Tensor:
        """Committed entries, per row."""
        return self._lengths.tensor_B

    def extend(self, inputs_BPI: Tensor, counts_B: Tensor) -> Tensor:
        """Commits the first counts_B entries of each row; B x P x D, where entries past counts_B are junk."""
        lengths, start = self._lengths.tensor_B, self._lengths.longest
        B, P, _ = inputs_BPI.shape
        prefix_BM = self._prefix()
        self._reserve(start + P)
        step = torch.arange(P, device=lengths.device)
        outputs = []
        for begin in range(0, P, CHUNK):
            query = step[begin : begin + CHUNK]
            end = begin + len(query)
            seen = torch.cat(
                [prefix_BM[:, None].expand(-1, len(query), -1), (step[:end] <= query[:, None]).expand(B, -1, -1)],
                dim=-1,
            )
            attend = self._attend(lengths[:, None] + query, seen, start + begin)
            outputs.append(self._network(inputs_BPI[:, begin:end], attend))
        if start and B > 1:  # rows were written side by side: each one's entries go down to its own end
            source, destination = path_slots(step.expand(B, -1), counts_B, lengths, start)
            for store in self._stores:
                store.move(source, destination)
        self._lengths.add(counts_B)
        self.open_tree()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def open_tree(self) -> None:
        """Forgets the entries of the last tree."""
        self._ancestors_BWM = None
        self._depth = 0

    def level(self, inputs_BWI: Tensor, parent_BW: Tensor) -> Tensor:
        """The next level of the tree; each entry sees its row's committed ones, its ancestors and itself.

        Args:
            inputs_BWI: the entries.
            parent_BW: the place of each one's parent in the level before; of no meaning in the first level.

        Returns:
            hidden states, B x W x D.
        """
        B, W, _ = inputs_BWI.shape
        ancestors = torch.eye(W, dtype=torch.bool, device=inputs_BWI.device).expand(B, W, W)
        if self._ancestors_BWM is not None:
            above = self._ancestors_BWM
            inherited = above.gather(1, parent_BW[..., None].expand(-1, -1, above.shape[-1]))
            ancestors = torch.cat([inherited, ancestors], dim=-1)
        start = self._lengths.longest + ancestors.shape[-1] - W
        self._reserve(start + W)
        seen = torch.cat([self._prefix()[:, None].expand(-1, W, -1), ancestors], dim=-1)
        position = (self.lengths_B[:, None] + self._depth).expand(-1, W)
        self._ancestors_BWM = ancestors
        self._depth += 1
        return self._network(inputs_BWI, self._attend(position, seen, start))

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (indices, increasing)."""
        for store in self._stores:
            store.keep(rows.tolist())
        self._lengths.keep(rows)
        self.open_tree()

    def _prefix(self) -> Tensor:
        """B x M: which slots before the longest row's end hold an entry of the row."""
        slot = torch.arange(self._lengths.longest, device=self.lengths_B.device)
        return slot < self.lengths_B[:, None]

    def _attend(self, position_BN: Tensor, seen_BNM: Tensor, start: int) -> Attend:
        cos, sin = self._rope(position_BN)
        return Attend(cos, sin, seen_BNM, self._stores, start)

    def _reserve(self, end: int) -> None:
        """Makes larger caches where a tree needs more entries than were foreseen."""
        if end <= self._stores[0].capacity:
            return
        for index, old in enumerate(self._stores):
            keys, values = old.view(old.capacity)
            _, heads, _, head_dim = keys.shape
            new = KVStore(old.rows, heads, head_dim, end + CHUNK // 4, keys.dtype, keys.device)
            new.write(0, keys, values)
            self._stores[index] = new
