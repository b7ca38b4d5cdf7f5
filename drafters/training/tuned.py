"""Medusa-2: heads and target learn together, the target through adapters of low rank (Cai et al. 2024, arXiv 2401.10774).

loss = KL(original || tuned), over the places where a token of an answer is next, + ramp * the heads' loss on the tuned target

The original is the same model with its adapters switched off. The output matrix has no adapter, as many models share it with the
embedding. What comes out is a target folder of its own and an ordinary Medusa head for it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from drafters.batch import TargetFeatures, TrainBatch
from drafters.heads.base import Drafter, save_head
from drafters.heads.blocks import target_dtype
from drafters.losses import Lesson, chunk_rows, token_loss
from drafters.recipe import Recipe, TargetSection, TrainSection, TuneSection
from drafters.run import atomic_folder
from drafters.target.hf import HFTarget, load_target
from drafters.target.info import make_info
from drafters.training.optim import make_optimizer
from drafters.training.wrapping import Pairs

logger = logging.getLogger(__name__)


def load_tuned_target(
    section: TargetSection, tune: TuneSection, device: torch.device | str = "cpu", seed: int = 0
) -> HFTarget:
    """A target with fresh adapters, drawn from the seed, which change nothing yet.

    Raises:
        ValueError: peft is not installed, or the target has no layers of the names in tune.layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("tune.lora_rank needs the package peft; install it: pip install 'drafters[lora]'") from error
    target = load_target(section, device)
    config = LoraConfig(
        r=tune.lora_rank,
        lora_alpha=tune.lora_alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=tune.lora_dropout,
        target_modules=list(tune.layers),
    )
    torch.manual_seed(seed)
    inject_adapter_in_model(config, target.model)
    logger.warning("the target is being tuned: what comes out is another model, and its answers may differ")
    return target


class TunedModule(nn.Module):
    """What `fit` trains: the drafter, and the adapters of a target of `load_tuned_target`.

    Args:
        drafter: reads layer -1 only.
        ramp_calls: forwards in training until the ramp is at 1.
    """

    calls: Tensor

    def __init__(self, drafter: Drafter, target: HFTarget, tune: TuneSection, ramp_calls: int) -> None:
        super().__init__()
        assert tuple(drafter.feature_layers) == (-1,)
        self.drafter = drafter
        self.adapters = nn.ParameterList(
            parameter for name, parameter in target.model.named_parameters() if "lora_" in name
        )
        self.adapters.requires_grad_(True)
        self._sine = tune.ramp == "sine"
        self._ramp_calls = max(1, ramp_calls)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, batch: TrainBatch, target: HFTarget) -> Pairs:
        with torch.no_grad():
            switch(target, on=False)
            original_BTD = last_hidden(target, batch)
            switch(target, on=True)
        target.model.train(self.training)  # for the adapters' dropout
        tuned_BTD = last_hidden(target, batch)
        target.model.eval()
        _, learned_BT = batch.label(1)
        kl = self._kl(original_BTD[learned_BT], tuned_BTD[learned_BT], target)
        heads = self.drafter(replace(batch, features=TargetFeatures(tuned_BTD, tuned_BTD)), target)
        total = kl.total + self._ramp() * heads.loss.sum
        metrics = {name: (ratio.sum, ratio.count) for name, ratio in heads.metrics.items()}
        return {
            "loss": (total, heads.loss.count),
            "kl_to_original": (kl.losses[0].sum, kl.losses[0].count),
            **metrics,
        }

    def _ramp(self) -> float:
        if not self._sine:
            return 1.0
        done = min(1.0, int(self.calls) / self._ramp_calls)
        if self.training:
            self.calls += 1
        return math.sin(math.pi / 2 * done)

    def _kl(self, original_ND: Tensor, tuned_ND: Tensor, target: HFTarget) -> Any:
        def lesson(start: int, stop: int) -> Lesson:
            logits = target.logits(original_ND[start:stop].to(target_dtype(target)))
            return Lesson(logits.argmax(-1), torch.softmax(logits.float(), dim=-1))

        def logits(hidden: Tensor) -> Tensor:
            return target.logits(hidden.to(target_dtype(target)))

        rows = chunk_rows(target.info.vocab_size, tuned_ND.device)
        return token_loss("kl", tuned_ND, logits, lesson, rows=rows)


def switch(target: HFTarget, *, on: bool) -> None:
    """Switches the adapters; off, the target is the original."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    gradients = [parameter.requires_grad for parameter in target.model.parameters()]
    for module in target.model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(on)
    for parameter, wanted in zip(target.model.parameters(), gradients, strict=True):
        parameter.requires_grad_(wanted)  # peft freezes what it switches off


def last_hidden(target: HFTarget, batch: TrainBatch) -> Tensor:
    """Layer -1, with a gradient where there is one to take."""
    with target.captured([-1]) as hidden:
        target.decoder(
            input_ids=batch.input_ids_BT, attention_mask=None, position_ids=batch.position_BT, use_cache=False
        )
    return hidden[-1]


class Bare:
    """A feature source that gives nothing: `TunedModule` runs the target itself."""

    def attach(self, batch: TrainBatch) -> TrainBatch:
        return batch


def make_tuned_optimizer(module: TunedModule, section: TrainSection, tune: TuneSection) -> torch.optim.AdamW:
    """The drafter's optimizer, and the adapters at their share of its rate."""
    optimizer = make_optimizer(module.drafter, section)
    optimizer.add_param_group({"params": list(module.adapters), "weight_decay": 0.0, "share": tune.rate})
    return optimizer


def save_tuned(
    accelerator: Accelerator,
    module: TunedModule,
    target: HFTarget,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    folder: Path,
    extra: dict[str, Any],
) -> None:
    """Writes folder/target, the adapters merged into it, and folder/head, trained for that. To be called on all processes."""
    if accelerator.is_main_process:
        merge(target)
        out = folder / "target"
        with atomic_folder(out) as temporary:
            target.model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        section = replace(recipe.target, path=str(out), revision="main")
        module.drafter.info = make_info(section, target.model.config, tokenizer, folder=out, revision="")
        save_head(module.drafter, folder / "head", extra)
    accelerator.wait_for_everyone()


def merge(target: HFTarget) -> None:
    """Adds the adapters to the weights and takes them out; the model is of its stock class again."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(target.model.named_modules()):
        if isinstance(layer, LoraLayer):
            parent, _, own = name.rpartition(".")
            layer.merge(safe_merge=True)
            setattr(target.model.get_submodule(parent), own, layer.get_base_layer())
