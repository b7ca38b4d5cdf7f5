"""The contract of a learned drafter, and head folders: config.json and model.safetensors."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafters import __version__
from drafters.batch import TrainBatch
from drafters.metrics import Ratio
from drafters.recipe import find_drafter
from drafters.run import atomic_folder
from drafters.target.adapter import TargetHead, TargetInfo
from drafters.tree import Committed, DraftBudget, DraftTree

FORMAT = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadOutput:
    """The loss of a batch as sum and count, and metrics by name (teacher-forced: never called alpha or tau)."""

    loss: Ratio
    metrics: dict[str, Ratio] = field(default_factory=dict)


class Drafter(nn.Module, ABC):
    """A head: network, loss, drafting and export in one class, in one file.

    A subclass has a nested frozen dataclass `Config` (its whole recipe section; its first field is `type: str`). The
    loop and the trainer know only the methods below.
    """

    Config: ClassVar[type]

    def __init__(self, config: Any, info: TargetInfo) -> None:
        super().__init__()
        self.config = config
        self.info = info

    @property
    @abstractmethod
    def feature_layers(self) -> Sequence[int]:
        """Layers of the target whose hidden states the head reads, in the numbering of `target.adapter`."""

    @property
    def max_depth(self) -> int:
        """The deepest tree that the head can draft; 0 where there is no limit."""
        return 0

    def set_vocabulary(self, counts_V: Tensor) -> None:
        """Chooses the draft vocabulary, for heads with one of their own; called once, before `init_from`.

        Args:
            counts_V: how often each token of the target's vocabulary is to be learned in the training data.
        """

    def init_from(self, target: TargetHead) -> None:
        """Sets the weights that start as something of the target's; called once, before training."""

    @abstractmethod
    def count(self, batch: TrainBatch) -> Tensor:
        """The count of forward's loss, from the masks alone: the trainer needs it before a step's first forward."""

    @abstractmethod
    def forward(self, batch: TrainBatch, target: TargetHead) -> HeadOutput:
        """Loss and metrics of a batch that has features."""

    @abstractmethod
    def start(self, target: TargetHead, rows: int, max_tokens: int) -> Any:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def advance(self, state: Any, committed: Committed) -> Any:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def draft(self, state: Any, budget: DraftBudget) -> DraftTree:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def keep(self, state: Any, rows: Tensor) -> Any:
        """See `drafters.tree.Drafting`."""

    @abstractmethod
    def export_spec(self) -> dict[str, Any]:
        """What serving formats need to know of the head beyond its weights; read by `drafters.export`."""


def save_head(
    drafter: Drafter,
    folder: Path | str,
    extra: dict[str, Any] | None = None,
    *,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes a head folder: whole or not at all, over an older one of the same name.

    Args:
        drafter: the head, unwrapped.
        folder: where; its parent must exist.
        extra: facts to keep with the head, such as steps and data hash; anything JSON can hold.
        state: the tensors, where they are not the drafter's own (gathered from shards).
    """
    tensors = drafter.state_dict() if state is None else state
    config = {
        "format": FORMAT,
        "type": drafter.config.type,
        "config": asdict(drafter.config),
        "target": asdict(drafter.info),
        "drafters_version": __version__,
        "extra": extra or {},
    }
    with atomic_folder(Path(folder)) as temporary:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, temporary / WEIGHTS_FILE, metadata={"format": "pt"})


def load_head(folder: Path | str, info: TargetInfo, device: torch.device | str = "cpu") -> Drafter:
    """A saved head, bit for bit, for a target.

    Shapes and positions come from the target it was trained on. A target of other dimensions is refused; other
    weights, tokenizer or chat template are warned of, each by name.

    Raises:
        ValueError: not a head folder, damaged, incomplete, or for a target of other dimensions.
    """
    folder = Path(folder)
    saved = _read_config(folder)
    trained_on = _read_info(saved["target"], folder)
    _compare_targets(trained_on, info, folder)
    drafter_class = find_drafter(saved["type"])
    try:
        config = TypeAdapter(drafter_class.Config).validate_python(saved["config"])
    except ValidationError as error:
        raise ValueError(
            f"{folder / CONFIG_FILE}: the head's config is not one of {saved['type']!r}: {error}"
        ) from error
    with torch.device(device):
        drafter: Drafter = drafter_class(
            config, replace(trained_on, path=info.path, revision=info.revision, dtype=info.dtype)
        )
    _load_weights(drafter, folder / WEIGHTS_FILE, device)
    return drafter.eval()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a head folder: it has no {CONFIG_FILE}")
    try:
        saved = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    wanted = ("format", "type", "config", "target")
    missing = [key for key in wanted if not isinstance(saved, dict) or key not in saved]
    if missing:
        raise ValueError(f"{path} is not the config of a head saved here: it lacks {', '.join(missing)}")
    if saved["format"] != FORMAT:
        raise ValueError(f"{path} has format {saved['format']}, this version of drafters reads format {FORMAT}")
    return dict(saved)


def _read_info(saved: dict[str, Any], folder: Path) -> TargetInfo:
    names = {entry.name for entry in fields(TargetInfo)}
    if set(saved) != names:
        wrong = ", ".join(sorted(set(saved) ^ names))
        raise ValueError(f"{folder / CONFIG_FILE}: the facts about the target are not those expected; see {wrong}")
    return TargetInfo(**{**saved, "eos_token_ids": tuple(saved["eos_token_ids"])})


def _compare_targets(trained_on: TargetInfo, info: TargetInfo, folder: Path) -> None:
    for name, word in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary size")):
        old, new = getattr(trained_on, name), getattr(info, name)
        if old != new:
            raise ValueError(
                f"the head in {folder} was trained on {trained_on.path} with {word} {old}, "
                f"but {info.path} has {word} {new}; load it with the target it was trained on"
            )
    for name, word in (
        ("revision", "revision"),
        ("weights_hash", "weights"),
        ("tokenizer_hash", "tokenizer"),
        ("template_hash", "chat template"),
    ):
        old, new = getattr(trained_on, name), getattr(info, name)
        if old and new and old != new:
            logger.warning(
                "the head in %s was trained on another %s: %s of %s then, %s of %s now; expect lower acceptance",
                folder, word, old, trained_on.path, new, info.path,
            )  # fmt: skip


def _load_weights(drafter: Drafter, path: Path, device: torch.device | str) -> None:
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(torch.nan)
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a whole head folder: it has no {WEIGHTS_FILE}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    _check_tensors(tensors, drafter.state_dict(), path)
    drafter.load_state_dict(tensors, assign=True)
    unset = [name for name, parameter in drafter.named_parameters() if parameter.isnan().any()]
    if unset:
        raise ValueError(f"{path} holds NaN in {', '.join(unset)}; the head was saved broken")


def _check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    faults = [f"missing: {name} {tuple(expected[name].shape)}" for name in expected if name not in found]
    faults += [f"unexpected: {name} {tuple(found[name].shape)}" for name in found if name not in expected]
    faults += [
        f"shape of {name}: {tuple(found[name].shape)} in the file, {tuple(expected[name].shape)} by the config"
        for name in expected
        if name in found and found[name].shape != expected[name].shape
    ]
    if faults:
        raise ValueError(f"{path} does not hold the tensors its config asks for:\n  " + "\n  ".join(faults))
