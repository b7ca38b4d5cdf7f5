"""What a recipe must satisfy beyond the types of its fields."""

from __future__ import annotations

from collections.abc import Iterator

from drafters.recipe import Recipe

Fault = tuple[tuple[str, ...], str]

AT_LEAST_ONE = (
    "data.max_length",
    "train.batch_size",
    "train.micro_batch_size",
    "train.log_every",
    "train.keep_checkpoints",
    "eval.num_prompts",
    "eval.max_new_tokens",
    "eval.batch_size",
    "eval.tree.depth",
    "eval.tree.width",
    "eval.tree.nodes",
)
AT_LEAST_ZERO = (
    "eval.num_rows",
    "data.limit",
    "tune.lora_rank",
    "train.max_steps",
    "train.eval_every",
    "train.save_every",
    "train.weight_decay",
    "eval.sampling.temperature",
    "eval.sampling.top_k",
)
ABOVE_ZERO = ("train.epochs", "train.learning_rate", "train.clip_norm", "eval.sampling.top_p", "tune.rate")
FRACTIONS = (
    "tune.lora_dropout",
    "train.warmup_fraction",
    "train.decay_fraction",
    "train.final_learning_rate_fraction",
    "eval.sampling.top_p",
    "eval.sampling.min_p",
)


def unsound_settings(recipe: Recipe) -> Iterator[Fault]:
    """Settings of the right type that make no sense, with what was expected."""
    yield from _out_of_range(recipe)
    train, data = recipe.train, recipe.data
    if train.batch_size % train.micro_batch_size:
        got = f"{train.batch_size} and {train.micro_batch_size}"
        yield ("train", "batch_size"), f"must be a multiple of micro_batch_size, got {got}"
    if not data.train:
        yield ("data", "train"), "names no data"
    if not data.heldout and not 0 < data.heldout_fraction < 1:
        yield ("data", "heldout_fraction"), f"must lie between 0 and 1, got {data.heldout_fraction}"
    if recipe.eval.tree.kind == "static" and not recipe.eval.tree.paths:
        yield ("eval", "tree", "paths"), "must list the paths of a static tree"


def _out_of_range(recipe: Recipe) -> Iterator[Fault]:
    bounds = ((AT_LEAST_ONE, "at least 1", lambda x: x >= 1), (AT_LEAST_ZERO, "at least 0", lambda x: x >= 0))
    more = ((ABOVE_ZERO, "above 0", lambda x: x > 0), (FRACTIONS, "from 0 to 1", lambda x: 0 <= x <= 1))
    for names, expected, holds in (*bounds, *more):
        for name in names:
            value = _value(recipe, name)
            if not holds(value):
                yield tuple(name.split(".")), f"must be {expected}, got {value}"


def _value(recipe: Recipe, name: str) -> float:
    value: object = recipe
    for part in name.split("."):
        value = vars(value)[part]
    assert isinstance(value, int | float)
    return value
