"""The loop on a tiny target: what a step is, resuming, stopping, evaluation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_training as tt
import torch

from drafters.batch import TrainBatch
from drafters.heads.base import Drafter
from drafters.heads.eagle import EagleConfig
from drafters.heads.medusa import MedusaConfig
from drafters.recipe import TrainSection


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_step_is_adamw_on_the_mean_over_positions(tmp_path: Path) -> None:
    """One step against the slow way: every row alone, sums added up, divided once, clipped, AdamW."""
    recipe = tt.make_recipe(
        tmp_path, MedusaConfig(num_heads=2), max_steps=1, micro_batch_size=2, warmup_fraction=0.0, schedule="constant"
    )
    starts: dict[str, torch.Tensor] = {}
    outcome = tt.train(
        tmp_path, recipe, change=lambda d: starts.update({name: p.detach().clone() for name, p in d.named_parameters()})
    )
    target = tt.make_target()
    drafter = type(outcome.drafter)(recipe.drafter, target.info)
    drafter.load_state_dict(starts)
    source = tt.OnlineFeatures(target, drafter.feature_layers)
    outputs = [drafter(source.attach(tt.make_row(row)), target).loss for row in range(4)]
    count = sum(float(output.count) for output in outputs)
    (torch.stack([output.sum for output in outputs]).sum() / count).backward()
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), recipe.train.clip_norm)
    torch.optim.AdamW(
        drafter.parameters(), lr=recipe.train.learning_rate, betas=recipe.train.betas, weight_decay=0.0
    ).step()
    assert tt.distance(outcome.weights, drafter.state_dict()) < 1e-6
    assert outcome.lines[0]["train/loss"] == pytest.approx(
        sum(float(output.sum.detach()) for output in outputs) / count
    )


@pytest.mark.parametrize("micro", [1, 2])
def test_accumulation_changes_nothing(tmp_path: Path, micro: int) -> None:
    weights = [
        tt.train(
            tmp_path / str(size),
            tt.make_recipe(tmp_path, EagleConfig(noise=0.0), micro_batch_size=size, learning_rate=1.0, max_steps=2),
            optimizer_for=tt.plain_sgd,
        ).weights
        for size in (4, micro)
    ]
    assert tt.distance(*weights) < 1e-6


def test_loss_falls(tmp_path: Path) -> None:
    class SameRows(tt.Rows):
        def window(self, step: int) -> list[TrainBatch]:
            return super().window(0)

    lines = tt.train(tmp_path, tt.make_recipe(tmp_path, max_steps=30, clip_norm=1.0), loader=SameRows).lines
    assert lines[-1]["train/loss"] < 0.9 * lines[0]["train/loss"]


@pytest.mark.parametrize("drafter", [EagleConfig(noise=0.2, num_layers=2), MedusaConfig()], ids=["eagle", "medusa"])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, drafter: Any) -> None:
    """Weights, their names, and with them the gradients; the noise is the same in both passes."""
    plain = tt.train(tmp_path / "a", tt.make_recipe(tmp_path, drafter, max_steps=2))
    calls: list[int] = []

    def count_calls(head: Drafter) -> None:
        members = next(module for module in head.modules() if isinstance(module, torch.nn.ModuleList))
        inside = next(module for module in members[0].modules() if isinstance(module, torch.nn.Linear))
        inside.register_forward_pre_hook(lambda *_: calls.append(1))

    recipe = tt.make_recipe(tmp_path, drafter, max_steps=2, gradient_checkpointing=True)
    recomputed = tt.train(tmp_path / "b", recipe, change=count_calls)
    assert tt.same(plain.weights, recomputed.weights)
    assert len(calls) == 4, "each of 2 steps must run the layer twice"


def test_bfloat16_keeps_float32_weights(tmp_path: Path) -> None:
    outcome = tt.train(tmp_path, tt.make_recipe(tmp_path, max_steps=2, precision="bfloat16"))
    exact = tt.train(tmp_path / "b", tt.make_recipe(tmp_path, max_steps=2))
    assert all(tensor.dtype == torch.float32 for tensor in outcome.weights.values())
    assert 0 < abs(outcome.lines[0]["train/loss"] - exact.lines[0]["train/loss"]) < 0.05


@pytest.mark.parametrize("half", [2, 3], ids=["at a log line", "between log lines"])
def test_resume_is_exact(tmp_path: Path, half: int) -> None:
    """2N steps == N, resume, N: weights, moments, metrics and data order, bit for bit, noise included."""
    loaders: list[tt.Rows] = []

    def loader(section: TrainSection, rank: int, world: int) -> tt.Rows:
        loaders.append(tt.Rows(section, rank, world))
        return loaders[-1]

    recipe = tt.make_recipe(tmp_path, max_steps=6, save_every=half, eval_every=2)
    heldout = (tt.stack([tt.make_row(1000), tt.make_row(1001)]),)
    straight = tt.train(tmp_path / "a", recipe, loader=loader, heldout=heldout)

    class Killed(Exception):
        pass

    def dying(section: TrainSection, rank: int, world: int) -> tt.Rows:
        made = loader(section, rank, world)
        window = made.window

        def wrapped(step: int) -> list[TrainBatch]:
            if step == half + 1:
                raise Killed
            return window(step)

        made.window = wrapped  # type: ignore[method-assign]
        return made

    with pytest.raises(Killed):
        tt.train(tmp_path / "b", recipe, loader=dying, heldout=heldout)
    resumed = tt.train(tmp_path / "b", recipe, loader=loader, heldout=heldout)
    assert tt.same(straight.weights, resumed.weights)
    assert loaders[2].asked == list(range(half, 6))
    assert straight.deterministic_lines() == resumed.deterministic_lines()
    moments = [outcome.optimizer.optimizer.state_dict() for outcome in (straight, resumed)]
    for key, state in moments[0]["state"].items():
        assert all(torch.equal(value, moments[1]["state"][key][name]) for name, value in state.items())
    assert moments[0]["param_groups"] == moments[1]["param_groups"]


def test_finished_run_is_left_alone(tmp_path: Path) -> None:
    first = tt.train(tmp_path, tt.make_recipe(tmp_path))
    again = tt.train(tmp_path, tt.make_recipe(tmp_path))
    assert tt.same(first.weights, again.weights) and first.lines == again.lines


def test_step_without_a_token_to_learn_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loader(section: TrainSection, rank: int, world: int) -> tt.Rows:
        return tt.Rows(section, rank, world, empty_steps=(1, 2))

    outcome = tt.train(tmp_path, tt.make_recipe(tmp_path, log_every=1), loader=loader)
    assert [line["train/skipped_steps"] for line in outcome.lines] == [0, 1, 1, 0]
    assert all(tensor.isfinite().all() for tensor in outcome.weights.values())
    assert sum("skipped" in record.getMessage() for record in caplog.records) == 2
    untouched = tt.train(tmp_path / "b", tt.make_recipe(tmp_path, max_steps=1), loader=loader)
    assert not tt.same(outcome.weights, untouched.weights)


def test_loss_that_is_not_finite_stops_with_step_and_rows(tmp_path: Path) -> None:
    class Poisoned(tt.OnlineFeatures):
        calls = 0

        def attach(self, batch: TrainBatch) -> TrainBatch:
            attached = super().attach(batch)
            self.calls += 1
            if self.calls == 6:  # step 2 of 2 micro-batches a step
                assert attached.features is not None
                attached.features.last_BTD.fill_(torch.inf)
            return attached

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tt, "OnlineFeatures", Poisoned)
        with pytest.raises(ValueError, match=r"step 2,.*rows 2 to 3"):
            tt.train(tmp_path, tt.make_recipe(tmp_path, micro_batch_size=2, save_every=1))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_evaluation_has_its_own_names_and_ends_in_training_mode(tmp_path: Path) -> None:
    modes = []

    def evaluate(drafter: Drafter) -> dict[str, float]:
        modes.append(drafter.training)
        return {"alpha_1": 0.5, "tau": 1.5}

    heldout = (tt.stack([tt.make_row(1000), tt.make_row(1001)]), tt.make_row(1002))
    outcome = tt.train(tmp_path, tt.make_recipe(tmp_path, eval_every=2), heldout=heldout, evaluate=evaluate)
    assert modes == [False, False] and outcome.drafter.training
    lines = [line for line in outcome.lines if "eval/tau" in line]
    assert [line["step"] for line in lines] == [2, 4] and lines[0]["eval/alpha_1"] == 0.5
    target = tt.make_target()
    source = tt.OnlineFeatures(target, outcome.drafter.feature_layers)
    with torch.no_grad():
        losses = [outcome.drafter.eval()(source.attach(tt.make_row(row)), target).loss for row in (1000, 1001, 1002)]
    mean = sum(float(loss.sum) for loss in losses) / sum(float(loss.count) for loss in losses)
    assert lines[-1]["heldout/loss"] == pytest.approx(mean, rel=1e-5)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    """Drafting draws random numbers; training after it goes on as if it had not."""

    def evaluate(drafter: Drafter) -> dict[str, float]:
        return {"tau": float(torch.rand(7).sum())}

    plain = tt.train(tmp_path / "a", tt.make_recipe(tmp_path))
    watched = tt.train(
        tmp_path / "b", tt.make_recipe(tmp_path, eval_every=1), heldout=(tt.make_row(1000),), evaluate=evaluate
    )
    assert tt.same(plain.weights, watched.weights)


def test_sigterm_saves_after_the_step_and_goes_on_exactly(tmp_path: Path) -> None:
    class Signalled(tt.Rows):
        def window(self, step: int) -> list[TrainBatch]:
            if step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().window(step)

    recipe = tt.make_recipe(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    stopped = tt.train(tmp_path / "b", recipe, loader=Signalled)
    assert not stopped.complete and signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-000001"]
    resumed = tt.train(tmp_path / "b", recipe)
    assert resumed.complete
    assert tt.same(tt.train(tmp_path / "a", recipe).weights, resumed.weights)


def test_log_lines_have_throughput_and_shares_of_time(tmp_path: Path) -> None:
    line = tt.train(tmp_path, tt.make_recipe(tmp_path)).lines[-1]
    shares = [line[f"time/{name}_share"] for name in ("target", "forward", "backward", "rest")]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert line["train/tokens_per_second"] > 0 and line["train/gradient_norm"] > 0
