"""The head as accelerate wraps it, and the way back: bare, whole, saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.batch import TrainBatch
from drafters.heads.base import Drafter, save_head
from drafters.target.adapter import TargetHead

Pairs = dict[str, tuple[Tensor, Tensor]]


class LossModule(nn.Module):
    """A drafter as DDP, FSDP and DeepSpeed wrap it: loss and metrics leave as plain pairs of tensors (sum, count).

    Sharding hooks look for tensors in dicts and tuples, not in dataclasses. With `recompute`, activations inside the
    members of every `nn.ModuleList` (decoder layers, blocks of heads) are computed again in the backward pass instead
    of kept, one call at a time; gradients stay as they were.
    """

    def __init__(self, drafter: Drafter, *, recompute: bool = False) -> None:
        super().__init__()
        self.drafter = drafter
        if recompute:
            for member in outermost_members(drafter):
                # On the instance: a module around it would hide its class and attributes from the head.
                member.forward = partial(checkpoint, member.forward, use_reentrant=False)

    def forward(self, batch: TrainBatch, target: TargetHead) -> Pairs:
        output = self.drafter(batch, target)
        assert "loss" not in output.metrics, "a head's metrics must not be named loss"
        return {name: (ratio.sum, ratio.count) for name, ratio in {"loss": output.loss, **output.metrics}.items()}


def outermost_members(module: nn.Module) -> list[nn.Module]:
    """Members of module lists that lie in no other member."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else outermost_members(child)
    return found


def bare_drafter(accelerator: Accelerator, model: nn.Module) -> Drafter:
    """The drafter in a wrapped `LossModule`; its weights may be shards."""
    drafter = accelerator.unwrap_model(model).drafter
    assert isinstance(drafter, Drafter)
    return drafter


def whole_drafter(accelerator: Accelerator, model: nn.Module) -> Drafter | None:
    """A drafter with whole weights on the main process, None on the others; the one in training where nothing is sharded."""
    drafter = bare_drafter(accelerator, model)
    if not is_sharded(accelerator):
        return drafter if accelerator.is_main_process else None
    state = gathered_state(accelerator, model)
    if not accelerator.is_main_process:
        return None
    with torch.device(accelerator.device):
        copy = type(drafter)(drafter.config, drafter.info)
    copy.load_state_dict(state)
    return copy


def is_sharded(accelerator: Accelerator) -> bool:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.state.deepspeed_plugin.zero_stage == 3)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def gathered_state(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The drafter's tensors, whole, on the main process; to be called on all."""
    state = accelerator.get_state_dict(model) or {}
    return {name.removeprefix("drafter."): tensor for name, tensor in state.items()}


def save_trained(accelerator: Accelerator, model: nn.Module, folder: Path, extra: dict[str, Any]) -> None:
    """Writes the head folder; `extra` is kept with the head. To be called on all processes."""
    state = gathered_state(accelerator, model)
    if accelerator.is_main_process:
        save_head(bare_drafter(accelerator, model), folder, extra, state=state)
    accelerator.wait_for_everyone()
