"""The printed command starts a server, whose output is the target's own and whose drafts are accepted."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_vllm import LENGTH, TRAINED, K, make_target, need_vllm, prompts_of, save_trained

from drafters.decoding.generate import generate
from drafters.evaluation.serving import vllm_python
from drafters.export.write import export_run

pytestmark = pytest.mark.vllm
START_SECONDS = 300
SMALL = ["--max-model-len", "256", "--max-num-seqs", "2", "--enforce-eager"]


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def serving(command: str, log: Path) -> Iterator[int]:
    """A server by the command as printed, with `vllm` of the environment."""
    port = free_port()
    words = [
        str(vllm_python().parent / "vllm"),
        *shlex.split(command)[1:],
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    with log.open("w") as stream:
        server = subprocess.Popen([*words, *SMALL], stdout=stream, stderr=stream, env={**os.environ, **settings})
    try:
        wait_for(server, port, log)
        yield port
    finally:
        server.terminate()
        server.wait(60)


def wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            ask(port, "/health")
        except OSError:
            time.sleep(1)
        else:
            return
    raise AssertionError(f"no server after {START_SECONDS} s:\n{log.read_text()[-3000:]}")


@pytest.mark.parametrize("head", TRAINED)
def test_the_printed_command_serves(head: str, tmp_path: Path) -> None:
    need_vllm()
    target = make_target(tmp_path, "llama_untied_rope")
    (tmp_path / "run").mkdir()
    save_trained(tmp_path / "run/head", TRAINED[head], target)
    command = export_run(tmp_path / "run", "vllm", draft_length=K).command
    assert command.startswith("vllm serve ")
    prompts = prompts_of(target)[:2]
    with serving(command, tmp_path / "server.log") as port:
        for prompt in prompts:
            body = {
                "model": target.info.path, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            answer = json.loads(ask(port, "/v1/completions", body))
            plain = generate(target, None, [prompt], max_new_tokens=LENGTH, eos_token_ids=())
            assert answer["choices"][0]["token_ids"] == plain.sequences[0]
        metrics = ask(port, "/metrics")
    found = re.findall(r'num_accepted_tokens_per_pos_total\{.*position="(\d)".*\} ([\d.]+)', metrics)
    accepted = {int(position): float(count) for position, count in found}
    assert len(accepted) == K
    assert accepted[0] > 5
