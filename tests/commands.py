"""Runs the project's scripts as users do, on a tiny target and a few chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny

ROOT = Path(__file__).parent.parent
LIMIT_S = 180


def make_inputs(folder: Path) -> None:
    """folder/target and folder/chats.jsonl: answers that are a function of their questions."""
    tiny.save_target(folder / "target", num_hidden_layers=2)
    with (folder / "chats.jsonl").open("w") as stream:
        for i in range(40):
            messages = [
                {"role": "user", "content": f"say {i % 7}"},
                {"role": "assistant", "content": f"{i % 7} " * 6 + "and so on"},
                {"role": "user", "content": f"more {i}"},
                {"role": "assistant", "content": f"no more than {i}"},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")


def overrides(folder: Path, run: str, **others: Any) -> list[str]:
    """What makes a tiny recipe use `make_inputs`'s files; `train__max_steps=5` sets train.max_steps."""
    settings = {
        "target.path": folder / "target",
        "data.train": f"[{folder / 'chats.jsonl'}]",
        "data.cache_folder": folder / "cache",
        "output.folder": folder / run,
        **{name.replace("__", "."): value for name, value in others.items()},
    }
    return [f"{name}={value}" for name, value in settings.items()]


def environment() -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **threads, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def launched(script: str, *arguments: str, processes: int = 1) -> list[str]:
    """The command of a training script: accelerate launch, or torchrun where there are several processes on CPUs."""
    if processes == 1:
        config = ROOT / "recipes/accelerate/cpu.yaml"
        start = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    else:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *start, str(ROOT / script), *arguments]


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def run(command: list[str], *, status: int = 0, cwd: Path = ROOT) -> str:
    """What a command printed on both streams; fails where it ends with another status."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == status, f"status {done.returncode}, expected {status}:\n{output[-4000:]}"
    return output


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command on its way, in a process group of its own; dead when the body is through."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.wait(timeout=30)
