"""Losslessness by distribution: the joint law of three tokens against enumeration; wrong recipes must fail."""

import math
from dataclasses import replace

import pytest
import torch
from toys import TableDrafter, chain_tree, chi_square_p, exact_law, random_table, simulate

from drafters.decoding import accept
from drafters.decoding.accept import Acceptance, PointMass, Recursive, Token, make_rule, residual
from drafters.decoding.sampling import law, sample
from drafters.recipe import Sampling, TreeSection
from drafters.tree import DraftTree

torch.set_num_threads(1)

SAMPLES = 200_000
V = 5
CHAIN = TreeSection(depth=2)
STATIC = TreeSection("static", paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
DYNAMIC = TreeSection("dynamic", depth=2, width=3, nodes=6)
COMBINATIONS = [
    ("token", CHAIN), ("recursive", CHAIN), ("point_mass", CHAIN), ("recursive", STATIC), ("point_mass", STATIC),
    ("point_mass", DYNAMIC),
]  # fmt: skip
SETTINGS = [
    Sampling(temperature=0.5),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, top_k=3),
]
TARGET, DRAFT = random_table(V, 0), random_table(V, 1)


def p_value(rule, tree, sampling, target=TARGET, drafter=None, samples=SAMPLES, length=3, seed=0):
    drafter = drafter or TableDrafter(DRAFT)
    text = simulate(target, drafter, rule, tree, sampling, rows=samples, length=length, seed=seed)
    return chi_square_p(text, exact_law(target, (0, 1), length, sampling))


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: f"T{s.temperature}-p{s.top_p}-k{s.top_k}")
@pytest.mark.parametrize(("rule", "tree"), COMBINATIONS, ids=lambda x: x if isinstance(x, str) else x.kind)
def test_joint_law_of_three_tokens(rule, tree, sampling):
    assert p_value(make_rule(rule, sampling, tree), tree, sampling) > 1e-4


def masked(table, tokens):
    """The table with these tokens impossible."""
    table = table.clone()
    table[..., tokens] = -math.inf
    return table


PAIRS = {
    "q with zeros": (TARGET, TableDrafter(random_table(V, 1, columns=3), torch.tensor([4, 0, 2]))),
    "p with zeros": (masked(TARGET, [1, 3]), TableDrafter(DRAFT)),
    "disjoint supports": (masked(TARGET, [0, 2, 3]), TableDrafter(masked(DRAFT, [1, 4]))),
    "perfect": (TARGET, TableDrafter(TARGET)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("rule", "tree"), COMBINATIONS, ids=lambda x: x if isinstance(x, str) else x.kind)
def test_joint_law_of_hard_pairs(rule, tree, pair):
    target, drafter = PAIRS[pair]
    sampling = Sampling(temperature=0.7)
    assert p_value(make_rule(rule, sampling, tree), tree, sampling, target, drafter, samples=30_000) > 1e-4


@pytest.mark.parametrize("rule", ["token", "recursive"])
@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: f"T{s.temperature}-p{s.top_p}-k{s.top_k}")
def test_perfect_drafter_makes_every_other_token_a_bonus(rule, sampling):
    tree = TreeSection(depth=1)  # accepted, bonus, accepted
    counting = Counting(make_rule(rule, sampling, tree))
    assert p_value(counting, tree, sampling, drafter=TableDrafter(TARGET), samples=30_000) > 1e-4
    assert counting.shortest == 2


class Counting:
    """Passes a rule on and remembers the shortest path."""

    def __init__(self, rule):
        self.rule, self.draws, self.shortest = rule, rule.draws, 99

    def accept(self, *arguments):
        acceptance = self.rule.accept(*arguments)
        self.shortest = min(self.shortest, int(acceptance.counts_B.min()))
        return acceptance


@pytest.mark.parametrize("rule", ["token", "recursive"])
def test_deterministic_trees_are_point_mass_to_sampling_rules(rule):
    class Direct(TableDrafter):
        def draft(self, state, budget):
            first = self.table[state.last_B, state.root_B].argmax(-1)
            return chain_tree(torch.stack([state.root_B, first, (first + 1) % V], 1))

    sampling = Sampling(temperature=0.8)
    assert p_value(make_rule(rule, sampling, CHAIN), CHAIN, sampling, drafter=Direct(DRAFT), samples=30_000) > 1e-4


def test_recursive_accepts_repeated_siblings_of_a_deterministic_tree():
    class Direct(TableDrafter):
        def draft(self, state, budget):
            first = self.table[state.last_B, state.root_B].topk(2).indices
            tree = chain_tree(torch.cat([state.root_B[:, None], first, first[:, :1]], 1))
            parents = torch.tensor([-1, 0, 0, 0]).expand_as(tree.tokens_BN)
            return replace(tree, parents_BN=parents, max_depth=1)

    sampling = Sampling(temperature=0.8)
    for name in ("recursive", "point_mass"):
        assert (
            p_value(make_rule(name, sampling, STATIC), STATIC, sampling, drafter=Direct(DRAFT), samples=30_000) > 1e-4
        )


def accepted_mean(rule, tree, sampling):
    """Mean accepted tokens of one round of the toy pair from the context (0, 1)."""
    counts = Lengths(make_rule(rule, sampling, tree))
    simulate(TARGET, TableDrafter(DRAFT), counts, tree, sampling, rows=50_000, length=1, chunk=50_000)
    return counts.mean


class Lengths(Counting):
    def accept(self, *arguments):
        acceptance = self.rule.accept(*arguments)
        self.mean = float(acceptance.counts_B.float().mean()) - 1
        return acceptance


def test_recursive_equals_token_on_a_chain_and_beats_point_mass_on_trees():
    sampling = Sampling(temperature=1.0)
    chain = TreeSection(depth=1)
    assert abs(accepted_mean("recursive", chain, sampling) - accepted_mean("token", chain, sampling)) < 0.01
    wide = TreeSection("static", paths=((0,), (1,)))
    assert accepted_mean("recursive", wide, sampling) > accepted_mean("point_mass", wide, sampling) - 0.005


def test_token_alpha_is_one_minus_total_variation():
    sampling = Sampling(temperature=1.0)
    alpha = accepted_mean("token", TreeSection(depth=1), sampling)
    expected = torch.minimum(law(TARGET[0, 1], sampling), law(DRAFT[0, 1], sampling)).sum()
    assert abs(alpha - float(expected)) < 0.01


# Wrong recipes: each must be caught.


def caught(rule, tree, sampling=SETTINGS[1], **settings):
    return p_value(rule, tree, sampling, samples=30_000, **settings) < 1e-4


@pytest.mark.parametrize(("rule", "tree"), [(Token(), CHAIN), (Recursive(), CHAIN), (Recursive(), STATIC)])
def test_top_children_judged_as_if_sampled_are_caught(rule, tree):
    class TopWithLaw(TableDrafter):
        def draft(self, state, budget):
            top = replace(budget, picker=replace(budget.picker, draws="top"))
            drawn, best = super().draft(state, budget), super().draft(state, top)
            before = best.tokens_BN.gather(1, best.parents_BN.clamp_min(0))
            before[:, 0] = state.last_B
            assert drawn.q_BNV is not None
            return replace(best, q_BNV=self.table[before, best.tokens_BN].softmax(-1))

    assert caught(rule, tree, drafter=TopWithLaw(DRAFT))


def test_draft_law_not_renormalized_is_caught(monkeypatch):
    monkeypatch.setattr(accept, "without", lambda q_BV, x_B1: q_BV.scatter(-1, x_B1, 0.0))
    assert caught(Recursive(), STATIC)


def test_earlier_siblings_left_in_the_draft_law_are_caught(monkeypatch):
    monkeypatch.setattr(accept, "without", lambda q_BV, x_B1: q_BV)
    assert caught(Recursive(), STATIC)


@pytest.mark.parametrize(("rule", "tree"), [(Token(), CHAIN), (Recursive(), CHAIN), (Recursive(), STATIC)])
def test_target_law_instead_of_the_residual_is_caught(monkeypatch, rule, tree):
    monkeypatch.setattr(accept, "residual", lambda r_BV, q_BV: r_BV)
    assert caught(rule, tree)


@pytest.mark.parametrize(("rule", "tree"), [(Token(), CHAIN), (Recursive(), STATIC), (PointMass(), STATIC)])
def test_bonus_from_raw_logits_is_caught(rule, tree):
    class RawBonus(Counting):
        def accept(self, tree, logits_BNV, sampling, generator):
            kept = self.rule.accept(tree, logits_BNV, sampling, generator)
            row_B = torch.arange(len(logits_BNV))
            last_B = kept.path_BP[row_B, kept.counts_B - 1]
            leaf_B = ~(tree.parents_BN == last_B[:, None]).any(1)
            raw_B = sample(logits_BNV[row_B, last_B].softmax(-1), generator)
            return Acceptance(kept.path_BP, kept.counts_B, torch.where(leaf_B, raw_B, kept.next_B))

    assert caught(RawBonus(rule), tree, SETTINGS[0])
    assert caught(RawBonus(rule), tree, SETTINGS[2])


@pytest.mark.parametrize(("rule", "tree"), [(Token(), CHAIN), (Recursive(), CHAIN)])
def test_stale_residual_for_the_bonus_is_caught(rule, tree):
    class StaleResidual(Counting):
        def accept(self, tree, logits_BNV, sampling, generator):
            kept = self.rule.accept(tree, logits_BNV, sampling, generator)
            stale_B = sample(residual(law(logits_BNV[:, -2], sampling), tree.q_BNV[:, -2]), generator)
            whole_B = kept.counts_B == tree.max_depth + 1
            return Acceptance(kept.path_BP, kept.counts_B, torch.where(whole_B, stale_B, kept.next_B))

    assert caught(StaleResidual(rule), tree)


@pytest.mark.parametrize("tree", [STATIC, DYNAMIC], ids=lambda t: t.kind)
def test_a_draw_for_each_child_is_caught(tree):
    class DrawPerChild(PointMass):
        """Medusa's nucleus acceptance: siblings are judged by independent draws of their parent's next token."""

        def accept(self, tree, logits_BNV, sampling, generator):
            first = super().accept(tree, logits_BNV, sampling, generator)
            second = super().accept(tree, logits_BNV, sampling, generator)
            longer_B = second.counts_B > first.counts_B
            path_BP = torch.where(longer_B[:, None], second.path_BP, first.path_BP)
            return Acceptance(
                path_BP,
                torch.where(longer_B, second.counts_B, first.counts_B),
                torch.where(longer_B, second.next_B, first.next_B),
            )

    assert caught(DrawPerChild(), tree)


def test_point_mass_that_forgets_the_rejection_is_caught():
    class Forgets(PointMass):
        """Where nothing was accepted, the next token is drawn afresh: the children get a second chance."""

        def accept(self, tree, logits_BNV, sampling, generator):
            kept = super().accept(tree, logits_BNV, sampling, generator)
            row_B = torch.arange(len(logits_BNV))
            fresh_B = sample(law(logits_BNV[row_B, kept.path_BP[row_B, kept.counts_B - 1]], sampling), generator)
            return Acceptance(kept.path_BP, kept.counts_B, fresh_B)

    for tree in (CHAIN, STATIC, DYNAMIC):
        assert caught(Forgets(), tree)


# Numbers and shapes.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["token", "recursive", "point_mass"])
def test_an_almost_certain_target_stays_finite(rule, dtype):
    p = torch.tensor([1 - 1e-4, 1e-4, 0.0, 0.0, 0.0])
    table = p.log().clamp_min(-60).to(dtype).expand(V, V, V)
    sampling = Sampling(temperature=1.0)
    for tree in (CHAIN, STATIC):
        if rule == "token" and tree is not CHAIN:
            continue
        for draft in (table, table.flip(-1), torch.zeros(V, V, V, dtype=dtype)):
            text = simulate(table, TableDrafter(draft), make_rule(rule, sampling, tree), tree, sampling, rows=2_000)
            assert torch.isin(text, torch.tensor([0, 1])).all()
            assert (text == 0).float().mean() > 0.99


def test_residual():
    r = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.75, 0.25, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.equal(residual(r, q), torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def hand_tree(**changes):
    """Two rows of root - {1, 2}, 1 - {3}; all tokens equal their node's index."""
    tree = DraftTree(
        tokens_BN=torch.tensor([[0, 1, 2, 3]] * 2),
        parents_BN=torch.tensor([[-1, 0, 0, 1]] * 2),
        log_q_BN=torch.zeros(2, 4),
        valid_BN=torch.ones(2, 4, dtype=torch.bool),
        max_depth=2,
    )
    return replace(tree, **changes)


def want(*best):
    """Logits whose argmax at node n of both rows is best[n]."""
    return 50 * torch.eye(V)[torch.tensor(best)].expand(2, -1, -1)


@pytest.mark.parametrize("name", ["greedy", "recursive", "point_mass"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_paths(name, temperature):
    sampling = Sampling(temperature=temperature)
    if name == "greedy" and temperature:
        pytest.skip("greedy needs temperature 0")
    rule = make_rule(name, sampling, STATIC)
    for best, path, following in [((1, 3, 0, 4), [0, 1, 3], 4), ((2, 3, 4, 4), [0, 2], 4), ((4, 3, 0, 0), [0], 4)]:
        result = rule.accept(hand_tree(), want(*best), sampling, torch.Generator().manual_seed(0))
        assert result.path_BP.tolist() == [path + [0] * (3 - len(path))] * 2
        assert result.counts_B.tolist() == [len(path)] * 2 and result.next_B.tolist() == [following] * 2


@pytest.mark.parametrize("name", ["greedy", "recursive", "point_mass"])
def test_unused_nodes_are_never_accepted(name):
    sampling = Sampling(temperature=0.0)
    valid = torch.tensor([[True, False, True, False], [True, True, True, False]])
    tree = hand_tree(valid_BN=valid, parents_BN=torch.tensor([[-1, -1, 0, -1], [-1, 0, 0, -1]]))
    result = make_rule(name, sampling, STATIC).accept(tree, want(1, 3, 0, 4), sampling, None)
    assert result.counts_B.tolist() == [1, 2] and result.next_B.tolist() == [1, 3]


def test_token_rule_stops_at_unused_nodes_without_a_residual():
    sampling = Sampling(temperature=0.0)
    tree = replace(
        chain_tree(torch.tensor([[0, 1, 2]] * 2)), valid_BN=torch.tensor([[True, False, False], [True, True, False]])
    )
    result = Token().accept(tree, want(1, 2, 3), sampling, None)
    assert result.counts_B.tolist() == [1, 2] and result.next_B.tolist() == [1, 2]


def test_same_seed_same_answer():
    texts = [
        simulate(TARGET, TableDrafter(DRAFT), Recursive(), STATIC, SETTINGS[1], rows=100, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize(
    ("temperature", "tree", "name"),
    [
        (0.0, CHAIN, "greedy"),
        (0.0, DYNAMIC, "greedy"),
        (1.0, CHAIN, "recursive"),
        (1.0, STATIC, "recursive"),
        (1.0, DYNAMIC, "point_mass"),
    ],
)
def test_auto(temperature, tree, name):
    rule = make_rule("auto", Sampling(temperature=temperature), tree)
    assert rule.name == name and rule.lossless


@pytest.mark.parametrize(
    ("name", "temperature", "tree", "message"),
    [
        ("greedy", 0.7, CHAIN, "needs temperature 0, got 0.7"),
        ("token", 1.0, STATIC, "takes chains, got a static tree"),
        ("recursive", 1.0, DYNAMIC, "dynamic tree"),
        ("best", 1.0, CHAIN, 'no rule "best"; expected auto, greedy'),
        ("auto", -1.0, CHAIN, "temperature is -1"),
    ],
)
def test_combinations_that_do_not_go_together(name, temperature, tree, message):
    with pytest.raises(ValueError, match=message):
        make_rule(name, Sampling(temperature=temperature), tree)


@pytest.mark.parametrize("name", ["greedy", "point_mass"])
def test_sampled_drafts_are_refused_by_exact_match(name):
    sampling = Sampling()
    tree = hand_tree(q_BNV=torch.full((2, 4, V), 1 / V))
    with pytest.raises(ValueError, match="drew its tokens by sampling"):
        make_rule(name, sampling, STATIC).accept(tree, want(1, 3, 0, 4), sampling, None)


def test_draft_law_in_another_vocabulary_is_refused():
    sampling = Sampling(temperature=1.0)
    tree = hand_tree(q_BNV=torch.full((2, 4, V - 1), 1 / V))
    with pytest.raises(ValueError, match="has 4 tokens, the target 5"):
        Recursive().accept(tree, want(1, 3, 0, 4), sampling, None)
    with pytest.raises(ValueError, match="takes chains, got a tree of 4 nodes and depth 2"):
        Token().accept(hand_tree(), want(1, 3, 0, 4), sampling, None)
