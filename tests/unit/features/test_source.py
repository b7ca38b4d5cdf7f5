import tiny
import torch

from drafters.batch import TrainBatch
from drafters.features.source import OnlineFeatures
from drafters.recipe import TargetSection
from drafters.target.hf import HFTarget
from drafters.target.info import make_info


def test_online_features_are_the_target_s() -> None:
    model = tiny.make_model("llama")
    target = HFTarget(model, make_info(TargetSection(path="tiny"), model.config, None, folder=None, revision=""))
    ids = torch.arange(3, 13)[None]
    batch = TrainBatch(ids, ids > 0, torch.zeros_like(ids), torch.arange(10)[None])
    attached = OnlineFeatures(target, [0, 1]).attach(batch)
    assert attached.features is not None
    assert torch.equal(attached.features.captured_BTF, target.features(batch, [0, 1]).captured_BTF)
    assert not attached.features.captured_BTF.requires_grad
