"""Norm, attention and positions against transformers and against loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_target as toy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.heads.blocks import Attend, Attention, DecoderLayer, LayerShape, RMSNorm, RoPE, document_mask, rotate
from drafters.heads.eagle import Eagle

SHAPE = LayerShape(hidden_size=24, intermediate_size=20, num_heads=6, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_llamas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    own, theirs = RMSNorm(24, 1e-5).to(dtype), LlamaRMSNorm(24, 1e-5).to(dtype)
    torch.nn.init.normal_(own.weight)
    theirs.load_state_dict(own.state_dict())
    x = torch.randn(3, 5, 24).to(dtype) * 10
    assert torch.equal(own(x), theirs(x))


def test_document_mask() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, -1]]))[0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_grouped_attention_against_loops() -> None:
    torch.manual_seed(0)
    attention = Attention(SHAPE, input_size=48).double()
    q, k, v = torch.randn(2, 6, 3, 8).double(), torch.randn(2, 2, 5, 8).double(), torch.randn(2, 2, 5, 8).double()
    mask = torch.rand(2, 3, 5) > 0.5
    mask[..., 0] = True
    expected = torch.zeros(2, 3, 48).double()
    for b in range(2):
        for h in range(6):
            for n in range(3):
                scores = torch.tensor(
                    [q[b, h, n] @ k[b, h // 3, m] / 8**0.5 if mask[b, n, m] else -torch.inf for m in range(5)]
                )
                expected[b, n, 8 * h : 8 * h + 8] = torch.softmax(scores.double(), 0) @ v[b, h // 3]
    torch.testing.assert_close(attention.mix(q, k, v, mask), attention.o_proj(expected))


def test_positions_are_relative() -> None:
    torch.manual_seed(0)
    rope = RoPE(toy.make_target().info)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    products = [
        (rotate(q, *rope(torch.tensor([[i]]))) * rotate(k, *rope(torch.tensor([[j]])))).sum()
        for i, j in ((5, 2), (45, 42), (25, 2))
    ]
    torch.testing.assert_close(products[0], products[1], rtol=1e-4, atol=1e-5)
    assert abs(products[0] - products[2]) > 1e-3


def test_part_of_a_head_can_stay_unturned() -> None:
    info = toy.make_target().info
    settings = dict(
        rope_type="longrope", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16,
        partial_rotary_factor=0.5, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
    )  # fmt: skip
    cos, sin = RoPE(replace(info, rope=settings))(torch.tensor([[7]]))
    x = torch.randn(1, 2, 1, 16)
    assert cos.shape[-1] == 8
    assert torch.equal(rotate(x, cos, sin)[..., 8:], x[..., 8:])
    whole, _ = RoPE(replace(info, rope={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}))(
        torch.tensor([[7]])
    )
    assert whole.shape[-1] == 16


def test_casting_a_head_does_not_round_its_positions() -> None:
    head = toy.make_head(Eagle, toy.make_target())
    assert isinstance(head, Eagle)
    position = torch.tensor([[0, 1, 333]])
    before = head.rope(position)
    assert all(torch.equal(a, b) for a, b in zip(before, head.bfloat16().rope(position), strict=True))


def test_layer_with_wide_attention_input_and_input_norm() -> None:
    torch.manual_seed(0)
    rope = RoPE(replace(toy.make_target().info, hidden_size=24, num_heads=6, head_dim=8))
    cos, sin = rope(torch.arange(4)[None])
    attend = Attend(cos, sin, document_mask(torch.zeros(1, 4, dtype=torch.long)))
    hidden, wide = torch.randn(1, 4, 24), torch.randn(1, 4, 48)
    layer: Any = DecoderLayer(SHAPE, input_norm=True)
    torch.nn.init.normal_(layer.input_layernorm.weight)
    expected = hidden + layer.self_attn(layer.input_layernorm(hidden), attend, 0)
    expected = expected + layer.mlp(layer.post_attention_layernorm(expected))
    torch.testing.assert_close(layer(hidden, attend, 0), expected)
    wider = DecoderLayer(SHAPE, input_norm=False, input_size=48)
    expected = hidden + wider.self_attn(wide, attend, 0)
    expected = expected + wider.mlp(wider.post_attention_layernorm(expected))
    torch.testing.assert_close(wider(hidden, attend, 0, wide), expected)


def test_mixed_precision_runs_in_bfloat16() -> None:
    rope = RoPE(replace(toy.make_target().info, hidden_size=24, num_heads=6, head_dim=8))
    attend = Attend(*rope(torch.arange(4)[None]), document_mask(torch.zeros(1, 4, dtype=torch.long)))
    layer, hidden = DecoderLayer(SHAPE, input_norm=True), torch.randn(1, 4, 24)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(hidden, attend, 0)
    mixed.sum().backward()
    torch.testing.assert_close(mixed.float(), layer(hidden, attend, 0), rtol=0.05, atol=0.05)
