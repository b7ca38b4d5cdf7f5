"""EAGLE-1: alignment, the layer against transformers' own, losses, and training against drafting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_target as toy
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafters.batch import TrainBatch
from drafters.decoding.budget import make_budget
from drafters.heads.eagle import Eagle, document_lengths
from drafters.heads.training_time_test import RolloutRows
from drafters.recipe import Sampling, TreeSection
from drafters.target.hf import HFTarget
from drafters.tree import Committed

# index      0  1  2   3   4   5   6   7   8   9   10  11  12
# token      p  p  p   A1  A2  A3  end u   u   B1  B2  B3  end
TWO_TURNS = toy.Document(
    [10, 11, 12, 101, 102, 103, 2, 13, 14, 201, 202, 203, 2],
    [False, False, False, True, True, True, True, False, False, True, True, True, True],
)
ROPES: dict[str, dict[str, Any]] = {
    "default": dict(rope_type="default", rope_theta=500000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
    "llama3": dict(
        rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16),
    "longrope": dict(
        rope_type="longrope", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16,
        short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + 0.3 * i for i in range(8)],
    ),
}  # fmt: skip


def eagle(target: HFTarget | None = None, **changes: Any) -> Any:
    return toy.make_head(Eagle, target or toy.make_target(), **changes)


def features_of(batch: TrainBatch) -> Tensor:
    assert batch.features is not None
    return batch.features.captured_BTF


def predict(head: Eagle, batch: TrainBatch, target: HFTarget) -> Tensor:
    """The output at every index, B x T x D."""
    feature = head.fuse(features_of(batch), target)
    everywhere = RolloutRows(torch.arange(batch.input_ids_BT.shape[1]).expand(len(feature), -1), torch.ones(1, 1, 1))
    return head.outputs(batch, target, everywhere, feature)[0]


def test_embedded_and_predicted_tokens_of_a_two_turn_chat() -> None:
    head = eagle()
    batch = toy.pack([[TWO_TURNS, TWO_TURNS]], padding=3)
    mask = head.supervised(batch)
    embedded, predicted = batch.label(1)[0][mask].tolist(), batch.label(2)[0][mask].tolist()
    turns = [(101, 102), (102, 103), (103, 2), (201, 202), (202, 203), (203, 2)]
    assert list(zip(embedded, predicted, strict=True)) == turns + turns
    assert mask[0].nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10, 15, 16, 17, 21, 22, 23]


def llama_config(**settings: Any) -> LlamaConfig:
    config = LlamaConfig(**settings)
    config._attn_implementation = "eager"
    return config


def reference(head: Eagle, target: HFTarget, ids: Tensor, last_TD: Tensor, config: LlamaConfig) -> Tensor:
    """The head built of transformers' Llama layer, its first norm taken out; one document."""
    inputs = torch.cat([target.model.model.embed_tokens(ids.roll(-1)), target.model.model.norm(last_TD)], dim=-1)
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    names = head.layers[0].state_dict()
    layer.load_state_dict(names)
    T = len(ids)
    mask = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
    position = torch.arange(T)[None]
    hidden = head.fc(inputs)[None]
    rope = LlamaRotaryEmbedding(config)(hidden, position)
    out: Tensor = layer(hidden, attention_mask=mask, position_ids=position, position_embeddings=rope)
    return out[0]


@pytest.mark.parametrize("kind", ROPES)
def test_the_layer_is_llamas_without_input_norm(kind: str) -> None:
    target = toy.make_target()
    info = replace(target.info, rope=ROPES[kind], max_position_embeddings=32)
    torch.manual_seed(0)
    head: Any = Eagle(Eagle.Config(), info).eval()
    nn.init.normal_(head.layers[0].post_attention_layernorm.weight, 1.0, 0.1)
    batch = toy.with_features(target, toy.pack([[toy.random_document(40, 5, 0)]]), head)
    config = llama_config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=32, rms_norm_eps=info.rms_norm_eps, rope_parameters=dict(ROPES[kind]),
    )  # fmt: skip
    with torch.no_grad():
        expected = reference(head, target, batch.input_ids_BT[0], features_of(batch)[0], config)
        torch.testing.assert_close(predict(head, batch, target)[0], expected, rtol=1e-4, atol=1e-5)


def test_loss_is_smooth_l1_plus_soft_cross_entropy() -> None:
    target = toy.make_target()
    head = eagle(target).eval()
    batch = toy.with_features(target, toy.pack([[TWO_TURNS], [toy.random_document(9, 3, 0)]], padding=1), head)
    predicted, normed = predict(head, batch, target), target.model.model.norm(features_of(batch))
    feature, token, hits, count = 0.0, 0.0, 0, 0
    for b in range(2):
        mask = batch.loss_mask_BT[b]
        for t in range(len(mask) - 2):
            if mask[t + 1] and mask[t + 2]:
                feature += F.smooth_l1_loss(predicted[b, t], normed[b, t + 1]).item()
                p, z = target.model.lm_head(normed[b, t + 1]).softmax(-1), target.model.lm_head(predicted[b, t])
                token -= (p * z.log_softmax(-1)).sum().item()
                hits += int(z.argmax() == p.argmax())
                count += 1
    output = head(batch, target)
    assert output.loss.count == count
    assert output.loss.sum.item() == pytest.approx(feature + 0.1 * token, rel=1e-5)
    assert float(output.metrics["feature_loss"].sum) == pytest.approx(feature, rel=1e-5)
    assert float(output.metrics["token_loss"].sum) == pytest.approx(token, rel=1e-5)
    assert output.metrics["top1"].sum == hits


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "llama_untied_rope"])
@pytest.mark.parametrize("layers", [1, 2])
def test_training_computes_what_drafting_computes(family: str, layers: int) -> None:
    """Every index of a packed batch against a cache that grows by uneven steps."""
    target = toy.make_target(family)
    head = eagle(target, num_layers=layers).eval()
    documents = [toy.random_document(length, 4, length) for length in (21, 13)]
    packed = toy.with_features(target, toy.pack([documents], padding=2), head)
    trained = predict(head, packed, target)[0]
    rows = toy.with_features(target, toy.pack([[document] for document in documents]), head)
    state, done = head.start(target, 2, 24), torch.zeros(2, dtype=torch.long)
    for counts in ([5, 1], [1, 4], [3, 2], [1, 1], [4, 1]):
        index = done[:, None] + torch.arange(max(counts))
        features = features_of(rows).gather(1, index[..., None].expand(-1, -1, features_of(rows).shape[-1]))
        step = torch.tensor(counts)
        done = done + step
        root = rows.input_ids_BT.gather(1, done[:, None])[:, 0]
        state = head.advance(state, Committed(rows.input_ids_BT.gather(1, index), features, step, root))
        assert state.hidden_BD is not None
        expected = torch.stack([trained[done[0] - 1], trained[21 + done[1] - 1]])
        torch.testing.assert_close(state.hidden_BD, expected, rtol=1e-4, atol=1e-5)
        head.draft(state, make_budget(TreeSection(), Sampling(), "top"))  # leaves no trace


def test_a_tree_holds_what_each_of_its_paths_would_alone() -> None:
    """Log-probabilities of nodes against the head run over the path with features of its own, without a cache."""
    target = toy.make_target()
    head = eagle(target).eval()
    paths = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 0, 0))
    budget = make_budget(TreeSection(kind="static", paths=paths), Sampling(), "top")
    documents = [toy.random_document(length, 4, length) for length in (11, 7)]
    batch = toy.with_features(target, toy.pack([[document] for document in documents]), head)
    counts, root = torch.tensor([11, 7]), torch.tensor([31, 32])
    committed = Committed(batch.input_ids_BT, features_of(batch), counts, root)
    tree = head.draft(head.advance(head.start(target, 2, 12), committed), budget)  # 12 slots: the cache has to grow
    for b in range(2):
        n = int(counts[b])
        for node in range(1, tree.tokens_BN.shape[1]):
            path: list[int] = []
            at = node
            while at > 0:
                path.insert(0, int(tree.tokens_BN[b, at]))
                at = int(tree.parents_BN[b, at])
            tokens = [*batch.input_ids_BT[b, 1:n].tolist(), int(root[b])]
            normed = target.model.model.norm(features_of(batch)[b, :n])
            hidden = whole(head, target, tokens, normed)
            for token in path[:-1]:
                tokens, normed = [*tokens, token], torch.cat([normed, hidden[-1:]])
                hidden = whole(head, target, tokens, normed)
            expected = target.unembed(hidden[-1]).log_softmax(-1)[path[-1]]
            torch.testing.assert_close(tree.log_q_BN[b, node], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def whole(head: Eagle, target: HFTarget, following: list[int], normed_TD: Tensor) -> Tensor:
    """The head over one row of entries, by way of transformers' layer."""
    config = llama_config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rms_norm_eps=head.info.rms_norm_eps, rope_parameters=dict(head.info.rope),
    )  # fmt: skip
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict(head.layers[0].state_dict())
    T = len(following)
    hidden = head.fc(torch.cat([target.model.model.embed_tokens(torch.tensor(following)), normed_TD], -1))[None]
    position = torch.arange(T)[None]
    mask = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
    rope = LlamaRotaryEmbedding(config)(hidden, position)
    out: Tensor = layer(hidden, attention_mask=mask, position_ids=position, position_embeddings=rope)
    return out[0]


def test_noise_is_on_the_input_in_training_only_and_fades_with_the_documents_length() -> None:
    target = toy.make_target()
    head = eagle(target, noise=0.2)
    documents = [toy.random_document(64, 5, 0), toy.random_document(16, 5, 1)]
    batch = toy.with_features(target, toy.pack([documents], padding=1), head)
    noise = head.train()._noise(batch)
    assert noise is not None
    for part, bound in ((noise[0, :64], 0.1 * 512 / 64), (noise[0, 64:80], 0.1 * 512 / 16)):
        assert 0.9 * bound < part.abs().max() <= bound and part.mean().abs() < 0.1 * bound
    flat = eagle(target, noise=0.2, noise_by_length=False).train()._noise(batch)
    assert flat is not None and 0.09 < flat.abs().max() <= 0.1
    assert head.eval()._noise(batch) is None and eagle(target).train()._noise(batch) is None
    assert head(batch, target).loss.sum == head(batch, target).loss.sum
    assert head.train()(batch, target).loss.sum != head(batch, target).loss.sum


def test_document_lengths() -> None:
    assert document_lengths(torch.tensor([[0, 0, 0, 1, 1, -1], [-1] * 6]))[:, :5].tolist() == [[3, 3, 3, 2, 2], [1] * 5]


def test_identity_start_repeats_the_feature() -> None:
    target = toy.make_target()
    head = eagle(target, initialize="identity").eval()
    batch = toy.with_features(target, toy.pack([[toy.random_document(30, 5, 0)]]), head)
    normed = target.model.model.norm(features_of(batch))
    assert (predict(head, batch, target) - normed).norm() < 0.4 * normed.norm()


def test_tensors_are_those_that_serving_expects() -> None:
    head = eagle(toy.make_target("qwen3"), intermediate_size=40, num_heads=6, num_kv_heads=3)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes == {
        "fc.weight": (80, 160),
        "layers.0.self_attn.q_proj.weight": (6 * 32, 80),
        "layers.0.self_attn.k_proj.weight": (3 * 32, 80),
        "layers.0.self_attn.v_proj.weight": (3 * 32, 80),
        "layers.0.self_attn.o_proj.weight": (80, 6 * 32),
        "layers.0.mlp.gate_proj.weight": (40, 80),
        "layers.0.mlp.up_proj.weight": (40, 80),
        "layers.0.mlp.down_proj.weight": (80, 40),
        "layers.0.post_attention_layernorm.weight": (80,),
    }
    more = eagle(fc_bias=True, num_layers=2).state_dict()
    assert (
        "fc.bias" in more
        and "layers.1.input_layernorm.weight" in more
        and "layers.0.input_layernorm.weight" not in more
    )


def test_faults_of_the_config() -> None:
    with pytest.raises(ValueError, match="num_layers 0 must be at least 1"):
        Eagle.Config(num_layers=0)
    with pytest.raises(ValueError, match="5 attention heads and 2 key-value heads"):
        eagle(num_heads=5)
