"""The types that travel: batch, tree, ratio; and what a failing command prints."""

from __future__ import annotations

import pytest
import torch

from drafters.batch import TargetFeatures, TrainBatch
from drafters.log import run_main
from drafters.metrics import Ratio
from drafters.tree import Committed, DraftTree

# row 0: two documents and padding; row 1: one document
IDS = torch.arange(16).view(2, 8)
DOCUMENT = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1], [0] * 8])
MASK = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 1, 1]], dtype=torch.bool)
POSITION = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], list(range(8))])


def batch() -> TrainBatch:
    return TrainBatch(IDS, MASK, DOCUMENT, POSITION)


def test_labels_and_drafted_places_stay_inside_a_document() -> None:
    for shift in (1, 2, 3):
        ids, mask = batch().label(shift)
        for row in range(2):
            for t in range(8):
                inside = (
                    t + shift < 8 and DOCUMENT[row, t] == DOCUMENT[row, min(t + shift, 7)] and DOCUMENT[row, t] >= 0
                )
                assert mask[row, t] == (inside and MASK[row, t + shift])
                assert not inside or ids[row, t] == IDS[row, t + shift]
    drafted = batch().drafted(3)
    for k in range(3):
        for row in range(2):
            for t in range(8):
                ahead = range(t + 1, t + 3 + k)
                wanted = all(u < 8 and MASK[row, u] and DOCUMENT[row, u] == DOCUMENT[row, t] for u in ahead)
                assert drafted[k, row, t] == wanted, (k, row, t)


def test_shapes_that_differ_are_told() -> None:
    with pytest.raises(ValueError, match=r"loss_mask_BT is \(2, 7\) but input_ids_BT is \(2, 8\)"):
        TrainBatch(IDS, MASK[:, :7], DOCUMENT, POSITION)
    features = TargetFeatures(torch.zeros(2, 8, 3), torch.zeros(2, 9, 3))
    with pytest.raises(ValueError, match=r"features.last_BTD is \(2, 9, 3\)"):
        TrainBatch(IDS, MASK, DOCUMENT, POSITION, features)


def test_depths_and_ancestors_of_a_tree() -> None:
    #      0
    #    1   2
    #   3     4       row 1 is the chain 0 1 2, the rest unused
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, -1, -1]])
    valid = torch.tensor([[True] * 5, [True, True, True, False, False]])
    tree = DraftTree(torch.zeros(2, 5, dtype=torch.long), parents, torch.zeros(2, 5), valid, max_depth=2)
    assert tree.depth_BN().tolist() == [[0, 1, 1, 2, 2], [0, 1, 2, 0, 0]]
    reach = tree.ancestors_BNN()
    assert [set(reach[0, node].nonzero().flatten().tolist()) for node in range(5)] == [
        {0},
        {0, 1},
        {0, 2},
        {0, 1, 3},
        {0, 2, 4},
    ]
    assert reach[1, 3].nonzero().flatten().tolist() == [3]


def test_each_committed_token_is_followed_by_the_next_and_the_last_by_the_root() -> None:
    tokens, counts = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([3, 1])
    following = Committed(tokens, torch.zeros(2, 3, 1), counts, torch.tensor([9, 4])).following_BP()
    assert following[0].tolist() == [6, 7, 9] and following[1, 0] == 4


def test_a_ratio_weighs_by_counts_and_an_empty_one_is_no_number() -> None:
    total = Ratio(torch.tensor(1.0), torch.tensor(1.0)) + Ratio(torch.tensor(0.0), torch.tensor(3.0))
    assert total.value() == 0.25
    assert Ratio.zero().value().isnan()


def test_what_a_user_can_mend_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("got 3, expected 4")

    with pytest.raises(SystemExit) as end:
        run_main(fail)
    assert end.value.code == 2 and capsys.readouterr().err == "error: got 3, expected 4\n"
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)
