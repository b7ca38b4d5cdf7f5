"""Which documents share a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OPEN_ROWS = 64


def pack(lengths: Sequence[int], room: int, seed: int) -> list[list[int]]:
    """Lays documents into rows of at most `room` tokens: in random order, each into the fullest open row that has room.

    Args:
        lengths: tokens of each document, at most `room`.
        room: of a row.
        seed: of the order.

    Returns:
        for each row, the documents it holds, in order; every document is in exactly one.
    """
    closed: list[list[int]] = []
    rows: list[tuple[int, list[int]]] = []  # room left, documents
    for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        assert lengths[index] <= room, "documents are cut to the row's length before"
        fitting = [place for place, (left, _) in enumerate(rows) if left >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda place: rows[place][0])
            left, documents = rows[best]
            rows[best] = (left - lengths[index], [*documents, index])
            continue
        if len(rows) == OPEN_ROWS:
            fullest = min(range(len(rows)), key=lambda place: rows[place][0])
            closed.append(rows.pop(fullest)[1])
        rows.append((room - lengths[index], [index]))
    return closed + [documents for _, documents in rows]
