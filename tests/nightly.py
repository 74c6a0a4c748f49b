"""Runs the targets of the Makefile that look for what the suite has no time for, and ends with a table of them."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

TARGETS = ("mutants", "matrix", "axes", "faults", "hosts", "clusters", "fuzz", "soak", "matrix-of-versions")


def in_turn(rows: Mapping[str, Sequence[Sequence[str]] | str]) -> int:
    """Runs the commands of each row, and prints a table; a string in their place says why the row is left out.

    What fails stops nothing else, and makes the whole fail.
    """
    table = []
    for name, commands in rows.items():
        if isinstance(commands, str):
            table.append((name, 0.0, f"left out: {commands}"))
            continue
        began, passed = time.monotonic(), True
        for command in commands:
            print(f"--- {' '.join(command)}", flush=True)
            passed &= subprocess.run(command).returncode == 0
        table.append((name, time.monotonic() - began, "passed" if passed else "failed"))
    width = max(len(name) for name in rows)
    print(f"\n{'':{width}} {'seconds':>8}  result")
    for name, seconds, result in table:
        print(f"{name:{width}} {seconds:8.0f}  {result}")
    return int(any(result == "failed" for *_, result in table))


if __name__ == "__main__":
    sys.exit(in_turn({target: [["make", target]] for target in TARGETS}))
