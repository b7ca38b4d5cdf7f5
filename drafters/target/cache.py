"""Keys and values of one attention layer, allocated once, for rows that advance by different lengths.

Committed tokens of row b lie in slots 0 .. length_b - 1, in order, so slot = position. The nodes of a draft tree
are written side by side at one `start` for all rows (the longest row's length), which makes every write one slice;
after acceptance the path's slots are moved down to the end of their own row. What lies between a row's length
and `start` is junk that the caller's mask hides.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVStore:
    """One layer's cache: `keys` and `values` of shape rows x kv_heads x capacity x head_dim."""

    def __init__(
        self, rows: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.rows = rows
        self.capacity = capacity
        self._keys = torch.zeros(rows, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)

    def write(self, start: int, keys_BHNd: Tensor, values_BHNd: Tensor) -> None:
        """Puts N entries at slots start .. start + N - 1 of every row.

        Raises:
            ValueError: the entries do not fit.
        """
        end = start + keys_BHNd.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"the cache has {self.capacity} slots and slots up to {end} were asked for; open it larger"
            )
        self._keys[: self.rows, :, start:end] = keys_BHNd
        self._values[: self.rows, :, start:end] = values_BHNd

    def view(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots 0 .. end - 1, without a copy."""
        return self._keys[: self.rows, :, :end], self._values[: self.rows, :, :end]

    def move(self, source_BP: Tensor, destination_BP: Tensor) -> None:
        """Copies slots source to slots destination; all sources are read before anything is written."""
        for store in (self._keys, self._values):
            part = store[: self.rows]
            shape = (self.rows, part.shape[1], source_BP.shape[1], part.shape[3])
            source = source_BP[:, None, :, None].expand(shape)
            destination = destination_BP[:, None, :, None].expand(shape)
            part.scatter_(2, destination, part.gather(2, source))

    def keep(self, rows: list[int]) -> None:
        """Keeps these rows (increasing), in the same memory."""
        for new, old in enumerate(rows):
            if new != old:
                self._keys[new] = self._keys[old]
                self._values[new] = self._values[old]
        self.rows = len(rows)


class RowLengths:
    """How far each row of a batch has come, kept on the device and on the host."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.tensor_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0

    def add(self, counts_B: Tensor) -> None:
        self.tensor_B = self.tensor_B + counts_B
        self.longest = int(self.tensor_B.max())

    def keep(self, rows: Tensor) -> None:
        self.tensor_B = self.tensor_B[rows]
        self.longest = int(self.tensor_B.max()) if len(rows) else 0


def path_slots(path_BP: Tensor, counts_B: Tensor, lengths_B: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Where the nodes of an accepted path lie and where they belong.

    node    path[b, p]                 slot start + path[b, p]
    belongs p-th new token of row b    slot length_b + p

    Entries past counts_B are moved onto themselves.

    Returns:
        source_BP, destination_BP: slot numbers for `KVStore.move`.
    """
    step = torch.arange(path_BP.shape[1], device=path_BP.device)
    destination = lengths_B[:, None] + step
    real = step < counts_B[:, None]
    return torch.where(real, path_BP + start, destination), destination
