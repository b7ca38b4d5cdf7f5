"""The cache of drafting against recomputing everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toy_target as toy
from torch import Tensor

from drafters.heads import rollout as rollout_module
from drafters.heads.blocks import Attend, DecoderLayer, LayerShape, RoPE, document_mask
from drafters.heads.rollout import Rollout

SHAPE = LayerShape(hidden_size=24, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5)


class Network:
    """Two layers; remembers nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [DecoderLayer(SHAPE, input_norm=True).requires_grad_(False) for _ in range(2)]
        self.rope = RoPE(replace(toy.make_target().info, hidden_size=24, num_heads=4, head_dim=8))

    def __call__(self, inputs: Tensor, attend: Attend) -> Tensor:
        for index, layer in enumerate(self.layers):
            inputs = layer(inputs, attend, index)
        return inputs

    def whole(self, inputs_ND: Tensor) -> Tensor:
        """One row, all at once."""
        cos, sin = self.rope(torch.arange(len(inputs_ND))[None])
        return self(inputs_ND[None], Attend(cos, sin, document_mask(torch.zeros(1, len(inputs_ND)))))[0]


def open_rollout(network: Network, rows: int, capacity: int) -> Rollout:
    return Rollout(network, network.rope, SHAPE, layers=2, rows=rows, capacity=capacity, like=torch.empty(0))


@pytest.mark.parametrize("chunk", [3, 1024])
def test_uneven_rows_equal_one_pass_each(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "CHUNK", chunk)
    network = Network()
    inputs = torch.randn(3, 30, 24)
    rollout = open_rollout(network, 3, 32)
    done = torch.zeros(3, dtype=torch.long)
    for counts in ([7, 2, 4], [1, 5, 2], [2, 1, 3], [4, 4, 1]):
        index = done[:, None] + torch.arange(max(counts))
        hidden = rollout.extend(inputs.gather(1, index[..., None].expand(-1, -1, 24)), torch.tensor(counts))
        for b, count in enumerate(counts):
            expected = network.whole(inputs[b, : done[b] + count])[-count:]
            torch.testing.assert_close(hidden[b, :count], expected, rtol=1e-4, atol=1e-5)
        done = done + torch.tensor(counts)
        assert torch.equal(rollout.lengths_B, done)


def test_a_node_sees_its_ancestors_and_not_its_siblings() -> None:
    network = Network()
    prefix, nodes = torch.randn(2, 5, 24), torch.randn(2, 2 + 3 + 1, 24)
    lengths = [5, 3]
    rollout = open_rollout(network, 2, 5)  # the tree does not fit: room is made
    rollout.extend(prefix, torch.tensor(lengths))
    #  level 1: nodes 0 1      level 2: nodes 2 3 4 below 1 0 1      level 3: node 5 below 4 in row 0, below 3 in row 1
    parents = [torch.zeros(2, 2, dtype=torch.long), torch.tensor([[1, 0, 1]] * 2), torch.tensor([[2], [1]])]
    paths = {0: [[0], [1], [1, 2], [0, 3], [1, 4], [1, 4, 5]], 1: [[0], [1], [1, 2], [0, 3], [1, 4], [0, 3, 5]]}
    for _ in range(2):
        rollout.open_tree()
        hidden = torch.cat(
            [
                rollout.level(nodes[:, a:b], parent)
                for (a, b), parent in zip(((0, 2), (2, 5), (5, 6)), parents, strict=True)
            ],
            dim=1,
        )
        for row, of_row in paths.items():
            for node, path in enumerate(of_row):
                expected = network.whole(torch.cat([prefix[row, : lengths[row]], nodes[row, path]]))[-1]
                torch.testing.assert_close(hidden[row, node], expected, rtol=1e-4, atol=1e-5)


def test_the_tree_is_forgotten_and_rows_can_leave() -> None:
    network = Network()
    inputs = torch.randn(3, 12, 24)
    rollout = open_rollout(network, 3, 16)
    rollout.extend(inputs[:, :5], torch.tensor([5, 2, 4]))
    rollout.level(torch.randn(3, 2, 24), torch.zeros(3, 2, dtype=torch.long))
    rollout.keep(torch.tensor([1, 2]))
    later = torch.stack([inputs[1, 2:5], inputs[2, 4:7]])
    hidden = rollout.extend(later, torch.tensor([3, 3]))
    for b, (row, n) in enumerate(((1, 5), (2, 7))):
        torch.testing.assert_close(hidden[b], network.whole(inputs[row, :n])[-3:], rtol=1e-4, atol=1e-5)
