"""Comparison of the signatures of all ranks, with an error on every rank if they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest


def as_text(lines: Sequence[str], problem: str | None) -> str:
    """Returns the text that a rank sends. lines: its signature. problem: the error message of this rank, or None."""
    return json.dumps({"problem": problem, "lines": list(lines)})


def refuse_differences(what: str, texts: Sequence[str]) -> None:
    """Raises ValueError if any rank has a problem, or if signatures differ. texts: of all ranks, or of this one."""
    ranks = [json.loads(text) for text in texts]
    problems = [(rank, sent["problem"]) for rank, sent in enumerate(ranks) if sent["problem"] is not None]
    if problems:
        where = f" (on rank {', '.join(str(rank) for rank, _ in problems)})" if len(texts) > 1 else ""
        raise ValueError(f"{problems[0][1]}{where}")
    for rank, sent in enumerate(ranks):
        _refuse_difference(what, ranks[0]["lines"], sent["lines"], rank)


def _refuse_difference(what: str, expected: list[str], lines: list[str], rank: int) -> None:
    for position, (first, other) in enumerate(zip_longest(expected, lines, fillvalue="nothing")):
        if first != other:
            raise ValueError(
                f"{what} differ between ranks: at position {position}, rank 0 has {first}, rank {rank} has {other}. "
                "Build the same on every rank, in the same order."
            )
