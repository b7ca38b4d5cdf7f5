"""From a conversation to token ids and the mask of what is to be learned, by the chat template's own renderings.

    rendering of turns before the answer, with the generation prompt    | prefix
    rendering of turns up to the answer                                 | prefix + answer + closing
    learned                                                             | answer + end of turn

Nothing is searched for in the text: an answer lies between the ends of two renderings, and the closing is what stays the
same when the answer changes. A template that renders a turn differently once others follow (one that drops earlier
reasoning, say) gives one document for each answer, each as the target reads it when it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from drafters.data.conversations import BrokenRow, Conversation, Message

PROBES = ("Alpha", "Beta.")


@dataclass(frozen=True)
class Document:
    """Tokens of one rendering, and which of them are to be learned; both [T]."""

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """Characters of a rendering: begin .. answer_end - 1 hold one answer, answer_end .. end - 1 its closing."""

    begin: int
    answer_end: int
    end: int


class Masker:
    """Renders, tokenizes and masks conversations for one tokenizer.

    Raises:
        ValueError: the tokenizer gives no offsets, or its template does not render assistant turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} gives no character offsets, which the loss mask needs; "
                "convert it to a fast tokenizer (tokenizer.json)"
            )
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self._closing = self._find_closing() if tokenizer.chat_template else ""

    def documents(self, conversation: Conversation) -> list[Document]:
        """One document, or one for each answer (see the module).

        Raises:
            BrokenRow: the template refuses the conversation or renders an answer where none can be found.
            ValueError: the conversation has turns and the tokenizer no chat template.
        """
        if not conversation.messages:
            return [self._plain(conversation.text)]
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{conversation.row} is a conversation, but the target's tokenizer has no chat template; "
                "set one in its tokenizer_config.json, or give data in the plain form (text)"
            )
        messages = conversation.messages
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        whole = self._render(messages)
        spans = [self._span(messages, answer, whole) for answer in answers]
        if all(span is not None for span in spans):
            return [self._document(whole, [s for s in spans if s], [messages[i] for i in answers])]
        return [self._single(messages[: answer + 1]) for answer in answers]

    def _single(self, messages: Sequence[Message]) -> Document:
        """Only the last answer is learned."""
        text = self._render(messages)
        span = self._span(messages, len(messages) - 1, text)
        if span is None:
            raise BrokenRow(
                "the chat template renders an answer that does not begin with its own generation prompt, "
                "so the answer's tokens cannot be told apart"
            )
        return self._document(text, [span], [messages[-1]])

    def _span(self, messages: Sequence[Message], answer: int, whole: str) -> Span | None:
        """Where an answer lies in a rendering; None where the rendering does not continue that of the turns before it."""
        prefix = self._render(messages[:answer], generation_prompt=True)
        through = whole if answer == len(messages) - 1 else self._render(messages[: answer + 1])
        if not (through.startswith(prefix) and whole.startswith(through)):
            return None
        if not through.endswith(self._closing):
            raise BrokenRow(f"the chat template closes an answer in another way than {self._closing!r}")
        return Span(len(prefix), len(through) - len(self._closing), len(through))

    def _document(self, text: str, spans: Sequence[Span], answers: Sequence[Message]) -> Document:
        if answers[-1].cut:  # nothing follows an answer that was cut off
            text = text[: spans[-1].answer_end]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        starts = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
        learned = np.zeros(len(ids), dtype=bool)
        for span, answer in zip(spans, answers, strict=True):
            if answer.content.strip():
                learned |= (starts >= span.begin) & (starts < span.answer_end)
                closing = np.flatnonzero((starts >= span.answer_end) & (starts < span.end))
                learned[closing[: 0 if answer.cut else self._end_of_turn(ids[closing])]] = True
        return Document(ids, learned)

    def _end_of_turn(self, closing: NDArray[np.int32]) -> int:
        """How many tokens of a closing end the turn: up to its first special one; without one, none are the target's to say."""
        special = [place for place, token in enumerate(closing.tolist()) if token in self._special]
        return special[0] + 1 if special else 0

    def _plain(self, text: str) -> Document:
        ids = list(self._tokenizer(text)["input_ids"])
        end = self._tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return Document(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
        except TemplateError as error:
            raise BrokenRow(f"the chat template refuses the conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def _find_closing(self) -> str:
        """What the template puts behind an answer: the common end of two renderings with different answers."""
        first, second = (self._render([Message("user", "Hello"), Message("assistant", probe)]) for probe in PROBES)
        if any(probe not in text for probe, text in zip(PROBES, (first, second), strict=True)):
            raise ValueError(
                "the target's chat template does not render assistant turns, so there is no answer to learn; "
                "give its tokenizer a template that does"
            )
        common = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
        return "".join(character for character, _ in common)[::-1]
