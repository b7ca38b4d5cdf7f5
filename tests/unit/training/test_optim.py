"""Schedules by their values, and what the optimizer holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drafters.recipe import TrainSection
from drafters.training.optim import learning_rate, make_optimizer, total_steps


def rates(total: int = 101, **changes: object) -> list[float]:
    settings: dict[str, object] = dict(learning_rate=2.0, warmup_fraction=0.0, final_learning_rate_fraction=0.1)
    section = TrainSection(**{**settings, **changes})  # type: ignore[arg-type]
    return [learning_rate(section, step, total) for step in range(total)]


def test_schedules() -> None:
    cosine, linear = rates(schedule="cosine"), rates(schedule="linear")
    assert cosine[0] == linear[0] == 2.0
    assert cosine[50] == pytest.approx(1.1) and linear[50] == pytest.approx(1.1)
    assert linear[25] == pytest.approx(0.2 + 1.8 * 0.75) and cosine[25] == pytest.approx(0.2 + 1.8 * (2 + 2**0.5) / 4)
    assert cosine[-1] == pytest.approx(0.2) and linear[-1] == pytest.approx(0.2)
    assert set(rates(schedule="constant")) == {2.0}
    wsd = rates(schedule="wsd", decay_fraction=0.2)
    assert set(wsd[:82]) == {2.0} and wsd[-1] == pytest.approx(0.2) and sorted(wsd, reverse=True) == wsd


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warmup_rises_to_the_peak_and_never_is_zero(schedule: str) -> None:
    found = rates(total=100, schedule=schedule, warmup_fraction=0.1)
    assert found[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert found[10] == pytest.approx(2.0) and max(found) == pytest.approx(2.0)


@pytest.mark.parametrize("total", [1, 2])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_shortest_runs(schedule: str, total: int) -> None:
    assert all(0 < rate <= 2.0 for rate in rates(total=total, schedule=schedule, warmup_fraction=0.5))


def test_total_steps() -> None:
    assert total_steps(TrainSection(epochs=1.5), steps_per_epoch=5) == 8
    assert total_steps(TrainSection(epochs=0.01), steps_per_epoch=5) == 1
    assert total_steps(TrainSection(epochs=3.0, max_steps=7), steps_per_epoch=5) == 7


def test_optimizer_holds_what_is_trained_and_decays_matrices_only() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3, bias=False))
    module[2].requires_grad_(False)
    groups = make_optimizer(module, TrainSection(weight_decay=0.1)).param_groups
    decayed = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    expected = {module[0].weight: 0.1, module[0].bias: 0.0, module[1].weight: 0.0, module[1].bias: 0.0}
    assert decayed == {id(p): decay for p, decay in expected.items()}
    assert isinstance(module[2].weight, torch.Tensor) and id(module[2].weight) not in decayed
