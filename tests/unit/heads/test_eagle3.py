"""EAGLE-3: layers, alignment, the draft vocabulary, the loss, and starting from the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_target as toy
from torch import Tensor

from drafters.heads.eagle3 import Eagle3, Eagle3Config, fused_layers
from drafters.heads.training_time_test import RolloutRows
from drafters.losses import LossKind
from drafters.target.hf import HFTarget

TWO_TURNS = toy.Document(
    [10, 11, 12, 101, 102, 103, 2, 13, 14, 201, 202, 203, 2],
    [False, False, False, True, True, True, True, False, False, True, True, True, True],
)


def eagle3(target: HFTarget | None = None, **changes: Any) -> Any:
    return toy.make_head(Eagle3, target or toy.make_target(), **changes)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(32, (1, 15, 28)), (36, (1, 17, 32)), (30, (1, 14, 26)), (7, (1, 2, 3)), (6, (0, 2, 4)), (4, (0, 1, 2)), (3, (0, 1, 2))],
)  # fmt: skip
def test_layers_by_depth(depth: int, expected: tuple[int, ...]) -> None:
    info = replace(toy.make_target().info, num_layers=depth)
    assert fused_layers((), info) == expected


def test_layers_that_make_no_sense_are_refused() -> None:
    info = replace(toy.make_target().info, num_layers=8)
    assert fused_layers((0, 2, -1), info) == (0, 2, 7)
    for layers in ((1, 1, 2), (2, 1, 3), (0, 7, -1)):
        with pytest.raises(ValueError, match="ascending and without duplicates"):
            fused_layers(layers, info)
    with pytest.raises(ValueError, match="layer 8 does not exist"):
        fused_layers((0, 1, 8), info)
    with pytest.raises(ValueError, match="too few"):
        fused_layers((), replace(info, num_layers=2))


def test_a_feature_is_the_output_of_the_named_block() -> None:
    target = toy.make_target("qwen3")
    head = eagle3(target)
    batch = toy.with_features(target, toy.pack([[toy.random_document(9, 3, 0)]]), head)
    seen: list[Tensor] = []
    blocks = [target.model.model.layers[index] for index in head.feature_layers]
    hooks = [block.register_forward_hook(lambda module, given, out: seen.append(out)) for block in blocks]
    with torch.no_grad():
        target.model(input_ids=batch.input_ids_BT)
    for hook in hooks:
        hook.remove()
    assert batch.features is not None
    outputs = [out[0] if isinstance(out, tuple) else out for out in seen]
    torch.testing.assert_close(batch.features.captured_BTF, torch.cat(outputs, -1), rtol=1e-4, atol=1e-4)


def test_embedded_and_predicted_tokens_of_a_two_turn_chat() -> None:
    batch = toy.pack([[TWO_TURNS]], padding=2)
    rows = RolloutRows.of(batch, 3)
    ids = TWO_TURNS.ids
    for step, expected in enumerate(
        (
            [(101, 102), (102, 103), (103, 2), (201, 202), (202, 203), (203, 2)],
            [(102, 103), (103, 2), (202, 203), (203, 2)],
            [(103, 2), (203, 2)],
        )
    ):
        index = rows.index_BR[0][rows.live_SBR[step, 0]].tolist()
        assert [(ids[t + 1 + step], ids[t + 2 + step]) for t in index] == expected


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "cross_entropy", "kl", "tv"])
@pytest.mark.parametrize("vocabulary", [0, 120])
def test_the_loss_against_a_plain_loop(kind: LossKind, vocabulary: int) -> None:
    target = toy.make_target()
    head = eagle3(target, steps=3, loss=kind, draft_vocab_size=vocabulary)
    counts = torch.zeros(target.info.vocab_size, dtype=torch.long)
    counts[100:320] = torch.arange(220, 0, -1)
    head.set_vocabulary(counts)
    documents = [[TWO_TURNS, toy.random_document(8, 2, 3)], [toy.random_document(17, 5, 4)]]
    batch = toy.with_features(target, toy.pack(documents, padding=1), head)
    rows = RolloutRows.of(batch, 3)
    assert batch.features is not None
    outputs = head.outputs(batch, target, rows, head.fuse(batch.features.captured_BTF, target))
    ids = head.d2t if vocabulary else torch.arange(target.info.vocab_size)
    logits_BTV = target.model.lm_head(target.model.model.norm(batch.features.last_BTD))
    total, hits = 0.0, [0, 0, 0]
    for s, b, r in rows.live_SBR.nonzero().tolist():
        t = int(rows.index_BR[b, r])
        z = head.lm_head(head.norm(outputs[s, b, r])).log_softmax(-1)
        teacher = logits_BTV[b, t + 1 + s]
        right = int(batch.input_ids_BT[b, t + 2 + s]) if kind == "cross_entropy" else int(teacher.argmax())
        hits[s] += int(ids[z.argmax()] == right)
        if right not in ids:
            continue  # what can't be drafted isn't learned
        p = teacher[ids].softmax(-1)
        value = {
            "soft_cross_entropy": -(p * z).sum(),
            "cross_entropy": -z[ids.tolist().index(right)],
            "kl": (p * (p.log() - z)).sum(),
            "tv": 0.5 * (p - z.exp()).abs().sum(),
        }[kind]
        total += 0.8**s * value.item()
    output = head(batch, target)
    assert output.loss.sum.item() == pytest.approx(total, rel=1e-5)
    assert output.loss.count == batch.drafted(1).sum()
    assert [int(output.metrics[f"step{s}_top1"].sum) for s in (1, 2, 3)] == hits
    assert [int(output.metrics[f"step{s}_top1"].count) for s in (1, 2, 3)] == rows.live_SBR.sum((1, 2)).tolist()


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_travels_with_the_head() -> None:
    target = toy.make_target()
    head = eagle3(target, draft_vocab_size=50)
    counts = torch.zeros(target.info.vocab_size, dtype=torch.long)
    counts[200:230] = 5
    head.set_vocabulary(counts)
    assert head.d2t.tolist() == [*range(20), *range(200, 230)]  # the lowest ids fill what the data leaves open
    assert head.t2d.nonzero().flatten().tolist() == head.d2t.tolist()
    assert {"d2t", "t2d"} <= set(head.state_dict())
    assert not {"d2t", "t2d"} & set(eagle3(target).state_dict())
    with pytest.raises(ValueError, match="draft_vocab_size is 999"):
        eagle3(target, draft_vocab_size=999)


@pytest.mark.parametrize("family", ["llama", "llama_untied_rope", "mistral", "qwen2", "qwen3"])
def test_starting_from_the_target(family: str) -> None:
    target = toy.make_target(family)
    head = eagle3(target, initialize="target", draft_vocab_size=64)
    counts = torch.arange(target.info.vocab_size)
    head.set_vocabulary(counts)
    head.init_from(target)
    x = torch.randn(3, target.info.hidden_size)
    torch.testing.assert_close(head.draft_logits(x, target), unscaled(target, x)[:, head.d2t], rtol=1e-3, atol=1e-3)
    block = target.blocks[-1]
    assert torch.equal(head.layers[0].mlp.down_proj.weight, block.mlp.down_proj.weight)
    D = target.info.hidden_size
    value = head.layers[0].self_attn.v_proj.weight
    assert torch.equal(value[:, D:], block.self_attn.v_proj.weight) and not value[:, :D].any()
    assert torch.equal(head.layers[0].hidden_norm.weight, block.input_layernorm.weight)


def unscaled(target: HFTarget, x: Tensor) -> Tensor:
    return target.model.lm_head(target.final_norm(x))


def test_starting_from_a_target_of_another_kind_says_what_differs() -> None:
    for family, tensor in (("gpt_neox", "attention.query_key_value.weight"), ("gemma3", "pre_feedforward_layernorm")):
        with pytest.raises(ValueError, match=f"initialize: target.*{tensor}"):
            eagle3(toy.make_target(family), initialize="target")
    with pytest.raises(ValueError, match=r"initialize: target.*\(40, 64\)"):
        eagle3(toy.make_target("llama"), initialize="target", intermediate_size=40)


def test_faults_of_the_config() -> None:
    with pytest.raises(ValueError, match="steps 0"):
        Eagle3Config(steps=0)
    with pytest.raises(ValueError, match="a head of 2 layers trains with steps: 1, got 7"):
        Eagle3Config(num_layers=2)
