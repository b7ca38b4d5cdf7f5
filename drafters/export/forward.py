"""What an exported head computes, from its file alone: slow, plain and without a cache. The reference of `check`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.export.rotary import config_rope, frequencies
from drafters.export.strict import ReadHead
from drafters.target.adapter import TargetHead


def draft_logits(
    head: ReadHead, target: TargetHead, tokens_T: Tensor, streams_LTD: Tensor, drafted_K: Tensor
) -> list[Tensor]:
    """Logits over the target's vocabulary [V] of each draft step of a chain; -inf where the head can't draft.

    Args:
        head: as read.
        target: embeds tokens and, for EAGLE-1, turns outputs into logits.
        tokens_T: x_1 .. x_T: the token after each position, the root last.
        streams_LTD: residual streams of the target at positions 0 .. T-1; index i enters block i, the last leaves the last block.
        drafted_K: the chain's tokens, given, so that a tie can't send it elsewhere than the one it is compared with.
    """
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in head.tensors.items()}
    if head.method == "medusa":
        return _medusa(head, weights, target, target.final_norm(streams_LTD[-1][-1]), len(drafted_K))
    network = _Network(head, weights, target)
    features_TD = network.fuse(streams_LTD)
    logits: list[Tensor] = []
    for token in drafted_K:
        output_TD = network(target.embed(tokens_T), features_TD)
        logits.append(network.logits(output_TD[-1]))
        fed_back = network.fed_back(output_TD[-1])
        # row i: (x_{i+1}, f_i) at position i; the next row holds the drafted token and this step's output
        tokens_T = torch.cat([tokens_T, token[None]])
        features_TD = torch.cat([features_TD, fed_back[None]])
    return logits


def _medusa(
    head: ReadHead, weights: dict[str, Tensor], target: TargetHead, hidden_D: Tensor, steps: int
) -> list[Tensor]:
    """A shared output matrix is known to be a copy of the target's; what the target does to its logits keeps their order."""
    shared = head.config.get("original_lm_head")
    logits = []
    for k in range(steps):
        x = hidden_D
        for j in range(head.layers):
            prefix = f"blocks.{k}.layers.{j}."
            x = x + F.silu(weights[f"{prefix}weight"] @ x + weights.get(f"{prefix}bias", 0.0))
        logits.append(target.unembed(x).float() if shared else weights[f"lm_heads.{k}.weight"] @ x)
    return logits


class _Network:
    """EAGLE-1 or EAGLE-3 over a whole row of entries."""

    def __init__(self, head: ReadHead, weights: dict[str, Tensor], target: TargetHead) -> None:
        self.head, self.weights, self.target = head, weights, target
        config = head.config
        self.eps = float(config["rms_norm_eps"])
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.rope = config_rope(config)

    def fuse(self, streams_LTD: Tensor) -> Tensor:
        if self.head.method == "eagle":
            return self.target.final_norm(streams_LTD[-1])
        parts = [streams_LTD[i] for i in self.head.streams]
        if self.head.fc_norm:
            parts = [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self._linear(torch.cat(parts, -1), "fc")

    def __call__(self, embedded_TD: Tensor, features_TD: Tensor) -> Tensor:
        eagle3 = self.head.method == "eagle3"
        if eagle3:
            normed = [
                self._norm(embedded_TD, "layers.0.input_layernorm"),
                self._norm(features_TD, "layers.0.hidden_norm"),
            ]
            hidden, read = features_TD, torch.cat(normed, -1)
        else:
            fc = self._linear(torch.cat([embedded_TD, features_TD], -1), "fc")
            hidden = read = fc + self.weights["fc.bias"] if "fc.bias" in self.weights else fc
        for i in range(self.head.layers):
            if i:
                read = self._norm(hidden, f"layers.{i}.input_layernorm")
            hidden = hidden + self._attention(read, f"layers.{i}.self_attn.")
            hidden = hidden + self._mlp(self._norm(hidden, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp.")
        return hidden

    def logits(self, hidden_D: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        if self.head.method == "eagle":
            return self.target.unembed(hidden_D).float()
        own = self._linear(self._norm(hidden_D, "norm"), "lm_head")
        full = own.new_full((self.head.config["vocab_size"],), float("-inf"))
        ids = torch.arange(len(own))
        if "d2t" in self.weights:
            ids = ids + self.weights["d2t"]  # offsets
        if int(ids.min()) < 0 or int(ids.max()) >= len(full):
            raise ValueError(
                f"d2t leads to token ids {int(ids.min())} to {int(ids.max())}, outside of the target's {len(full)}; it must "
                "hold offsets: d2t[i] = target id - i"
            )
        full[ids] = own
        return full

    def fed_back(self, hidden_D: Tensor) -> Tensor:
        return self._norm(hidden_D, "norm") if self.head.norm_output else hidden_D

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weights[f"{name}.weight"]

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = self._linear(x, f"{prefix}gate_proj"), self._linear(x, f"{prefix}up_proj")
        return self._linear(F.silu(gate) * up, f"{prefix}down_proj")

    def _attention(self, x_TI: Tensor, prefix: str) -> Tensor:
        T = len(x_TI)
        q = self._turn(self._linear(x_TI, f"{prefix}q_proj").view(T, self.heads, self.head_dim))
        k = self._turn(self._linear(x_TI, f"{prefix}k_proj").view(T, self.kv_heads, self.head_dim))
        v = self._linear(x_TI, f"{prefix}v_proj").view(T, self.kv_heads, self.head_dim)
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        outputs = []
        for h in range(self.heads):
            group = h // (self.heads // self.kv_heads)
            scores = (q[:, h] @ k[:, group].T / self.head_dim**0.5).masked_fill(~causal, float("-inf"))
            outputs.append(scores.softmax(-1) @ v[:, group])
        return self._linear(torch.cat(outputs, -1), f"{prefix}o_proj")

    def _turn(self, x_THd: Tensor) -> Tensor:
        T, _, d = x_THd.shape
        angles, scale = frequencies(self.rope, d, T, self.head.config["max_position_embeddings"])
        turn = (torch.arange(T, dtype=torch.float64)[:, None] * angles)[:, None]
        cos, sin = (turn.cos() * scale).float(), (turn.sin() * scale).float()
        a, b = x_THd[..., : d // 2], x_THd[..., d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
