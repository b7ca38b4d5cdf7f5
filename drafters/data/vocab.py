"""The draft vocabulary: the tokens that a head with a smaller output matrix can propose."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from drafters.data.dataset import Documents


def count_tokens(documents: Documents, vocab_size: int) -> Tensor:
    """How often each id is to be learned; [V], int64."""
    counts = np.bincount(documents.ids[documents.learned], minlength=vocab_size)
    return torch.from_numpy(counts.astype(np.int64))


def draft_vocabulary(counts_V: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent ids; ties, and what data too small leaves open, go to the lowest ids.

    Returns:
        d2t: [size], the target's id of each draft id, ascending (absolute; file formats that hold offsets convert).
        t2d: [V], bool, which ids can be drafted.

    Raises:
        ValueError: more ids are asked for than the target has.
    """
    vocab_size = len(counts_V)
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} was asked for; the target has {vocab_size} ids, so 1 to {vocab_size} can be drafted"
        )
    order = torch.sort(counts_V, descending=True, stable=True).indices
    d2t = order[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t] = True
    return d2t, t2d
