"""Medusa-2: the tuned target against the original, the loss, and what is merged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import toy_target as toy
from torch.nn import functional as F

from drafters.batch import TargetFeatures
from drafters.heads.medusa import Medusa, MedusaConfig
from drafters.recipe import TargetSection, TrainSection, TuneSection
from drafters.training.optim import set_learning_rate
from drafters.training.tuned import TunedModule, last_hidden, load_tuned_target, make_tuned_optimizer, merge, switch

DOCUMENTS = [toy.random_document(12, 4, 0), toy.random_document(9, 3, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save_target(tmp_path / "target", num_hidden_layers=2)


def make(folder: Path, **tune: Any) -> tuple[Any, TunedModule]:
    torch.manual_seed(0)
    section = TuneSection(lora_rank=3, lora_dropout=0.0, **tune)
    target = load_tuned_target(TargetSection(path=str(folder), dtype="float32"), section)
    drafter = Medusa(MedusaConfig(num_heads=2), target.info)
    drafter.init_from(target)
    return target, TunedModule(drafter, target, section, ramp_calls=4)


def disturb(module: TunedModule) -> None:
    with torch.no_grad():
        for parameter in module.adapters:
            parameter.normal_(0, 0.1)


def test_fresh_adapters_change_nothing_and_all_of_them_learn(folder: Path) -> None:
    target, module = make(folder)
    batch = toy.pack([DOCUMENTS], padding=2)
    output = module(batch, target)
    assert output["kl_to_original"][0].abs() < 1e-4
    assert output["loss"][1] == module.drafter.count(batch)
    assert len(module.adapters) == 2 * 2 * 7
    disturb(module)
    module(batch, target)["loss"][0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.adapters)
    stock = [p for name, p in target.model.named_parameters() if "lora_" not in name]
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in stock)


def test_loss_is_the_kl_to_the_original_and_the_heads_on_the_tuned_target(folder: Path) -> None:
    target, module = make(folder)
    disturb(module)
    batch = toy.pack([DOCUMENTS[:1], DOCUMENTS[1:]])
    output = module(batch, target)
    kl, count = torch.zeros(()), 0
    for document in DOCUMENTS:
        ids = torch.tensor([document.ids])
        with torch.no_grad():
            tuned = target.model(input_ids=ids).logits[0].log_softmax(-1)
            switch(target, on=False)
            original = target.model(input_ids=ids).logits[0].log_softmax(-1)
            switch(target, on=True)
        for t in range(len(document.ids) - 1):
            if document.mask[t + 1]:
                kl += F.kl_div(tuned[t], original[t], reduction="sum", log_target=True)
                count += 1
    assert output["kl_to_original"][1] == count and kl > 0.1
    torch.testing.assert_close(output["kl_to_original"][0], kl, rtol=1e-4, atol=1e-4)
    hidden = last_hidden(target, batch)
    heads = module.drafter(replace(batch, features=TargetFeatures(hidden, hidden)), target)
    torch.testing.assert_close(output["loss"][0], kl + heads.loss.sum, rtol=1e-4, atol=1e-3)


def test_the_ramp_is_a_sine_over_the_run_and_the_same_after_a_resume(folder: Path) -> None:
    target, module = make(folder, ramp="sine")
    batch = toy.pack([DOCUMENTS])
    module.train()

    def weight() -> float:
        output = module(batch, target)
        bare = module.drafter(replace(batch, features=TargetFeatures(*[last_hidden(target, batch)] * 2)), target)
        return float(((output["loss"][0] - output["kl_to_original"][0]) / bare.loss.sum).detach())

    found = [weight() for _ in range(3)]
    _, other = make(folder, ramp="sine")
    other.load_state_dict(module.state_dict())
    assert int(other.calls) == 3
    found += [weight() for _ in range(3)]
    wanted = [math.sin(math.pi / 2 * min(1.0, call / 4)) for call in range(6)]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_merging_gives_a_stock_model_that_says_the_same(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target, module = make(folder)
    disturb(module)
    ids = torch.tensor([DOCUMENTS[0].ids])
    with torch.no_grad():
        before = target.model(input_ids=ids).logits
        merge(target)
        target.model.save_pretrained(tmp_path / "merged")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        after = stock(input_ids=ids).logits
    assert not any("lora" in name for name, _ in target.model.named_modules())
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (original(input_ids=ids).logits - after).abs().max() > 0.01


def test_adapters_have_their_share_of_the_rate(folder: Path) -> None:
    _, module = make(folder, rate=0.25)
    optimizer = make_tuned_optimizer(module, TrainSection(), TuneSection(lora_rank=3))
    set_learning_rate(optimizer, 0.4)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert all(rates[id(p)] == 0.1 for p in module.adapters)
    assert all(rates[id(p)] == 0.4 for p in module.drafter.parameters())
