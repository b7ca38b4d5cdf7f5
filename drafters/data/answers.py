"""The questions of conversations, asked again: what is asked in which order, and the file that keeps the answers.

    source     system   user 1   (its answer)   user 2   (its answer)   ...
    asked      system   user 1                                              -> new answer 1
               system   user 1   new answer 1   user 2                      -> new answer 2

A conversation ends early where an answer was cut off by length, as later turns would follow half an answer, before the
first turn of a tool, which answers a call that may not come again, and before a blank question.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from drafters.data.conversations import ROLES, BrokenRow, Conversation, _rows, parse_row
from drafters.run import disk_full, write_json_atomic

FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}
TOO_LONG = "too long for the target"
NO_QUESTION = "no user turn"
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """What a conversation asks. id: a digest of it, of its own for each of several equal ones; row: where it stands."""

    id: str
    row: str
    system: str
    questions: tuple[str, ...]
    part_of: str


@dataclass(frozen=True)
class Question:
    """Messages that end with a user's, and a seed of this question alone, so that its answer depends on no other."""

    messages: list[dict[str, str]]
    seed: int


@dataclass(frozen=True)
class Answer:
    """text: without the end of turn. cut: ended by length. tokens: how many were generated."""

    text: str
    cut: bool
    tokens: int


@dataclass(frozen=True)
class NoAnswer:
    """The question could not be asked; the conversation ends before it."""

    reason: str


Ask = Callable[[Sequence[Question]], Sequence[Answer | NoAnswer]]


class Dialogue:
    """A conversation on its way: gives the next question, takes its answer.

    Args:
        source: what is asked.
        seed: of the run; each question's own follows from it.
        drop_cut: leave out an answer that was cut off, and its question.
    """

    def __init__(self, source: Source, *, seed: int = 0, drop_cut: bool = False) -> None:
        self.source = source
        self.answers: list[Answer] = []
        self.reason = ""
        self._seed = seed
        self._drop_cut = drop_cut

    def question(self) -> Question | None:
        """What to ask next; None at the end."""
        turn = len(self.answers)
        if self.reason or turn == len(self.source.questions) or (self.answers and self.answers[-1].cut):
            return None
        digest = hashlib.sha256(f"{self._seed} {self.source.id} {turn}".encode()).digest()
        messages = [*self._messages(self.answers), {"role": "user", "content": self.source.questions[turn]}]
        return Question(messages, int.from_bytes(digest[:4], "big") >> 1)

    def take(self, answer: Answer | NoAnswer) -> None:
        if isinstance(answer, NoAnswer):
            self.reason = answer.reason
        elif answer.cut:  # inside of a character, maybe
            self.answers.append(Answer(answer.text.rstrip(HALF_CHARACTER), True, answer.tokens))
        else:
            self.answers.append(answer)

    def row(self) -> dict[str, Any] | None:
        """The conversation in the "messages" form; None where nothing is left that could be learned.

        finish_reason of an assistant turn tells the reader that no end of turn followed; finish lists them all.
        """
        kept = [answer for answer in self.answers if not (answer.cut and self._drop_cut)]
        if not any(answer.text.strip() for answer in kept):
            return None
        finish = ["length" if answer.cut else "stop" for answer in kept]
        messages = self._messages(kept)
        answered = [message for message in messages if message["role"] == "assistant"]
        for message, reason in zip(answered, finish, strict=True):
            message["finish_reason"] = reason
        part_of = {"part_of": self.source.part_of} if self.source.part_of else {}
        return {"id": self.source.id, "row": self.source.row, **part_of, "messages": messages, "finish": finish}

    def _messages(self, answers: Sequence[Answer]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.source.system}] if self.source.system else []
        for question, answer in zip(self.source.questions, answers, strict=False):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer.text})
        return messages


def in_windows(
    dialogues: Sequence[Dialogue], done: Container[str], ask: Ask, size: int
) -> Generator[Dialogue, None, None]:
    """Replays conversations in order, `size` at a time: the open ones of a window are asked their next turn together.

    Windows lie where they lie without `done`, so that a run that goes on asks the same things together.
    """
    for start in range(0, len(dialogues), size):
        window = [dialogue for dialogue in dialogues[start : start + size] if dialogue.source.id not in done]
        while asked := [(dialogue, question) for dialogue in window if (question := dialogue.question()) is not None]:
            answers = ask([question for _, question in asked])
            for (dialogue, _), answer in zip(asked, answers, strict=True):
                dialogue.take(answer)
        yield from window


def read_sources(path: str, *, broken_rows: Literal["stop", "skip"] = "stop", limit: int = 0) -> list[Source]:
    """What the conversations of a file, folder or dataset ask, in order. Those without a user turn are left out, with a warning.

    Args:
        path: see `drafters.data.conversations`; the answers there are not read, and none need be there.
        broken_rows: "stop" at the first row that cannot be used, or "skip" them with a count by reason.
        limit: most conversations to give; 0 for all.

    Raises:
        ValueError: a file that cannot be read, a broken row with "stop", or nothing to ask at all.
    """
    skipped: Counter[str] = Counter()
    sources: list[Source] = []
    seen: Counter[str] = Counter()
    for place, row in _rows(path):
        if limit and len(sources) >= limit:
            break
        try:
            conversation = _asking(row, place)
        except BrokenRow as error:
            if broken_rows == "stop":
                raise ValueError(f"{place}: {error}; mend the row, or skip broken rows") from error
            skipped[str(error).split(":")[0]] += 1
            continue
        source = _source(conversation, seen) if conversation is not None else None
        if source is None:
            skipped[NO_QUESTION] += 1
        else:
            sources.append(source)
    for reason, count in skipped.most_common():
        logger.warning("skipped %d rows: %s", count, reason)
    if not sources:
        raise ValueError(
            f"nothing to ask in {path} ({sum(skipped.values())} rows skipped); expected rows with user turns"
        )
    return sources


def _asking(row: Any, place: str) -> Conversation | None:
    """The row as the reader takes it, whatever its answers and whether its last question has one; None without a user turn."""
    key = next((key for key in FORMS if isinstance(row, dict) and isinstance(row.get(key), list)), None)
    if key is None:
        return parse_row(row, place)
    role, content = FORMS[key]
    roles = [ROLES.get(str(turn.get(role)).lower()) if isinstance(turn, dict) else None for turn in row[key]]
    if all(found in ("system", "assistant") for found in roles):
        return None
    answer = {role: "assistant", content: "-"}
    turns = [answer if found == "assistant" else turn for turn, found in zip(row[key], roles, strict=True)]
    return parse_row({**row, key: turns if roles[-1] == "assistant" else [*turns, answer]}, place)


def _source(conversation: Conversation, seen: Counter[str]) -> Source | None:
    system, questions = "", []
    for message in conversation.messages:
        if message.role == "system":
            system = message.content
        elif message.role == "tool" or not message.content.strip():
            break
        elif message.role == "user":
            questions.append(message.content)
    if not questions:
        return None
    asked = hashlib.sha256(json.dumps([conversation.part_of, system, questions]).encode()).hexdigest()
    seen[asked] += 1
    own = hashlib.sha256(f"{asked} {seen[asked]}".encode()).hexdigest()[:32]
    return Source(own, conversation.row, system, tuple(questions), conversation.part_of)


class AnswerFile:
    """A JSONL file of answered conversations that grows row by row, and can be gone on with after any end.

        OUT                  the rows
        OUT.settings.json    what they were answered with; other settings are refused
        OUT.dropped          ids of conversations that left no row, so that they are not asked again

    Raises:
        ValueError: rows of other settings, rows that are not this file's own, or another process that writes it.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._settings_file = path.with_name(f"{path.name}.settings.json")
        self._dropped_file = path.with_name(f"{path.name}.dropped")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{path}.lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(f"another process writes {path}; wait for it, or name another file") from error
        try:
            self.done = self._go_on(settings) if path.is_file() and path.stat().st_size else self._begin(settings)
        except BaseException:
            self._lock.release()
            raise
        self._rows = path.open("a", encoding="utf-8")
        self._dropped = self._dropped_file.open("a", encoding="utf-8")

    def close(self) -> None:
        self._rows.close()
        self._dropped.close()
        self._lock.release()

    def add(self, dialogue: Dialogue) -> None:
        """Writes a conversation's row. One that could not be asked at all is forgotten: a later run asks it again."""
        row = dialogue.row()
        try:
            if row is not None:
                self._rows.write(json.dumps(row, ensure_ascii=False) + "\n")
                self._rows.flush()
            elif dialogue.answers:
                self._dropped.write(dialogue.source.id + "\n")
                self._dropped.flush()
        except OSError as error:
            if disk_full(error):
                raise ValueError(
                    f"no space left to write {self.path}; free some, then run the same command again"
                ) from error
            raise
        self.done.add(dialogue.source.id)

    def _begin(self, settings: dict[str, Any]) -> set[str]:
        self._dropped_file.unlink(missing_ok=True)
        write_json_atomic(self._settings_file, settings)
        return set()

    def _go_on(self, settings: dict[str, Any]) -> set[str]:
        """The ids of what is done; a last line that was only half written is removed."""
        try:
            known = json.loads(self._settings_file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} has rows, but no {self._settings_file.name}; name another file") from error
        changed = [name for name in {**known, **settings} if known.get(name) != settings.get(name)]
        if changed:
            there, now = (", ".join(f"{name} {facts.get(name)}" for name in changed) for facts in (known, settings))
            raise ValueError(
                f"{self.path} was answered with {there}, asked for is {now}; use its settings, or name another file"
            )
        done, end = set(), 0
        with self.path.open("r+b") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    stream.truncate(end)
                    break
                done.add(self._id(line, number))
                end += len(line)
        dropped = self._dropped_file.read_text().split() if self._dropped_file.is_file() else []
        return done.union(dropped)

    def _id(self, line: bytes, number: int) -> str:
        try:
            return str(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} row {number} is not a row of answers; name another file") from error
