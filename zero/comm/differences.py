"""What ranks were given, and an error on every rank where it differs."""

from __future__ import annotations

import json
from collections.abc import Sequence


def as_text(lines: Sequence[str], problem: str | None) -> str:
    """What one rank sends the others. lines: what must be the same; problem: what is wrong on this rank."""
    return json.dumps({"problem": problem, "lines": list(lines)})


def refuse_differences(what: str, texts: Sequence[str]) -> None:
    """Raises ValueError if any rank has a problem, or if lines differ. texts: of all ranks, or of one that is alone."""
    given = [json.loads(text) for text in texts]
    problems = [(rank, one["problem"]) for rank, one in enumerate(given) if one["problem"] is not None]
    if problems:
        where = f" (on rank {', '.join(str(rank) for rank, _ in problems)})" if len(texts) > 1 else ""
        raise ValueError(f"{problems[0][1]}{where}")
    for rank, one in enumerate(given):
        _refuse_difference(what, given[0]["lines"], one["lines"], rank)


def _refuse_difference(what: str, expected: list[str], found: list[str], rank: int) -> None:
    for position in range(max(len(expected), len(found))):
        here = expected[position] if position < len(expected) else "nothing"
        there = found[position] if position < len(found) else "nothing"
        if here != there:
            raise ValueError(
                f"{what} differ between ranks: at position {position}, rank 0 has {here}, rank {rank} has {there}. "
                "Build the same on every rank, in the same order."
            )
