"""Medusa-1: alignment, loss, initial state, and where it says no."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_target as toy
from torch.nn import functional as F

from drafters.decoding.budget import make_budget
from drafters.heads.medusa import Medusa
from drafters.recipe import Sampling, TreeSection
from drafters.tree import Committed

# index      0  1  2   3   4   5   6   7   8   9   10  11  12
# token      p  p  p   A1  A2  A3  end u   u   B1  B2  B3  end
TWO_TURNS = toy.Document(
    [10, 11, 12, 101, 102, 103, 2, 13, 14, 201, 202, 203, 2],
    [False, False, False, True, True, True, True, False, False, True, True, True, True],
)


def medusa(**changes: Any) -> Any:
    return toy.make_head(Medusa, toy.make_target(), **changes)


def test_each_head_learns_the_tokens_of_the_roots_own_answer() -> None:
    head = medusa(num_heads=3)
    batch = toy.pack([[TWO_TURNS, TWO_TURNS]], padding=2)
    pairs = []
    for k, mask in enumerate(batch.drafted(3), start=1):
        root, label = batch.label(1)[0], batch.label(1 + k)[0]
        pairs.append(list(zip(root[mask].tolist(), label[mask].tolist(), strict=True)))
    assert pairs[0] == 2 * [(101, 102), (102, 103), (103, 2), (201, 202), (202, 203), (203, 2)]
    assert pairs[1] == 2 * [(101, 103), (102, 2), (201, 203), (202, 2)]
    assert pairs[2] == 2 * [(101, 2), (201, 2)]
    assert head.count(batch) == 12
    assert batch.drafted(1)[0, 0].nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10, 15, 16, 17, 21, 22, 23]


def test_loss_is_the_sum_by_head_over_the_first_heads_count() -> None:
    target = toy.make_target()
    head = medusa(num_heads=3, loss_weight=0.2)
    torch.nn.init.normal_(head.blocks[1].layers[0].weight, std=0.1)
    batch = toy.with_features(target, toy.pack([[TWO_TURNS], [toy.random_document(9, 3, 0)]], padding=1), head)
    assert batch.features is not None
    normed = target.model.model.norm(batch.features.last_BTD)
    total, count = torch.zeros(()), 0
    for b in range(2):
        ids, mask = batch.input_ids_BT[b], batch.loss_mask_BT[b]
        for k in (1, 2, 3):
            linear, matrix = head.blocks[k - 1].layers[0], head.lm_heads[k - 1].weight
            for t in range(len(ids) - 1 - k):
                if mask[t + 1 : t + 2 + k].all():
                    x = normed[b, t]
                    logits = matrix @ (x + F.silu(linear.weight @ x + linear.bias))
                    total += 0.2 * 0.8**k * F.cross_entropy(logits, ids[t + 1 + k]).detach()
                    count += k == 1
    output = head(batch, target)
    assert output.loss.count == count
    torch.testing.assert_close(output.loss.sum.detach(), total)


def test_every_head_starts_as_the_targets_output() -> None:
    target = toy.make_target("llama_untied_rope")
    head: Any = toy.make_head(Medusa, target)
    for block, matrix in zip(head.blocks, head.lm_heads, strict=True):
        assert torch.equal(matrix.weight, target.model.lm_head.weight)
        assert not block.layers[0].weight.any() and block.layers[0].bias.any()


def test_output_matrices_are_unset_until_they_come_from_somewhere() -> None:
    head: Any = Medusa(Medusa.Config(), toy.make_target().info)
    assert all(matrix.weight.isnan().all() for matrix in head.lm_heads)


def test_layers_of_a_head_are_separate_and_named_as_vllm_has_them() -> None:
    head = medusa(num_heads=2, num_layers=2)
    names = [f"blocks.{i}.layers.{j}.{part}" for i in range(2) for j in range(2) for part in ("weight", "bias")]
    assert sorted(head.state_dict()) == sorted([*names, "lm_heads.0.weight", "lm_heads.1.weight"])
    assert len({tensor.data_ptr() for tensor in head.state_dict().values()}) == 10


def test_shared_output_trains_no_output_matrix() -> None:
    target = toy.make_target()
    head = toy.make_head(Medusa, target, shared_output=True)
    assert not any(name.startswith("lm_heads") for name in head.state_dict())
    batch = toy.with_features(target, toy.pack([[TWO_TURNS]]), head)
    losses = toy.overfit(head, batch, target, steps=100, learning_rate=1e-2)
    assert losses[-1] < 0.1 * losses[0]
    own = toy.make_head(Medusa, target)
    torch.testing.assert_close(
        own(batch, target).loss.sum, toy.make_head(Medusa, target, shared_output=True)(batch, target).loss.sum
    )


def test_depth_k_of_a_tree_holds_the_best_tokens_of_head_k() -> None:
    target = toy.make_target()
    head = medusa()
    batch = toy.with_features(target, toy.pack([[toy.random_document(9, 3, 0)]]), head)
    assert batch.features is not None
    committed = Committed(batch.input_ids_BT, batch.features.captured_BTF, torch.tensor([7]), torch.tensor([5]))
    state = head.advance(head.start(target, 1, 32), committed)
    tree = head.draft(
        state, make_budget(TreeSection(kind="static", paths=((0,), (1,), (0, 0), (1, 0))), Sampling(), "top")
    )
    x = target.model.model.norm(batch.features.last_BTD)[0, 6]
    first, second = ((head.lm_heads[k](head.blocks[k](x))).topk(2).indices.tolist() for k in (0, 1))
    assert tree.tokens_BN.tolist() == [[5, first[0], first[1], second[0], second[0]]]


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    head = medusa(num_heads=2)
    state = head.start(toy.make_target(), 1, 32)
    with pytest.raises(ValueError, match=r"3 deep.*2 heads"):
        head.draft(state, make_budget(TreeSection(depth=3), Sampling(), "top"))


def test_config_faults() -> None:
    with pytest.raises(ValueError, match="num_heads 0"):
        Medusa.Config(num_heads=0)
