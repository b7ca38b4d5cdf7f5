"""Rows of chat files as conversations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.data.conversations import BrokenRow, data_digest, parse_row, read_conversations

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


@pytest.mark.parametrize("row", [{"conversations": [HUMAN, GPT]}, {"messages": [USER, ASSISTANT]}])
def test_both_forms_give_the_same(row: dict) -> None:
    turns = [(message.role, message.content) for message in parse_row(row, "row 1").messages]
    assert turns == [("user", "Hi"), ("assistant", "Hello")]


def test_turns_that_answer_nothing_and_questions_without_answers_are_dropped() -> None:
    conversation = parse_row({"conversations": [GPT, HUMAN, GPT, HUMAN]}, "row 1")
    assert [message.role for message in conversation.messages] == ["user", "assistant"]


def test_an_answer_cut_by_length_is_known() -> None:
    row = {"messages": [USER, {**ASSISTANT, "finish_reason": "length"}]}
    assert parse_row(row, "row 1").messages[1].cut


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "not an object: got list"),
        ({"prompt": "x"}, "unknown form: got the keys prompt"),
        ({"messages": "x"}, "turns are not a list: got str"),
        ({"messages": [{"content": "x"}]}, "a turn without a role"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn without text: content is NoneType"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role: got 'wizard'"),
        ({"messages": [USER, USER, ASSISTANT]}, "two user turns follow each other"),
        ({"messages": [USER, {"role": "system", "content": "x"}, ASSISTANT]}, "a system turn inside"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "all assistant turns are empty"),
        ({"text": "  "}, "unknown form"),
    ],
)
def test_broken_rows(row: object, message: str) -> None:
    with pytest.raises(BrokenRow, match=message):
        parse_row(row, "row 1")


def test_a_broken_row_in_the_middle_stops_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ASSISTANT]}, '{"messages": [', {"text": "x"})
    with pytest.raises(ValueError, match=r"a\.jsonl row 2: not JSON.*broken_rows"):
        list(read_conversations([path]))


def test_or_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ASSISTANT]}, "{", {"text": "x"}, {"messages": [USER]})
    with caplog.at_level("WARNING"):
        assert len(list(read_conversations([path], broken_rows="skip"))) == 2
    assert "skipped 1 rows: not JSON" in caplog.text
    assert "skipped 1 rows: no assistant turn" in caplog.text


def test_limit_counts_what_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{", {"text": "a"}, {"text": "b"}, {"text": "c"})
    found = list(read_conversations([path, path], broken_rows="skip", limit=2))
    assert [conversation.text for conversation in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("[{]", "is not JSON"), ('{"a": 1}\n', "unknown form"), ("hello\n", "row 1: not JSON")],
)
def test_files_that_hold_nothing_usable(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_conversations([str(tmp_path / "a.json")]))


def test_no_usable_row_at_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER]})
    with pytest.raises(ValueError, match=r"no usable conversation .*1 rows skipped"):
        list(read_conversations([path], broken_rows="skip"))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"no file or folder \./nowhere"):
        list(read_conversations(["./nowhere.jsonl"]))


def test_folders_arrays_and_saved_datasets(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a.jsonl", {"text": "a"})
    (tmp_path / "folder" / "b.json").write_text(json.dumps([{"text": "b"}, {"text": "c"}]))
    datasets.Dataset.from_list([{"messages": [USER, ASSISTANT]}]).save_to_disk(str(tmp_path / "saved"))
    assert [c.text for c in read_conversations([str(tmp_path / "folder")])] == ["a", "b", "c"]
    (saved,) = read_conversations([str(tmp_path / "saved")])
    assert saved.messages[1].content == "Hello"
    assert saved.row.endswith("saved row 1")


def test_the_digest_of_data_follows_its_contents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a"})
    before, folder = data_digest(path), data_digest(str(tmp_path))
    write(tmp_path / "a.jsonl", {"text": "b"})
    assert data_digest(path) != before
    assert data_digest(str(tmp_path)) != folder


def test_parts_of_a_conversation_have_one_digest() -> None:
    rows = [{"id": f"QWJhYvA_{n}", "conversations": [HUMAN, {**GPT, "value": str(n)}]} for n in range(2)]
    first, second = (parse_row(row, "row") for row in rows)
    other = parse_row({**rows[0], "id": "identity_3"}, "row")
    assert first.digest() == second.digest() != other.digest()
