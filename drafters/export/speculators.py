"""The format of the speculators library (0.9), which vLLM reads too: EAGLE-3 with a config that names the target."""

from __future__ import annotations

from drafters.export import vllm
from drafters.export.layout import Format, Layout, llama_config
from drafters.export.spec import Eagle3Spec, ExportHead

VERSION = "0.9.0"


def refusal(head: ExportHead) -> str:
    if not isinstance(head.spec, Eagle3Spec):
        return f"speculators {VERSION} knows EAGLE-3 and not {head.spec.kind!r}"
    return vllm.unordered(head.spec, head)


def lay_out(head: ExportHead, draft_length: int) -> Layout:
    """No `model_type` at the top: its absence is how readers tell the format."""
    spec = head.spec
    assert isinstance(spec, Eagle3Spec)
    layer = llama_config(spec, head.info, head.dtype)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        **vllm.eagle3_fields(spec, head),
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": {**layer, **vllm.aux_count(spec)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_length,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": head.info.path, "architectures": [head.info.architecture]},
        },
    }
    return Layout(config, dict(head.tensors))


FORMAT = Format("speculators", refusal, lay_out, vllm.serve)
