"""Where the time of a decoding run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PHASES = ("prefill", "draft", "verify", "accept", "commit")


class Clock:
    """Seconds per phase, without waiting for the device: on CUDA by events, read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._start = self._now()
        self.rounds = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def seconds(self) -> dict[str, float]:
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize()
        spent = dict.fromkeys((*PHASES, "rest"), 0.0)
        for name, start, stop in self._spans:
            spent[name] += self._between(start, stop)
        total = self._between(self._start, end)
        spent["rest"] = max(0.0, total - sum(spent.values()))
        return {**spent, "total": total, "rounds": float(self.rounds)}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1000 if self._cuda else stop - start
