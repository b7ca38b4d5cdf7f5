"""The tensors that travel through training, with their shapes checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetFeatures:
    """What the target computed for a batch.

    Attributes:
        captured_BTF: hidden states of the layers the head asked for, side by side in the order asked,
            each the residual stream after that block (F = C*D).
        last_BTD: the residual stream after the last block, before the final norm (layer -1).
    """

    captured_BTF: Tensor
    last_BTD: Tensor


@dataclass(frozen=True)
class TrainBatch:
    """Rows of one or several packed documents, padded on the right.

    Attributes:
        input_ids_BT: tokens; padding holds any valid id.
        loss_mask_BT: bool, true where the token is to be learned: an assistant's token or the
            end-of-turn token that closes the assistant's turn. Not shifted.
        document_BT: which document of its row a token belongs to, from 0; -1 in padding. Attention and
            every shift stay inside a document.
        position_BT: position within the document, from 0; padding counts from 0 as a document of its own.
        features: the target's hidden states, once a feature source has attached them.
    """

    input_ids_BT: Tensor
    loss_mask_BT: Tensor
    document_BT: Tensor
    position_BT: Tensor
    features: TargetFeatures | None = None

    def __post_init__(self) -> None:
        shape = self.input_ids_BT.shape
        if len(shape) != 2:
            raise ValueError(f"input_ids_BT must be B x T, got shape {tuple(shape)}")
        for name in ("loss_mask_BT", "document_BT", "position_BT"):
            other = getattr(self, name).shape
            if other != shape:
                raise ValueError(f"{name} is {tuple(other)} but input_ids_BT is {tuple(shape)}; they must be equal")
        if self.features is not None:
            for name, tensor in vars(self.features).items():
                if tensor.shape[:2] != shape:
                    raise ValueError(
                        f"features.{name} is {tuple(tensor.shape)} but input_ids_BT is {tuple(shape)}; "
                        "the first two sizes must be equal"
                    )

    def to(self, device: torch.device | str) -> TrainBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        features = self.features
        if features is not None:
            features = TargetFeatures(features.captured_BTF.to(device), features.last_BTD.to(device))
        return replace(self, **moved, features=features)

    def label(self, shift: int) -> tuple[Tensor, Tensor]:
        """The token `shift` places ahead of each index, and whether it is to be learned there.

        Returns:
            ids_BT: x_{t+shift} at index t (an arbitrary id where there is none).
            mask_BT: true where x_{t+shift} is in the same document as x_t and in the loss mask.
        """
        ids = torch.roll(self.input_ids_BT, -shift, dims=1)
        mask = torch.roll(self.loss_mask_BT, -shift, dims=1) & self.same_document(shift)
        return ids, mask

    def drafted(self, depth: int) -> Tensor:
        """Where drafting to each depth happens: [depth, B, T], true at t of place k-1 if x_{t+1} .. x_{t+1+k} are all learned.

        index t            last of prompt   A1        A2        ..   An-1
        the root, x_{t+1}  A1               A2        A3        ..   An = end of turn
        depth 1            A2               A3        A4        ..   -
        depth 2            A3               A4        A5        ..   -

        The root always comes from the target, and nothing is drafted past the end of an answer.
        """
        _, inside = self.label(1)
        places = []
        for k in range(1, depth + 1):
            inside = inside & self.label(1 + k)[1]
            places.append(inside)
        return torch.stack(places)

    def same_document(self, shift: int) -> Tensor:
        """BT, true where index t and index t+shift are in the same document (never in padding)."""
        same = (torch.roll(self.document_BT, -shift, dims=1) == self.document_BT) & (self.document_BT >= 0)
        if shift > 0:
            same[:, -shift:] = False
        return same
