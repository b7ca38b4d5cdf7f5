"""Every step of training-time test against the head drafting from that prefix with its cache."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.heads.autoregressive import AutoregressiveHead
from drafters.heads.eagle import Eagle, EagleConfig
from drafters.heads.eagle3 import Eagle3, Eagle3Config, fused_layers
from drafters.heads.training_time_test import RolloutRows, rollout
from drafters.recipe import TargetSection
from drafters.target.hf import HFTarget
from drafters.target.info import make_info

STEPS = 4


def make_target(family: str = "llama_untied_rope") -> HFTarget:
    model = tiny.make_model(family)
    info = make_info(TargetSection(path="tiny", dtype="float32"), model.config, None, folder=None, revision="")
    return HFTarget(model, info)


def packed_batch(target: HFTarget, layers: Any) -> TrainBatch:
    """Two rows: two documents and padding; one document whose answer is interrupted."""
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(5))
    document = torch.tensor([[0] * 11 + [1] * 9 + [-1] * 4, [0] * 24])
    position = torch.tensor([[*range(11), *range(9), *range(4)], [*range(24)]])
    mask = torch.zeros(2, 24, dtype=torch.bool)
    mask[0, 4:11], mask[0, 13:18], mask[1, 3:8], mask[1, 15:24] = True, True, True, True
    batch = TrainBatch(ids, mask, document, position)
    return TrainBatch(ids, mask, document, position, target.features(batch, layers))


def drafted(head: AutoregressiveHead, target: HFTarget, batch: TrainBatch, b: int, t: int, steps: int) -> list[Tensor]:
    """The obvious way: feed the prefix of one document into an empty cache, then one entry at a time."""
    assert batch.features is not None
    first = t - int(batch.position_BT[b, t])
    tokens = batch.input_ids_BT[b : b + 1]
    feature = head.fuse(batch.features.captured_BTF[b : b + 1, first : t + 1], target)
    state = head.start(target, rows=1, max_tokens=32)
    entries = head.entries(tokens[:, first + 1 : t + 2], feature, target)
    outputs = [state.rollout.extend(entries, torch.tensor([t + 1 - first]))[:, -1:]]
    for step in range(1, steps):
        entry = head.entries(tokens[:, t + 1 + step : t + 2 + step], head.feedback(outputs[-1]), target)
        outputs.append(state.rollout.level(entry, torch.zeros(1, 1, dtype=torch.long)))
    return [output[0, 0] for output in outputs]


HEADS = {
    "eagle3": (Eagle3, Eagle3Config(steps=STEPS, draft_vocab_size=100)),
    "eagle3.1": (Eagle3, Eagle3Config(steps=STEPS, feature_norm=True, feed_back_normed=True)),
    "hass": (Eagle, EagleConfig(steps=STEPS, noise=0.0)),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("family", ["llama_untied_rope", "qwen3"])
def test_each_step_equals_drafting(name: str, family: str) -> None:
    torch.manual_seed(0)
    target = make_target(family)
    kind, config = HEADS[name]
    head = kind(config, target.info).eval()
    batch = packed_batch(target, head.feature_layers)
    assert batch.features is not None
    rows = RolloutRows.of(batch, STEPS)
    with torch.no_grad():
        outputs = rollout(head, batch, target, rows, head.fuse(batch.features.captured_BTF, target))
        for b in range(2):
            for r, t in enumerate(rows.index_BR[b].tolist()):
                steps = int(rows.live_SBR[:, b, r].sum())
                for s, expected in enumerate(drafted(head, target, batch, b, t, steps) if steps else []):
                    assert torch.allclose(outputs[s, b, r], expected, atol=1e-5), (b, t, s)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_later_reaches_an_output(name: str) -> None:
    """The gradient of step s at row t is exactly zero for features after t and for tokens after t + 1 + s."""
    torch.manual_seed(0)
    target = make_target()
    kind, config = HEADS[name]
    head = kind(config, target.info).eval()
    batch = packed_batch(target, head.feature_layers)
    assert batch.features is not None
    rows = RolloutRows.of(batch, STEPS)
    feature = head.fuse(batch.features.captured_BTF, target).detach().requires_grad_()
    embedding = target.model.get_input_embeddings().weight.requires_grad_()
    outputs = rollout(head, batch, target, rows, feature)
    for s in range(STEPS):
        for b, r in rows.live_SBR[s].nonzero().tolist():
            t = int(rows.index_BR[b, r])
            to_feature, to_embedding = torch.autograd.grad(outputs[s, b, r].sum(), [feature, embedding], retain_graph=True)
            first = t - int(batch.position_BT[b, t])
            assert to_feature[b, first : t + 1].any()
            assert not to_feature[b, t + 1 :].any() and not to_feature[b, :first].any() and not to_feature[1 - b].any()
            seen = set(batch.input_ids_BT[b, first + 1 : t + 2 + s].tolist())
            assert set(to_embedding.any(1).nonzero().flatten().tolist()) <= seen


def test_fused_layers_of_any_depth() -> None:
    def of(depth: int) -> tuple[int, ...]:
        return fused_layers((), make_info_of(depth))

    assert of(32) == (1, 15, 28)
    assert of(4) == (0, 1, 2)
    assert all(len(set(of(depth))) == 3 and max(of(depth)) < depth for depth in range(3, 80))
    with pytest.raises(ValueError, match="too few"):
        of(2)
    with pytest.raises(ValueError, match="ascending and without duplicates"):
        fused_layers((1, 3, -1), make_info_of(4))
    with pytest.raises(ValueError, match="without duplicates"):
        Eagle3Config(layers=(1, 1, 2))


def make_info_of(depth: int) -> Any:
    config = tiny.make_model("llama", num_hidden_layers=depth).config
    return make_info(TargetSection(path="tiny"), config, None, folder=None, revision="")
