import math
from collections import defaultdict

import pytest
import tiny
import torch
from toys import RateDrafter, TableDrafter, ToySession, ToyTarget, chain_tree, chi_square_p, exact_law, random_table

from drafters.decoding.generate import generate
from drafters.decoding.stats import AcceptanceStats
from drafters.decoding.stopping import Stopping
from drafters.recipe import Sampling, TreeSection

torch.set_num_threads(1)

V = 40
TABLE = random_table(V, 0, spread=3.0)
NEAR = TABLE + random_table(V, 1, spread=1.5)  # a drafter that is often right
TARGET = ToyTarget(TABLE)
STATIC = TreeSection("static", paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
DYNAMIC = TreeSection("dynamic", depth=4, width=3, nodes=9)
TREES = [TreeSection(depth=3), STATIC, DYNAMIC]
PROMPTS = [[3], [1, 2], [5, 6, 7, 8, 9], [11, 12, 13], [4, 4, 4, 4], [30, 31]]


def slow_greedy(table, prompt, length):
    text = [0, *prompt]
    for _ in range(length):
        text.append(int(table[text[-2], text[-1]].argmax()))
    return text[-length:]


class Streamed:
    """Collects what the callback is given."""

    def __init__(self):
        self.tokens = defaultdict(list)

    def __call__(self, row, tokens):
        self.tokens[row] += tokens


def comb(width, depth):
    """`width` chains side by side."""
    return TreeSection("static", paths=tuple((r, *[0] * d) for r in range(width) for d in range(depth)))


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.kind)
@pytest.mark.parametrize("table", [NEAR, TABLE, -TABLE], ids=["near", "perfect", "useless"])
def test_greedy_is_the_targets_own(tree, table):
    result = generate(TARGET, TableDrafter(table), PROMPTS, max_new_tokens=25, tree=tree)
    assert result.sequences == [slow_greedy(TABLE, prompt, 25) for prompt in PROMPTS]


def test_plain_decoding():
    for rule, temperature in [("auto", 0.0), ("token", 0.0), ("auto", 1.0), ("point_mass", 1.0)]:
        sampling = Sampling(temperature=temperature)
        result = generate(TARGET, None, PROMPTS, max_new_tokens=9, sampling=sampling, rule=rule)
        assert all(len(sequence) == 9 for sequence in result.sequences)
        assert [stats.tau() for stats in result.stats] == [1.0] * len(PROMPTS)
        assert result.timings["rounds"] == 8 and result.timings["draft"] < 0.05
        if temperature == 0:
            assert result.sequences == [slow_greedy(TABLE, prompt, 9) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_perfect_drafter_has_tau_of_depth_plus_one(depth, temperature):
    sampling, tree = Sampling(temperature=temperature), TreeSection(depth=depth)
    result = generate(TARGET, TableDrafter(TABLE), PROMPTS, max_new_tokens=20, sampling=sampling, tree=tree)
    for stats in result.stats:
        assert stats.tau() == depth + 1 and stats.expected_tau() == depth + 1 and stats.alpha() == [1.0] * depth
        assert stats.rounds == math.ceil(19 / (depth + 1))


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.kind)
def test_useless_drafter_has_tau_one(tree):
    result = generate(TARGET, TableDrafter(-TABLE), PROMPTS, max_new_tokens=20, tree=tree)
    for stats in result.stats:
        assert stats.tau() == 1.0 and stats.alpha() == [0.0] and stats.rounds == 19


def test_known_rates_are_recovered():
    rates = (0.9, 0.7, 0.5, 0.8)
    prompts = [[i % V, (7 * i) % V] for i in range(64)]
    result = generate(TARGET, RateDrafter(TABLE, rates, seed=3), prompts, max_new_tokens=200, tree=TreeSection(depth=4))
    stats = AcceptanceStats().merge(*result.stats)
    assert stats.rounds > 3000
    for rate, (low, high) in zip(rates, stats.alpha_interval(), strict=True):
        assert low <= rate <= high and high - low < 0.06
    assert math.isclose(stats.tau(), stats.expected_tau(), rel_tol=1e-9)


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("table", [NEAR, TABLE], ids=["near", "perfect"])
def test_stops_at_the_end_of_sequence_wherever_it_falls(depth, table):
    prompt = next([i, j] for i in range(V) for j in range(V) if len(set(slow_greedy(TABLE, [i, j], 14))) == 14)
    text = slow_greedy(TABLE, prompt, 14)
    never = next(token for token in range(V) if token not in text)
    for tree in (TreeSection(depth=depth), TreeSection("dynamic", depth=depth, width=2, nodes=8)):
        for j in range(14):
            target, streamed = ToyTarget(TABLE, eos=(never, text[j])), Streamed()
            result = generate(target, TableDrafter(table), [prompt], max_new_tokens=50, tree=tree, on_tokens=streamed)
            assert result.sequences == [text[: j + 1]] and streamed.tokens[0] == text[: j + 1]
            assert result.stats[0].tokens == j


def test_round_cut_by_eos_counts_what_was_emitted_and_one_cut_by_the_limit_counts_whole():
    text = slow_greedy(TABLE, [1, 2], 12)
    assert text[3] not in text[:3]
    cut = generate(
        TARGET, TableDrafter(TABLE), [[1, 2]], max_new_tokens=50, tree=TreeSection(depth=5), eos_token_ids=[text[3]]
    )
    assert cut.stats[0] == AcceptanceStats([1, 1, 1], [1, 1, 1], rounds=1, tokens=3)
    limit = generate(TARGET, TableDrafter(TABLE), [[1, 2]], max_new_tokens=4, tree=TreeSection(depth=5))
    assert limit.sequences == [text[:4]]
    assert limit.stats[0] == AcceptanceStats([1] * 5, [1] * 5, rounds=1, tokens=6)


def test_eos_ids_given_replace_the_targets():
    text = slow_greedy(TABLE, [1, 2], 12)
    target = ToyTarget(TABLE, eos=(text[2],))
    assert generate(target, None, [[1, 2]], max_new_tokens=12, eos_token_ids=()).sequences == [text]
    assert generate(target, None, [[1, 2]], max_new_tokens=12).sequences == [text[:3]]
    assert generate(target, None, [[1, 2]], max_new_tokens=12, eos_token_ids=[text[0]]).sequences == [text[:1]]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 7])
def test_max_new_tokens(max_new_tokens):
    for drafter in (TableDrafter(TABLE), None):
        result = generate(TARGET, drafter, PROMPTS, max_new_tokens=max_new_tokens)
        assert result.sequences == [slow_greedy(TABLE, prompt, max_new_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.kind)
def test_batch_equals_one_by_one(tree):
    eos = tuple(range(0, V, 9))
    target = ToyTarget(TABLE, eos)
    prompts = [[i, *range(j)] for i in range(12) for j in range(1, 4)]
    streamed = Streamed()
    batch = generate(target, TableDrafter(NEAR), prompts, max_new_tokens=30, tree=tree, on_tokens=streamed)
    assert len({len(sequence) for sequence in batch.sequences}) > 5
    for index, prompt in enumerate(prompts):
        alone = generate(target, TableDrafter(NEAR), [prompt], max_new_tokens=30, tree=tree)
        assert alone.sequences[0] == batch.sequences[index] == streamed.tokens[index]
        assert alone.stats[0] == batch.stats[index]


def test_finished_rows_leave_the_batch(monkeypatch):
    rows = []
    verify = ToySession.verify
    monkeypatch.setattr(
        ToySession, "verify", lambda self, tree: (rows.append(len(tree.tokens_BN)), verify(self, tree))[1]
    )
    target = ToyTarget(TABLE, eos=tuple(range(0, V, 5)))
    result = generate(target, TableDrafter(NEAR), PROMPTS, max_new_tokens=30)
    assert rows == [sum(stats.rounds > i for stats in result.stats) for i in range(len(rows))]
    assert len(set(rows)) > 1


def test_widths_and_depths():
    table, near = random_table(10, 5, spread=2.0), random_table(10, 6)
    target, prompts = ToyTarget(table), [[1, 2], [3]]
    expected = [slow_greedy(table, prompt, 5) for prompt in prompts]
    for width in range(1, 9):
        for depth in range(1, 9):
            for tree in (comb(width, depth), TreeSection("dynamic", depth=depth, width=width, nodes=width * depth)):
                for temperature in (0.0, 1.0):
                    sampling = Sampling(temperature=temperature)
                    result = generate(
                        target, TableDrafter(near), prompts, max_new_tokens=5, tree=tree, sampling=sampling
                    )
                    assert [len(sequence) for sequence in result.sequences] == [5, 5]
                    assert temperature or result.sequences == expected, (width, depth, tree.kind)


@pytest.mark.parametrize("name", ["recursive", "point_mass", "token"])
def test_every_lossless_rule_is_greedy_at_temperature_zero(name):
    for tree in TREES[:1] if name == "token" else [TREES[0], STATIC]:
        result = generate(TARGET, TableDrafter(NEAR), PROMPTS, max_new_tokens=15, tree=tree, rule=name)
        assert result.sequences == [slow_greedy(TABLE, prompt, 15) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("rule", "tree"), [("token", TreeSection(depth=2)), ("recursive", STATIC), ("point_mass", DYNAMIC), ("auto", None)]
)
def test_joint_law_through_the_whole_loop(rule, tree):
    """Tokens of rows in one batch, the prefill's included; without a tree: plain decoding."""
    table, sampling = random_table(5, 0), Sampling(temperature=0.8, top_p=0.9)
    drafter = TableDrafter(random_table(5, 1, columns=4), torch.tensor([3, 0, 4, 1])) if tree else None
    text = []
    for seed in range(6):
        result = generate(
            ToyTarget(table), drafter, [[0, 1]] * 4096, max_new_tokens=3, sampling=sampling, tree=tree or STATIC,
            rule=rule, seed=seed,
        )  # fmt: skip
        text += result.sequences
    assert chi_square_p(torch.tensor(text), exact_law(table, (0, 1), 3, sampling)) > 1e-4


def test_seed():
    def run(seed):
        sampling = Sampling(temperature=1.5)
        return generate(TARGET, TableDrafter(NEAR), PROMPTS, max_new_tokens=20, sampling=sampling, seed=seed).sequences

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.kind)
def test_drafter_that_stops_early(tree, levels):
    result = generate(TARGET, TableDrafter(TABLE, levels=levels), PROMPTS, max_new_tokens=15, tree=tree)
    assert result.sequences == [slow_greedy(TABLE, prompt, 15) for prompt in PROMPTS]
    assert all(stats.tau() == levels + 1 for stats in result.stats)


@pytest.mark.parametrize("drafter", [None, TableDrafter(NEAR), TableDrafter(TABLE)], ids=["plain", "near", "perfect"])
def test_stop_strings_end_with_the_token_that_completes_them(drafter):
    tokenizer = tiny.make_tokenizer()
    table = torch.full((tiny.VOCAB, tiny.VOCAB, tiny.VOCAB), -4.0)
    text = tokenizer.encode("abcdéfgh ijk", add_special_tokens=False)
    for before, last, following in zip([0, *text], text, text[1:], strict=False):
        table[before, last, following] = 4.0
    if drafter is not None:
        drafter = TableDrafter(table if drafter.table is TABLE else table.roll(1, 0))

    def run(*strings):
        found = generate(
            ToyTarget(table),
            drafter,
            [text[:1]],
            max_new_tokens=len(text) - 1,
            stop_strings=strings,
            tokenizer=tokenizer,
        )
        return tokenizer.decode(found.sequences[0])

    assert run("cd") == "bcd"
    assert run("é") == "bcdé"
    assert run("h i", "zzz") == "bcdéfgh i"
    assert run("jk", "gh") == "bcdéfgh"
    assert run("ab") == "bcdéfgh ijk"  # the prompt's text does not count


def test_stopping_reports():
    with pytest.raises(ValueError, match="need the tokenizer"):
        Stopping((), ("x",))
    with pytest.raises(ValueError, match="empty"):
        Stopping((), ("",), tiny.make_tokenizer())
    assert Stopping((3, 4)).cut([1], [5, 4, 3]) == 2 and Stopping((3,)).cut([1], [5]) is None


def test_timings():
    result = generate(TARGET, TableDrafter(NEAR), PROMPTS, max_new_tokens=10)
    timings = result.timings
    parts = sum(timings[name] for name in ("prefill", "draft", "verify", "accept", "commit", "rest"))
    assert math.isclose(parts, timings["total"], rel_tol=1e-6)
    assert timings["rounds"] == max(stats.rounds for stats in result.stats)
    assert all(seconds >= 0 for seconds in timings.values())


def test_no_prompts():
    result = generate(TARGET, None, [], max_new_tokens=5)
    assert result.sequences == [] and result.stats == [] and result.timings["rounds"] == 0


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, V]], {}, f"token ids 1 to {V}; the target's are 0 to {V - 1}"),
        ([[1] * 10], {"max_new_tokens": 23}, "10 tokens and max_new_tokens is 23: more than the 32 positions"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"sampling": Sampling(temperature=1.0), "rule": "greedy"}, "needs temperature 0"),
        ([[1]], {"sampling": Sampling(top_p=0.0)}, "top_p"),
        ([[1]], {"stop_strings": ["x"]}, "tokenizer"),
        ([[1]], {"tree": TreeSection("static")}, "needs paths"),
    ],
)
def test_faults(prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(ToyTarget(TABLE, positions=32), TableDrafter(NEAR), prompts, **{"max_new_tokens": 5, **settings})


def test_the_last_position_can_be_used():
    result = generate(ToyTarget(TABLE, positions=32), TableDrafter(NEAR), [[1] * 10], max_new_tokens=22)
    assert result.sequences == [slow_greedy(TABLE, [1] * 10, 22)]


def test_tree_beyond_the_budget_is_refused():
    class Greedy(TableDrafter):
        def draft(self, state, budget):
            return chain_tree(state.root_B[:, None].expand(-1, 6))

    with pytest.raises(ValueError, match="6 nodes and depth 5; the budget allows 5 and 4"):
        generate(TARGET, Greedy(NEAR), PROMPTS, max_new_tokens=5)
