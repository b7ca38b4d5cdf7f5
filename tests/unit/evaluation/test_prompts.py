"""Prompts: files, held-out conversations, and their tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from drafters.evaluation.prompts import Prompt, encode_prompts, heldout_prompts, load_prompts, read_prompts, spread
from drafters.recipe import EvalSection

SHIPPED = Path(__file__).parents[3] / "eval" / "prompts.jsonl"


def conversation(row: str, *messages: tuple[str, str]) -> Any:
    return SimpleNamespace(row=row, messages=tuple(SimpleNamespace(role=r, content=c) for r, c in messages))


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_reads_the_spec_bench_form(tmp_path: Path) -> None:
    path = write(tmp_path, {"question_id": 81, "category": "writing", "turns": ["Hello", "More"]}, "", {"turns": ["A"]})
    first, second = read_prompts(path)
    assert first == Prompt("81", "writing", ("Hello", "More"))
    assert second == Prompt(f"{path}:3", "", ("A",))


@pytest.mark.parametrize(
    "row", ["{", '{"turns": []}', '{"turns": "Hello"}', '{"turns": [""]}', "[1]", '{"turns": [1]}']
)
def test_names_the_broken_row(tmp_path: Path, row: str) -> None:
    path = write(tmp_path, {"turns": ["A"]}, row)
    with pytest.raises(ValueError, match=f"{path}:2"):
        read_prompts(path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(write(tmp_path, ""))


def test_the_shipped_prompts_are_many_and_of_several_categories() -> None:
    prompts = read_prompts(SHIPPED)
    assert len(prompts) >= 24
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert len({prompt.category for prompt in prompts}) >= 8


def test_held_out_prompts_are_first_turns_of_the_user_with_the_system_message() -> None:
    prompts = heldout_prompts(
        [
            conversation("1", ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")),
            conversation("2", ("assistant", "Hello"), ("user", "Hi")),
            conversation("3", ("user", "  ")),
            conversation("4"),
            conversation("5", ("user", "Why?"), ("assistant", "So.")),
        ]
    )
    assert prompts == [Prompt("1", "held-out", ("Hi",), "Be brief."), Prompt("5", "held-out", ("Why?",))]


def test_tokens_are_the_templates_own_with_the_generation_prompt() -> None:
    tokenizer = tiny.make_tokenizer()
    [encoded] = encode_prompts([Prompt("1", "", ("Hi", "Later"), "Be brief.")], tokenizer, max_tokens=200)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encoded.ids) == text
    assert encoded.turn == 1


def test_later_turns_follow_the_targets_answers() -> None:
    tokenizer = tiny.make_tokenizer()
    asked: list[str] = []

    def answer(ids: list[int]) -> list[int]:
        asked.append(tokenizer.decode(ids))
        return [*tokenizer("So.")["input_ids"], 2]

    encoded = encode_prompts([Prompt("1", "", ("A", "B"))], tokenizer, max_tokens=200, answer=answer)
    assert [entry.turn for entry in encoded] == [1, 2]
    start = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [start]
    assert (
        tokenizer.decode(encoded[1].ids)
        == start + "So.<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tokenizer_without_a_template_takes_plain_text(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = None
    with caplog.at_level(logging.WARNING):
        [encoded] = encode_prompts([Prompt("1", "", ("Hi",))], tokenizer, max_tokens=200)
    assert tokenizer.decode(encoded.ids) == "Hi"
    assert "no chat template" in caplog.text


def test_long_prompts_are_left_out_before_the_choice_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny.make_tokenizer()
    prompts = [Prompt(str(i), "", ("x" * (300 if i % 2 else 5),)) for i in range(8)]
    with caplog.at_level(logging.WARNING):
        encoded = encode_prompts(prompts, tokenizer, max_tokens=100, limit=4)
    assert [entry.name for entry in encoded] == ["0", "2", "4", "6"]
    assert "4 of 8" in caplog.text
    with pytest.raises(ValueError, match="none of 8"):
        encode_prompts(prompts, tokenizer, max_tokens=3)


def test_spread_covers_the_list() -> None:
    prompts = [Prompt(str(i), "", ("x",)) for i in range(10)]
    assert [prompt.name for prompt in spread(prompts, 3)] == ["0", "3", "6"]
    assert spread(prompts, 0) == spread(prompts, 99) == prompts


def test_the_section_says_where_prompts_come_from(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    path = write(tmp_path, *({"turns": [f"Q{i}"]} for i in range(5)))
    heldout = [conversation("7", ("user", "Hi"))]
    from_file = load_prompts(EvalSection(prompts=str(path), num_prompts=2), heldout, tokenizer, max_tokens=100)
    assert len(from_file) == 2
    assert [p.name for p in load_prompts(EvalSection(), heldout, tokenizer, max_tokens=100)] == ["7"]
    assert load_prompts(EvalSection(num_prompts=0), heldout, tokenizer, max_tokens=100) == []
    with pytest.raises(ValueError, match=r"eval.prompts"):
        load_prompts(EvalSection(), [], tokenizer, max_tokens=100)
