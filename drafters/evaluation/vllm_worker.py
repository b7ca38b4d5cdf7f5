"""Runs in vLLM's own environment, where this project is not installed: decodes the cases of a JSON file, each in a child process.

    python -P vllm_worker.py CASES.json RESULTS.json

See `drafters.evaluation.serving` for what a case and a result hold.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.medusa import MedusaProposer


def listen(log: list[list[int]]) -> None:
    """Notes every chain that a drafter proposes."""
    for proposer in (SpecDecodeBaseProposer, MedusaProposer):
        proposer.propose = _listening(proposer.propose, log)


def _listening(propose: Any, log: list[list[int]]) -> Any:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = propose(self, *args, **kwargs)
        log.append(drafted[0].tolist())
        return drafted

    return wrapped


def decode(case: dict[str, Any]) -> dict[str, Any]:
    log: list[list[int]] = []
    listen(log)
    llm = LLM(
        model=case["target"],
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        max_num_batched_tokens=max(512, case["max_model_len"]),
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=case["speculation"],
    )
    greedy = {"temperature": 0, "ignore_eos": True, "stop_token_ids": case["stop_token_ids"], "detokenize": False}
    # Warm-up: one token has no round, so the counters stay at 0.
    llm.generate([{"prompt_token_ids": case["prompts"][0]}], SamplingParams(max_tokens=1, **greedy), use_tqdm=False)
    answers, drafts, seconds = [], [], 0.0
    for prompt in case["prompts"]:
        log.clear()
        start = time.perf_counter()
        sampling = SamplingParams(max_tokens=case["max_tokens"], **greedy)
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        seconds += time.perf_counter() - start
        answers.append(list(output.outputs[0].token_ids))
        drafts.append(list(log))
    metrics = {
        m.name: getattr(m, "value", None) or getattr(m, "values", None)
        for m in llm.get_metrics()
        if "spec_decode" in m.name
    }
    return {"answers": answers, "drafts": drafts, "seconds": seconds, "metrics": metrics}


def in_child(case: dict[str, Any], path: Path) -> dict[str, Any]:
    """An engine can't be closed well enough to start another in its process."""
    child = os.fork()
    if child == 0:
        try:
            result = decode(case)
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        path.write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    return dict(json.loads(path.read_text())) if path.is_file() else {"error": "the process died"}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    results = {}
    for index, (name, case) in enumerate(cases.items()):
        results[name] = in_child(case, out.with_suffix(f".{index}.json"))
        sys.stdout.write(f"case {name}: {results[name].get('error', 'decoded')}\n")
        sys.stdout.flush()
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
