"""Recipes: what is refused, and how; overrides; the shipped ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from drafters.heads.base import Drafter
from drafters.recipe import RecipeError, dump_recipe, find_drafter
from drafters.recipe_file import load_recipe, recipe_schema
from drafters.target.adapter import TargetInfo

RECIPES = Path("recipes")
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))
BARE = """\
target: {path: somewhere}
drafter: {type: medusa}
data: {train: [chats.jsonl]}
output: {folder: runs/x}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Any:
    (tmp_path / "r.yaml").write_text(text)
    return load_recipe([str(tmp_path / "r.yaml"), *overrides])


def faults(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text, *overrides)
    return str(error.value)


def test_every_fault_is_told_at_once_with_its_line_and_the_closest_name(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """\
target:
  path: somewhere
  path: elsewhere
drafter:
  type: medusa
  num_head: 4
data:
  train: chats.jsonl
trian:
  epochs: 1
train:
  schedule: cosin
  batch_size: 2.5
eval:
  tree: {dept: 3}
""",
    )
    lines = [line.strip() for line in found.splitlines()]
    assert "has 8 fault(s)" in lines[0]
    for line, parts in {
        1: ["section output is missing"],
        3: ["target.path: stands twice"],
        6: ["drafter.num_head: unknown field; did you mean num_heads?"],
        8: ["data.train: ", "array", "got 'chats.jsonl'"],
        9: ["trian: unknown section; did you mean train?"],
        12: ["train.schedule: ", "'cosine'", "got 'cosin'"],
        13: ["train.batch_size: ", "integer", "got 2.5"],
        15: ["eval.tree.dept: unknown field; did you mean depth?"],
    }.items():
        assert any(
            told.startswith(f"{tmp_path}/r.yaml:{line}: ") and all(part in told for part in parts) for told in lines
        ), (line, lines)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=3 ", ""),
        ("train.betas=[0.9, 0.99]", ""),
        ("train.lerning_rate=1", "argv: train.lerning_rate: unknown field; did you mean learning_rate?"),
        ("batch_size=3", "expected section.field=value, got 'batch_size=3'"),
        ("train.batch_size", "expected section.field=value, got 'train.batch_size'"),
        ("train.batch_size=0", "argv: train.batch_size: must be at least 1, got 0"),
        ("train.epochs.x=1", "argv: train.epochs"),
    ],
)
def test_overrides(tmp_path: Path, override: str, message: str) -> None:
    if message:
        assert message in faults(tmp_path, BARE, override)
    else:
        load(tmp_path, BARE, override)


def test_an_override_wins_and_is_read_as_yaml(tmp_path: Path) -> None:
    text = BARE + "train: {learning_rate: 3e-3, epochs: 2}\n"
    recipe = load(tmp_path, text, "train.learning_rate=1e-4", "eval.tree.depth=6", "train.betas=[0.8, 0.9]")
    assert (recipe.train.learning_rate, recipe.eval.tree.depth, recipe.train.betas) == (1e-4, 6, (0.8, 0.9))
    assert recipe.train.epochs == 2
    assert load(tmp_path, text).train.learning_rate == 3e-3, "1e-4 is a number in YAML, too"


def test_settings_that_make_no_sense_together_are_told_all_at_once(tmp_path: Path) -> None:
    found = faults(tmp_path, BARE, "train.batch_size=3", "train.micro_batch_size=2", "data.heldout_fraction=1.0")
    assert "must be a multiple of micro_batch_size, got 3 and 2" in found and "between 0 and 1, got 1.0" in found


def test_an_unknown_drafter_names_the_closest(tmp_path: Path) -> None:
    assert "did you mean medusa?" in faults(tmp_path, BARE.replace("medusa", "medussa"))


def test_a_missing_file_and_bad_yaml_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        load_recipe([str(tmp_path / "none.yaml")])
    assert "is not YAML" in faults(tmp_path, "target: [")


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_load_and_survive_being_saved(name: str, tmp_path: Path) -> None:
    recipe = load_recipe([str(RECIPES / f"{name}.yaml")])
    assert recipe.output.folder == f"runs/{name}"
    dump_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe([str(tmp_path / "saved.yaml")]) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_files_that_recipes_name_are_there(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text()
    words = [word for word in text.split() if word.startswith(("recipes/", "train/"))]
    assert all(Path(word).is_file() for word in words), words


@pytest.mark.parametrize("file", sorted((RECIPES / "accelerate").glob("*.yaml")), ids=lambda file: file.stem)
def test_launcher_configs_are_accelerate_s(file: Path) -> None:
    config: Any = load_config_from_file(str(file))
    assert config.num_processes in (1, 8) and config.mixed_precision == "no"


LLAMA = TargetInfo(
    path="meta-llama/Llama-3.1-8B-Instruct",
    revision="main",
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    num_layers=32,
    vocab_size=128256,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 500000.0},
    max_position_embeddings=131072,
    tied_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=(128001, 128008, 128009),
    weights_hash="",
    tokenizer_hash="",
    template_hash="",
)
QWEN = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    num_layers=36,
    intermediate_size=12288,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1000000.0},
    max_position_embeddings=40960,
    eos_token_ids=(151645,),
)


@pytest.mark.parametrize("name", [name for name in NAMES if "8b" in name])
def test_heads_of_the_8b_recipes_have_the_target_s_sizes(name: str) -> None:
    info = LLAMA if name.startswith("llama") else QWEN
    config = load_recipe([str(RECIPES / f"{name}.yaml")]).drafter
    with torch.device("meta"):
        head: Drafter = find_drafter(config.type)(config, info)
    shapes = {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}
    gate = {"medusa": None, "hydra": None}.get(config.type, (info.intermediate_size, 4096))
    assert gate is None or shapes["layers.0.mlp.gate_proj.weight"] == gate
    if config.type == "eagle3":
        assert shapes["fc.weight"] == (4096, 3 * 4096) and shapes["lm_head.weight"] == (32000, 4096)
        assert shapes["layers.0.self_attn.k_proj.weight"] == (1024, 2 * 4096)
    if config.type == "eagle":
        assert shapes["fc.weight"] == (4096, 2 * 4096)
    if config.type == "medusa":
        assert (info.vocab_size, 4096) in shapes.values()
    assert all(0 <= info.layer(layer) < info.num_layers for layer in head.feature_layers)


def test_the_schema_on_disk_is_that_of_the_code() -> None:
    on_disk = json.loads((RECIPES / "schema.json").read_text())
    assert on_disk == recipe_schema(), "run: python scripts/make_schema.py"


def test_the_schema_knows_every_head_s_fields_and_no_others() -> None:
    schema = recipe_schema()
    heads = {part["properties"]["type"].get("const"): part for part in schema["properties"]["drafter"]["anyOf"]}
    assert "draft_vocab_size" in heads["eagle3"]["properties"] and "num_heads" in heads["medusa"]["properties"]
    assert not any(
        part.get("additionalProperties", True) for part in (schema, heads["eagle3"], *schema["$defs"].values())
    )
    assert set(schema["required"]) == {"target", "drafter", "data", "output"}
