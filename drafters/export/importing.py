"""Heads from elsewhere, and our own exports, as heads of this package.

Sizes and counts come from the tensors and the layers' config; a folder that this package exported also says how it was trained.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from drafters.export.about import ABOUT_FILE, Facts, read_about, read_facts
from drafters.export.check import CheckResult, check_target, compare_drafts
from drafters.export.layout import from_ids
from drafters.export.reader import LAYOUTS, find_layout, read_folder
from drafters.export.rotary import config_rope
from drafters.export.spec import Eagle3Spec, Spec, compare_shapes, expected_shapes, read_spec
from drafters.export.strict import ReadHead
from drafters.heads.base import Drafter, save_head
from drafters.recipe import TargetSection, find_drafter
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.target.weights import load_target_head


def import_folder(source: Path, target: TargetSection, out: Path, layout: str = "") -> CheckResult:
    """Writes a head from elsewhere as a head folder, after comparing its draft logits with those of the file.

    Args:
        source: its folder.
        target: the target it drafts for.
        out: the head folder to write.
        layout: one of `reader.LAYOUTS`; by default what the folder looks like.

    Raises:
        ValueError: see `import_head`, or its logits differ.
    """
    vocabulary = load_target_head(replace(target, dtype="float32"))
    layout = layout or find_layout(source)
    drafter, read = _build(source, vocabulary, layout)
    result = compare_drafts(read, source, copy.deepcopy(drafter).float(), vocabulary, steps=max(read.heads, 1))
    drafter.info = replace(drafter.info, dtype=target.dtype)
    facts = _facts(source)
    extra = {"facts": asdict(facts)} if facts else {"imported_from": str(source), "layout": layout}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_head(drafter, out, extra)
    return result


def import_head(source: Path, target: TargetHead, layout: str = "") -> Drafter:
    """A head from elsewhere, ready to decode with a target.

    Raises:
        ValueError: no known layout, tensors that are missing or left over, sizes that contradict each other, a variant
            that no class here has, or a head for another target; the message names the layout.
    """
    return _build(source, target, layout or find_layout(source))[0]


def _build(source: Path, target: TargetHead, layout: str) -> tuple[Drafter, ReadHead]:
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    read = read_folder(source, layout, target.info.num_layers)
    check_target(read, source, target)
    try:
        info = _info(read, target.info)
        tensors = _own_tensors(read, layout)
        drafter = _drafter(read, tensors, info, _facts(source))
    except ValueError as error:
        raise ValueError(f"{source}, read in {layout}'s layout: {error}") from error
    drafter.load_state_dict(_own_names(drafter, tensors), assign=True)
    return drafter.eval(), read


def _facts(source: Path) -> Facts | None:
    told = read_about(source)
    return read_facts(told.get("facts"), source / ABOUT_FILE) if told else None


def _info(read: ReadHead, info: TargetInfo) -> TargetInfo:
    """The target's facts with the sizes and angles of the head's layers, where these are its own."""
    if read.method == "medusa":
        return info
    config, rope = read.config, config_rope(read.config)
    positions = config.get("max_position_embeddings", info.max_position_embeddings)
    if positions != info.max_position_embeddings and rope["rope_type"] not in ("default", "linear", "llama3"):
        rope.setdefault("original_max_position_embeddings", positions)  # its angles depend on it
    return replace(
        info,
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=rope,
    )


def _own_tensors(read: ReadHead, layout: str) -> dict[str, Tensor]:
    """Without copies of the target's matrices, already compared with them, and without zeros that a layout demands."""
    copies = ("embed_tokens.weight", *(["lm_head.weight"] if read.method == "medusa" else []))
    tensors = {name: tensor for name, tensor in read.tensors.items() if name not in copies}
    if layout == "sglang" and "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
    if read.method == "medusa":
        for name in [name for name in tensors if name.startswith("blocks.") and name.endswith(".weight")]:
            tensors.setdefault(name.removesuffix("weight") + "bias", tensors[name].new_zeros(tensors[name].shape[0]))
    if "d2t" in tensors:
        tensors["t2d"] = _draftable(tensors["d2t"], tensors.get("t2d"), read.config["vocab_size"])
    return tensors


def _draftable(d2t_U: Tensor, t2d_V: Tensor | None, vocab_size: int) -> Tensor:
    """Which of the target's ids can be drafted, from the offsets."""
    ids_U = d2t_U + torch.arange(len(d2t_U))
    if ids_U.min() < 0 or ids_U.max() >= vocab_size or not bool((ids_U.diff() > 0).all()):
        raise ValueError(
            f"d2t must hold offsets (target id - draft id) that lead to ascending ids below {vocab_size}; they lead to ids "
            f"{int(ids_U.min())} to {int(ids_U.max())}"
        )
    draftable_V = torch.zeros(vocab_size, dtype=torch.bool)
    draftable_V[ids_U] = True
    if t2d_V is not None and not torch.equal(t2d_V.bool(), draftable_V):
        raise ValueError("t2d does not name the ids that d2t does")
    return draftable_V


def _drafter(read: ReadHead, tensors: dict[str, Tensor], info: TargetInfo, facts: Facts | None) -> Drafter:
    """The class with the settings it was trained with, where they are known and agree with the file; without weights."""
    drafter_class = find_drafter(read.method)
    adapter = TypeAdapter(drafter_class.Config)
    configs = [adapter.validate_python({"type": read.method, **_settings(read, tensors, info)})]
    if facts and facts.head_type == read.method:
        configs.append(adapter.validate_python(facts.head_config))
    with torch.device("meta"):
        drafters: list[Drafter] = [drafter_class(config, info) for config in configs]
    found = read_spec(drafters[0])
    faults = compare_shapes(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected_shapes(found, info)
    )
    faults += [f"not finite: {n}" for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if faults:
        raise ValueError("it contradicts itself:\n  " + "\n  ".join(faults))
    agree = [drafter for drafter in drafters if _counted(read_spec(drafter), info) == _counted(found, info)]
    return agree[-1]


def _counted(spec: Spec, info: TargetInfo) -> Spec:
    """With layers counted from 0."""
    if not isinstance(spec, Eagle3Spec):
        return spec
    return replace(spec, feature_layers=tuple(info.layer(layer) for layer in spec.feature_layers))


def _settings(read: ReadHead, tensors: dict[str, Tensor], info: TargetInfo) -> dict[str, Any]:
    """Fields of the recipe section that the file tells; 0 where a size is the target's."""
    if read.method == "medusa":
        shared = bool(read.config.get("original_lm_head"))
        return {"num_heads": read.heads, "num_layers": read.layers, "shared_output": shared}
    found = {
        "intermediate_size": (read.config["intermediate_size"], info.intermediate_size),
        "num_heads": (read.config["num_attention_heads"], info.num_heads),
        "num_kv_heads": (read.config["num_key_value_heads"], info.num_kv_heads),
    }
    sizes = {name: 0 if own == targets else own for name, (own, targets) in found.items()}
    sizes["num_layers"] = read.layers
    if read.method == "eagle":
        return {**sizes, "fc_bias": "fc.bias" in tensors}
    if read.layers > 1:
        sizes["steps"] = 1  # what a head of several layers can be trained with
    return {
        **sizes,
        "feature_layers": from_ids(read.streams, info, "inputs"),
        "draft_vocab_size": read.config["draft_vocab_size"] if "d2t" in tensors else 0,
        "feature_norm": read.fc_norm,
        "feed_back_normed": read.norm_output,
    }


def _own_names(drafter: Drafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Serving names and offsets back to the head's own."""
    own = {serving: name for name, serving in read_spec(drafter).renames.items()}
    if "d2t" in tensors:
        tensors = {**tensors, "d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}
    return {own.get(name, name): tensor for name, tensor in tensors.items()}
