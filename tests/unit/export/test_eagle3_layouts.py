"""EAGLE-3: layer ids in each convention, draft vocabularies as offsets, the variants, and the layouts of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_export as te
import torch

from drafters.export.check import check_export, own_logits
from drafters.export.formats import FORMATS
from drafters.export.importing import import_folder, import_head
from drafters.export.reader import find_layout
from drafters.export.write import export_run
from drafters.heads.base import Drafter, load_head
from drafters.heads.eagle3 import Eagle3Config
from drafters.target.weights import VocabularyHead, load_target_head

BLOCKS = 8
PUBLISHED = (1, 3, 4)  # the inputs of blocks 2, L // 2 and L - 3
HEADS = {
    "plain": Eagle3Config(feature_layers=PUBLISHED, draft_vocab_size=100),
    "whole_vocabulary": Eagle3Config(feature_layers=PUBLISHED),
    "own_layers": Eagle3Config(feature_layers=(0, 2, 6), draft_vocab_size=100, num_heads=2, num_kv_heads=1, intermediate_size=48),
    "last_block": Eagle3Config(feature_layers=(0, 2, -1), draft_vocab_size=100),
    "four_features": Eagle3Config(feature_layers=(0, 2, 3, 6), draft_vocab_size=100),
    "two_layers": Eagle3Config(feature_layers=PUBLISHED, num_layers=2, steps=1, draft_vocab_size=100),
    "eagle3.1": Eagle3Config(feature_layers=PUBLISHED, feature_norm=True, feed_back_normed=True, draft_vocab_size=100),
}  # fmt: skip
HOLD = {
    "plain": {"vllm", "speculators", "sglang", "eagle"},
    "whole_vocabulary": {"vllm", "speculators", "sglang", "eagle"},
    "own_layers": {"vllm", "speculators", "sglang"},
    "last_block": {"vllm", "speculators"},
    "four_features": {"vllm", "speculators"},
    "two_layers": {"vllm", "speculators"},
    "eagle3.1": {"vllm", "speculators"},
}
HELD = [(head, name) for head, names in HOLD.items() for name in sorted(names)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("targets") / "qwen3", "qwen3", num_hidden_layers=BLOCKS)


@pytest.fixture(scope="module")
def vocabulary(target: Path) -> VocabularyHead:
    return load_target_head(te.section(target))


def export(tmp_path: Path, target: Path, head: str, name: str) -> Path:
    return export_run(te.make_run(tmp_path / "run", target, HEADS[head]), name).folder


@pytest.mark.parametrize("head", HEADS)
def test_every_format_holds_the_head_or_says_why(head: str, target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, HEADS[head])
    for name in FORMATS:
        if name in HOLD[head]:
            assert export_run(run, name).check.difference < 1e-4
        else:
            with pytest.raises(ValueError, match=f"the format '{name}' can't hold this head"):
                export_run(run, name)


@pytest.mark.parametrize(("head", "name"), HELD)
def test_export_import_export_is_byte_identical(head: str, name: str, target: Path, tmp_path: Path) -> None:
    first = export(tmp_path, target, head, name)
    import_folder(first, te.section(target), tmp_path / "imported" / "head")
    second = export_run(tmp_path / "imported", name).folder
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


@pytest.mark.parametrize(("head", "name"), HELD)
def test_sizes_layers_and_vocabulary_come_from_the_file_alone(
    head: str, name: str, target: Path, vocabulary: VocabularyHead, tmp_path: Path
) -> None:
    folder = export(tmp_path, target, head, name)
    (folder / "drafters.json").unlink()
    assert find_layout(folder) == name
    imported, original = import_head(folder, vocabulary), load_head(tmp_path / "run" / "head", vocabulary.info)
    info = vocabulary.info
    assert [info.layer(i) for i in imported.feature_layers] == [info.layer(i) for i in original.feature_layers]
    assert same_drafts(imported, original, vocabulary)


def same_drafts(first: Drafter, second: Drafter, target: VocabularyHead) -> bool:
    info = target.info
    tokens = torch.randint(info.vocab_size, (9,), generator=torch.Generator().manual_seed(1))
    streams = torch.randn(info.num_layers + 1, 8, info.hidden_size, generator=torch.Generator().manual_seed(2))
    pairs = zip(*(own_logits(head, target, tokens, streams, 3) for head in (first, second)), strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


def test_layer_ids_in_each_convention(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, HEADS["own_layers"])  # outputs of blocks 0, 2, 6
    configs = {n: json.loads((export_run(run, n).folder / "config.json").read_text()) for n in HOLD["own_layers"]}
    assert configs["vllm"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 7]
    assert configs["speculators"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 7]
    assert configs["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 6]


def test_the_configs_say_what_vllm_has_to_know(target: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", target, HEADS["four_features"])
    vllm, speculators = (
        json.loads((export_run(run, name).folder / "config.json").read_text()) for name in ("vllm", "speculators")
    )
    assert vllm["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (vllm["model_type"], vllm["draft_vocab_size"], vllm["vocab_size"]) == ("llama", 100, tiny.VOCAB)
    assert vllm["num_aux_hidden_states"] == 4
    assert vllm["norm_before_residual"] is speculators["norm_before_residual"] is False  # the library's default is true
    assert "model_type" not in speculators
    assert speculators["transformer_layer_config"]["num_aux_hidden_states"] == 4
    verifier = speculators["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]}
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_the_draft_vocabulary_is_offsets(target: Path, tmp_path: Path) -> None:
    folder = export(tmp_path, target, "plain", "vllm")
    ids = te.tensors_of(tmp_path / "run" / "head")["d2t"]
    tensors = te.tensors_of(folder)
    assert torch.equal(tensors["d2t"] + torch.arange(100), ids)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert (ids != torch.arange(100)).any()


# format, what is done to the folder, what the message says
FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "ids of SGLang's convention in vLLM": (
        "vllm", lambda f: te.edit(f, "eagle_aux_hidden_state_layer_ids", [1, 3, 4]),
        r"wrong layers: read as vllm \(ids count inputs of blocks\), its ids make the head read the outputs "
        r"of blocks \[0, 2, 3\], but it was trained on those of blocks \[1, 3, 4\]; the ids must be \[2, 4, 5\]",
    ),
    "ids of vLLM's convention in SGLang": (
        "sglang", lambda f: te.edit(f, "eagle_config.eagle_aux_hidden_state_layer_ids", [2, 4, 5]),
        r"wrong layers: read as sglang \(ids count outputs of blocks\), .+ the ids must be \[1, 3, 4\]",
    ),
    "no ids": ("vllm", lambda f: te.edit(f, "eagle_aux_hidden_state_layer_ids", None),
    "config.json has no 'eagle_aux_hidden"),
    "ids out of order": (
        "vllm", lambda f: te.edit(f, "eagle_aux_hidden_state_layer_ids", [5, 4, 2]),
        "are not ascending; the engine sorts them",
    ),
    "too few ids": (
        "vllm", lambda f: te.edit(f, "eagle_aux_hidden_state_layer_ids", [2, 4]),
        "2 layer ids, but num_aux_hidden_states is 3",
    ),
    "absolute ids in d2t": (
        "vllm", lambda f: te.set_tensors(f, d2t=te.tensors_of(f)["d2t"] + torch.arange(100)), "d2t .+ offsets",
    ),
    "another draft vocabulary": (
        "vllm", lambda f: te.set_tensors(f, d2t=torch.zeros(100, dtype=torch.long)), "its d2t gives another draft vocabulary",
    ),
    "no d2t": ("vllm", lambda f: te.set_tensors(f, d2t=None), "missing: d2t"),
    "another norm before the residual": (
        "vllm", lambda f: te.edit(f, "norm_before_residual", True),
        "norm_before_residual is true, which no head here has",
    ),
    "the library's default for it": (
        "speculators", lambda f: te.edit(f, "norm_before_residual", None), "norm_before_residual is true",
    ),
    "a model type that hides the format": (
        "speculators", lambda f: te.edit(f, "model_type", "llama"),
        "speculators_model_type must be eagle3, and model_type absent",
    ),
    "a norm left out": (
        "vllm", lambda f: te.set_tensors(f, layers__0__hidden_norm__weight=None),
        "missing: layers.0.hidden_norm.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_caught_and_named(fault: str, target: Path, vocabulary: VocabularyHead, tmp_path: Path) -> None:
    name, change, message = FAULTS[fault]
    folder = export(tmp_path, target, "plain", name)
    drafter = load_head(tmp_path / "run" / "head", vocabulary.info)
    assert check_export(folder, name, drafter, vocabulary).difference < 1e-4
    change(folder)
    with pytest.raises(ValueError, match=message):
        check_export(folder, name, drafter, vocabulary)


def test_eagle31_flags_change_what_is_drafted(target: Path, vocabulary: VocabularyHead, tmp_path: Path) -> None:
    folder = export(tmp_path, target, "eagle3.1", "vllm")
    drafter = load_head(tmp_path / "run" / "head", vocabulary.info)
    te.edit(folder, "norm_output", False)
    with pytest.raises(ValueError, match="drafts something else than the head it was made from: at draft step 2"):
        check_export(folder, "vllm", drafter, vocabulary)


def published(drafter: Drafter, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """SafeAILab's EAGLE-3 as released: one layer called midlayer, d2t as offsets, a Llama config without layer ids."""
    info = drafter.info
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": info.hidden_size,
        "intermediate_size": info.intermediate_size, "num_attention_heads": info.num_heads,
        "num_key_value_heads": info.num_kv_heads, "num_hidden_layers": 1, "head_dim": info.head_dim,
        "max_position_embeddings": 2048, "rms_norm_eps": info.rms_norm_eps, "rope_theta": 10000.0,
        "vocab_size": info.vocab_size, "draft_vocab_size": drafter.config.draft_vocab_size, "tie_word_embeddings": False,
        **changes,
    }  # fmt: skip
    tensors = {name.replace("layers.0.", "midlayer."): t.clone() for name, t in drafter.state_dict().items()}
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))
    return config, tensors


SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6], "use_aux_hidden_state": True},
}


@pytest.mark.parametrize(
    ("head", "changes", "layout"),
    [
        ("plain", {}, "eagle"),
        ("plain", {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle"),
        (
            "own_layers",
            {**SPECFORGE, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48},
            "sglang",
        ),
    ],
    ids=["SafeAILab", "SpecForge without ids", "SpecForge"],
)
@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_the_layouts_of_others(
    head: str, changes: dict[str, Any], layout: str, weights: str, vocabulary: VocabularyHead, tmp_path: Path
) -> None:
    drafter = te.make_head(HEADS[head], vocabulary)
    folder = te.write(tmp_path / "foreign", *published(drafter, **changes), weights)
    assert find_layout(folder) == layout
    assert same_drafts(import_head(folder, vocabulary), drafter, vocabulary)


def test_without_t2d(vocabulary: VocabularyHead, tmp_path: Path) -> None:
    """It follows from d2t."""
    drafter = te.make_head(HEADS["plain"], vocabulary)
    config, tensors = published(drafter)
    del tensors["t2d"]
    imported = import_head(te.write(tmp_path / "foreign", config, tensors), vocabulary)
    assert torch.equal(imported.state_dict()["t2d"], drafter.state_dict()["t2d"])


FOREIGN_FAULTS = {
    "absolute ids": ({}, lambda t: t["d2t"].add_(torch.arange(100)), "d2t must hold offsets"),
    "an id twice": ({}, lambda t: t["d2t"][1].sub_(t["d2t"][1] - t["d2t"][0] + 1), "d2t must hold offsets"),
    "t2d of another vocabulary": ({}, lambda t: t["t2d"].logical_not_(), "t2d does not name the ids that d2t does"),
    "embeddings as a feature": (
        {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 3, 5]}}, lambda t: None,
        "layer id 0 is out of range",
    ),
    "a narrower head": ({"target_hidden_size": 160}, lambda t: None, "a head of another width than its target's"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FOREIGN_FAULTS)
def test_faults_of_others_are_named(fault: str, vocabulary: VocabularyHead, tmp_path: Path) -> None:
    changes, change, message = FOREIGN_FAULTS[fault]
    config, tensors = published(te.make_head(HEADS["plain"], vocabulary), **changes)
    change(tensors)
    with pytest.raises(ValueError, match=message):
        import_head(te.write(tmp_path / "foreign", config, tensors), vocabulary)


def test_the_targets_embedding_may_be_in_the_file(vocabulary: VocabularyHead, tmp_path: Path) -> None:
    drafter = te.make_head(HEADS["plain"], vocabulary)
    folder = te.write(tmp_path / "foreign", *published(drafter))
    rows = vocabulary.embed(torch.arange(tiny.VOCAB))
    te.set_tensors(folder, embed_tokens__weight=rows.clone())
    assert same_drafts(import_head(folder, vocabulary), drafter, vocabulary)
    te.set_tensors(folder, embed_tokens__weight=rows + 1)
    with pytest.raises(ValueError, match="is for another target"):
        import_head(folder, vocabulary)
