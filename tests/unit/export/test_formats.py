"""Every head in every format that can hold it, for every family of targets: written, read strictly, drafts equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_export as te
import torch
from safetensors import safe_open

from drafters.export.formats import FORMATS
from drafters.export.write import export_run

# head: formats that hold it on a target with plain rotary positions
HOLD = {
    "eagle": {"vllm", "sglang", "eagle"},
    "eagle_two_layers": {"vllm", "sglang"},
    "eagle_bias": {"sglang", "eagle"},
    "medusa": {"vllm"},
    "medusa_deep": {"vllm"},
    "medusa_shared": {"vllm"},
}
SCALED = ("llama_untied_rope", "yarn")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.mark.parametrize("family", [name for name in te.TARGETS if "_llama" not in name])
@pytest.mark.parametrize("head", te.HEADS)
def test_every_format_holds_the_head_or_says_why(head: str, family: str, targets: Path, tmp_path: Path) -> None:
    target = te.make_target(targets, family)
    run = te.make_run(tmp_path / "run", target, te.HEADS[head])
    hold = HOLD[head] - ({"eagle"} if family in SCALED else set())
    for name in FORMATS:
        if name in hold:
            assert export_run(run, name).check.difference < 1e-4
        else:
            with pytest.raises(ValueError, match=f"the format '{name}' can't hold this head: .+; formats that hold"):
                export_run(run, name)
            assert not (run / "export" / name).exists()


def test_the_config_says_what_vllm_has_to_know(targets: Path, tmp_path: Path) -> None:
    target = te.make_target(targets, "qwen3")
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle_two_layers"])
    config = json.loads((export_run(run, "vllm").folder / "config.json").read_text())
    own = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 2
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 32)
    assert config["intermediate_size"] == 48
    for key in ("vocab_size", "hidden_size", "max_position_embeddings", "rms_norm_eps"):
        assert config[key] == own[key]
    assert "bias" not in config  # vLLM takes it for one of the attention
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == own["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("family", SCALED)
def test_scaled_rotary_positions_are_in_both_schemas(family: str, targets: Path, tmp_path: Path) -> None:
    target = te.make_target(targets, family)
    run = te.make_run(tmp_path / "run", target, te.HEADS["eagle"])
    config = json.loads((export_run(run, "vllm").folder / "config.json").read_text())
    own = json.loads((target / "config.json").read_text())["rope_parameters"]
    assert config["rope_parameters"] == own
    assert {**config["rope_scaling"], "rope_theta": config["rope_theta"]} == own


def test_the_medusa_config_has_no_key_that_vllm_would_rename(targets: Path, tmp_path: Path) -> None:
    run = te.make_run(tmp_path / "run", te.make_target(targets, "llama"), te.HEADS["medusa_deep"])
    folder = export_run(run, "vllm").folder
    config = json.loads((folder / "config.json").read_text())
    assert {key for key in config if "num" in key} == {"num_heads", "num_hidden_layers"}
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (2, 2, True)


def test_shared_medusa_carries_the_targets_matrix(targets: Path, tmp_path: Path) -> None:
    """A tied target has it as its embedding."""
    target = te.make_target(targets, "llama")
    run = te.make_run(tmp_path / "run", target, te.HEADS["medusa_shared"])
    folder = export_run(run, "vllm").folder
    assert json.loads((folder / "config.json").read_text())["original_lm_head"] is True
    with safe_open(target / "model.safetensors", framework="pt") as stream:
        assert torch.equal(te.tensors_of(folder)["lm_head.weight"], stream.get_tensor("model.embed_tokens.weight"))


def test_sglang_gets_a_bias_of_zeros(targets: Path, tmp_path: Path) -> None:
    """Its class has one in any case, of random values where the file has none."""
    run = te.make_run(tmp_path / "run", te.make_target(targets, "llama"), te.HEADS["eagle"])
    assert not te.tensors_of(export_run(run, "sglang").folder)["fc.bias"].any()


@pytest.mark.parametrize(("head", "name"), [("eagle", "eagle"), ("eagle", "sglang"), ("medusa_shared", "vllm")])
def test_bfloat16_stays(head: str, name: str, targets: Path, tmp_path: Path) -> None:
    target = te.make_target(targets, "llama")
    run = te.make_run(tmp_path / "run", target, te.HEADS[head], torch.bfloat16)
    done = export_run(run, name)
    assert {tensor.dtype for tensor in te.tensors_of(done.folder).values()} == {torch.bfloat16}
    assert json.loads((done.folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert "--dtype bfloat16" in done.command or name == "eagle"
    kept = te.tensors_of(run / "head")
    assert all(torch.equal(te.tensors_of(done.folder)[tensor], kept[tensor]) for tensor in kept)
