"""Where the time of training goes: target, head forward, head backward, and the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SECTIONS = ("target", "forward", "backward")


class Clock:
    """Seconds per section and tokens per second since the last reading.

    On a GPU a section is measured by events in the stream, which are read, and waited for, at the log points only.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._reset()

    def _reset(self) -> None:
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._tokens = 0.0
        self._total = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Encloses one step; what is outside of steps (evaluation, checkpoints) does not count."""
        start = time.perf_counter()
        yield
        self._total += time.perf_counter() - start

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        if self._cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
        else:
            before = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - before

    def add_tokens(self, count: float) -> None:
        self._tokens += count

    def read(self) -> dict[str, float]:
        """Tokens per second and shares of the time in steps; starts anew."""
        if self._cuda:
            before = time.perf_counter()
            torch.cuda.synchronize()
            self._total += time.perf_counter() - before
        for name, start, stop in self._events:
            self._seconds[name] += start.elapsed_time(stop) / 1000
        total = max(self._total, 1e-9)
        shares = {f"time/{name}_share": seconds / total for name, seconds in self._seconds.items()}
        rest = 1 - sum(shares.values())
        result = {"train/tokens_per_second": self._tokens / total, **shares, "time/rest_share": rest}
        self._reset()
        return result
