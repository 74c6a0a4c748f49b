"""Runs the targets of the Makefile that look for what the suite has no time for, and ends with a table of them.

A target that fails stops none of the others; one failure makes the whole fail.
"""

import subprocess
import sys
import time

TARGETS = ("mutants", "matrix", "axes", "faults", "hosts", "clusters", "fuzz", "soak", "oldest")


def main() -> int:
    rows = []
    for target in TARGETS:
        print(f"--- make {target}", flush=True)
        began = time.monotonic()
        code = subprocess.run(["make", target]).returncode
        rows.append((target, time.monotonic() - began, "failed" if code else "passed"))
    print(f"\n{'target':8} {'seconds':>8}  result")
    for target, seconds, result in rows:
        print(f"{target:8} {seconds:8.0f}  {result}")
    return int(any(result == "failed" for *_, result in rows))


if __name__ == "__main__":
    sys.exit(main())
