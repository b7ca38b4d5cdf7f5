"""What every head must do. Heads are found in the folder; a new file is tested without a word here."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from inspect import isabstract
from pathlib import Path

import pytest
import torch
import toy_target as toy
from torch import Tensor

import drafters.heads
from drafters.batch import TargetFeatures, TrainBatch
from drafters.decoding.budget import make_budget
from drafters.decoding.generate import generate
from drafters.heads.base import Drafter, load_head, save_head
from drafters.recipe import Sampling, TreeSection
from drafters.target.hf import HFTarget
from drafters.tree import Committed


def head_classes() -> list[type[Drafter]]:
    found = []
    for module in pkgutil.iter_modules(drafters.heads.__path__):
        for value in vars(importlib.import_module(f"drafters.heads.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Drafter) and value.__module__.endswith(module.name):
                found.append(value)
    return [value for value in found if not isabstract(value)]


HEADS = head_classes()
heads = pytest.mark.parametrize("head", HEADS, ids=[value.Config().type for value in HEADS])
families = pytest.mark.parametrize("family", ["llama", "llama_untied_rope", "qwen3", "gemma3", "gpt_neox"])

K = 4
CHAIN = TreeSection(kind="chain", depth=K)
STATIC = TreeSection(
    kind="static", paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
)
DYNAMIC = TreeSection(kind="dynamic", depth=K, width=3, nodes=10)
TREES = [CHAIN, STATIC, DYNAMIC]
trees = pytest.mark.parametrize("section", TREES, ids=[section.kind for section in TREES])


def batch_of(
    head: Drafter, target: HFTarget, *rows: list[toy.Document], padding: int = 0, pad_id: int = 0
) -> TrainBatch:
    return toy.with_features(target, toy.pack(rows, padding, pad_id), head)


@cache
def trained(head: type[Drafter]) -> tuple[HFTarget, Drafter, toy.Document]:
    """A head that knows one answer of the target by heart."""
    target = toy.make_target("llama_untied_rope")
    document = toy.answered(target, list(range(10, 22)), 40)
    drafter = toy.make_head(head, target)
    toy.overfit(drafter, batch_of(drafter, target, [document]), target, steps=300, learning_rate=3e-3)
    return target, drafter, document


@heads
def test_config_names_the_head_first(head: type[Drafter]) -> None:
    config = head.Config()
    assert next(iter(vars(config))) == "type"
    assert head.__module__ == f"drafters.heads.{config.type}"


@heads
def test_loss_is_finite_and_falls(head: type[Drafter]) -> None:
    target = toy.make_target(scale=40.0)  # its law is nearly one-hot, so a loss against it can fall far
    drafter = toy.make_head(head, target)
    documents = [[toy.random_document(24, 6, seed)] for seed in range(3)]
    losses = toy.overfit(drafter, batch_of(drafter, target, *documents), target, steps=40, learning_rate=2e-3)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < 0.8 * losses[0]


@heads
def test_count_is_known_before_the_features(head: type[Drafter]) -> None:
    target = toy.make_target()
    drafter = toy.make_head(head, target)
    bare = toy.pack([[toy.random_document(20, 5, 0)], [toy.random_document(9, 5, 1)]])
    assert drafter.count(bare) == drafter(toy.with_features(target, bare, drafter), target).loss.count > 0


@heads
def test_padding_does_not_change_the_loss(head: type[Drafter]) -> None:
    target = toy.make_target()
    drafter = toy.make_head(head, target).eval()
    rows = [[toy.random_document(20, 5, 0)], [toy.random_document(13, 4, 1)]]
    plain = drafter(batch_of(drafter, target, *rows), target).loss
    for padding, pad_id in ((7, 0), (19, 77)):
        padded = drafter(batch_of(drafter, target, *rows, padding=padding, pad_id=pad_id), target).loss
        assert padded.count == plain.count
        torch.testing.assert_close(padded.sum, plain.sum, rtol=1e-5, atol=1e-5)


@heads
def test_tokens_after_the_answer_do_not_change_the_loss(head: type[Drafter]) -> None:
    target = toy.make_target()
    drafter = toy.make_head(head, target).eval()
    document = toy.random_document(20, 5, 0)
    alone = drafter(batch_of(drafter, target, [document]), target).loss
    for filler in (30, 31):
        longer = toy.Document(document.ids + [filler] * 6, document.mask + [False] * 6)
        loss = drafter(batch_of(drafter, target, [longer]), target).loss
        assert loss.count == alone.count
        torch.testing.assert_close(loss.sum, alone.sum, rtol=1e-5, atol=1e-5)


@heads
@families
def test_packed_equals_unpacked(head: type[Drafter], family: str) -> None:
    target = toy.make_target(family)
    drafter = toy.make_head(head, target).eval()
    documents = [toy.random_document(length, 4, length) for length in (12, 9, 15)]
    apart = drafter(batch_of(drafter, target, *[[document] for document in documents]), target)
    packed = drafter(batch_of(drafter, target, documents, padding=3), target)
    for one, other in (
        (apart.loss, packed.loss),
        *((apart.metrics[name], packed.metrics[name]) for name in apart.metrics),
    ):
        assert one.count == other.count
        torch.testing.assert_close(one.sum, other.sum, rtol=1e-4, atol=1e-4)


@heads
def test_a_batch_without_answers_trains_nothing(head: type[Drafter]) -> None:
    target = toy.make_target()
    drafter = toy.make_head(head, target)
    loss = drafter(batch_of(drafter, target, [toy.random_document(12, 12, 0)]), target).loss
    assert loss.count == 0 and loss.sum == 0
    loss.sum.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


@heads
def test_gradients_reach_the_head_and_not_the_target(head: type[Drafter]) -> None:
    target = toy.make_target()
    drafter = toy.make_head(head, target)
    toy.loss_value(drafter, batch_of(drafter, target, [toy.random_document(24, 6, 0)]), target).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in target.model.parameters())


@heads
def test_the_head_holds_nothing_of_the_target(head: type[Drafter]) -> None:
    target = toy.make_target()
    drafter = toy.make_head(head, target)
    drafter(batch_of(drafter, target, [toy.random_document(24, 6, 0)]), target)
    drafter.start(target, 1, 64)
    own = {tensor.untyped_storage().data_ptr() for tensor in drafter.state_dict().values()}
    assert own.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in target.model.parameters())
    assert set(drafter.state_dict()) == set(toy.make_head(head, target).state_dict())


@heads
def test_nothing_from_later_tokens_reaches_the_loss(head: type[Drafter]) -> None:
    """Answers end at index q - 1 of each document; what lies at q and after is out of bounds, to the last bit."""
    target = toy.make_target()
    drafter = toy.make_head(head, target).eval()
    q, length = 12, 18
    documents = [toy.random_document(length, 4, seed) for seed in (0, 1)]
    cut = [toy.Document(document.ids, [m and i < q for i, m in enumerate(document.mask)]) for document in documents]
    cut[0] = toy.Document(cut[0].ids, [False] * length)  # the loss is the second document's alone
    batch = batch_of(drafter, target, cut, padding=5)
    assert batch.features is not None
    features = [tensor.clone().requires_grad_() for tensor in vars(batch.features).values()]
    loss = drafter(replace(batch, features=TargetFeatures(*features)), target).loss.sum
    for gradient in torch.autograd.grad(loss, features, allow_unused=True):
        if gradient is not None:
            assert not gradient[:, :length].any() and not gradient[:, length + q :].any()
    changed = batch.input_ids_BT.clone()
    changed[:, :length] = 9
    changed[:, length + q :] = 9
    assert drafter(replace(batch, input_ids_BT=changed), target).loss.sum == loss


@heads
@trees
def test_draft_returns_valid_trees_within_the_budget(head: type[Drafter], section: TreeSection) -> None:
    target = toy.make_target("qwen3")
    drafter = toy.make_head(head, target).eval()
    budget = make_budget(section, Sampling(), "top")
    rows = [[toy.random_document(length, 4, length)] for length in (14, 9)]
    batch = batch_of(drafter, target, *rows)
    assert batch.features is not None
    counts, root = torch.tensor([14, 9]), torch.tensor([5, 6])
    committed = Committed(batch.input_ids_BT, batch.features.captured_BTF, counts, root)
    state = drafter.advance(drafter.start(target, 2, 64), committed)
    drawn = [drafter.draft(state, budget) for _ in range(2)]
    assert torch.equal(drawn[0].tokens_BN, drawn[1].tokens_BN)  # drafting leaves nothing behind
    assert torch.equal(drawn[0].log_q_BN, drawn[1].log_q_BN)
    for tree in drawn:
        assert tree.tokens_BN.shape[1] <= budget.max_nodes and tree.max_depth <= budget.max_depth
        assert torch.equal(tree.tokens_BN[:, 0], root)
        assert (tree.parents_BN[:, 0] == -1).all() and tree.valid_BN.all()
        assert (tree.parents_BN < torch.arange(tree.tokens_BN.shape[1])).all() and (tree.parents_BN[:, 1:] >= 0).all()
        assert ((tree.tokens_BN >= 0) & (tree.tokens_BN < target.info.vocab_size)).all()
        assert (tree.log_q_BN <= 0).all()
        if section.kind != "dynamic":
            assert tree.depth_BN().max() == K


@heads
def test_after_overfitting_the_loop_accepts_nearly_everything(head: type[Drafter]) -> None:
    target, drafter, document = trained(head)
    result = generate(target, drafter, [document.ids[:12]], max_new_tokens=40, tree=CHAIN, eos_token_ids=())
    assert result.sequences[0] == document.ids[12:]
    assert result.stats[0].tau() > K + 0.5


@heads
@trees
def test_rows_of_a_batch_equal_one_by_one(head: type[Drafter], section: TreeSection) -> None:
    """Rows that accept much and rows that accept little, side by side; the drafter must not mix up their lengths."""
    target, drafter, document = trained(head)
    prompts = [document.ids[:12], [40, 41, 42], document.ids[:25], list(range(60, 80))]
    together = generate(target, drafter, prompts, max_new_tokens=24, tree=section, eos_token_ids=())
    assert len({stats.tau() for stats in together.stats}) > 1
    for index, prompt in enumerate(prompts):
        alone = generate(target, drafter, [prompt], max_new_tokens=24, tree=section, eos_token_ids=())
        assert alone.sequences[0] == together.sequences[index]
        assert alone.stats[0] == together.stats[index]


@heads
@families
@trees
def test_greedy_output_equals_plain_greedy(head: type[Drafter], family: str, section: TreeSection) -> None:
    target = toy.make_target(family)
    drafter = toy.make_head(head, target).eval()
    prompts = [list(range(10, 22)), [40, 41, 42], list(range(60, 80))]
    plain = generate(target, None, prompts, max_new_tokens=24)
    assert generate(target, drafter, prompts, max_new_tokens=24, tree=section).sequences == plain.sequences


@heads
def test_save_and_load_are_bit_equal(head: type[Drafter], tmp_path: Path) -> None:
    target, drafter, document = trained(head)
    save_head(drafter, tmp_path / "head", {"steps": 300})
    loaded = load_head(tmp_path / "head", target.info)
    assert type(loaded) is type(drafter) and loaded.config == drafter.config and not loaded.training
    state = drafter.state_dict()
    assert list(loaded.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    batch = batch_of(drafter, target, [document])
    loss: Tensor = loaded(batch, target).loss.sum
    assert loss == drafter(batch, target).loss.sum
