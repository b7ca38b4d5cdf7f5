"""Where an answer ends: end-of-sequence ids, stop strings and max_new_tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from drafters.decoding.stats import AcceptanceStats

OnTokens = Callable[[int, list[int]], None]
EXTRA_TOKENS = 8  # some tokenizers drop a space at the start of what they decode, and a character may span tokens


class Stopping:
    """Finds the first token that ends an answer; as in transformers, that token is part of the answer.

    A stop string counts where the new text contains it; text of the prompt does not.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int],
        stop_strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if stop_strings and tokenizer is None:
            raise ValueError("stop_strings need the tokenizer, got None")
        if "" in stop_strings:
            raise ValueError("a stop string is empty; it would stop at once")
        self._eos = frozenset(eos_token_ids)
        self._strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self._window = max((len(string.encode()) for string in self._strings), default=0) + EXTRA_TOKENS

    def cut(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the new tokens belong to the answer, the one that ends it included; None if it goes on.

        Args:
            before: tokens of the answer so far, none of which ended it.
            new: the tokens that follow.
        """
        if self._eos.isdisjoint(new) and not self._strings:
            return None
        for count in range(1, len(new) + 1):
            if new[count - 1] in self._eos or self._completes_string([*before[-self._window :], *new[:count]]):
                return count
        return None

    def _completes_string(self, tokens: list[int]) -> bool:
        if self._tokenizer is None or not self._strings:
            return False
        window = tokens[-self._window :]
        text = self._tokenizer.decode(window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


@dataclass
class Answer:
    """The new tokens of one prompt, so far.

    Attributes:
        index: the prompt's place in the list the user gave.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    finished: bool = False


@dataclass(frozen=True)
class Emitter:
    """Adds tokens to an answer, as far as it goes, and tells the user."""

    stopping: Stopping
    max_new_tokens: int
    on_tokens: OnTokens | None

    def emit(self, answer: Answer, tokens: list[int]) -> int:
        """Returns how many of the tokens come before the end of the text, max_new_tokens aside."""
        cut = self.stopping.cut(answer.tokens, tokens)
        whole = len(tokens) if cut is None else cut
        new = tokens[: min(whole, self.max_new_tokens - len(answer.tokens))]
        answer.tokens += new
        answer.finished = cut is not None or len(answer.tokens) >= self.max_new_tokens
        if self.on_tokens is not None:
            self.on_tokens(answer.index, new)
        return whole
