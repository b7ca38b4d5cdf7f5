"""Heads from elsewhere load into our classes and draft the same; our own exports come back as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_export as te
import torch
from safetensors.torch import save_file

from drafters.decoding.generate import generate
from drafters.export.check import own_logits
from drafters.export.importing import import_folder, import_head
from drafters.export.reader import find_layout
from drafters.export.write import export_run
from drafters.heads.base import Drafter, load_head
from drafters.recipe import TreeSection
from drafters.target.hf import load_target
from drafters.target.weights import VocabularyHead, load_target_head

HELD = [
    ("eagle", "vllm"),
    ("eagle", "sglang"),
    ("eagle", "eagle"),
    ("eagle_two_layers", "vllm"),
    ("eagle_bias", "sglang"),
    ("eagle_bias", "eagle"),
    ("medusa", "vllm"),
    ("medusa_deep", "vllm"),
    ("medusa_shared", "vllm"),
]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def llama(targets: Path) -> VocabularyHead:
    return load_target_head(te.section(te.make_target(targets, "llama")))


def same_drafts(first: Drafter, second: Drafter, target: VocabularyHead, steps: int = 2) -> bool:
    info = target.info
    tokens = torch.randint(info.vocab_size, (9,), generator=torch.Generator().manual_seed(1))
    streams = torch.randn(info.num_layers + 1, 8, info.hidden_size, generator=torch.Generator().manual_seed(2))
    pairs = zip(*(own_logits(head, target, tokens, streams, steps) for head in (first, second)), strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)  # memory layouts differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "head", "name"),
    [
        (family, head, name)
        for family in ("qwen3", "yarn", "padded_vocab")
        for head, name in HELD
        if (family, name) != ("yarn", "eagle")  # EAGLE's code has no yarn
    ],
)
def test_export_import_export_is_byte_identical(
    family: str, head: str, name: str, dtype: torch.dtype, targets: Path, tmp_path: Path
) -> None:
    target = te.make_target(targets, family)
    run = te.make_run(tmp_path / "run", target, te.HEADS[head], dtype)
    first = export_run(run, name).folder
    served = replace(te.section(target), dtype=str(dtype).removeprefix("torch."))
    import_folder(first, served, tmp_path / "imported" / "head")
    second = export_run(tmp_path / "imported", name).folder
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


@pytest.mark.parametrize(("head", "name"), HELD)
def test_the_head_itself_comes_back(head: str, name: str, targets: Path, llama: VocabularyHead, tmp_path: Path) -> None:
    """Weights, and every setting of the recipe, also those that no serving format knows."""
    run = te.make_run(tmp_path / "run", te.make_target(targets, "llama"), te.HEADS[head])
    imported = import_head(export_run(run, name).folder, llama)
    original = load_head(run / "head", llama.info)
    assert imported.config == original.config == te.HEADS[head]
    assert imported.info == original.info
    assert imported.state_dict().keys() == original.state_dict().keys()
    assert all(torch.equal(tensor, imported.state_dict()[key]) for key, tensor in original.state_dict().items())


@pytest.mark.parametrize(("head", "name"), HELD)
def test_sizes_come_from_the_file_alone(
    head: str, name: str, targets: Path, llama: VocabularyHead, tmp_path: Path
) -> None:
    """Without drafters.json, as from elsewhere."""
    run = te.make_run(tmp_path / "run", te.make_target(targets, "llama"), te.HEADS[head])
    folder = export_run(run, name).folder
    (folder / "drafters.json").unlink()
    imported = import_head(folder, llama)
    original = load_head(run / "head", llama.info)
    assert imported.export_spec() == original.export_spec()
    assert same_drafts(imported, original, llama)


def foreign_medusa(tmp_path: Path, llama: VocabularyHead, head: str = "medusa") -> tuple[Drafter, Path]:
    drafter = te.make_head(te.HEADS[head], llama)
    return drafter, te.write(tmp_path / "medusa", *te.medusa_v1(drafter), "medusa_lm_head.pt")


def foreign_eagle(
    tmp_path: Path, llama: VocabularyHead, head: str = "eagle", weights: str = "pytorch_model.bin"
) -> tuple[Drafter, Path]:
    drafter = te.make_head(te.HEADS[head], llama)
    return drafter, te.write(tmp_path / "eagle", *te.eagle_v1(drafter, llama), weights)


@pytest.mark.parametrize("head", ["medusa", "medusa_deep"])
def test_medusa_v1(head: str, llama: VocabularyHead, tmp_path: Path) -> None:
    """The config says 2 heads of 1 layer; the file is right."""
    drafter, folder = foreign_medusa(tmp_path, llama, head)
    assert find_layout(folder) == "medusa"
    assert same_drafts(import_head(folder, llama), drafter, llama)


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("head", ["eagle", "eagle_bias"])
def test_eagle_v1(head: str, weights: str, llama: VocabularyHead, tmp_path: Path) -> None:
    drafter, folder = foreign_eagle(tmp_path, llama, head, weights)
    assert find_layout(folder) == "eagle"
    assert same_drafts(import_head(folder, llama), drafter, llama)


def test_sizes_that_are_not_the_targets(llama: VocabularyHead, tmp_path: Path) -> None:
    """Own heads, own rotary base, own epsilon."""
    config = replace(te.HEADS["eagle"], num_heads=2, num_kv_heads=1, intermediate_size=40)
    own = VocabularyHead.__new__(VocabularyHead)
    own.__dict__.update(llama.__dict__)
    rope = {"rope_type": "default", "rope_theta": 777.0}
    own.info = replace(llama.info, head_dim=8, rms_norm_eps=0.01, rope=rope)
    drafter = te.make_head(config, own)
    folder = te.write(tmp_path / "eagle", *te.eagle_v1(drafter, own))
    te.edit(folder, "rope_theta", 777.0)
    te.edit(folder, "head_dim", 8)
    assert same_drafts(import_head(folder, llama), drafter, llama)
    te.edit(folder, "rope_theta", 778.0)
    assert not same_drafts(import_head(folder, llama), drafter, llama)


def test_shards(llama: VocabularyHead, tmp_path: Path) -> None:
    drafter, folder = foreign_eagle(tmp_path, llama, weights="model.safetensors")
    tensors = te.tensors_of(folder)
    halves = {"a.safetensors": list(tensors)[:4], "b.safetensors": list(tensors)[4:]}
    for name, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, folder / name)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    placed = {key: name for name, keys in halves.items() for key in keys}
    index.write_text(json.dumps({"weight_map": placed}))
    assert same_drafts(import_head(folder, llama), drafter, llama)
    index.write_text(json.dumps({"weight_map": {**placed, "more": "a.safetensors"}}))
    with pytest.raises(ValueError, match="promises tensors that its files lack: more"):
        import_head(folder, llama)
    index.write_text(json.dumps({"weight_map": {**placed, "more": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="a file outside of its folder"):
        import_head(folder, llama)


def test_vllms_medusa_with_a_prefix_and_without_biases(llama: VocabularyHead, tmp_path: Path) -> None:
    drafter = te.make_head(te.HEADS["medusa"], llama)
    for block in drafter.get_submodule("blocks").modules():
        if isinstance(block, torch.nn.Linear):
            block.bias.data.zero_()
    tensors = {f"medusa_heads.{name}": t for name, t in drafter.state_dict().items() if not name.endswith("bias")}
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 320}
    folder = te.write(tmp_path / "medusa", config, {name: tensor.clone() for name, tensor in tensors.items()})
    assert find_layout(folder) == "vllm"
    assert same_drafts(import_head(folder, llama), drafter, llama)


def test_an_imported_head_decodes(targets: Path, llama: VocabularyHead, tmp_path: Path) -> None:
    """Greedy output is the target's own."""
    target = load_target(te.section(te.make_target(targets, "llama")))
    for make in (foreign_medusa, foreign_eagle):
        folder = make(tmp_path, llama)[1]
        import_folder(folder, te.section(te.make_target(targets, "llama")), tmp_path / f"{folder.name}_head")
        head = load_head(tmp_path / f"{folder.name}_head", target.info)
        prompts = [[5, 6, 7, 8], [9, 10]]
        chain = TreeSection(kind="chain", depth=3)
        drafted = generate(target, head, prompts, max_new_tokens=12, tree=chain, eos_token_ids=())
        plain = generate(target, None, prompts, max_new_tokens=12, eos_token_ids=())
        assert drafted.sequences == plain.sequences
        assert drafted.stats[0].reached[0] > 0


def drop(folder: Path, name: str) -> None:
    path = next(folder.glob("*.pt"), folder / "pytorch_model.bin")
    tensors = torch.load(path, weights_only=True)
    del tensors[name]
    torch.save(tensors, path)


def put(folder: Path, name: str, tensor: Any) -> None:
    path = next(folder.glob("*.pt"), folder / "pytorch_model.bin")
    torch.save({**torch.load(path, weights_only=True), name: tensor}, path)


# layout: fault; what is done to the folder; what the message says
FAULTS = {
    "medusa: head without a layer": (
        foreign_medusa, lambda f: drop(f, "1.0.linear.bias"),
        "not a whole head in medusa's layout:\n  missing: blocks.1.layers.0.bias",
    ),
    "medusa: head without a matrix": (foreign_medusa, lambda f: drop(f, "2.1.weight"), "missing: lm_heads.2.weight"),
    "medusa: no matrix": (foreign_medusa, lambda f: drop(f, "0.1.weight"),
    "not a head in medusa's layout: missing: 0.1.weight"),
    "medusa: something else": (
        foreign_medusa, lambda f: put(f, "0.7.weight", torch.zeros(2)),
        "not a whole head in medusa's layout:\n  left over: 0.7.weight",
    ),
    "medusa: another shape": (
        foreign_medusa, lambda f: put(f, "2.1.weight", torch.zeros(319, 64)),
        r"read in medusa's layout: it contradicts itself:\n  shape of lm_heads.2.weight: \(319, 64\), expected \(320, 64\)",
    ),
    "medusa: another target": (
        foreign_medusa, lambda f: put(f, "0.1.weight", torch.zeros(319, 64)),
        "for another target: its vocabulary size is 319",
    ),
    "eagle: a layer too few": (
        foreign_eagle, lambda f: drop(f, "layers.0.mlp.up_proj.weight"),
        "not a whole head in eagle's layout:\n  missing: layers.0.mlp.up_proj",
    ),
    "eagle: attention biases": (
        foreign_eagle, lambda f: put(f, "layers.0.self_attn.q_proj.bias", torch.zeros(64)),
        "left over: layers.0.self_attn.q_proj.bias",
    ),
    "eagle: another shape": (
        foreign_eagle, lambda f: te.edit(f, "intermediate_size", 95),
        r"shape of layers.0.mlp.gate_proj.weight: \(96, 64\), expected \(95, 64\)",
    ),
    "eagle: not numbers": (
        foreign_eagle, lambda f: put(f, "fc.weight", torch.full((64, 128), torch.nan)), "not finite: fc.weight",
    ),
    "eagle: no sizes": (
        foreign_eagle, lambda f: te.edit(f, "num_attention_heads", None),
        "not a head in eagle's layout: config.json has no 'num_attention_heads'",
    ),
    "eagle: no width": (
        foreign_eagle, lambda f: te.edit(f, "intermediate_size", None),
        "not a whole head in eagle's layout:\n  config.json has no 'intermediate_size'",
    ),
    "eagle: another embedding": (
        foreign_eagle, lambda f: put(f, "embed_tokens.weight", torch.zeros(320, 64)),
        "for another target: its embed_tokens.weight",
    ),
    "eagle: more than tensors": (foreign_eagle, lambda f: put(f, "note", "hello"), "is not a dict of tensors by name"),
    "eagle: code": (foreign_eagle, lambda f: put(f, "fc.weight", Path), "holds more than tensors"),
    "eagle: cut short": (
        foreign_eagle,
        lambda f: (f / "pytorch_model.bin").write_bytes((f / "pytorch_model.bin").read_bytes()[:9000]),
        "damaged, cut short or holds more than tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_layout(fault: str, llama: VocabularyHead, tmp_path: Path) -> None:
    make, change, message = FAULTS[fault]
    folder = make(tmp_path, llama)[1]
    import_head(folder, llama)
    change(folder)
    with pytest.raises(ValueError, match=message):
        import_head(folder, llama)


def test_unknown_layouts_are_refused(llama: VocabularyHead, tmp_path: Path) -> None:
    folder = te.write(tmp_path / "other", {"architectures": ["Novel"]}, {"a.weight": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"in no layout that is known .+ architecture 'Novel', tensors such as a\.weight"
    ):
        import_head(folder, llama)
    with pytest.raises(ValueError, match="there is no layout 'novel'; there are vllm"):
        import_head(folder, llama, "novel")
