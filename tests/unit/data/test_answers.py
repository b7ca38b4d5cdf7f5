"""What is asked of a target, in which order, and the file that keeps its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny

from drafters.data.answers import Answer, AnswerFile, Dialogue, NoAnswer, Question, Source, in_windows, read_sources
from drafters.data.conversations import parse_row, read_conversations
from drafters.data.masking import Masker

SETTINGS = {"target": "T", "temperature": 0.0}


def turns(*contents: str, first: str = "user") -> dict[str, Any]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(*questions: str, system: str = "", name: str = "a") -> Source:
    return Source(name, "row 1", system, questions, "")


def echo(questions: Sequence[Question]) -> list[Answer | NoAnswer]:
    """Answers with all that was asked, so that a wrong history shows. "cut" is cut off, "no" is not answered."""
    found: list[Answer | NoAnswer] = []
    for question in questions:
        last = question.messages[-1]["content"]
        said = "|".join(message["content"] for message in question.messages)
        found.append(NoAnswer("too long") if last == "no" else Answer(f"<{said}>", last == "cut", 2))
    return found


def replay(*sources: Source, drop_cut: bool = False, done: tuple[str, ...] = (), size: int = 10) -> list[Dialogue]:
    return list(in_windows([Dialogue(one, drop_cut=drop_cut) for one in sources], done, echo, size))


def test_questions_follow_the_target_s_own_answers() -> None:
    (dialogue,) = replay(source("q1", "q2", system="be brief"))
    row = dialogue.row()
    assert row is not None
    assert [(message["role"], message["content"]) for message in row["messages"]] == [
        ("system", "be brief"),
        ("user", "q1"),
        ("assistant", "<be brief|q1>"),
        ("user", "q2"),
        ("assistant", "<be brief|q1|<be brief|q1>|q2>"),
    ]
    assert row["finish"] == ["stop", "stop"] and row["id"] == "a" and row["row"] == "row 1"


def test_a_cut_answer_ends_its_conversation_and_is_marked_for_the_reader() -> None:
    (dialogue,) = replay(source("q1", "cut", "q3"))
    row = dialogue.row()
    assert row is not None and row["finish"] == ["stop", "length"]
    assert [message.cut for message in parse_row(row, "row 1").messages] == [False, False, False, True]


def test_training_learns_the_end_of_turn_of_a_whole_answer_only() -> None:
    masker = Masker(tiny.make_tokenizer())
    learned = {}
    for question in ("q1", "cut"):
        row = replay(source(question))[0].row()
        (document,) = masker.documents(parse_row(row, "row 1"))
        learned[question] = masker._tokenizer.decode(document.ids[document.learned])
    assert learned == {"q1": "<q1><|im_end|>", "cut": "<cut>"}


def test_cut_answers_can_be_left_out() -> None:
    later, first = replay(source("q1", "cut", "q3"), source("cut", "q2"), drop_cut=True)
    row = later.row()
    assert row is not None and row["finish"] == ["stop"] and len(row["messages"]) == 2
    assert first.row() is None


def test_a_character_that_was_cut_in_half_is_no_text() -> None:
    half, whole = Dialogue(source("q")), Dialogue(source("q"))
    half.take(Answer("so\ufffd", True, 3))
    whole.take(Answer("so\ufffd", False, 3))
    assert half.row()["messages"][1]["content"] == "so"  # type: ignore[index]
    assert whole.row()["messages"][1]["content"] == "so\ufffd"  # type: ignore[index]


def test_a_question_that_can_t_be_asked_ends_the_conversation_before_it() -> None:
    later, first = replay(source("q1", "no", "q3"), source("no"))
    assert len(later.row()["messages"]) == 2 and later.reason == "too long"  # type: ignore[index]
    assert first.row() is None


def test_blank_answers_alone_leave_nothing_to_learn() -> None:
    dialogue = Dialogue(source("q"))
    dialogue.take(Answer(" \n", False, 1))
    assert dialogue.row() is None


def test_windows_ask_the_open_conversations_their_next_turn_together() -> None:
    asked: list[list[str]] = []

    def ask(questions: Sequence[Question]) -> list[Answer | NoAnswer]:
        asked.append([question.messages[-1]["content"] for question in questions])
        return echo(questions)

    sources = [source("a1", "a2"), source("b1", name="b"), source("c1", "c2", name="c"), source("d1", name="d")]
    finished = list(in_windows([Dialogue(one) for one in sources], {"b"}, ask, 2))
    assert [dialogue.source.id for dialogue in finished] == ["a", "c", "d"]
    assert asked == [["a1"], ["a2"], ["c1", "d1"], ["c2"]]  # b is done, and still takes its place


def test_seeds_are_a_question_s_own() -> None:
    def seeds(seed: int, name: str) -> list[int]:
        dialogue = Dialogue(source("q1", "q2", name=name), seed=seed)
        found = []
        while (question := dialogue.question()) is not None:
            found.append(question.seed)
            dialogue.take(Answer("x", False, 1))
        return found

    assert seeds(0, "a") == seeds(0, "a")
    assert len({*seeds(0, "a"), *seeds(0, "b"), *seeds(1, "a")}) == 6
    assert all(0 <= seed < 2**31 for seed in seeds(0, "a"))


def test_both_forms_are_read_with_or_without_answers(tmp_path: Path) -> None:
    sharegpt = {"id": "abcdefg_1", "conversations": [{"from": "gpt", "value": "lost"}, {"from": "human", "value": "q"}]}
    system = {"role": "system", "content": "s"}
    empty = {"messages": [system, *turns("q1", "", "q2")["messages"]]}
    path = write(tmp_path / "a.jsonl", sharegpt, turns("q1", "a1", "q2", "a2"), turns("only"), empty)
    found = read_sources(path)
    assert [one.questions for one in found] == [("q",), ("q1", "q2"), ("only",), ("q1", "q2")]
    assert [one.system for one in found] == ["", "", "", "s"]
    assert found[0].part_of == "abcdefg" and found[0].row == f"{path} row 1"


def test_a_conversation_ends_before_a_tool_s_turn_and_before_a_blank_question(tmp_path: Path) -> None:
    tool = {
        "messages": [*turns("q1", "call")["messages"], {"role": "tool", "content": "42"}, *turns("q2")["messages"][1:]]
    }
    tool["messages"].append({"role": "assistant", "content": "it is 42"})
    found = read_sources(write(tmp_path / "a.jsonl", tool, turns("q1", "a1", " ", "a2", "q3", "a3")))
    assert [one.questions for one in found] == [("q1",), ("q1",)]


def test_conversations_without_a_user_turn_are_counted_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path / "a.jsonl", turns("hello", first="assistant"), {"text": "plain"}, turns(" ", "x"), turns("q")
    )
    assert [one.questions for one in read_sources(path)] == [("q",)]
    assert "skipped 3 rows: no user turn" in caplog.text
    with pytest.raises(ValueError, match=r"nothing to ask in .* \(1 rows skipped\)"):
        read_sources(write(tmp_path / "b.jsonl", {"text": "plain"}))


def test_broken_rows_stop_or_are_skipped(tmp_path: Path) -> None:
    broken = {"messages": [{"role": "user", "content": "q"}, {"role": "user", "content": "q"}]}
    path = write(tmp_path / "a.jsonl", turns("q1", "a1"), broken, turns("q2", "a2"))
    with pytest.raises(ValueError, match="row 2: turns do not alternate"):
        read_sources(path)
    assert [one.questions for one in read_sources(path, broken_rows="skip")] == [("q1",), ("q2",)]
    assert len(read_sources(path, limit=1)) == 1


def test_equal_conversations_have_ids_of_their_own(tmp_path: Path) -> None:
    rows = [turns("q", "a"), turns("q", "another"), turns("r", "a")]
    ids = [one.id for one in read_sources(write(tmp_path / "a.jsonl", *rows))]
    assert len(set(ids)) == 3
    assert ids == [one.id for one in read_sources(write(tmp_path / "b.jsonl", *rows))]


def test_a_file_goes_on_after_a_half_written_row(tmp_path: Path) -> None:
    out = tmp_path / "new/out.jsonl"
    first, second = replay(source("q1"), source("q2", name="b"))
    with closing(AnswerFile(out, SETTINGS)) as file:
        file.add(first)
        file.add(second)
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])
    with closing(AnswerFile(out, SETTINGS)) as file:
        assert file.done == {"a"}
        file.add(second)
    assert out.read_bytes() == whole
    assert len(list(read_conversations([str(out)]))) == 2
    assert json.loads((tmp_path / "new/out.jsonl.settings.json").read_text()) == SETTINGS


def test_rows_are_on_disk_as_soon_as_they_are_added(tmp_path: Path) -> None:
    with closing(AnswerFile(tmp_path / "out.jsonl", SETTINGS)) as file:
        file.add(replay(source("q1"))[0])
        assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "a"


def test_what_left_no_row_is_asked_again_only_where_there_was_no_answer(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with closing(AnswerFile(out, SETTINGS)) as file:
        for dialogue in replay(source("q"), source("cut", name="b"), source("no", name="c"), drop_cut=True):
            file.add(dialogue)
        assert file.done == {"a", "b", "c"}
    with closing(AnswerFile(out, SETTINGS)) as file:
        assert file.done == {"a", "b"}
    assert len(out.read_text().splitlines()) == 1


def test_other_settings_are_refused_and_leave_the_file_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with closing(AnswerFile(out, SETTINGS)) as file:
        file.add(replay(source("q"))[0])
    out.write_bytes(out.read_bytes() + b'{"id": "ha')
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"answered with temperature 0\.0, asked for is temperature 0\.7"):
        AnswerFile(out, {**SETTINGS, "temperature": 0.7})
    assert out.read_bytes() == before
    with closing(AnswerFile(out, SETTINGS)) as file:  # what was refused holds no lock
        assert file.done == {"a"}


def test_settings_bind_only_once_there_are_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    AnswerFile(out, SETTINGS).close()
    AnswerFile(out, {**SETTINGS, "temperature": 0.7}).close()
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text())["temperature"] == 0.7


def test_a_file_of_others_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"has rows, but no out\.jsonl\.settings\.json"):
        AnswerFile(out, SETTINGS)
    (tmp_path / "out.jsonl.settings.json").write_text(json.dumps(SETTINGS))
    out.write_text('{"text": "mine"}\n')
    with pytest.raises(ValueError, match="row 1 is not a row of answers"):
        AnswerFile(out, SETTINGS)
    assert out.read_text() == '{"text": "mine"}\n'


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    with (
        closing(AnswerFile(tmp_path / "out.jsonl", SETTINGS)),
        pytest.raises(ValueError, match="another process writes"),
    ):
        AnswerFile(tmp_path / "out.jsonl", SETTINGS)
