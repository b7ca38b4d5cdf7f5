"""Tokenized conversations on disk, their held-out split, and packed rows of them.

    cache_folder/KEY/
        train.ids.npy  train.learned.npy  train.ends.npy     all documents one after another, and where each ends
        heldout.*.npy                                        the same of the held-out conversations
        heldout.jsonl                                        the held-out conversations themselves, for prompts
        counts.json                                          how many of what, for the log

KEY is a digest of everything the contents depend on: the data files, tokenizer and template, and the settings below.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from drafters.batch import TrainBatch
from drafters.data.conversations import BrokenRow, Conversation, Message, data_digest, read_conversations
from drafters.data.masking import Document, Masker
from drafters.data.packing import pack
from drafters.recipe import DataSection
from drafters.run import atomic_folder

FORMAT = 1
PARTS = ("ids", "learned", "ends")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Documents:
    """Tokenized documents one after another: ids and learned [sum of lengths], ends [n]."""

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Document:
        start = int(self.ends[index - 1]) if index else 0
        return Document(self.ids[start : self.ends[index]], self.learned[start : self.ends[index]])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)


class Rows:
    """Documents laid out in rows; `batch` collates any of them.

    Args:
        documents: what the rows are made of.
        layout: for each row, the documents it holds, in order.
    """

    def __init__(self, documents: Documents, layout: Sequence[Sequence[int]]) -> None:
        self.documents = documents
        self._layout = layout

    def __len__(self) -> int:
        return len(self._layout)

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        """The rows as one batch, padded on the right to the longest of them."""
        parts = [[self.documents[index] for index in self._layout[row]] for row in rows]
        length = max(sum(len(document.ids) for document in row) for row in parts)
        shape = (len(rows), length)
        ids, learned = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        number, position = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for b, row in enumerate(parts):
            end = 0
            for place, document in enumerate(row):
                start, end = end, end + len(document.ids)
                ids[b, start:end] = document.ids
                learned[b, start:end] = document.learned
                number[b, start:end] = place
                position[b, start:end] = np.arange(end - start)
            position[b, end:] = np.arange(length - end)
        tensors = [torch.from_numpy(array) for array in (ids, learned, number, position)]
        return TrainBatch(tensors[0], tensors[1], tensors[2], tensors[3])


@dataclass(frozen=True)
class Dataset:
    """Rows to train on, rows held out, and the held-out conversations; `key` identifies all of it."""

    train: Rows
    heldout: Rows
    heldout_conversations: list[Conversation]
    key: str


def load_rows(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The data of a recipe; tokenized once, by the first process that asks, and reused as long as nothing changes.

    Raises:
        ValueError: data that cannot be read or used; the message gives file and row.
    """
    masker = Masker(tokenizer)
    key = _key(section, tokenizer)
    folder = Path(section.cache_folder) / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "counts.json").is_file():
            with atomic_folder(folder) as temporary:
                _build(section, masker, temporary)
        _log_counts(section, json.loads((folder / "counts.json").read_text()))
    train, heldout = (_rows(_read(folder, side), section) for side in ("train", "heldout"))
    return Dataset(train, heldout, _read_conversations(folder / "heldout.jsonl"), key)


def _rows(documents: Documents, section: DataSection) -> Rows:
    if not section.packing:
        return Rows(documents, [[index] for index in range(len(documents))])
    return Rows(documents, pack(documents.lengths.tolist(), section.max_length, section.seed))


def _key(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> str:
    settings = asdict(section)
    # Packing is not stored; files count by content.
    for name in ("train", "heldout", "packing", "seed", "cache_folder"):
        del settings[name]
    facts = {
        "format": FORMAT,
        "settings": settings,
        "data": [[data_digest(path) for path in paths] for paths in (section.train, section.heldout)],
        "template": str(tokenizer.chat_template),
        "special": [tokenizer.all_special_ids, tokenizer.eos_token_id],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else b"")
    return digest.hexdigest()[:24]


def _build(section: DataSection, masker: Masker, folder: Path) -> None:
    train, heldout = split(section)
    counts: Counter[str] = Counter()
    _write_side(folder, "train", _documents(train, masker, section, counts))
    if not counts["documents"]:
        raise ValueError(
            f"nothing to train on in {', '.join(section.train)}: no document has two learned tokens or more within "
            f"max_length {section.max_length} ({dict(counts)})"
        )
    _write_side(folder, "heldout", _documents(heldout, masker, section, Counter()))
    with (folder / "heldout.jsonl").open("w", encoding="utf-8") as stream:
        for conversation in heldout:
            stream.write(json.dumps(asdict(conversation)) + "\n")
    (folder / "counts.json").write_text(json.dumps({**counts, "heldout conversations": len(heldout)}))


def split(section: DataSection) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on and held-out ones; what is equal, or part of the same, is never on both sides.

    Without files of its own, the held-out side takes the conversations whose digest falls into the first
    heldout_fraction of all digests, and at least one where there are two.
    """
    limits = {"broken_rows": section.broken_rows, "limit": section.limit}
    conversations = list(read_conversations(section.train, **limits))  # type: ignore[arg-type]
    digests = [conversation.digest() for conversation in conversations]
    if section.heldout:
        heldout = list(read_conversations(section.heldout, broken_rows=section.broken_rows))
        outside = {conversation.digest() for conversation in heldout}
    else:
        outside = {digest for digest in digests if int.from_bytes(digest[:8], "big") < section.heldout_fraction * 2**64}
        if not outside and len(set(digests)) > 1:
            outside = {min(digests)}
        heldout = [
            conversation for conversation, digest in zip(conversations, digests, strict=True) if digest in outside
        ]
    train = [conversation for conversation, digest in zip(conversations, digests, strict=True) if digest not in outside]
    if section.heldout and len(train) < len(conversations):
        logger.warning(
            "%d conversations of data.train are in data.heldout too and are not trained on",
            len(conversations) - len(train),
        )
    if not train:
        raise ValueError(
            f"all {len(conversations)} conversations of {', '.join(section.train)} are held out; lower data.heldout_fraction "
            f"(got {section.heldout_fraction}) or give other files"
        )
    return train, heldout


def _documents(
    conversations: Iterable[Conversation], masker: Masker, section: DataSection, counts: Counter[str]
) -> Iterator[Document]:
    for conversation in tqdm(conversations, desc="tokenize", unit="conversation"):
        try:
            documents = masker.documents(conversation)
        except BrokenRow as error:
            if section.broken_rows == "stop":
                raise ValueError(
                    f"{conversation.row}: {error}; mend the row, or set data.broken_rows to skip"
                ) from error
            counts["conversations the template refuses"] += 1
            continue
        for document in documents:
            fitted = _fit(document, section, conversation.row, counts)
            if fitted is not None:
                counts["documents"] += 1
                counts["tokens"] += len(fitted.ids)
                counts["learned tokens"] += int(fitted.learned.sum())
                yield fitted


def _fit(document: Document, section: DataSection, row: str, counts: Counter[str]) -> Document | None:
    """The document within max_length, as too_long says; None where nothing is left to learn."""
    if len(document.ids) > section.max_length:
        if section.too_long == "stop":
            raise ValueError(
                f"{row} has {len(document.ids)} tokens, more than data.max_length {section.max_length}; raise it, or set "
                "data.too_long to truncate or drop"
            )
        counts["documents too long"] += 1
        if section.too_long == "drop":
            return None
        document = Document(document.ids[: section.max_length], document.learned[: section.max_length])
    if document.learned.sum() < 2:  # the first learned token is the root, so there would be nothing to draft
        counts["documents without an answer"] += 1
        return None
    return document


def _write_side(folder: Path, side: str, documents: Iterable[Document]) -> None:
    ids, learned = [], []
    for document in documents:
        ids.append(document.ids)
        learned.append(document.learned)
    arrays = {
        "ids": np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32),
        "learned": np.concatenate(learned) if learned else np.zeros(0, dtype=bool),
        "ends": np.cumsum([len(part) for part in ids], dtype=np.int64),
    }
    for part in PARTS:
        np.save(folder / f"{side}.{part}.npy", arrays[part])


def _read(folder: Path, side: str) -> Documents:
    try:
        return Documents(*(np.load(folder / f"{side}.{part}.npy", mmap_mode="r") for part in PARTS))
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenized data in {folder} is damaged: {error}; delete that folder") from error


def _read_conversations(path: Path) -> list[Conversation]:
    conversations = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields: dict[str, Any] = json.loads(line)
        fields["messages"] = tuple(Message(**message) for message in fields["messages"])
        conversations.append(Conversation(**fields))
    return conversations


def _log_counts(section: DataSection, counts: dict[str, int]) -> None:
    logger.info(
        "data %s: %s", ", ".join(section.train), ", ".join(f"{count:,} {name}" for name, count in counts.items())
    )
