"""Kinds of heads, precision, warm start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_training as tt
import torch

from drafters.heads.base import save_head
from drafters.heads.eagle import EagleConfig
from drafters.heads.medusa import MedusaConfig
from drafters.training.launch import make_drafter, require_kind
from drafters.training.wrapping import LossModule, outermost_members


def test_scripts_take_their_own_kind(tmp_path: Path) -> None:
    eagle = tt.make_recipe(tmp_path)
    require_kind(eagle, "eagle")
    with pytest.raises(ValueError, match=r"train/medusa\.py trains.*'eagle'; run train/eagle\.py"):
        require_kind(eagle, "medusa")
    own = replace(eagle, drafter=MedusaConfig(type="package.mine"))
    with pytest.raises(ValueError, match=r"run train/head\.py"):
        require_kind(own, "eagle")
    require_kind(replace(own, drafter=MedusaConfig(type="package.medusa_wide")), "medusa")


def test_heads_of_all_processes_start_alike(tmp_path: Path) -> None:
    recipe, target = tt.make_recipe(tmp_path), tt.make_target()
    first = make_drafter(recipe, target, "cpu")
    torch.rand(3)
    assert tt.same(first.state_dict(), make_drafter(recipe, target, "cpu").state_dict())
    assert first.training
    other = make_drafter(tt.with_train(recipe, seed=1), target, "cpu")
    assert not tt.same(first.state_dict(), other.state_dict())


def test_warm_start_takes_the_weights_and_the_recipe_s_settings(tmp_path: Path) -> None:
    target = tt.make_target()
    trained = tt.train(tmp_path / "first", tt.make_recipe(tmp_path, max_steps=2)).drafter
    save_head(trained, tmp_path / "head")
    recipe = tt.make_recipe(tmp_path, EagleConfig(noise=0.0), warm_start=str(tmp_path / "head"))
    drafter = make_drafter(recipe, target, "cpu")
    assert tt.same(drafter.state_dict(), trained.state_dict())
    assert drafter.config.noise == 0.0 and drafter.training
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_warm_start_from_a_head_of_other_sizes(tmp_path: Path) -> None:
    target = tt.make_target()
    save_head(make_drafter(tt.make_recipe(tmp_path), target, "cpu"), tmp_path / "head")
    wide = tt.make_recipe(tmp_path, EagleConfig(intermediate_size=48), warm_start=str(tmp_path / "head"))
    with pytest.raises(ValueError, match=r"(?s)train\.warm_start: .*does not fit.*mlp"):
        make_drafter(wide, target, "cpu")


def test_recomputed_modules_do_not_lie_in_each_other(tmp_path: Path) -> None:
    drafter = make_drafter(tt.make_recipe(tmp_path, MedusaConfig(num_heads=2, num_layers=2)), tt.make_target(), "cpu")
    names = set(drafter.state_dict())
    assert len(outermost_members(drafter)) == 4, "two blocks and two output matrices; not the layers in a block"
    LossModule(drafter, recompute=True)
    assert set(drafter.state_dict()) == names
