"""Prompts to evaluate on: files in the Spec-Bench form, or first turns of held-out conversations."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from drafters.recipe import EvalSection

if TYPE_CHECKING:
    from drafters.data.conversations import Conversation

logger = logging.getLogger(__name__)
Answer = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Prompt:
    """What a user asks, turn by turn.

    Attributes:
        name: question_id, or the row of the conversation.
        category: free text; "" where there is none.
        turns: the user's messages, at least one.
        system: the system message, or "".
    """

    name: str
    category: str
    turns: tuple[str, ...]
    system: str = ""


@dataclass(frozen=True)
class EncodedPrompt:
    """Tokens to continue. `turn` counts from 1."""

    name: str
    category: str
    turn: int
    ids: list[int]


def load_prompts(
    section: EvalSection,
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    answer: Answer | None = None,
) -> list[EncodedPrompt]:
    """The prompts an eval section asks for: of its file, or the first turns of held-out conversations.

    Args:
        section: `prompts` and `num_prompts` are read.
        conversations: used where the section names no file.
        tokenizer, max_tokens, answer: see `encode_prompts`.

    Raises:
        ValueError: the file is not one of prompts, or nothing short enough is left.
    """
    if section.num_prompts == 0:
        return []
    prompts = read_prompts(section.prompts) if section.prompts else heldout_prompts(conversations)
    if not prompts:
        raise ValueError("no held-out conversation begins with a user's turn: give eval.prompts a file of prompts")
    return encode_prompts(prompts, tokenizer, max_tokens=max_tokens, limit=section.num_prompts, answer=answer)


def read_prompts(path: Path | str) -> list[Prompt]:
    """A JSONL file in the Spec-Bench form: question_id, category and turns, a list of the user's messages.

    Raises:
        ValueError: no such file, no prompts in it, or a row that is not of this form; with the row's number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no prompts file {path}; expected JSONL with question_id, category and turns")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompts.append(_read_row(line, f"{path}:{number}"))
    if not prompts:
        raise ValueError(f"the prompts file {path} is empty; expected a JSON object a line")
    return prompts


def heldout_prompts(conversations: Iterable[Conversation]) -> list[Prompt]:
    """The user's first turn of each conversation, with the system message before it.

    Conversations that do not begin with the user (after a system message) are left out.
    """
    prompts = []
    for conversation in conversations:
        messages = list(conversation.messages)
        system = messages.pop(0).content if messages and messages[0].role == "system" else ""
        if messages and messages[0].role == "user" and messages[0].content.strip():
            prompts.append(Prompt(str(conversation.row), "held-out", (messages[0].content,), system))
    return prompts


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    limit: int = 0,
    answer: Answer | None = None,
) -> list[EncodedPrompt]:
    """Prompts as the target reads them, through its own chat template; plain text where it has none.

    Args:
        prompts: what to encode.
        tokenizer: the target's.
        max_tokens: longer prompts are left out, with a warning that says how many.
        limit: how many to take, spread evenly so that each category is met; 0 for all.
        answer: the target's answer to a prompt, in tokens. With it all turns are used, each after the answers to those
            before it, as long as they fit; without it only the first turn of each.

    Raises:
        ValueError: none is short enough.
    """
    if not tokenizer.chat_template:
        logger.warning("the tokenizer has no chat template: prompts are encoded as plain text")
    short = [prompt for prompt in prompts if len(_encode(_opening(prompt), tokenizer)) <= max_tokens]
    if len(short) < len(prompts):
        logger.warning(
            "%d of %d prompts left out: longer than %d tokens", len(prompts) - len(short), len(prompts), max_tokens
        )
    if not short:
        raise ValueError(f"none of {len(prompts)} prompts has at most {max_tokens} tokens; use shorter ones")
    entries = (_encode_turns(prompt, tokenizer, answer) for prompt in spread(short, limit))
    return [entry for turns in entries for entry in takewhile(lambda entry: len(entry.ids) <= max_tokens, turns)]


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts, evenly spaced; all where limit is 0 or no less than there are."""
    if limit <= 0 or limit >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def _opening(prompt: Prompt) -> list[dict[str, str]]:
    """The system message and the first turn."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def _encode_turns(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, answer: Answer | None) -> Iterator[EncodedPrompt]:
    """Lazy: an answer is asked for only when the turn after it is."""
    messages: list[dict[str, Any]] = list(_opening(prompt))
    ids = _encode(messages, tokenizer)
    yield EncodedPrompt(prompt.name, prompt.category, 1, ids)
    for number, turn in enumerate(prompt.turns[1:] if answer is not None else (), start=2):
        assert answer is not None
        text = tokenizer.decode(answer(ids), skip_special_tokens=True)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        ids = _encode(messages, tokenizer)
        yield EncodedPrompt(prompt.name, prompt.category, number, ids)


def _encode(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template:
        rendered: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(rendered["input_ids"])
    text = "\n\n".join(message["content"] for message in messages)
    return list(tokenizer(text)["input_ids"])


def _read_row(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{place}: expected an object with a list of texts named turns, got {line[:80]}")
    return Prompt(str(row.get("question_id", place)), str(row.get("category", "")), tuple(turns))
