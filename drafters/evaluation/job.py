"""What the eval scripts share: their arguments, and the target, head and prompts that these name."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drafters.data.conversations import Conversation
from drafters.evaluation.measure import decode
from drafters.evaluation.prompts import EncodedPrompt, load_prompts
from drafters.evaluation.report import MARKDOWN_FILE, update_report
from drafters.heads.base import CONFIG_FILE, WEIGHTS_FILE, Drafter, load_head
from drafters.recipe import EvalSection, Recipe, Sampling, TargetSection, TreeSection
from drafters.recipe_file import load_recipe
from drafters.run import file_hash, provenance
from drafters.target.hf import HFTarget, load_target
from drafters.target.info import load_tokenizer

# For static trees where the recipe lists no paths: more children where acceptance is likelier.
STATIC_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))


@dataclass(frozen=True)
class Job:
    """Everything an evaluation needs.

    Attributes:
        sections: the recipe's eval section under each tree and temperature asked for.
        settings: facts for the report: prompts, template, precision, device, threads.
    """

    argv: list[str]
    head_folder: Path
    out: Path
    target: HFTarget
    drafter: Drafter
    prompts: list[EncodedPrompt]
    sections: list[EvalSection]
    settings: dict[str, Any]

    @property
    def prompt_ids(self) -> list[list[int]]:
        return [prompt.ids for prompt in self.prompts]

    def report(self, section: str, runs: list[dict[str, Any]]) -> None:
        """Puts the runs into the report of the output folder, and prints it."""
        content = {"settings": self.settings, "provenance": {**provenance(), "argv": self.argv}, "runs": runs}
        config = json.loads((self.head_folder / CONFIG_FILE).read_text())
        head = {
            "folder": str(self.head_folder),
            "type": config["type"],
            "weights_hash": file_hash(self.head_folder / WEIGHTS_FILE),
            "config": config["config"],
            "extra": config.get("extra", {}),
        }
        update_report(self.out, section, content, head=head, target=asdict(self.target.info))
        print((self.out / MARKDOWN_FILE).read_text())
        print(f"Report: {self.out / MARKDOWN_FILE}")


def make_parser(description: str) -> argparse.ArgumentParser:
    """The arguments of all eval scripts; what is not given comes from the recipe."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, metavar="HEAD_FOLDER", help="a run folder or a head folder")
    parser.add_argument("--recipe", type=Path, help="recipe.yaml (default: the one beside the head, if any)")
    parser.add_argument("--target", help="folder or hub id of the target (default: the recipe's, or the head's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="precision of target and head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL with question_id, category, turns (default: held-out turns)"
    )
    parser.add_argument("--num-prompts", type=int, metavar="N")
    parser.add_argument("--all-turns", action="store_true", help="use every turn of a prompt, not only the first")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, metavar="N", help="leave out longer prompts")
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--batch-size", type=int, metavar="B")
    parser.add_argument("--temperature", type=float, nargs="+", metavar="T", help="0 is greedy")
    parser.add_argument("--tree", nargs="+", choices=("chain", "static", "dynamic"))
    parser.add_argument("--depth", type=int, metavar="K", help="draft length: depth of the tree")
    parser.add_argument("--rule", help="acceptance rule")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, help="folder of the report (default: report/ in the run folder)")
    return parser


def open_job(args: argparse.Namespace, *, prompts: Path) -> Job:
    """Loads what the arguments name.

    Args:
        args: of `make_parser`.
        prompts: the file to use where neither the arguments nor a recipe name prompts.

    Raises:
        ValueError: a folder, recipe, head, target or prompt is missing or does not fit; the message says which.
    """
    head_folder = find_head(args.head)
    recipe = _find_recipe(args.recipe, args.head, head_folder)
    section = eval_section(args, recipe.eval if recipe else EvalSection(prompts=str(prompts)))
    target_section = _target_section(args, recipe, head_folder)
    tokenizer = load_tokenizer(target_section)
    target = load_target(target_section, args.device)
    drafter = load_head(head_folder, target.info, args.device).to(target.dtype)
    room = target.info.max_position_embeddings - section.max_new_tokens
    encoded = load_prompts(
        section,
        () if section.prompts else _heldout(recipe, tokenizer),
        tokenizer,
        max_tokens=min(args.max_prompt_tokens, room),
        answer=_answer(target, section) if args.all_turns else None,
    )
    return Job(
        argv=sys.argv,
        head_folder=head_folder,
        out=args.out or (head_folder.parent if head_folder.name == "head" else head_folder) / "report",
        target=target,
        drafter=drafter,
        prompts=encoded,
        sections=variants(args, section),
        settings=_settings(section, encoded, target, recipe),
    )


def find_head(folder: Path) -> Path:
    """The head folder: the folder itself, or head/ inside a run folder.

    Raises:
        ValueError: neither.
    """
    for candidate in (folder / "head", folder):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; expected a run folder or a head folder")
    raise ValueError(
        f"{folder} holds no head: expected {CONFIG_FILE} in it or in {folder / 'head'}; has its training ended?"
    )


def eval_section(args: argparse.Namespace, section: EvalSection) -> EvalSection:
    """The recipe's eval section with what the arguments change."""
    names = ("prompts", "num_prompts", "max_new_tokens", "batch_size", "rule", "seed")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.prompts is not None:
        changes["prompts"] = str(args.prompts)
    for name, least in (("num_prompts", 1), ("max_new_tokens", 1), ("batch_size", 1)):
        if changes.get(name, least) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {changes[name]}; expected at least {least}")
    section = replace(section, **changes)
    return section if section.num_prompts else replace(section, num_prompts=EvalSection.num_prompts)


def variants(args: argparse.Namespace, section: EvalSection) -> list[EvalSection]:
    """The section under every tree and temperature asked for."""
    temperatures = args.temperature or [section.sampling.temperature]
    return [
        replace(section, tree=_tree(kind, args.depth, section.tree), sampling=replace(section.sampling, temperature=t))
        for kind in args.tree or [section.tree.kind]
        for t in temperatures
    ]


def _tree(kind: Any, depth: int | None, tree: TreeSection) -> TreeSection:
    tree = replace(tree, kind=kind, depth=tree.depth if depth is None else depth)
    if kind == "static" and not tree.paths:
        return replace(tree, paths=tuple(path for path in STATIC_PATHS if len(path) <= tree.depth))
    return tree


def _find_recipe(given: Path | None, *folders: Path) -> Recipe | None:
    if given is not None:
        return load_recipe([str(given)])
    candidates = [folder / "recipe.yaml" for folder in (*folders, folders[-1].parent)]
    return next((load_recipe([str(path)]) for path in candidates if path.is_file()), None)


def _target_section(args: argparse.Namespace, recipe: Recipe | None, head_folder: Path) -> TargetSection:
    if recipe is not None:
        section = recipe.target
    else:
        saved = json.loads((head_folder / CONFIG_FILE).read_text()).get("target", {})
        section = TargetSection(path=saved.get("path", ""), dtype=saved.get("dtype", "bfloat16"))
    section = replace(section, path=args.target or section.path, dtype=args.dtype or section.dtype)
    if not section.path:
        raise ValueError(f"neither a recipe nor {head_folder} names the target; give it with --target")
    return section


def _heldout(recipe: Recipe | None, tokenizer: Any) -> Iterable[Conversation]:
    if recipe is None:
        return ()
    from drafters.data.dataset import load_rows  # imported here: reads the training data only where it is asked for

    return load_rows(recipe.data, tokenizer).heldout_conversations


def _answer(target: HFTarget, section: EvalSection) -> Callable[[list[int]], list[int]]:
    plain = replace(section, sampling=Sampling(), rule="auto")
    return lambda ids: decode(target, None, [ids], plain).sequences[0]


def _settings(
    section: EvalSection, prompts: list[EncodedPrompt], target: HFTarget, recipe: Recipe | None
) -> dict[str, Any]:
    used = json.dumps([[prompt.name, prompt.turn, prompt.ids] for prompt in prompts])
    source = section.prompts or f"held-out conversations of {', '.join(recipe.data.train) if recipe else ''}"
    return {
        "prompts": {
            "source": source,
            "count": len(prompts),
            "hash": hashlib.sha256(used.encode()).hexdigest(),
            "names": [prompt.name for prompt in prompts],
            "categories": sorted({prompt.category for prompt in prompts}),
        },
        "template_hash": target.info.template_hash,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type,
        "threads": torch.get_num_threads(),
    }
