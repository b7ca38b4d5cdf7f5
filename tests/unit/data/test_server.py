"""Asking a chat-completions server: many requests in flight, failures that pass and failures that don't."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from drafters.data.answers import Answer, Dialogue, NoAnswer, Question, Source
from drafters.data.server import ChatServer
from drafters.recipe import Sampling

KEY = "sk-secret-0123456789"
QUESTION = Question([{"role": "user", "content": "q"}], 7)
Reply = tuple[int, Any]


class Fake:
    """A server whose replies a test decides: `reply` gets the body of a request and gives status and JSON."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Reply] = lambda body: (200, completion("fine"))
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: dict[str, str] = {}
        self.models = ["served"]
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": name} for name in fake.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append({"path": self.path, **body})
                fake.keys.append(self.headers["Authorization"])
                self._send(*fake.reply(body))

            def _send(self, status: int, value: Any) -> None:
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in {"Content-Length": str(len(data)), **fake.headers}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def connect(self, *, attempts: int = 3, model: str = "m", timeout_s: float = 10.0, **sampling: Any) -> ChatServer:
        return ChatServer(
            self.url,
            model=model,
            sampling=Sampling(**sampling),
            max_new_tokens=5,
            key=KEY,
            attempts=attempts,
            backoff_s=0.01,
            timeout_s=timeout_s,
        )


def completion(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


def dialogues(count: int, turns: int = 1) -> list[Dialogue]:
    return [Dialogue(Source(str(i), "row", "", (str(i),) * turns, "")) for i in range(count)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fake = Fake()
    thread = threading.Thread(target=fake.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()
    thread.join()


def test_a_question_is_sent_as_the_form_wants_it(fake: Fake) -> None:
    assert fake.connect().answer(QUESTION) == Answer("fine", False, 3)
    greedy = {"model": "m", "messages": QUESTION.messages, "max_tokens": 5, "temperature": 0.0, "top_p": 1.0}
    assert fake.bodies == [{"path": "/v1/chat/completions", **greedy}]
    assert fake.keys == [f"Bearer {KEY}"]
    fake.connect(temperature=0.5, top_k=4).answer(QUESTION)
    assert fake.bodies[1] == {**fake.bodies[0], "temperature": 0.5, "top_k": 4, "seed": 7}


def test_an_answer_ended_by_length_is_cut(fake: Fake) -> None:
    fake.reply = lambda body: (200, completion("half an", "length"))
    assert fake.connect().answer(QUESTION) == Answer("half an", True, 3)


def test_many_requests_are_in_flight(fake: Fake) -> None:
    together = threading.Barrier(4, timeout=20)  # lets nobody through before four are there

    def reply(body: dict[str, Any]) -> Reply:
        together.wait()
        return 200, completion("fine")

    fake.reply = reply
    finished = list(fake.connect().answers(dialogues(8), 4))
    assert {dialogue.source.id for dialogue in finished} == set(map(str, range(8)))
    assert all(dialogue.answers == [Answer("fine", False, 3)] for dialogue in finished)


def test_no_more_requests_are_in_flight_than_asked_for(fake: Fake) -> None:
    lock, now, most = threading.Lock(), 0, 0
    pause = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        pause.wait(0.02)
        with lock:
            now -= 1
        return 200, completion("fine")

    fake.reply = reply
    assert len(list(fake.connect().answers(dialogues(6, turns=2), 2))) == 6
    assert most == 2


def test_turns_of_a_conversation_follow_each_other(fake: Fake) -> None:
    fake.reply = lambda body: (200, completion(f"answer {len(body['messages'])}"))
    (dialogue,) = fake.connect().answers(dialogues(1, turns=2), 4)
    assert [answer.text for answer in dialogue.answers] == ["answer 1", "answer 3"]
    assert fake.bodies[1]["messages"][1] == {"role": "assistant", "content": "answer 1"}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass_are_tried_again(fake: Fake, status: int) -> None:
    replies = iter([(status, "busy"), (status, "busy"), (200, completion("fine"))])
    fake.reply = lambda body: next(replies)
    assert fake.connect(attempts=3).answer(QUESTION) == Answer("fine", False, 3)
    assert len(fake.bodies) == 3


def test_a_server_s_wish_to_wait_is_granted(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([(429, "busy"), (200, completion("fine"))])
    fake.reply = lambda body: next(replies)
    fake.headers = {"Retry-After": "5"}
    server = fake.connect()
    waits: list[float] = []
    monkeypatch.setattr(server._stopped, "wait", lambda seconds: waits.append(seconds))
    server.answer(QUESTION)
    assert waits == [5.0]


def test_a_reply_that_doesn_t_come_is_tried_again(fake: Fake) -> None:
    late = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if len(fake.bodies) == 1:
            late.wait(10)
        return 200, completion("fine")

    fake.reply = reply
    assert fake.connect(timeout_s=0.3).answer(QUESTION) == Answer("fine", False, 3)
    late.set()
    assert len(fake.bodies) == 2


def test_tries_end_with_a_clear_error_without_the_key(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.reply = lambda body: (500, f"the key was {KEY}")
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(ValueError, match="failed 3 times, last with status 500") as raised,
    ):
        fake.connect(attempts=3).answer(QUESTION)
    assert len(fake.bodies) == 3
    assert "trying again" in caplog.text, "retries are told"
    assert "the key was (key)" in str(raised.value)
    assert KEY not in caplog.text + str(raised.value) + repr(raised.value.__cause__)


def test_a_server_that_is_not_there(fake: Fake) -> None:
    fake.url = "http://127.0.0.1:9/v1"
    with pytest.raises(ValueError, match=r"failed 2 times, last with .*; is the server running"):
        fake.connect(attempts=2).answer(QUESTION)


def test_what_is_finished_when_the_server_fails_is_given(fake: Fake) -> None:
    together, failed = threading.Barrier(3, timeout=20), threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        asked = body["messages"][0]["content"]
        if asked in "012":
            together.wait()
        if asked == "1":
            failed.set()
            return 500, "down"
        failed.wait(10)
        return 200, completion("fine")

    fake.reply = reply
    kept: list[Dialogue] = []
    with pytest.raises(ValueError, match="failed 1 times"):
        kept.extend(fake.connect(attempts=1).answers(dialogues(50), 3))
    names = {dialogue.source.id for dialogue in kept}
    assert {"0", "2"} <= names and "1" not in names
    assert len(fake.bodies) < 50, "nothing new is asked"


def test_a_wrong_key_is_not_tried_again_or_told(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.reply = lambda body: (401, {"error": f"bad key {KEY}"})
    with pytest.raises(ValueError, match=r"status 401.*set OPENAI_API_KEY") as raised:
        fake.connect().answer(QUESTION)
    assert len(fake.bodies) == 1
    assert KEY not in caplog.text + str(raised.value)


def test_a_key_that_no_header_can_hold_is_not_told(fake: Fake) -> None:
    with pytest.raises(ValueError, match="set OPENAI_API_KEY to the key alone") as raised:
        ChatServer(fake.url, model="m", sampling=Sampling(), max_new_tokens=5, key=f"{KEY}\n{KEY}")
    assert KEY not in str(raised.value)


def test_the_key_follows_no_redirect(fake: Fake) -> None:
    other = Fake()
    thread = threading.Thread(target=other.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.headers = {"Location": f"{other.url}/chat/completions"}
    fake.reply = lambda body: (302, "elsewhere")
    with pytest.raises(ValueError, match="status 302"):
        fake.connect().answer(QUESTION)
    other.http.shutdown()
    other.http.server_close()
    thread.join()
    assert not other.keys


def test_a_conversation_too_long_for_the_target_is_no_failure(fake: Fake) -> None:
    fake.reply = lambda body: (400, {"message": "This model's maximum context length is 8 tokens."})
    assert fake.connect().answer(QUESTION) == NoAnswer("too long for the target")


def test_a_refused_conversation_is_no_failure_but_refusals_alone_are(fake: Fake) -> None:
    server = fake.connect()
    fake.reply = lambda body: (400, {"message": "no such field top_k"})
    assert server.answer(QUESTION) == NoAnswer("refused by the server")
    with pytest.raises(ValueError, match=r"refused the first 2\d requests: status 400.*no such field top_k"):
        list(server.answers(dialogues(40), 2))
    assert len(fake.bodies) < 25


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("<html>", "sent no JSON: <html>"),
        ({"choices": []}, "sent no chat completion"),
        ([], "sent no chat completion"),
        (completion("so", reasoning_content="hm"), "without a reasoning parser"),
        (completion(None, "length", reasoning="hm"), "without a reasoning parser"),
    ],
)
def test_replies_that_can_t_be_learned_from(fake: Fake, reply: Any, message: str) -> None:
    fake.reply = lambda body: (200, reply)
    with pytest.raises(ValueError, match=message):
        fake.connect().answer(QUESTION)


def test_an_answer_that_was_filtered_is_none(fake: Fake) -> None:
    fake.reply = lambda body: (200, completion("so", "content_filter"))
    assert fake.connect().answer(QUESTION) == NoAnswer("the server ended with content_filter")


def test_the_only_model_is_taken_and_several_are_named(fake: Fake) -> None:
    assert fake.connect(model="").model == "served"
    fake.models = ["a", "b"]
    with pytest.raises(ValueError, match="has the models a, b; name one with --model"):
        fake.connect(model="")


def test_a_url_is_needed() -> None:
    with pytest.raises(ValueError, match="the server is 'localhost:8000'; expected a URL"):
        ChatServer("localhost:8000", model="m", sampling=Sampling(), max_new_tokens=5)
