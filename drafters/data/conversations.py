"""Conversations from chat files, in the forms people have them.

ShareGPT rows ("conversations": from/value), OpenAI rows ("messages": role/content) and plain text ("text"); as JSON,
JSONL, folders of either, saved `datasets` folders, or hub ids of datasets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drafters.run import file_hash

logger = logging.getLogger(__name__)

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
# ShareGPT's ids: the conversation's, and the number of its part.
SHAREGPT_PART = re.compile(r"([A-Za-z0-9]{7})_\d+")
FORMS = '"conversations" (from/value), "messages" (role/content) or "text"'


@dataclass(frozen=True)
class Message:
    """One turn. cut: the answer was ended by length, so that no end of turn is to be learned after it."""

    role: str
    content: str
    cut: bool = False


@dataclass(frozen=True)
class Conversation:
    """The turns of a conversation, or one plain text.

    row: where it came from, for messages. part_of: what it is a part of, where a source cuts long conversations up.
    """

    messages: tuple[Message, ...]
    row: str
    text: str = ""
    part_of: str = ""

    def digest(self) -> bytes:
        """Equal for equal contents and for parts of one conversation, wherever they stand."""
        turns = [[message.role, message.content] for message in self.messages]
        return hashlib.sha256(json.dumps(self.part_of or [turns, self.text]).encode()).digest()


class BrokenRow(ValueError):
    """A row that cannot be used; the message says why."""


def read_conversations(
    paths: Sequence[str], *, broken_rows: Literal["stop", "skip"] = "stop", limit: int = 0
) -> Iterator[Conversation]:
    """All conversations, in order; leading assistant turns are dropped, since nothing precedes them to answer.

    Args:
        paths: files, folders or hub ids.
        broken_rows: "stop" at the first row that cannot be used, or "skip" them with a count by reason.
        limit: most conversations to give; 0 for all.

    Raises:
        ValueError: a file that cannot be read, a broken row with "stop", or no usable conversation at all.
    """
    skipped: Counter[str] = Counter()
    given = 0
    for path in paths:
        for place, row in _rows(path):
            try:
                conversation = parse_row(row, place)
            except BrokenRow as error:
                if broken_rows == "stop":
                    raise ValueError(f"{place}: {error}; mend the row, or set data.broken_rows to skip") from error
                skipped[str(error).split(":")[0]] += 1
                continue
            yield conversation
            given += 1
            if limit and given >= limit:
                break
        if limit and given >= limit:
            break
    for reason, count in skipped.most_common():
        logger.warning("skipped %d rows: %s", count, reason)
    if not given:
        raise ValueError(
            f"no usable conversation in {', '.join(paths)} ({sum(skipped.values())} rows skipped); expected rows with {FORMS}"
        )


def parse_row(row: Any, place: str) -> Conversation:
    """One row as a conversation.

    Raises:
        BrokenRow: the row has none of the known forms, an unknown role, or turns that do not alternate.
    """
    if not isinstance(row, dict):
        if isinstance(row, str) and row.startswith("not JSON"):
            raise BrokenRow(row)
        raise BrokenRow(f"not an object: got {type(row).__name__}, expected {FORMS}")
    part_of = ""
    if "messages" in row:
        messages = _messages(row["messages"], "role", "content")
    elif "conversations" in row:
        messages = _messages(row["conversations"], "from", "value")
        part = SHAREGPT_PART.fullmatch(str(row.get("id", "")))
        part_of = part.group(1) if part else ""
    elif isinstance(row.get("text"), str) and row["text"].strip():
        return Conversation((), place, row["text"])
    else:
        raise BrokenRow(f"unknown form: got the keys {', '.join(map(str, row)) or 'none'}, expected {FORMS}")
    return Conversation(_checked(messages), place, part_of=part_of)


def _messages(turns: Any, role_key: str, content_key: str) -> list[Message]:
    if not isinstance(turns, list):
        raise BrokenRow(f"turns are not a list: got {type(turns).__name__}")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get(role_key), str):
            raise BrokenRow(f"a turn without a role: expected the keys {role_key} and {content_key}")
        content = turn.get(content_key)
        if not isinstance(content, str):
            raise BrokenRow(f"a turn without text: {content_key} is {type(content).__name__}")
        role = ROLES.get(turn[role_key].lower())
        if role is None:
            raise BrokenRow(f"unknown role: got {turn[role_key]!r}, expected one of {', '.join(ROLES)}")
        messages.append(Message(role, content, cut=turn.get("finish_reason") == "length"))
    return messages


def _checked(messages: list[Message]) -> tuple[Message, ...]:
    """System turns first, then user and assistant in turn; tool turns may stand where a user's would."""
    system = [message for message in messages[:1] if message.role == "system"]
    rest = messages[len(system) :]
    while rest and rest[0].role == "assistant":
        rest = rest[1:]
    before = ""
    for message in rest:
        if message.role == "system":
            raise BrokenRow("a system turn inside the conversation")
        if message.role == before and message.role != "tool":
            raise BrokenRow(f"turns do not alternate: two {message.role} turns follow each other")
        before = message.role
    while rest and rest[-1].role != "assistant":
        rest = rest[:-1]
    if not rest:
        raise BrokenRow("no assistant turn that answers something")
    if all(not message.content.strip() for message in rest if message.role == "assistant"):
        raise BrokenRow("all assistant turns are empty")
    return (*system, *rest)


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    """Rows of a file, folder or dataset, each with its place."""
    source = Path(path)
    if source.is_dir() and (source / "dataset_info.json").is_file():
        import datasets  # imported here: slow, and only some data needs it

        yield from _numbered(path, datasets.load_from_disk(path))
    elif source.is_dir():
        files = sorted(file for file in source.rglob("*") if file.suffix in (".json", ".jsonl"))
        if not files:
            raise ValueError(f"data: the folder {path} holds no .json or .jsonl files")
        for file in files:
            yield from _file_rows(file)
    elif source.is_file():
        yield from _file_rows(source)
    elif _is_hub_id(path):
        import datasets

        yield from _numbered(path, datasets.load_dataset(path, split="train"))
    else:
        raise ValueError(f"data: there is no file or folder {path}")


def data_digest(path: str) -> str:
    """Changes when the data does: of contents for files, of the fingerprint for datasets.

    Raises:
        ValueError: there is no such file, folder or dataset.
    """
    source = Path(path)
    if source.is_dir() and (source / "dataset_info.json").is_file():
        import datasets

        return str(datasets.load_from_disk(path)._fingerprint)
    if source.is_dir():
        files = [file for file in sorted(source.rglob("*")) if file.suffix in (".json", ".jsonl")]
        return " ".join(f"{file.relative_to(source)}:{file_hash(file)}" for file in files)
    if source.is_file():
        return file_hash(source)
    if _is_hub_id(path):
        import datasets

        return str(datasets.load_dataset(path, split="train")._fingerprint)
    raise ValueError(f"data: there is no file or folder {path}")


def _is_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix


def _numbered(path: str, rows: Any) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _file_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8", errors="strict") as stream:
        start = stream.read(64).lstrip()
    if not start:
        raise ValueError(f"data: {file} is empty; expected JSON or JSONL rows with {FORMS}")
    if start.startswith("["):
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"data: {file} is not JSON: {error}; expected an array of rows, or one row a line"
            ) from error
        yield from _numbered(str(file), rows)
        return
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{file} row {number}", _parse_line(line)


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
