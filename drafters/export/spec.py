"""What a head says of itself for export, read once into typed form.

`Drafter.export_spec()` gives a dict: `kind` names the method, the rest are its sizes. Tensors travel under serving names,
those of vLLM (`layers.0.self_attn.q_proj.weight`, `blocks.0.layers.0.weight`); a head whose own names differ says so in
`renames`. Nothing here asks which class the head is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from drafters.heads.base import Drafter
from drafters.target.adapter import TargetHead, TargetInfo

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What every kind has. renames: serving name of a tensor by the head's own name, where they differ."""

    kind: str
    renames: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(Spec):
    """K residual blocks, each with an output matrix of its own or (shared_output) all with the target's."""

    num_heads: int
    num_layers: int
    shared_output: bool


@dataclass(frozen=True, kw_only=True)
class LayerSpec(Spec):
    """Sizes of Llama decoder layers; rope_parameters as transformers names them."""

    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EagleSpec(LayerSpec):
    """EAGLE-1."""

    fc_bias: bool


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(LayerSpec):
    """EAGLE-3.

    feature_layers: as in `drafters.target.adapter`, in the order in which fc reads them. draft_vocab_size: U; the target's
    size where the head has no vocabulary of its own. feature_norm: a norm on each feature before fc. norm_output: what is
    fed back is normed.
    """

    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    feature_norm: bool = False
    norm_output: bool = False


KINDS: dict[str, type[Spec]] = {"medusa": MedusaSpec, "eagle": EagleSpec, "eagle3": Eagle3Spec}


@dataclass(frozen=True)
class ExportHead:
    """A head on its way out.

    Attributes:
        spec: what it is.
        info: its target.
        tensors: weights by serving name, complete and of the right shapes, on the CPU. A vocabulary of its own is `d2t`:
            offsets, target id = draft id + d2t[draft id].
        target: for formats that hold a copy of one of the target's matrices.
    """

    spec: Spec
    info: TargetInfo
    tensors: dict[str, Tensor]
    target: TargetHead

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        kinds = {tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()}
        if len(kinds) != 1:
            raise ValueError(f"the head mixes types of numbers ({', '.join(map(str, kinds))}); expected one")
        return kinds.pop()


def read_spec(drafter: Drafter) -> Spec:
    """The head's `export_spec()`, checked.

    Raises:
        ValueError: a kind that no format holds, or fields that are not those of the kind.
    """
    said = drafter.export_spec()
    kind = said.get("kind")
    if kind not in KINDS:
        raise ValueError(
            f"no export format holds a head of type {drafter.config.type!r} (its export_spec says kind {kind!r}); "
            f"formats exist for {', '.join(KINDS)}"
        )
    unknown = set(said) - {entry.name for entry in fields(KINDS[kind])}
    try:
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        spec: Spec = TypeAdapter(KINDS[kind]).validate_python(said)
    except (ValidationError, ValueError) as error:
        raise ValueError(f"export_spec() of {drafter.config.type!r} is not that of kind {kind!r}: {error}") from error
    return spec


def export_head(drafter: Drafter, target: TargetHead, dtype: str) -> ExportHead:
    """The head under serving names, its tensors checked against its spec; `dtype` is what the target is served in.

    Raises:
        ValueError: a tensor is missing, left over, of another shape or not finite.
    """
    spec = read_spec(drafter)
    tensors = serving_tensors(spec, drafter)
    faults = compare_shapes({n: tuple(t.shape) for n, t in tensors.items()}, expected_shapes(spec, drafter.info))
    faults += [f"not finite: {n}" for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if faults:
        raise ValueError(f"the head of type {drafter.config.type!r} can't be exported:\n  " + "\n  ".join(faults))
    return ExportHead(spec, replace(drafter.info, dtype=dtype), tensors, target)


def serving_tensors(spec: Spec, drafter: Drafter) -> dict[str, Tensor]:
    """The head's tensors by serving name, on the CPU."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    tensors = {spec.renames.get(name, name): tensor for name, tensor in own.items()}
    if "d2t" in tensors:  # the target's ids in a head, offsets in files
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return tensors


def compare_shapes(found: Shapes, expected: Shapes) -> list[str]:
    """One line for each tensor that is missing, left over or of another shape."""
    faults = [f"missing: {name} {expected[name]}" for name in expected if name not in found]
    faults += [f"left over: {name} {found[name]}" for name in found if name not in expected]
    both = [name for name in expected if name in found and found[name] != expected[name]]
    return faults + [f"shape of {name}: {found[name]}, expected {expected[name]}" for name in both]


def expected_shapes(spec: Spec, info: TargetInfo) -> Shapes:
    """Serving name and shape of every tensor that a head of this spec has."""
    if isinstance(spec, MedusaSpec):
        return _medusa_shapes(spec, info)
    if isinstance(spec, EagleSpec):
        return _eagle_shapes(spec, info)
    assert isinstance(spec, Eagle3Spec)
    return _eagle3_shapes(spec, info)


def _medusa_shapes(spec: MedusaSpec, info: TargetInfo) -> Shapes:
    D, V = info.hidden_size, info.vocab_size
    shapes: Shapes = {}
    for head in range(spec.num_heads):
        for layer in range(spec.num_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (D, D)
            shapes[f"blocks.{head}.layers.{layer}.bias"] = (D,)
        if not spec.shared_output:
            shapes[f"lm_heads.{head}.weight"] = (V, D)
    return shapes


def _eagle_shapes(spec: EagleSpec, info: TargetInfo) -> Shapes:
    D = info.hidden_size
    shapes: Shapes = {"fc.weight": (D, 2 * D)}
    if spec.fc_bias:
        shapes["fc.bias"] = (D,)
    for layer in range(spec.num_layers):
        shapes |= _layer_shapes(spec, D, f"layers.{layer}.", D)
        if layer > 0:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (D,)
    return shapes


def _eagle3_shapes(spec: Eagle3Spec, info: TargetInfo) -> Shapes:
    D, count = info.hidden_size, len(spec.feature_layers)
    shapes: Shapes = {"fc.weight": (D, count * D), "norm.weight": (D,), "lm_head.weight": (spec.draft_vocab_size, D)}
    if spec.draft_vocab_size != info.vocab_size:
        shapes |= {"d2t": (spec.draft_vocab_size,), "t2d": (info.vocab_size,)}
    if spec.feature_norm:
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(count)}
    for layer in range(spec.num_layers):
        shapes |= _layer_shapes(spec, D, f"layers.{layer}.", D if layer else 2 * D)
        shapes[f"layers.{layer}.input_layernorm.weight"] = (D,)
    shapes["layers.0.hidden_norm.weight"] = (D,)
    return shapes


def _layer_shapes(spec: LayerSpec, D: int, prefix: str, input_size: int) -> Shapes:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, input_size),
        f"{prefix}self_attn.k_proj.weight": (keys, input_size),
        f"{prefix}self_attn.v_proj.weight": (keys, input_size),
        f"{prefix}self_attn.o_proj.weight": (D, queries),
        f"{prefix}mlp.gate_proj.weight": (spec.intermediate_size, D),
        f"{prefix}mlp.up_proj.weight": (spec.intermediate_size, D),
        f"{prefix}mlp.down_proj.weight": (D, spec.intermediate_size),
        f"{prefix}post_attention_layernorm.weight": (D,),
    }
