"""scripts/regenerate.py as users run it: in this process's place on a tiny target, and through a server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import commands
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.data.dataset import load_rows
from drafters.recipe import DataSection

SCRIPT = "scripts/regenerate.py"
LENGTH = 32
COUNT = 24
SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, data.jsonl in both forms, whole.jsonl (sampled in one go) and whole.txt, what that printed."""
    folder = tmp_path_factory.mktemp("inputs")
    save_target(folder / "target")
    with (folder / "data.jsonl").open("w") as stream:
        for i in range(COUNT):
            questions = [f"say {i} " * (1 + i % 5), f"more {i}"]
            turns = [("user", questions[0]), ("assistant", "not what the target says"), ("user", questions[1])]
            messages = [{"role": role, "content": content} for role, content in turns]
            sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in turns]
            row = (
                {"messages": [{"role": "system", "content": "brief"}, *messages]}
                if i % 2
                else {"conversations": sharegpt}
            )
            stream.write(json.dumps(row) + "\n")
    (folder / "whole.txt").write_text(commands.run(regenerate(folder, "whole.jsonl", *SAMPLED)))
    return folder


def save_target(folder: Path) -> None:
    """A target whose answers end by themselves as well as by length."""
    model = tiny.make_model("llama_untied_rope", seed=3, num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight[model.config.eos_token_id] *= 2
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)


def regenerate(folder: Path, out: str, *options: str) -> list[str]:
    where = ["--target", str(folder / "target"), "--dtype", "float32", "--device", "cpu", "--batch-size", "2"]
    length = ["--max-new-tokens", str(LENGTH)]
    return commands.python(SCRIPT, str(folder / "data.jsonl"), str(folder / out), *where, *length, *options)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_answers_are_those_of_generate_one_by_one(folder: Path) -> None:
    commands.run(regenerate(folder, "greedy.jsonl"))
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    found = rows(folder / "greedy.jsonl")
    assert [row["row"] for row in found] == [f"{folder / 'data.jsonl'} row {i + 1}" for i in range(COUNT)]
    seen = set()
    for row in found:
        answers = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for place, finish in zip(answers, row["finish"], strict=True):
            said, reason = reference(model, tokenizer, row["messages"][:place])
            assert (row["messages"][place]["content"], finish) == (said, reason)
            seen.add((len(answers), reason))
    assert {reason for _, reason in seen} == {"stop", "length"} and {count for count, _ in seen} == {1, 2}, (
        "the target's answers exercise both ends and both turns"
    )


def reference(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str]:
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=LENGTH, do_sample=False)
    new = output[0, prompt["input_ids"].shape[1] :].tolist()
    ended = new[-1] == model.config.eos_token_id
    text = tokenizer.decode(new, skip_special_tokens=True)
    return (text, "stop") if ended else (text.rstrip("\ufffd"), "length")


def test_a_killed_run_goes_on_to_the_same_file(folder: Path) -> None:
    out = folder / "killed.jsonl"
    with commands.started(regenerate(folder, out.name, *SAMPLED)) as process:
        deadline = time.monotonic() + commands.LIMIT_S
        while not (out.is_file() and out.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    done = out.read_text().count("\n")
    assert 0 < done < COUNT, "the run was killed in the middle"
    with out.open("a") as stream:
        stream.write('{"id": "half a row')
    printed = commands.run(regenerate(folder, out.name, *SAMPLED))
    assert f"{done} done before" in printed and f"{COUNT - done} conversations" in printed
    assert out.read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_a_finished_file_is_left_as_it_is_and_other_settings_are_refused(folder: Path) -> None:
    before = (folder / "whole.jsonl").read_bytes()
    assert "0 conversations, 0 answers, 0 tokens\n" in commands.run(regenerate(folder, "whole.jsonl", *SAMPLED))
    printed = commands.run(regenerate(folder, "whole.jsonl", *SAMPLED, "--temperature", "0.5"), status=2)
    assert "answered with temperature 0.8, asked for is temperature 0.5" in printed
    assert (folder / "whole.jsonl").read_bytes() == before


def test_what_was_done_is_printed(folder: Path) -> None:
    printed, found = (folder / "whole.txt").read_text(), rows(folder / "whole.jsonl")
    answers = [reason for row in found for reason in row["finish"]]
    assert f"{COUNT} conversations, {len(answers)} answers, " in printed
    assert f"{answers.count('length')} answers cut by length, 0 conversations left out, 0 done before" in printed
    assert "tokens/s" in printed


def test_the_answers_train(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    section = DataSection(
        train=(str(folder / "whole.jsonl"),), cache_folder=str(folder / "cache"), heldout_fraction=0.1, packing=False
    )
    dataset = load_rows(section, tokenizer)
    cut = {answer(row): row["finish"][-1] == "length" for row in rows(folder / "whole.jsonl")}
    ends = set()
    for document in (dataset.train.documents[i] for i in range(len(dataset.train.documents))):
        learned = document.ids[document.learned]
        text = tokenizer.decode(document.ids, skip_special_tokens=False)
        was_cut = next(cut[said] for said in cut if text.removesuffix("<|im_end|>\n").endswith(said))
        assert (learned[-1] == tokenizer.eos_token_id) != was_cut, "the end of turn of a cut answer was never said"
        ends.add(was_cut)
    assert ends == {True, False}


def answer(row: dict[str, Any]) -> str:
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}" for message in row["messages"][-1:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that answers with the question in capitals; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": body["messages"][-1]["content"].upper()}
            choice = {"message": message, "finish_reason": "stop"}
            self._send({"choices": [choice], "usage": {"completion_tokens": 2}})

        def _send(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_server_answers_as_well(folder: Path, server: str) -> None:
    out = folder / "served.jsonl"
    command = commands.python(SCRIPT, str(folder / "data.jsonl"), str(out), "--server", server, "--concurrency", "4")
    printed = commands.run(command)
    assert f"{COUNT} conversations, {2 * COUNT} answers, {4 * COUNT} tokens" in printed
    found = rows(out)
    assert sorted(row["messages"][-1]["content"] for row in found) == sorted(f"MORE {i}" for i in range(COUNT))
    assert json.loads((folder / "served.jsonl.settings.json").read_text())["target"] == "served"
    assert f"{COUNT} done before" in commands.run(command)
