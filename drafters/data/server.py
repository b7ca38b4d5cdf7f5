"""Answers from a server of OpenAI's chat-completions form (vLLM, SGLang, ...), many requests in flight."""

from __future__ import annotations

import http.client
import json
import logging
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from drafters.data.answers import TOO_LONG, Answer, Dialogue, NoAnswer, Question
from drafters.recipe import Sampling

BUSY = (408, 409, 425, 429)
LONGEST_WAIT_S = 60.0
MOST_REFUSED = 20
logger = logging.getLogger(__name__)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Stopped(Exception):
    """The run ends; this conversation stays open."""


class _Again(Exception):
    """A failure that may pass. wait_s: what the server asks for, 0 where it doesn't."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Refused(Exception):
    """The server answered, and does not want this request."""


class ChatServer:
    """Asks one server. Its threads share an instance.

    Args:
        url: up to and with the version, http://host:8000/v1.
        model: its name on the server; "" takes the only one there.
        sampling: temperature, top_p, and where they are set top_k and min_p, which OpenAI's own servers don't know.
        max_new_tokens: most tokens of an answer.
        key: sent as bearer token, and nowhere else.
        attempts, backoff_s, timeout_s: tries of a request, the wait after the first (it doubles), and the wait for a reply.

    Raises:
        ValueError: no URL, a key that can't be sent, or the server doesn't say which model to take.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        sampling: Sampling,
        max_new_tokens: int,
        key: str = "",
        attempts: int = 7,
        backoff_s: float = 1.0,
        timeout_s: float = 600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server is {url!r}; expected a URL such as http://localhost:8000/v1")
        self._url = url.rstrip("/")
        self._key = key.strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(
                "the server's key holds characters that no header can; set OPENAI_API_KEY to the key alone"
            )
        self._attempts, self._backoff_s, self._timeout_s = attempts, backoff_s, timeout_s
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._stopped = threading.Event()
        self._answered = self._refused = 0
        self._sampling, self._max_new_tokens = sampling, max_new_tokens
        self.model = model or self._only_model()

    def answers(self, dialogues: Iterable[Dialogue], concurrency: int) -> Generator[Dialogue, None, None]:
        """Replays conversations, `concurrency` at a time; they come in the order in which they finish.

        Raises:
            ValueError: the server failed for good; the conversations that were finished by then are given before.
        """
        waiting = iter(dialogues)
        running: set[Future[Dialogue]] = set()
        failure: BaseException | None = None
        self._stopped.clear()
        with ThreadPoolExecutor(concurrency) as pool:
            try:
                while True:
                    if failure is None:
                        more = islice(waiting, concurrency - len(running))
                        running |= {pool.submit(self._replay, dialogue) for dialogue in more}
                    if not running:
                        break
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        error = future.exception()
                        if error is None:
                            yield future.result()
                        elif not isinstance(error, _Stopped):
                            failure = failure or error
                            self._stopped.set()
            finally:
                self._stopped.set()
        if failure is not None:
            raise failure

    def answer(self, question: Question) -> Answer | NoAnswer:
        """One answer, after as many tries as it takes.

        Raises:
            ValueError: the tries are used up, the reply is no chat completion, or the server refuses everything.
        """
        try:
            reply = self._request("/chat/completions", self._body(question))
        except _Refused as error:
            return self._no_answer(str(error))
        self._answered += 1
        try:
            choice = reply["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
            text = message["content"]
            tokens = int((reply.get("usage") or {}).get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._url} sent no chat completion: {self._short(json.dumps(reply))}") from error
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ValueError(
                f"{self._url} takes the reasoning out of its answers, so that they are not what the target said; "
                "start the server without a reasoning parser"
            )
        if not isinstance(text, str) or finish not in ("stop", "length"):
            return NoAnswer(f"the server ended with {finish}")
        return Answer(text, finish == "length", tokens)

    def _replay(self, dialogue: Dialogue) -> Dialogue:
        while (question := dialogue.question()) is not None:
            if self._stopped.is_set():
                raise _Stopped
            dialogue.take(self.answer(question))
        return dialogue

    def _no_answer(self, reason: str) -> NoAnswer:
        self._refused += 1
        if not self._answered and self._refused >= MOST_REFUSED:
            raise ValueError(f"{self._url} refused the first {self._refused} requests: {reason}")
        if "context length" in reason or "context_length" in reason:
            return NoAnswer(TOO_LONG)
        logger.warning("%s refuses a conversation: %s", self._url, reason)
        return NoAnswer("refused by the server")

    def _body(self, question: Question) -> dict[str, Any]:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": question.messages,
            "max_tokens": self._max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.temperature > 0:
            body["seed"] = question.seed
        optional = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        return {**body, **{name: value for name, value in optional.items() if value}}

    def _only_model(self) -> str:
        try:
            models = [str(model["id"]) for model in self._request("/models")["data"]]
        except (_Refused, KeyError, TypeError) as error:
            raise ValueError(f"{self._url} does not list its models: {error}; name one with --model") from error
        if len(models) != 1:
            raise ValueError(f"{self._url} has the models {', '.join(models) or 'none'}; name one with --model")
        return models[0]

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        for attempt in range(self._attempts):
            try:
                return self._once(path, body)
            except _Again as error:
                reason = str(error)
                delay = min(max(error.wait_s, self._backoff_s * 2**attempt * random.uniform(0.8, 1.2)), LONGEST_WAIT_S)
            if attempt + 1 == self._attempts:
                break
            if attempt:
                logger.warning("%s: %s; trying again in %.0f s", self._url, reason, delay)
            if self._stopped.wait(delay):
                raise _Stopped
        raise ValueError(f"{self._url}{path} failed {self._attempts} times, last with {reason}; is the server running?")

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                text = response.read().decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            raise self._fault(error, path) from None
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _Again(self._short(str(error) or type(error).__name__)) from None
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise ValueError(f"{self._url}{path} sent no JSON: {self._short(text)}") from None

    def _fault(self, error: urllib.error.HTTPError, path: str) -> Exception:
        try:
            text = self._short(error.read().decode("utf-8", errors="replace"))
        except (OSError, http.client.HTTPException):
            text = ""
        said = f"status {error.code}: {text or error.reason}"
        if error.code in BUSY or error.code >= 500:
            asked = error.headers.get("Retry-After", "")
            return _Again(said, float(asked) if asked.isdecimal() else 0.0)
        if error.code in (400, 413, 422):
            return _Refused(said)
        hint = "set OPENAI_API_KEY to a key it knows" if error.code in (401, 403) else "check --server and --model"
        return ValueError(f"{self._url}{path} answered with {said}; {hint}")

    def _short(self, text: str) -> str:
        """A reply for a message: without the key, should it be quoted there."""
        if self._key:
            text = text.replace(self._key, "(key)")
        return " ".join(text.split())[:300]
