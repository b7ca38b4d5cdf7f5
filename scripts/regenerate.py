#!/usr/bin/env python
"""Answers the questions of a dataset with the target itself, so that a drafter learns what the target says.

    python scripts/regenerate.py DATA OUT.jsonl --target PATH_OR_HUB_ID --max-new-tokens 1024
    python scripts/regenerate.py DATA OUT.jsonl --server http://localhost:8000/v1 --concurrency 128

The user's turns are asked one after another, each after the target's own earlier answers; a system turn is kept. OUT.jsonl is
data for a recipe (data.train). It grows row by row, and the same command goes on where an earlier one ended. With --target the
rows are in the order of DATA, with --server in the order in which they finish. An answer cut off by length is marked as such and
ends its conversation; for a target that reasons before it answers, use --drop-cut, since half a reasoning is not an answer.
A server's key is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafters.data.answers import AnswerFile, Dialogue, in_windows, read_sources
from drafters.data.server import ChatServer
from drafters.log import run_main
from drafters.recipe import Sampling, TargetSection

WINDOW = 4  # batches that are sorted by length together


def main() -> None:
    args = parse()
    if Path(args.data).resolve() == args.output.resolve():
        raise ValueError(f"{args.data} is both what is read and what is written; name another output file")
    sources = read_sources(args.data, broken_rows=args.broken_rows, limit=args.limit)
    dialogues = [Dialogue(source, seed=args.seed, drop_cut=args.drop_cut) for source in sources]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    server = make_server(args, sampling) if args.server else None
    with closing(AnswerFile(args.output, settings(args, server))) as file:
        there = sum(source.id in file.done for source in sources)
        counts: Counter[str] = Counter()
        start = time.perf_counter()
        if there < len(sources):
            if server is not None:
                open_ones = [dialogue for dialogue in dialogues if dialogue.source.id not in file.done]
                finished = server.answers(open_ones, args.concurrency)
            else:
                finished = answered_here(args, sampling, dialogues, file)
                start = time.perf_counter()  # the target is loaded
            keep(finished, file, counts, len(sources) - there)
        report(counts, time.perf_counter() - start, there, args.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", help="conversations: a file, folder, saved dataset or hub id; answers there are not read"
    )
    parser.add_argument("output", type=Path, help="the JSONL file to write, or to go on with")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", help="a folder or hub id; answers in this process")
    where.add_argument("--server", help="URL of an OpenAI-compatible server that serves the target")
    parser.add_argument("--max-new-tokens", type=positive, default=1024, help="most tokens of an answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="%(default)s (off)")
    parser.add_argument("--top-k", type=int, default=0, help="%(default)s (off)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="most conversations to take; 0 for all")
    parser.add_argument("--drop-cut", action="store_true", help="leave out answers that were cut off by length")
    parser.add_argument(
        "--broken-rows", choices=["stop", "skip"], default="stop", help="rows that can't be read (stop)"
    )
    here = parser.add_argument_group("with --target")
    here.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="%(default)s")
    here.add_argument("--device", default="", help="cuda, cuda:1, cpu, ... (a GPU where there is one)")
    here.add_argument("--batch-size", type=positive, default=32, help="questions of a forward (%(default)s)")
    there = parser.add_argument_group("with --server")
    there.add_argument("--model", default="", help="the target's name there (the only one it serves)")
    there.add_argument("--concurrency", type=positive, default=64, help="requests in flight (%(default)s)")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def settings(args: argparse.Namespace, server: ChatServer | None) -> dict[str, Any]:
    """What the answers depend on."""
    if server is not None:
        by = {"target": server.model, "engine": "server"}
    else:
        folder = Path(args.target)
        by = {
            "target": str(folder.resolve()) if folder.is_dir() else args.target,
            "engine": f"transformers {args.dtype}",
        }
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "drop_cut")
    return {**by, **{name: getattr(args, name) for name in names}}


def make_server(args: argparse.Namespace, sampling: Sampling) -> ChatServer:
    key = os.environ.get("OPENAI_API_KEY", "")
    return ChatServer(args.server, model=args.model, sampling=sampling, max_new_tokens=args.max_new_tokens, key=key)


def answered_here(
    args: argparse.Namespace, sampling: Sampling, dialogues: Sequence[Dialogue], file: AnswerFile
) -> Generator[Dialogue, None, None]:
    import torch  # imported here, as what follows: slow, and a server needs none of it

    from drafters.decoding.answering import LocalAnswerer
    from drafters.target.hf import load_target
    from drafters.target.info import load_tokenizer

    section = TargetSection(path=args.target, dtype=args.dtype)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    answer = LocalAnswerer(
        load_target(section, device),
        load_tokenizer(section),
        sampling=sampling,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
    )
    return in_windows(dialogues, file.done, answer, args.batch_size * WINDOW)


def keep(finished: Generator[Dialogue, None, None], file: AnswerFile, counts: Counter[str], total: int) -> None:
    """Writes conversations as they finish, and counts."""
    with closing(finished), tqdm(finished, total=total, desc="answer", unit="conversation") as bar:
        for dialogue in bar:
            file.add(dialogue)
            counts["conversations"] += dialogue.row() is not None
            counts["left out"] += dialogue.row() is None
            counts["answers"] += len(dialogue.answers)
            counts["cut"] += sum(answer.cut for answer in dialogue.answers)
            counts["tokens"] += sum(answer.tokens for answer in dialogue.answers)
            if dialogue.reason:
                counts[f"not asked: {dialogue.reason}"] += 1
            bar.set_postfix(answers=counts["answers"], tokens=counts["tokens"], refresh=False)


def report(counts: Counter[str], seconds: float, there: int, output: Path) -> None:
    """Prints what was done.

    Raises:
        ValueError: nothing was answered, and nothing had been.
    """
    reasons = [f"{count} {reason}" for reason, count in counts.most_common() if reason.startswith("not asked: ")]
    if not there and not counts["conversations"]:
        raise ValueError(
            f"no conversation has an answer to learn: {counts['cut']} cut; {'; '.join(reasons) or 'all blank'}"
        )
    print(f"{counts['conversations']} conversations, {counts['answers']} answers, {counts['tokens']} tokens")
    print(f"{counts['tokens'] / max(seconds, 1e-9):.1f} tokens/s")
    print(f"{counts['cut']} answers cut by length, {counts['left out']} conversations left out, {there} done before")
    for reason in reasons:
        print(reason)
    print(output)


if __name__ == "__main__":
    run_main(main)
