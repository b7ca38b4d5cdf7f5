"""What `export.check` has to catch: each fault is put into a good export, and the message says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_export as te
import torch

from drafters.export.check import check_export
from drafters.export.write import export_run
from drafters.heads.base import Drafter, load_head
from drafters.target.weights import VocabularyHead, load_target_head


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


class Export:
    """A good export of a head, and its check."""

    def __init__(self, targets: Path, run: Path, head: str, name: str, family: str = "llama") -> None:
        self.target: VocabularyHead = load_target_head(te.section(te.make_target(targets, family)))
        te.make_run(run, te.make_target(targets, family), te.HEADS[head])
        self.name = name
        self.folder = export_run(run, name).folder
        self.drafter: Drafter = load_head(run / "head", self.target.info)

    def check(self, target: VocabularyHead | None = None) -> float:
        return check_export(self.folder, self.name, self.drafter, target or self.target).difference


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


# head, format, what is done to the folder, what the message says
FAULTS: dict[str, tuple[str, str, Callable[[Path], object], str]] = {
    "a tensor is missing": (
        "eagle", "vllm", lambda f: te.set_tensors(f, fc__weight=None),
        "is not a whole head in vllm's layout:\n  missing: fc.weight",
    ),
    "a tensor too many": (
        "eagle", "vllm", lambda f: te.set_tensors(f, norm__weight=zeros(64)), "left over: norm.weight",
    ),
    "a bias that vLLM drops": (
        "eagle", "vllm", lambda f: te.set_tensors(f, fc__bias=zeros(64)), "fc.bias is in the file, and vLLM drops it",
    ),
    "a bias that SGLang would draw": (
        "eagle", "sglang", lambda f: te.set_tensors(f, fc__bias=None), "SGLang would draw one at random",
    ),
    "a bias that the config denies": (
        "eagle_bias", "eagle", lambda f: te.edit(f, "bias", False),
        r"fc.bias in the file: True; bias in the config: False",
    ),
    "the key that gives the attention biases": (
        "eagle", "vllm", lambda f: te.edit(f, "bias", True), "config says bias or attention_bias",
    ),
    "another shape": (
        "eagle", "vllm", lambda f: te.set_tensors(f, fc__weight=zeros(64, 64)),
        r"shape of fc.weight: \(64, 64\), the head's is \(64, 128\)",
    ),
    "not finite": (
        "eagle", "vllm", lambda f: te.set_tensors(f, fc__weight=zeros(64, 128) / 0), "not finite: fc.weight",
    ),
    "other weights": (
        "eagle", "vllm", lambda f: te.set_tensors(f, fc__weight=te.tensors_of(f)["fc.weight"].flip(1)),
        "drafts something else than the head it was made from: at draft step 1",
    ),
    "a head count that is wrong": (
        "medusa", "vllm", lambda f: te.edit(f, "num_heads", 2), "left over: blocks.2.layers.0.bias",
    ),
    "biases that vLLM drops": (
        "medusa", "vllm", lambda f: te.edit(f, "medusa_fc_bias", False), "medusa_fc_bias is not true",
    ),
    "a Medusa output that is missing": (
        "medusa", "vllm", lambda f: te.set_tensors(f, lm_heads__1__weight=None), "missing: lm_heads.1.weight",
    ),
    "no rotary base": (
        "eagle", "vllm", lambda f: [te.edit(f, k, None) for k in ("rope_theta", "rope_scaling", "rope_parameters")],
        "config.json has neither rope_theta nor rope_parameters",
    ),
    "another rotary base in one schema": (
        "eagle", "vllm", lambda f: te.edit(f, "rope_theta", 5e5), "differ in rope_theta",
    ),
    "another rotary base in both": (
        "eagle", "vllm", lambda f: [te.edit(f, k, 5e5) for k in ("rope_theta", "rope_parameters.rope_theta")],
        "rotary settings of config.json are not the head's: rope_theta 500000.0 instead of 10000.0",
    ),
    "another norm epsilon": (
        "eagle_two_layers", "vllm", lambda f: te.edit(f, "rms_norm_eps", 0.5), "drafts something else",
    ),
    "fewer positions": (
        "eagle", "vllm", lambda f: te.edit(f, "max_position_embeddings", 64),
        "max_position_embeddings is 64, the target's is 512",
    ),
    "another vocabulary": (
        "eagle", "vllm", lambda f: te.edit(f, "vocab_size", 300), "is for another target: its vocabulary size is 300",
    ),
    "an embedding that is not the target's": (
        "eagle", "eagle", lambda f: te.set_tensors(f, embed_tokens__weight=zeros(320, 64)),
        "for another target: its embed_tokens.weight is not the matrix",
    ),
    "an output that is not the target's": (
        "medusa_shared", "vllm", lambda f: te.set_tensors(f, lm_head__weight=zeros(320, 64)),
        "for another target: its lm_head.weight is not the matrix",
    ),
    "an unknown architecture": (
        "eagle", "vllm", lambda f: te.edit(f, "architectures", ["GPT"]), "vLLM has no drafter of architecture 'GPT'",
    ),
    "no config": ("eagle", "vllm", lambda f: (f / "config.json").unlink(), "has no config.json"),
    "half a config": (
        "eagle", "vllm", lambda f: (f / "config.json").write_text('{"a": '), "config.json is damaged",
    ),
    "no weights": ("eagle", "vllm", lambda f: (f / "model.safetensors").unlink(), "has no weights"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_caught_and_named(fault: str, targets: Path, tmp_path: Path) -> None:
    head, name, change, message = FAULTS[fault]
    export = Export(targets, tmp_path / "run", head, name)
    assert export.check() < 1e-4
    change(export.folder)
    with pytest.raises(ValueError, match=message):
        export.check()


@pytest.mark.parametrize("keep", [0.999, 0.5, 4])
def test_a_truncated_file_is_caught(keep: float, targets: Path, tmp_path: Path) -> None:
    export = Export(targets, tmp_path / "run", "eagle", "vllm")
    path = export.folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        export.check()


def test_a_target_of_the_same_sizes_but_other_weights_is_caught(targets: Path, tmp_path: Path) -> None:
    export = Export(targets, tmp_path / "run", "eagle", "vllm")
    other = load_target_head(te.section(te.make_target(targets, "other_llama")))
    with pytest.raises(
        ValueError, match=f"is for another target: it was made for weights {export.target.info.weights_hash}"
    ):
        export.check(other)


def test_a_target_of_another_width_is_caught(targets: Path, tmp_path: Path) -> None:
    export = Export(targets, tmp_path / "run", "eagle", "vllm")
    narrow = load_target_head(te.section(te.make_target(targets, "narrow_llama")))
    with pytest.raises(ValueError, match=r"its hidden size is 64, that of .+ is 32"):
        export.check(narrow)


def test_a_check_that_fails_leaves_nothing(targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers leave out a setting: no folder appears, an older one stays."""
    run = te.make_run(tmp_path / "run", te.make_target(targets, "llama"), te.HEADS["eagle"])
    folder = export_run(run, "vllm").folder
    before = (folder / "config.json").read_text()
    monkeypatch.setattr("drafters.export.layout.rope_config", lambda parameters: {"rope_theta": 1.0})
    with pytest.raises(ValueError, match=f"{folder}: rotary settings"):
        export_run(run, "vllm")
    with pytest.raises(ValueError, match="rotary settings"):
        export_run(run, "sglang")
    assert (folder / "config.json").read_text() == before
    assert [path.name for path in (run / "export").iterdir()] == ["vllm"]


def test_long_rotary_settings_matter(targets: Path, tmp_path: Path) -> None:
    export = Export(targets, tmp_path / "run", "eagle", "vllm", "llama_untied_rope")
    for key in ("rope_scaling", "rope_parameters"):
        te.edit(export.folder, f"{key}.factor", 8.0)
    with pytest.raises(ValueError, match=r"factor 8\.0 instead of 4\.0"):
        export.check()
    assert json.loads((export.folder / "config.json").read_text())["rope_scaling"]["rope_type"] == "llama3"
