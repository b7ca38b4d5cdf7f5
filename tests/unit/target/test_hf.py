"""Features, logits and cached decoding of every supported family against the stock model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.recipe import TargetSection
from drafters.target.hf import HFTarget, load_target
from drafters.target.info import load_tokenizer, make_info
from drafters.target.weights import load_target_head
from drafters.tree import DraftTree

families = pytest.mark.parametrize("family", tiny.FAMILIES)


def make_target(family: str, attention: str = "sdpa", **changes: object) -> HFTarget:
    model = tiny.make_model(family, **changes)
    model.set_attn_implementation(attention)
    section = TargetSection(path="tiny", dtype="float32")
    return HFTarget(model, make_info(section, model.config, tiny.make_tokenizer(), folder=None, revision=""))


def single_document(ids_BT: Tensor) -> TrainBatch:
    position = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    return TrainBatch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT), position)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(3, 250, shape, generator=torch.Generator().manual_seed(1))


def random_tree(lengths: int, generator_seed: int = 3) -> DraftTree:
    """Root, two children, and a grandchild below the second."""
    tokens = torch.randint(3, 250, (lengths, 4), generator=torch.Generator().manual_seed(generator_seed))
    parents = torch.tensor([[-1, 0, 0, 2]]).expand(lengths, -1)
    return DraftTree(tokens, parents, torch.zeros(lengths, 4), torch.ones(lengths, 4, dtype=torch.bool), max_depth=2)


@families
def test_features_equal_hooks_on_the_stock_model(family: str) -> None:
    target = make_target(family)
    ids = random_ids(2, 12)
    seen: dict[int, Tensor] = {}

    def remember(layer: int) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for i, block in enumerate(target.blocks):
        block.register_forward_hook(remember(i))
    logits = target.model(input_ids=ids).logits
    stock = dict(seen)

    features = target.features(single_document(ids), layers=[0, 2, -1])

    assert torch.allclose(features.captured_BTF, torch.cat([stock[0], stock[2], stock[3]], -1), atol=1e-5)
    assert torch.allclose(features.last_BTD, stock[3], atol=1e-5)
    assert torch.allclose(target.logits(features.last_BTD), logits, atol=1e-3, rtol=1e-4)


@families
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    target = make_target(family)
    first, second = random_ids(1, 11), random_ids(1, 13).flip(1)
    ids = torch.cat([first, second, torch.zeros(1, 4, dtype=torch.long)], 1)
    document = torch.tensor([[0] * 11 + [1] * 13 + [-1] * 4])
    position = torch.tensor([[*range(11), *range(13), *range(4)]])
    packed = target.features(TrainBatch(ids, document >= 0, document, position), layers=[1]).last_BTD
    assert torch.allclose(packed[:, :11], target.features(single_document(first), [1]).last_BTD, atol=1e-4)
    assert torch.allclose(packed[:, 11:24], target.features(single_document(second), [1]).last_BTD, atol=1e-4)


@families
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_session_equals_the_stock_model_row_by_row(family: str, attention: str) -> None:
    """Unequal prompts, a tree, unequal accepted paths, a second tree, a dropped row, a third tree."""
    target = make_target(family, attention)
    ids, lengths = random_ids(3, 20), torch.tensor([20, 9, 14])
    session = target.session(layers=[1, -1], rows=3, max_tokens=40, max_nodes=4)
    step = session.prefill(ids, lengths)
    known = [ids[b, : lengths[b]].tolist() for b in range(3)]
    for b in range(3):
        check(target, known[b], step.logits_BNV[b, 0], step.features_BNF[b, lengths[b] - 1])

    paths = torch.tensor([[0, 2, 3], [0, 1, 0], [0, 0, 0]])
    counts = torch.tensor([3, 2, 1])
    for round_number in range(2):
        tree = random_tree(3, round_number)
        step = session.verify(tree)
        for b in range(3):
            for node, path in enumerate([[0], [0, 1], [0, 2], [0, 2, 3]]):
                tokens = known[b] + tree.tokens_BN[b, path].tolist()
                check(target, tokens, step.logits_BNV[b, node], step.features_BNF[b, node])
        session.commit(paths, counts)
        for b in range(3):
            known[b] += tree.tokens_BN[b, paths[b, : counts[b]]].tolist()
    assert session.lengths_B.tolist() == [len(tokens) for tokens in known]

    session.keep(torch.tensor([1, 2]))
    tree = random_tree(2, 9)
    step = session.verify(tree)
    for b in range(2):
        tokens = known[b + 1] + tree.tokens_BN[b, [0, 2, 3]].tolist()
        check(target, tokens, step.logits_BNV[b, 3], step.features_BNF[b, 3])


def check(target: HFTarget, tokens: list[int], logits: Tensor, features: Tensor) -> None:
    """Compares with one uncached forward of the stock model."""
    with target.captured([1, -1]) as hidden:
        stock = target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert torch.allclose(logits, stock, atol=2e-3, rtol=1e-3)
    assert torch.allclose(features, torch.cat([hidden[1][0, -1], hidden[-1][0, -1]], -1), atol=1e-3, rtol=1e-3)


def test_long_prompt_is_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("mistral")
    ids, lengths = random_ids(2, 30), torch.tensor([30, 17])
    whole = target.session([0], 2, 30, 1).prefill(ids, lengths)
    monkeypatch.setattr("drafters.target.session.PREFILL_CHUNK", 7)
    chunked = target.session([0], 2, 30, 1).prefill(ids, lengths)
    assert torch.allclose(whole.logits_BNV, chunked.logits_BNV, atol=1e-4)
    assert torch.allclose(whole.features_BNF[1, :17], chunked.features_BNF[1, :17], atol=1e-4)


@families
def test_head_alone_equals_the_whole_target(family: str, tmp_path: Path) -> None:
    folder = tiny.save_target(tmp_path / "target", family)
    section = TargetSection(path=str(folder), dtype="float32")
    whole, alone = load_target(section), load_target_head(section)
    hidden, ids = torch.randn(2, 3, whole.info.hidden_size), random_ids(2, 3)
    assert torch.equal(whole.logits(hidden), alone.logits(hidden))
    assert torch.equal(whole.embed(ids), alone.embed(ids))
    assert whole.info == alone.info
    assert torch.equal(whole.unembed_rows(torch.tensor([5, 2])), whole.model.get_output_embeddings().weight[[5, 2]])


def test_facts_of_a_target(tmp_path: Path) -> None:
    folder = tiny.save_target(tmp_path / "target", "qwen3")
    info = load_target(TargetSection(path=str(folder), dtype="float32")).info
    assert (info.hidden_size, info.head_dim, info.num_kv_heads, info.eos_token_ids) == (80, 32, 2, (2,))
    assert info.weights_hash and info.tokenizer_hash and info.template_hash
    tiny.save_target(tmp_path / "other", "qwen3", seed=1)
    other = load_target(TargetSection(path=str(tmp_path / "other"), dtype="float32")).info
    assert other.weights_hash != info.weights_hash
    assert replace(other, path=info.path, weights_hash=info.weights_hash) == info


def test_unfit_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder 'nowhere'"):
        load_target(TargetSection(path="nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_target(TargetSection(path=str(tmp_path / "empty")))
    tiny.make_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(TargetSection(path=str(tmp_path / "bare")))
    with pytest.raises(ValueError, match="layer 4 does not exist"):
        make_target("llama").features(single_document(random_ids(1, 4)), [4])


def test_logits_that_cannot_be_recomputed_are_refused() -> None:
    model = tiny.make_model("llama")
    model.lm_head.register_forward_hook(lambda _m, _i, output: output * 1.5)
    real = model.forward
    model.forward = lambda *args, **kwargs: real(*args, **kwargs)
    info = make_info(TargetSection(path="tiny"), model.config, None, folder=None, revision="")
    HFTarget(model, info)  # a module's own behaviour is followed
    model.get_decoder().norm.register_forward_hook(lambda _m, _i, output: output)
    model.forward = lambda *args, **kwargs: _scaled(real(*args, **kwargs))
    with pytest.raises(ValueError, match="not the model's own"):
        HFTarget(model, info)


def _scaled(output: object) -> object:
    output.logits = output.logits * 2  # type: ignore[attr-defined]
    return output
