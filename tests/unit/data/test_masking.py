"""What is learned of a conversation, over templates of different kinds."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from drafters.data.conversations import BrokenRow, Conversation, Message
from drafters.data.masking import Document, Masker

LLAMA3 = (
    "{{ '<|pad|>' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Earlier answers lose their reasoning once a later turn follows.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_TURNS = (
    Message("user", "Hi <|im_end|> there"),
    Message("assistant", "Hello there"),
    Message("user", "Hello there"),
    Message("assistant", "Bye"),
)


def masker(template: str = tiny.CHAT_TEMPLATE) -> Masker:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    return Masker(tokenizer)


def learned(document: Document) -> list[str]:
    """The runs of learned tokens, as text."""
    tokenizer = tiny.make_tokenizer()
    edges = np.flatnonzero(np.diff(document.learned.astype(int), prepend=0, append=0))
    return [tokenizer.decode(document.ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (tiny.CHAT_TEMPLATE, ["Hello there<|im_end|>", "Bye<|im_end|>"]),
        (LLAMA3, ["Hello there<|im_end|>", "Bye<|im_end|>"]),
        (MISTRAL, [" Hello there<|im_end|>", " Bye<|im_end|>"]),
    ],
)
def test_learned_are_the_answers_and_their_end_of_turn(template: str, expected: list[str]) -> None:
    (document,) = masker(template).documents(Conversation(TWO_TURNS, "row 1"))
    assert learned(document) == expected
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    turns = [{"role": m.role, "content": m.content} for m in TWO_TURNS]
    assert document.ids.tolist() == tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]


def test_system_turn_is_read_and_not_learned() -> None:
    messages = (Message("system", "Hello there"), *TWO_TURNS[:2])
    (document,) = masker().documents(Conversation(messages, "row 1"))
    assert learned(document) == ["Hello there<|im_end|>"]


def test_a_template_that_forgets_gives_a_document_per_answer_as_it_is_read_when_answered() -> None:
    documents = masker(FORGETFUL).documents(Conversation(TWO_TURNS, "row 1"))
    assert [learned(document) for document in documents] == [
        ["<think></think>Hello there<|im_end|>"],
        ["<think></think>Bye<|im_end|>"],
    ]
    assert "<think></think>Hello" not in tiny.make_tokenizer().decode(documents[1].ids)


def test_an_empty_answer_teaches_nothing() -> None:
    messages = (TWO_TURNS[0], Message("assistant", " "), *TWO_TURNS[2:])
    (document,) = masker().documents(Conversation(messages, "row 1"))
    assert learned(document) == ["Bye<|im_end|>"]


def test_a_cut_answer_has_no_end_of_turn() -> None:
    messages = (*TWO_TURNS[:3], Message("assistant", "Bye", cut=True))
    (document,) = masker().documents(Conversation(messages, "row 1"))
    assert learned(document) == ["Hello there<|im_end|>", "Bye"]
    assert tiny.make_tokenizer().decode(document.ids).endswith("Bye")


def test_plain_text_is_learned_whole_and_ended() -> None:
    (document,) = masker().documents(Conversation((), "row 1", "Once upon"))
    assert learned(document) == ["Once upon<|im_end|>"]


def test_a_template_without_assistant_turns_is_refused() -> None:
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="does not render assistant turns"):
        masker(silent)


def test_a_tokenizer_without_a_template_refuses_conversations_only() -> None:
    bare = masker("")
    with pytest.raises(ValueError, match=r"row 7 is a conversation, but .* no chat template"):
        bare.documents(Conversation(TWO_TURNS, "row 7"))
    assert len(bare.documents(Conversation((), "row 8", "text"))) == 1


def test_what_the_template_refuses_is_a_broken_row() -> None:
    with pytest.raises(BrokenRow, match="only user and assistant"):
        masker(MISTRAL).documents(Conversation((Message("system", "x"), *TWO_TURNS), "row 1"))


def test_an_answer_that_does_not_follow_the_generation_prompt_is_a_broken_row() -> None:
    odd = tiny.CHAT_TEMPLATE.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>bot\n' }}{% endif")
    with pytest.raises(BrokenRow, match="generation prompt"):
        masker(odd).documents(Conversation(TWO_TURNS, "row 1"))
