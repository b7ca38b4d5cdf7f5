"""Tokenized data on disk: held-out split, cache, packing, collating, and which rows a step takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from drafters.data import dataset as dataset_module
from drafters.data.dataset import Dataset, Documents, Rows, load_rows, split
from drafters.data.loader import StepLoader, in_batches
from drafters.data.packing import pack
from drafters.data.vocab import count_tokens, draft_vocabulary
from drafters.recipe import DataSection, TrainSection


def make_data(folder: Path, count: int = 40, **changes: object) -> DataSection:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"answer {n} " * (1 + n % 5)},
            ]
        }
        for n in range(count)
    ]
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=(str(path),), max_length=128, heldout_fraction=0.2, cache_folder=str(folder / "cache"))
    return replace(section, **changes)


def contents(rows: Rows) -> list[tuple[int, ...]]:
    return sorted(tuple(rows.documents[i].ids.tolist()) for i in range(len(rows.documents)))


def load(section: DataSection) -> Dataset:
    return load_rows(section, tiny.make_tokenizer())


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.9])
def test_the_sides_never_overlap(tmp_path: Path, fraction: float) -> None:
    section = make_data(tmp_path, heldout_fraction=fraction)
    section = replace(section, train=section.train * 2)  # every conversation twice
    train, heldout = split(section)
    assert heldout
    assert len(train) + len(heldout) == 80
    assert not {c.digest() for c in train} & {c.digest() for c in heldout}


def test_a_larger_fraction_keeps_what_was_held_out(tmp_path: Path) -> None:
    small, large = (split(make_data(tmp_path, heldout_fraction=f))[1] for f in (0.2, 0.5))
    assert {c.digest() for c in small} < {c.digest() for c in large}


def test_held_out_files_are_taken_out_of_the_training_data(tmp_path: Path) -> None:
    section = make_data(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(Path(section.train[0]).read_text().splitlines(keepends=True)[:3]))
    train, heldout = split(replace(section, heldout=(str(other),)))
    assert (len(train), len(heldout)) == (37, 3)


def test_holding_everything_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"all 1 conversations .* are held out"):
        split(make_data(tmp_path, count=1, heldout_fraction=0.999999))


def test_the_cache_is_used_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = make_data(tmp_path)
    first = load(section)
    builds = []
    build = dataset_module._build
    monkeypatch.setattr(dataset_module, "_build", lambda *args: (builds.append(1), build(*args)))
    again = load(section)
    assert not builds
    assert contents(first.train) == contents(again.train)
    assert [c.messages for c in first.heldout_conversations] == [c.messages for c in again.heldout_conversations]
    assert first.key == again.key == load(replace(section, packing=False)).key
    assert not builds
    changed = [replace(section, max_length=64), replace(section, heldout_fraction=0.3), replace(section, limit=10)]
    assert len({load(other).key for other in changed} | {first.key}) == 4
    Path(section.train[0]).write_text(Path(section.train[0]).read_text() + '{"text": "more"}\n')
    load(section)
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<|im_start|> ")
    load_rows(section, tokenizer)
    assert len(builds) == 5


def test_a_killed_build_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = make_data(tmp_path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "_write_side", die)
        with pytest.raises(KeyboardInterrupt):
            load(section)
    assert len(load(section).train) > 0


def test_damaged_data_is_named(tmp_path: Path) -> None:
    section = make_data(tmp_path)
    key = load(section).key
    file = tmp_path / "cache" / key / "train.ids.npy"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"is damaged.*delete that folder"):
        load(section)


@pytest.mark.parametrize(("too_long", "kept"), [("truncate", 30), ("drop", 0)])
def test_too_long(tmp_path: Path, too_long: str, kept: int) -> None:
    section = make_data(tmp_path, count=1, heldout_fraction=0.5, too_long=too_long, max_length=30)
    if kept:
        assert [len(d) for d in contents(load(section).train)] == [30]
    else:
        with pytest.raises(ValueError, match="nothing to train on"):
            load(section)


def test_too_long_can_stop_with_the_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat\.jsonl row \d+ has \d+ tokens, more than data\.max_length 30"):
        load(make_data(tmp_path, too_long="stop", max_length=30))


def test_packing_keeps_every_document_once_within_the_room() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000).tolist()
    rows = pack(lengths, 100, seed=3)
    assert sorted(index for row in rows for index in row) == list(range(1000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 100
    assert sum(lengths) / (100 * len(rows)) > 0.9
    assert rows == pack(lengths, 100, seed=3) != pack(lengths, 100, seed=4)


def test_a_batch_lays_documents_side_by_side() -> None:
    documents = Documents(
        np.array([5, 6, 7, 8, 9, 10], dtype=np.int32),
        np.array([0, 1, 1, 0, 1, 1], dtype=bool),
        np.array([3, 5, 6]),
    )
    batch = Rows(documents, [[0, 1], [2]]).batch([1, 0])
    assert batch.input_ids_BT.tolist() == [[10, 0, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert batch.document_BT.tolist() == [[0, -1, -1, -1, -1], [0, 0, 0, 1, 1]]
    assert batch.position_BT.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 0, 1]]
    assert batch.loss_mask_BT.tolist() == [[True, False, False, False, False], [False, True, True, False, True]]
    # Index 2 is followed by another document, index 1 by the last token of its own.
    assert batch.label(1)[1].tolist()[1] == [True, True, False, True, False]


def global_rows(rows: Rows, section: TrainSection, step: int, world: int) -> torch.Tensor:
    parts = [StepLoader(rows, section, rank=rank, world=world).window(step) for rank in range(world)]
    ids = [
        row[mask >= 0]
        for part in parts
        for batch in part
        for row, mask in zip(batch.input_ids_BT, batch.document_BT, strict=True)
    ]
    return torch.cat(ids)


def test_the_global_batch_is_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    rows = load(make_data(tmp_path, packing=False)).train
    for step in (0, 3, 11):
        reference = global_rows(rows, TrainSection(batch_size=4, micro_batch_size=4), step, 1)
        for world, micro in ((1, 1), (2, 1), (2, 2), (4, 1)):
            assert torch.equal(
                reference, global_rows(rows, TrainSection(batch_size=4, micro_batch_size=micro), step, world)
            )


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    rows = load(make_data(tmp_path, packing=False)).train
    loader = StepLoader(rows, TrainSection(batch_size=1))
    assert loader.steps_per_epoch == len(rows)
    epochs = [
        [tuple(loader.window(e * len(rows) + s)[0].input_ids_BT[0].tolist()) for s in range(len(rows))] for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == contents(rows)
    assert epochs[0] != epochs[1]


def test_fewer_rows_than_a_batch_are_repeated(tmp_path: Path) -> None:
    rows = load(make_data(tmp_path, count=2, packing=False, heldout_fraction=0.5)).train
    (batch,) = StepLoader(rows, TrainSection(batch_size=4, micro_batch_size=4)).window(0)
    assert len(batch.input_ids_BT) == 4


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 rows, which 3 processes cannot share"):
        StepLoader(load(make_data(tmp_path)).train, TrainSection(batch_size=4), world=3)


def test_in_batches(tmp_path: Path) -> None:
    rows = load(make_data(tmp_path, packing=False)).heldout
    assert [len(batch.input_ids_BT) for batch in in_batches(rows, 2, 5)] == [2, 2, 1]
    assert in_batches(rows, 2, 0) == []


def test_counts_are_of_learned_tokens_and_the_vocabulary_holds_the_most_frequent() -> None:
    documents = Documents(
        np.array([3, 3, 1, 2, 2, 2], dtype=np.int32), np.array([1, 1, 1, 0, 0, 1], dtype=bool), np.array([6])
    )
    counts = count_tokens(documents, 6)
    assert counts.tolist() == [0, 1, 1, 2, 0, 0]
    d2t, t2d = draft_vocabulary(counts, 2)
    assert d2t.tolist() == [1, 3]
    assert t2d.tolist() == [False, True, False, True, False, False]
    assert draft_vocabulary(counts, 4)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="a draft vocabulary of 7 was asked for"):
        draft_vocabulary(counts, 7)
