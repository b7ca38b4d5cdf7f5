"""The formats by name, and which of them can hold a head."""

from __future__ import annotations

from drafters.export import eagle, sglang, speculators, vllm
from drafters.export.layout import Format
from drafters.export.spec import ExportHead

FORMATS: dict[str, Format] = {
    each.name: each for each in (vllm.FORMAT, speculators.FORMAT, sglang.FORMAT, eagle.FORMAT)
}


def find_format(name: str, head: ExportHead) -> Format:
    """The format of that name, if it can hold the head.

    Raises:
        ValueError: no such format, or one that can't; the message says why, and which formats can.
    """
    if name not in FORMATS:
        raise ValueError(f"there is no export format {name!r}; there are {', '.join(FORMATS)}")
    reason = FORMATS[name].refusal(head)
    if reason:
        able = [each.name for each in FORMATS.values() if not each.refusal(head)]
        others = f"formats that hold this head: {', '.join(able)}" if able else "no other format holds it either"
        raise ValueError(f"the format {name!r} can't hold this head: {reason}; {others}")
    return FORMATS[name]
