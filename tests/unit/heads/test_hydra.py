"""Hydra: what each head reads and learns, drafting against training, and where it says no."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_target as toy
from torch import Tensor
from torch.nn import functional as F

from drafters.batch import TargetFeatures
from drafters.decoding.budget import make_budget
from drafters.decoding.generate import generate
from drafters.heads.hydra import Hydra
from drafters.recipe import Sampling, TreeSection
from drafters.tree import Committed

PLUS_PLUS = {"num_layers": 2, "prefix_attention": True, "loss": "soft_cross_entropy"}
kinds = pytest.mark.parametrize("changes", [{}, PLUS_PLUS], ids=["hydra", "hydra++"])
DOCUMENTS = [toy.random_document(11, 4, 0), toy.random_document(8, 3, 1)]


def hydra(target: Any, **changes: Any) -> Any:
    """A head whose every weight counts."""
    head = toy.make_head(Hydra, target, num_heads=3, **changes)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1 and "output" not in name:
                parameter.normal_(0, 0.1)
            if name.endswith("output.bias"):
                parameter.normal_()
    return head.eval()


def reference_logits(head: Any, target: Any, ids: Tensor, last_TD: Tensor, t: int, k: int) -> Tensor:
    """Head k's logits at index t of a lone document, from its definition."""
    h = target.model.model.norm(last_TD)
    if head.prefix is not None:
        x = head.prefix.layer.input_layernorm(h[: t + 1])
        q, key, value = (F.linear(x, getattr(head.prefix.layer.self_attn, f"{n}_proj").weight) for n in "qkv")
        cos, sin = (table[0] for table in head.rope(torch.arange(t + 1)[None]))
        mixed = []
        for i in range(head.shape.num_heads):
            d, shared = head.shape.head_dim, head.shape.num_heads // head.shape.num_kv_heads
            mine = turned(q[:, i * d : i * d + d], cos, sin)[t]
            g = i // shared * d
            weights = torch.softmax(turned(key[:, g : g + d], cos, sin) @ mine * d**-0.5, dim=0)
            mixed.append(weights @ value[:, g : g + d])
        h_t = head.prefix.norm(head.prefix.layer.finish(h[t] + head.prefix.layer.self_attn.o_proj(torch.cat(mixed))))
    else:
        h_t = h[t]
    own = head.heads[k - 1]
    x = torch.cat([h_t, *(target.model.model.embed_tokens.weight[ids[t + j]] for j in range(1, k + 1))])
    x = own.residual.weight @ x + F.silu(own.layers[0](x))
    for layer in own.layers[1:]:
        x = x + F.silu(layer(x))
    return own.output.weight @ x + own.output.bias


def turned(x_Td: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_Td.chunk(2, dim=-1)
    return x_Td * cos + torch.cat([-second, first], dim=-1) * sin


@kinds
def test_loss_is_the_sum_over_heads_and_places(changes: dict[str, Any]) -> None:
    target = toy.make_target()
    head = hydra(target, loss_decay=0.7, **changes)
    batch = toy.with_features(target, toy.pack([DOCUMENTS], padding=3), head)
    total, count = torch.zeros(()), 0
    for document in DOCUMENTS:
        ids = torch.tensor(document.ids)
        alone = toy.with_features(target, toy.pack([[document]]), head)
        assert alone.features is not None
        last_TD = alone.features.last_BTD[0]
        law = torch.softmax(target.logits(last_TD), dim=-1)
        for k in (1, 2, 3):
            for t in range(len(ids) - 1 - k):
                if all(document.mask[t + 1 : t + 2 + k]):
                    log_q = torch.log_softmax(reference_logits(head, target, ids, last_TD, t, k), dim=-1)
                    loss = -(law[t + k] @ log_q) if changes else -log_q[ids[t + 1 + k]]
                    total += 0.7 ** (k - 1) * loss.detach()
                    count += k == 1
    output = head(batch, target)
    assert output.loss.count == count > 0
    torch.testing.assert_close(output.loss.sum.detach(), total, rtol=1e-4, atol=1e-4)


@kinds
def test_a_tree_holds_each_head_s_best_tokens_after_its_own_path(changes: dict[str, Any]) -> None:
    target = toy.make_target()
    head = hydra(target, **changes)
    batch = toy.with_features(target, toy.pack([[document] for document in DOCUMENTS]), head)
    assert batch.features is not None
    counts, root = torch.tensor([9, 6]), torch.tensor([5, 7])
    state = head.start(target, 2, 32)
    # The cache of the prefix layer grows in two parts of different lengths.
    first = Committed(batch.input_ids_BT[:, :4], batch.features.captured_BTF[:, :4], torch.tensor([4, 2]), root)
    state = head.advance(state, first)
    rest_ids, rest = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, batch.features.captured_BTF.shape[-1])
    for row, (done, n) in enumerate(((4, 5), (2, 4))):
        rest_ids[row, :n] = batch.input_ids_BT[row, done : done + n]
        rest[row, :n] = batch.features.captured_BTF[row, done : done + n]
    state = head.advance(state, Committed(rest_ids, rest, torch.tensor([5, 4]), root))
    section = TreeSection(kind="static", paths=((0,), (1,), (0, 0), (1, 0), (1, 0, 0)))
    tree = head.draft(state, make_budget(section, Sampling(), "top"))
    for row in range(2):
        n = int(counts[row])
        prefix, last_TD = batch.input_ids_BT[row, :n], batch.features.last_BTD[row, :n]

        def best(path: list[int], rank: int, n: int = n, prefix: Tensor = prefix, last: Tensor = last_TD) -> int:
            ids = torch.cat([prefix, torch.tensor(path)])
            logits = reference_logits(head, target, ids, last, n - 1, len(path))
            return int(logits.topk(2).indices[rank])

        r = int(root[row])
        a, b = best([r], 0), best([r], 1)
        wanted = [r, a, b, best([r, a], 0), best([r, b], 0)]
        assert tree.tokens_BN[row].tolist() == [*wanted, best([r, b, wanted[4]], 0)]


@kinds
def test_nothing_after_what_a_head_reads_reaches_its_loss(changes: dict[str, Any]) -> None:
    target = toy.make_target()
    head = hydra(target, **{**changes, "loss": "cross_entropy"})
    q = 8  # the first document's answer ends at q - 1; its last loss, of head 1, reads h_{q-3} and e_{q-2}
    cut = toy.Document(DOCUMENTS[0].ids, [m and i < q for i, m in enumerate(DOCUMENTS[0].mask)])
    batch = toy.with_features(target, toy.pack([[cut, toy.Document(DOCUMENTS[1].ids, [False] * 8)]], padding=2), head)
    assert batch.features is not None
    captured = batch.features.captured_BTF.clone().requires_grad_()
    features = TargetFeatures(captured, batch.features.last_BTD)
    loss = head(replace(batch, features=features), target).loss.sum
    (gradient,) = torch.autograd.grad(loss, captured)
    assert not gradient[0, q - 2 :].any() and gradient[0, q - 3].any()
    changed = batch.input_ids_BT.clone()
    changed[0, q:] = 9
    assert head(replace(batch, input_ids_BT=changed), target).loss.sum == loss


def test_hydra_plus_plus_is_lossless_on_rows_of_different_lengths() -> None:
    target = toy.make_target("llama_untied_rope")
    head = hydra(target, **PLUS_PLUS)
    document = toy.answered(target, list(range(10, 22)), 30)
    batch = toy.with_features(target, toy.pack([[document]]), head)
    toy.overfit(head, batch, target, steps=200, learning_rate=3e-3)
    prompts = [document.ids[:12], [40, 41, 42], document.ids[:25]]
    for section in (TreeSection(depth=3), TreeSection(kind="dynamic", depth=3, width=3, nodes=8)):
        found = generate(target, head, prompts, max_new_tokens=20, tree=section, eos_token_ids=())
        assert found.sequences == generate(target, None, prompts, max_new_tokens=20, eos_token_ids=()).sequences
        assert found.stats[0].accepted == found.stats[0].reached


def test_an_untrained_head_is_nearly_the_target() -> None:
    target = toy.make_target("llama_untied_rope")
    head: Any = toy.make_head(Hydra, target)
    hidden = torch.randn(5, target.info.hidden_size)
    for k, own in enumerate(head.heads, start=1):
        inputs = torch.cat([hidden, torch.randn(5, k * target.info.hidden_size)], dim=-1)
        assert torch.equal(own.output.weight, target.model.lm_head.weight)
        assert torch.equal(own.residual(inputs), hidden)


def test_faults() -> None:
    with pytest.raises(ValueError, match="num_heads 0"):
        Hydra.Config(num_heads=0)
    target = toy.make_target()
    head = hydra(target)
    with pytest.raises(ValueError, match=r"4 deep.*3 heads"):
        head.draft(head.start(target, 1, 32), make_budget(TreeSection(depth=4), Sampling(), "top"))
