"""Parts of autoregressive heads: norm, rotary positions, attention, decoder layer.

Parameter names and shapes are those of Llama, so a head's tensors go to serving formats without renaming.
Masks are boolean, true = may attend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.target.adapter import TargetHead, TargetInfo
from drafters.target.cache import KVStore

LLAMA_BLOCK = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def target_dtype(target: TargetHead) -> torch.dtype:
    """What the target computes in; hidden states go into its matrices in this type."""
    dtype = getattr(torch, target.info.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"the head has {self.num_heads} attention heads and {self.num_kv_heads} key-value heads; "
                "the first must be a multiple of the second"
            )

    @staticmethod
    def of(info: TargetInfo, *, intermediate_size: int = 0, num_heads: int = 0, num_kv_heads: int = 0) -> LayerShape:
        """The target's own sizes, but for those given (0 = the target's)."""
        return LayerShape(
            hidden_size=info.hidden_size,
            intermediate_size=intermediate_size or info.intermediate_size,
            num_heads=num_heads or info.num_heads,
            num_kv_heads=num_kv_heads or info.num_kv_heads,
            head_dim=info.head_dim,
            rms_norm_eps=info.rms_norm_eps,
        )


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the statistics in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rope_parameters(info: TargetInfo) -> dict[str, Any]:
    """The target's rotary settings as a head uses them.

    A head turns all of head_dim, also where the target turns a part only; longrope is the exception, since its lists of
    factors have the length of that part.
    """
    settings = dict(info.rope)
    if settings["rope_type"] != "longrope":
        settings.pop("partial_rotary_factor", None)
    return settings


class RoPE:
    """Rotary position embedding of every type that transformers knows.

    Not a module, and the frequencies stay in float32: casting a head must not round them.
    """

    def __init__(self, info: TargetInfo) -> None:
        self._info = info
        self._tables: LlamaRotaryEmbedding | None = None

    def __call__(self, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32, each B x N x R, where R is how much of head_dim is turned."""
        if self._tables is None:
            self._tables = LlamaRotaryEmbedding(self._config())
        tables = self._tables.to(position_BN.device)
        reference = torch.empty(
            (), dtype=torch.float32, device=position_BN.device
        )  # read for its dtype and device only
        cos, sin = tables(reference, position_BN)
        return cos, sin

    def _config(self) -> LlamaConfig:
        info = self._info
        return LlamaConfig(
            hidden_size=info.hidden_size,
            num_attention_heads=info.num_heads,
            head_dim=info.head_dim,
            max_position_embeddings=info.max_position_embeddings,
            rope_parameters=rope_parameters(info),
        )


def rotate(x_BHNd: Tensor, cos_BNR: Tensor, sin_BNR: Tensor) -> Tensor:
    """Turns pairs (i, i + R/2) of the first R entries by the position's angles."""
    turned = cos_BNR.shape[-1]
    x, rest = x_BHNd[..., :turned], x_BHNd[..., turned:]
    first, second = x.chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    rotated = (x * cos_BNR[:, None] + crossed * sin_BNR[:, None]).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def document_mask(document_BT: Tensor) -> Tensor:
    """B x T x T: each token sees itself and what precedes it in its document; padding sees padding only."""
    T = document_BT.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()
    return causal & (document_BT[:, :, None] == document_BT[:, None])


@dataclass(frozen=True)
class Attend:
    """Where N queries are and what they see.

    Attributes:
        cos_BNR, sin_BNR: of their positions.
        mask_BNM: which of M keys each sees; every query sees at least one.
        stores: one cache per layer, where there is one: the new keys go to slots start .. start + N - 1, and M is
            start + N. Without caches the keys are those of the queries, M = N.
    """

    cos_BNR: Tensor
    sin_BNR: Tensor
    mask_BNM: Tensor
    stores: Sequence[KVStore] = ()
    start: int = 0


class Attention(nn.Module):
    """Grouped-query attention without biases; the input may be wider than the output."""

    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def queries(self, x_BNI: Tensor, cos_BNR: Tensor, sin_BNR: Tensor) -> Tensor:
        """Queries turned to their positions, B x heads x N x head_dim."""
        return rotate(self._split(self.q_proj(x_BNI)), cos_BNR, sin_BNR)

    def keys_values(self, x_BNI: Tensor, cos_BNR: Tensor, sin_BNR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys turned to their positions, and values, each B x kv_heads x N x head_dim."""
        return rotate(self._split(self.k_proj(x_BNI)), cos_BNR, sin_BNR), self._split(self.v_proj(x_BNI))

    def _split(self, x_BNE: Tensor) -> Tensor:
        return x_BNE.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def output(self, mixed_BHNd: Tensor) -> Tensor:
        """The output projection; B x N x D."""
        projected: Tensor = self.o_proj(mixed_BHNd.transpose(1, 2).flatten(2))
        return projected

    def mix(self, q_BHNd: Tensor, k_BGMd: Tensor, v_BGMd: Tensor, mask_BNM: Tensor) -> Tensor:
        """Attention and output projection; B x N x D."""
        groups = self.shape.num_kv_heads
        shared = self.shape.num_heads // groups
        # Queries that share keys are laid one after another, so that keys and values are read once and never copied.
        q = q_BHNd.unflatten(1, (groups, shared)).flatten(2, 3)
        mask = mask_BNM.repeat(1, shared, 1)[:, None]
        mixed = F.scaled_dot_product_attention(q, k_BGMd, v_BGMd, attn_mask=mask)
        return self.output(mixed.unflatten(2, (shared, -1)).flatten(1, 2))

    def forward(self, x_BNI: Tensor, attend: Attend, layer: int) -> Tensor:
        q = self.queries(x_BNI, attend.cos_BNR, attend.sin_BNR)
        k, v = self.keys_values(x_BNI, attend.cos_BNR, attend.sin_BNR)
        if attend.stores:
            store = attend.stores[layer]
            store.write(attend.start, k, v)
            k, v = store.view(attend.start + k.shape[2])
        return self.mix(q, k, v, attend.mask_BNM)


class MLP(nn.Module):
    """SwiGLU feed-forward without biases."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A Llama decoder layer, its input norm optional, its attention's input as wide as asked."""

    def __init__(self, shape: LayerShape, *, input_norm: bool, input_size: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps) if input_norm else None
        self.self_attn = Attention(shape, input_size or shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, hidden_BND: Tensor, attend: Attend, layer: int, attention_input_BNI: Tensor | None = None
    ) -> Tensor:
        """The layer's output, B x N x D.

        Args:
            hidden_BND: the residual stream.
            attend: positions, mask and caches.
            layer: which of the caches is this layer's.
            attention_input_BNI: what attention reads, already normed; by default the residual stream, through the input
                norm where there is one.
        """
        x = hidden_BND if attention_input_BNI is None else attention_input_BNI
        if attention_input_BNI is None and self.input_layernorm is not None:
            x = self.input_layernorm(x)
        return self.finish(hidden_BND + self.self_attn(x, attend, layer))

    def finish(self, hidden: Tensor) -> Tensor:
        """The layer's output from the residual stream after attention; [..., D]."""
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def copy_block(self, weights: Mapping[str, Tensor]) -> None:
        """Starts as a block of a Llama-like target; what attention reads beyond the block's own input starts at zero.

        Biases are left out. Where the target norms queries and keys (Qwen3), these keep their random start.

        Args:
            weights: the block's tensors by their names inside it.

        Raises:
            ValueError: the block is of another kind or another size.
        """
        advice = "use initialize: random, or sizes of 0, which are the target's"
        normed = "self_attn.q_norm.weight" in weights
        other = [name for name in weights if not name.endswith(".bias") and name not in LLAMA_BLOCK]
        if other:
            raise ValueError(f"drafter.initialize: target: the target's blocks hold {', '.join(other)}; {advice}")
        with torch.no_grad():
            for name, own in self.named_parameters():
                if name not in LLAMA_BLOCK or (normed and name.endswith(("q_proj.weight", "k_proj.weight"))):
                    continue
                if name == "input_layernorm.weight" and self.self_attn.q_proj.in_features > own.shape[0]:
                    continue  # it norms something that the block doesn't read
                given = weights[name]
                if given.shape[0] != own.shape[0] or given.shape[-1] > own.shape[-1]:
                    raise ValueError(
                        f"drafter.initialize: target: the head's {name} is {tuple(own.shape)}, the target's "
                        f"{tuple(given.shape)}; {advice}"
                    )
                own.zero_()
                own[..., own.shape[-1] - given.shape[-1] :].copy_(given)
