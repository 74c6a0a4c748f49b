"""What the benchmark found: a row a stage, as a table and as JSON, and whether the losses agree."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 2**20
HEAD = (
    *("stage", "params", "grads", "optim", "peak", "predicted", "process", "sent"),
    *("step ms", "CPU ms", "first loss", "last loss"),
)


@dataclass(frozen=True)
class Row:
    """One stage, on the rank that needs most; CPU time is the mean over ranks, losses are too."""

    stage: str
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    process_peak_bytes: int
    sent_bytes_per_step: int
    step_ms: float
    cpu_ms: float
    losses: list[float]


def write_json(file: Path, rows: Sequence[Row], *, world: int, parameters: int, subject: str) -> None:
    """subject: what was measured, on what."""
    stages = [asdict(row) for row in rows]
    content = {"subject": subject, "world": world, "parameters": parameters, "stages": stages}
    file.write_text(json.dumps(content, indent=2) + "\n")


def format_table(rows: Sequence[Row]) -> str:
    return align([HEAD, *(_format_cells(row) for row in rows)])


def align(lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table: the first `left` columns to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[*map(str.ljust, line[:left], widths), *map(str.rjust, line[left:], widths[left:])] for line in lines]
    return "\n".join("  ".join(line) for line in aligned)


def _format_cells(row: Row) -> tuple[str, ...]:
    sizes = [
        row.parameters_bytes,
        row.gradients_bytes,
        row.optimizer_bytes,
        row.peak_bytes,
        row.predicted_peak_bytes,
        row.process_peak_bytes,
        row.sent_bytes_per_step,
    ]
    times = [row.step_ms, row.cpu_ms]
    return (
        row.stage,
        *(f"{size / MIB:.1f}" for size in sizes),
        *(f"{time:.0f}" for time in times),
        f"{row.losses[0]:.4f}",
        f"{row.losses[-1]:.4f}",
    )


def find_differences(losses: Mapping[str, Sequence[float]], tolerance: float) -> list[str]:
    """Where losses first differ from those that come first, relative to them; 0 asks for the same bits."""
    (reference, those), *others = losses.items()
    differences = []
    for name, these in others:
        for step, (expected, found) in enumerate(zip(those, these, strict=True)):
            if not math.isclose(expected, found, rel_tol=tolerance, abs_tol=0):
                differences.append(
                    f"{name} differs from {reference} at step {step}: "
                    f"loss {found!r}, expected {expected!r} (relative tolerance {tolerance:g})"
                )
                break
    return differences


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
