"""Layer numbers of others, and ours."""

from __future__ import annotations

import pytest
import toy_target as toy

from drafters.export.layout import eagle_layers, from_ids, to_ids


def test_conventions() -> None:
    info = toy.make_target("llama").info  # 4 blocks
    assert to_ids((0, 1, -1), info, "inputs") == [1, 2, 4]
    assert to_ids((0, 1, -1), info, "outputs") == [0, 1, 3]
    for convention in ("inputs", "outputs"):
        assert from_ids(to_ids((0, 1, 3), info, convention), info, convention) == (0, 1, 3)
    with pytest.raises(ValueError, match="layer id 0 is out of range: the format counts the inputs of blocks, 1 to 4"):
        from_ids([0], info, "inputs")
    with pytest.raises(ValueError, match="layer id 4 is out of range: the format counts the outputs of blocks, 0 to 3"):
        from_ids([4], info, "outputs")


def test_the_layers_of_eagles_own_code() -> None:
    """Inputs of blocks 2, L // 2 and L - 3 of a 32-block target."""
    info = toy.make_target("llama", num_hidden_layers=32, hidden_size=8, intermediate_size=8, head_dim=4).info
    assert eagle_layers(info) == (1, 15, 28)
