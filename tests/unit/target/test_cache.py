import pytest
import torch

from drafters.target.cache import KVStore, RowLengths, path_slots


def test_path_moves_to_the_end_of_its_own_row() -> None:
    store = KVStore(rows=2, kv_heads=1, head_dim=1, capacity=10, dtype=torch.float32, device="cpu")
    prompt = torch.tensor([[10.0, 11, 12, 13], [20, 21, -1, -1]])[:, None, :, None]
    store.write(0, prompt, prompt)
    lengths = RowLengths(2, "cpu")
    lengths.add(torch.tensor([4, 2]))
    nodes = torch.tensor([[1.0, 2, 3], [4, 5, 6]])[:, None, :, None]
    store.write(lengths.longest, nodes, nodes)
    path, counts = torch.tensor([[0, 2], [0, 0]]), torch.tensor([2, 1])

    store.move(*path_slots(path, counts, lengths.tensor_B, lengths.longest))
    lengths.add(counts)

    keys, values = store.view(6)
    assert keys[0, 0, :6, 0].tolist() == [10, 11, 12, 13, 1, 3]
    assert values[1, 0, :3, 0].tolist() == [20, 21, 4]
    assert lengths.tensor_B.tolist() == [6, 3]
    assert lengths.longest == 6


def test_kept_rows_stay_in_the_same_memory() -> None:
    store = KVStore(rows=3, kv_heads=1, head_dim=2, capacity=4, dtype=torch.float32, device="cpu")
    keys = torch.arange(24.0).view(3, 1, 4, 2)
    store.write(0, keys, -keys)
    address = store.view(4)[0].data_ptr()
    store.keep([0, 2])
    assert torch.equal(store.view(4)[0], keys[[0, 2]])
    assert torch.equal(store.view(4)[1], -keys[[0, 2]])
    assert store.view(4)[0].data_ptr() == address


def test_full_cache_says_both_sizes() -> None:
    store = KVStore(rows=1, kv_heads=1, head_dim=1, capacity=4, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="has 4 slots and slots up to 6"):
        store.write(3, torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))
