import math

import pytest
import torch
from toys import TableDrafter, ToyState, random_table

from drafters.decoding.budget import make_budget
from drafters.recipe import Sampling, TreeSection

torch.set_num_threads(1)

PATHS = ((1, 0), (0,), (0, 0), (0, 2), (1,), (0, 0, 1), (3,))
ONE = Sampling(temperature=1.0)


def grow(section, table, draws="top", sampling=ONE, rows=3, token_map=None, levels=None, vocab_size=0, seed=0):
    budget = make_budget(section, sampling, draws, torch.Generator().manual_seed(seed), vocab_size)
    state = ToyState(torch.arange(rows) % 3, torch.arange(rows) % 4)
    tree = TableDrafter(table, token_map, levels).draft(state, budget)
    assert tree.tokens_BN.shape[1] <= budget.max_nodes and tree.max_depth <= budget.max_depth
    return tree, state


def node_context(tree, state, row, node):
    """The last two tokens at a node."""
    parent = int(tree.parents_BN[row, node])
    before = state.last_B[row] if node == 0 else tree.tokens_BN[row, parent]
    return int(before), int(tree.tokens_BN[row, node])


def test_chain_holds_the_argmax_of_each_level():
    table = random_table(7, 0)
    tree, state = grow(TreeSection(depth=3), table)
    assert tree.max_depth == 3 and tree.q_BNV is None and tree.valid_BN.all()
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 2]] * 3
    for row in range(3):
        for node in range(3):
            logits = table[node_context(tree, state, row, node)]
            assert tree.tokens_BN[row, node + 1] == logits.argmax()
            assert math.isclose(tree.log_q_BN[row, node + 1], logits.log_softmax(-1).max(), abs_tol=1e-6)


def test_static_tree_follows_its_paths_whatever_their_order():
    table = random_table(7, 1)
    tree, state = grow(TreeSection("static", paths=PATHS), table)
    ordered = [(0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 1)]
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 0, 1, 1, 2, 4]] * 3
    assert tree.depth_BN().tolist() == [[0, 1, 1, 1, 2, 2, 2, 3]] * 3 and tree.max_depth == 3
    for row in range(3):
        for node, path in enumerate(ordered, 1):
            ranking = table[node_context(tree, state, row, int(tree.parents_BN[row, node]))].argsort(descending=True)
            assert tree.tokens_BN[row, node] == ranking[path[-1]]


def test_sampled_tree_says_what_its_children_were_drawn_from():
    table = random_table(7, 2)
    tree, state = grow(TreeSection("static", paths=PATHS), table, "sample")
    assert tree.q_BNV is not None
    for row in range(3):
        for node in (0, 1, 2, 4):
            expected = table[node_context(tree, state, row, node)].softmax(-1)
            assert torch.allclose(tree.q_BNV[row, node], expected, atol=1e-6)
            siblings = tree.tokens_BN[row, tree.parents_BN[row] == node].tolist()
            assert len(set(siblings)) == len(siblings)
        assert not tree.q_BNV[row, [3, 5, 6, 7]].any()
        for node in range(1, 8):
            q = tree.q_BNV[row, tree.parents_BN[row, node], tree.tokens_BN[row, node]]
            assert math.isclose(tree.log_q_BN[row, node], q.log(), abs_tol=1e-5)


def test_siblings_are_drawn_in_their_order():
    # ranks 0 and 3 are the first and the second draw, so the pair's law is q(x) q(y) / (1 - q(x))
    table = random_table(4, 3)
    tree, _ = grow(TreeSection("static", paths=((0,), (3,))), table[:1, :1].expand(4, 4, 4), "sample", rows=40_000)
    q = table[0, 0].softmax(-1)
    first_is_0 = tree.tokens_BN[:, 1] == 0
    second_is_1 = tree.tokens_BN[first_is_0, 2] == 1
    assert abs(float(first_is_0.float().mean()) - float(q[0])) < 0.01
    assert abs(float(second_is_1.float().mean()) - float(q[1] / (1 - q[0]))) < 0.02


def test_draws_of_probability_zero_and_their_descendants_are_unused():
    section = TreeSection("static", paths=((0,), (1,), (2,), (2, 0), (0, 0)))
    tree, _ = grow(section, random_table(7, 4), "sample", Sampling(temperature=1.0, top_k=2))
    assert tree.valid_BN.tolist() == [[True, True, True, False, True, False]] * 3
    assert tree.parents_BN.tolist() == [[-1, 0, 0, -1, 1, -1]] * 3
    assert tree.log_q_BN.isfinite().all()
    cold, _ = grow(section, random_table(7, 4), "sample", Sampling(temperature=0.0))
    assert cold.valid_BN.tolist() == [[True, True, False, False, True, False]] * 3


@pytest.mark.parametrize("draws", ["top", "sample"])
def test_draft_vocabulary_is_mapped_to_the_targets(draws):
    token_map = torch.tensor([6, 1, 4])
    tree, _ = grow(TreeSection(depth=3), random_table(7, 5, columns=3), draws, token_map=token_map, vocab_size=7)
    assert torch.isin(tree.tokens_BN[:, 1:], token_map).all()
    if tree.q_BNV is not None:
        assert tree.q_BNV.shape == (3, 4, 7)
        assert torch.allclose(tree.q_BNV[:, :3, token_map].sum(-1), torch.ones(3, 3))


@pytest.mark.parametrize("kind", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_drafter_that_stops_early(kind, levels):
    section = TreeSection(kind, depth=4, width=2, nodes=20, paths=PATHS)
    tree, _ = grow(section, random_table(7, 6), levels=levels)
    assert tree.max_depth == levels == int(tree.depth_BN().max())
    assert tree.valid_BN.all() and tree.tokens_BN.shape == tree.log_q_BN.shape


def slow_eagle2(table, before, root, depth, width, nodes):
    """The dynamic tree of one row, node by node; returns sorted (path tokens)."""
    candidates = []  # (score, creation, path)
    level = [(0.0, (root,))]
    for _ in range(depth):
        grown = []
        for score, path in level:
            context = (path[-2] if len(path) > 1 else before, path[-1])
            log_q = table[context].log_softmax(-1)
            for token in log_q.argsort(descending=True)[:width].tolist():
                grown.append((score + float(log_q[token]), (*path, token)))
        candidates += grown
        level = sorted(grown, key=lambda node: -node[0])[:width]
    best = sorted(candidates, key=lambda node: -node[0])[:nodes]
    return sorted(path[1:] for _, path in best)


@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 3, 2), (3, 2, 6), (4, 3, 12), (2, 3, 100)])
def test_dynamic_tree_is_eagle2s(depth, width, nodes):
    table = random_table(9, 7)
    tree, state = grow(TreeSection("dynamic", depth=depth, width=width, nodes=nodes), table, rows=4)
    reach = tree.ancestors_BNN()
    for row in range(4):
        paths = sorted(tree.tokens_BN[row, on[1:].nonzero()[:, 0] + 1].tolist() for on in reach[row, 1:])
        expected = slow_eagle2(table, int(state.last_B[row]), int(state.root_B[row]), depth, width, nodes)
        assert paths == [list(path) for path in expected]


def assert_connected(tree):
    for row in range(len(tree.tokens_BN)):
        for node in range(1, tree.tokens_BN.shape[1]):
            parent = int(tree.parents_BN[row, node])
            assert 0 <= parent < node
    assert int(tree.depth_BN().max()) <= tree.max_depth


@pytest.mark.parametrize("peak", [0.0, 200.0])
def test_dynamic_tree_is_connected_under_ties(peak):
    # log q = 0 exactly for the certain token; or all equal
    table = torch.zeros(6, 6, 6)
    table[..., 2] = peak
    for nodes in range(1, 12):
        tree, _ = grow(TreeSection("dynamic", depth=5, width=3, nodes=nodes), table)
        assert_connected(tree)
        if peak:
            assert int(tree.depth_BN().max()) == min(nodes, 5)


@pytest.mark.parametrize("kind", ["chain", "static", "dynamic"])
def test_broken_logits_give_unused_nodes(kind):
    table = random_table(7, 8)
    table[0] = math.nan
    table[1, :, 1:] = -math.inf
    section = TreeSection(kind, depth=3, width=2, nodes=9, paths=PATHS)
    tree, _ = grow(section, table)
    assert tree.log_q_BN.isfinite().all() and not tree.valid_BN[0, 1:].any() and tree.valid_BN[2].any()
    assert ((tree.parents_BN >= 0) == tree.valid_BN)[:, 1:].all()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (TreeSection("static"), "needs paths"),
        (TreeSection("static", paths=((0,), (1, 0))), r"path \[1, 0\].*add \[1\]"),
        (TreeSection("static", paths=((0,), (0,))), "twice"),
        (TreeSection("static", paths=((0,), (-1,))), "ranks from 0"),
        (TreeSection("static", paths=((),)), "ranks from 0"),
        (TreeSection("chain", depth=0), "depth of a chain tree is 0"),
        (TreeSection("dynamic", width=0), "width"),
        (TreeSection("dynamic", nodes=0), "nodes"),
    ],
)
def test_broken_sections(section, message):
    with pytest.raises(ValueError, match=message):
        make_budget(section, ONE, "top")


def test_dynamic_tree_of_sampled_children_is_refused():
    with pytest.raises(ValueError, match="not lossless"):
        make_budget(TreeSection("dynamic"), ONE, "sample")


def test_vocabulary_faults():
    with pytest.raises(ValueError, match="asks for 4 children of a node but the drafter has 3"):
        grow(TreeSection("static", paths=PATHS), random_table(7, 0, columns=3))
    with pytest.raises(ValueError, match="need vocab_size"):
        grow(TreeSection(), random_table(7, 0, columns=3), "sample", token_map=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="7 tokens but the target has 5"):
        grow(TreeSection(), random_table(7, 0), "sample", vocab_size=5)
