"""Whether the suite catches errors: `make mutants` puts each of mutations/ in and runs tests until the first fails.

    make mutants                                  all
    make mutants ARGS="old-master late-gather"    these; options such as `-v` are passed on to pytest

Each runs the test that caught it before, which mutations/caught_by.txt names; only where that passes the quick subset,
and then the tests that are marked slow. A run writes the tests that it found into that file. The exit status is 1
unless each was caught by a test.

Processes of tests call `put_in`: with ZERO_MUTANT=name in the environment it patches `zero` there, without it nothing
happens. So one test can be tried, too:

    ZERO_MUTANT=old-master pytest tests/oss/test_master.py
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ZERO_MUTANT"
LONGEST = 900.0
"""Seconds after which a run is ended. A test that hangs is ended by pytest long before, and named."""

SAME, QUICK, SLOW = "its test", "the quick subset", "the slow tests"
CAUGHT = (SAME, QUICK, SLOW)
NOTHING, MISFIT, ERROR = "NOTHING", "DOES NOT FIT", "NO TEST FAILS"
NOT_OF_ZERO = ("tests/harness",)
"""Tests of the tests themselves."""
CAUGHT_BY = Path(__file__).parent / "mutations" / "caught_by.txt"
"""A line for each mutant: its name, a space, the test that caught it."""
PASSED = (0, 5)
"""Exit codes of pytest: all tests have passed, or none was marked so."""
NO_SUCH_TEST = 4


def put_in() -> None:
    """Puts in the error that the environment names, if it names one. Raises KeyError for an unknown name."""
    name = os.environ.get(VARIABLE)
    if name:
        _named(name).put_in()


def _named(name: str) -> object:
    import mutations  # not at the top: few processes need it

    table = mutations.load()
    if name not in table:
        raise KeyError(f"{VARIABLE}={name} is no mutant. Choose one of these: {', '.join(sorted(table))}")
    return table[name]


@dataclass(frozen=True)
class Result:
    """by: one of CAUGHT, NOTHING, or what is wrong with the mutant. test: the first that failed."""

    name: str
    by: str
    test: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name:52} {self.by:18} {self.seconds:6.0f} s  {self.test}"


def caught(name: str, paths: Sequence[str], options: Sequence[str]) -> Result:
    """Runs the tests with one mutant put in."""
    begun = time.monotonic()
    if before := tests_before().get(name):
        code, written = _run(name, [*options, before])
        if code not in (*PASSED, NO_SUCH_TEST):
            return _told(Result(name, *judged(written, SAME), time.monotonic() - begun))
    for part, mark in ((QUICK, "not slow"), (SLOW, "slow")):
        for number, path in enumerate(paths):  # one after another: to collect all takes as long as many tests
            done = [f"--ignore={earlier}" for earlier in (*paths[:number], *NOT_OF_ZERO)]
            code, written = _run(name, ["-m", mark, *options, *done, path])
            if code not in PASSED:
                return _told(Result(name, *judged(written, part), time.monotonic() - begun))
    return _told(Result(name, NOTHING, "", time.monotonic() - begun))


def tests_before() -> dict[str, str]:
    """Returns by mutant the test that caught it in an earlier run."""
    return dict(line.split(" ", 1) for line in CAUGHT_BY.read_text().splitlines())


def write(results: Iterable[Result]) -> None:
    """Writes the tests that caught mutants into CAUGHT_BY. Mutants that are no more leave it."""
    import mutations

    found = tests_before() | {one.name: one.test for one in results if one.by in CAUGHT}
    CAUGHT_BY.write_text("".join(f"{name} {found[name]}\n" for name in mutations.load() if name in found))


def _told(result: Result) -> Result:
    print(result, flush=True)
    return result


def _run(name: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Returns pytest's exit code, and what it has written until the first test failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as own:  # the other run empties its
        return _ended(name, [*command, "--basetemp", f"{own}/tests", *arguments])


def _ended(name: str, command: Sequence[str]) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        env={**os.environ, VARIABLE: name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        written = process.communicate(timeout=LONGEST)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        written = process.communicate()[0] + f"\nended after {LONGEST:.0f} s, and no test says where it hangs\n"
    return process.returncode, written


def judged(written: str, part: str) -> tuple[str, str]:
    """Returns by what it was caught, or what is wrong with it; and the test, or why there is none."""
    if misfit := re.search(r"the mutant \S+ does not fit: .*", written):
        return MISFIT, misfit[0]
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", written, re.MULTILINE):
        return part, failed[1]
    *_, last = written.strip().splitlines() or ["no output"]
    return ERROR, last


def main() -> int:
    import mutations

    parser = argparse.ArgumentParser(description="Says which test catches each mutant.")
    parser.add_argument("names", nargs="*", help="the mutants, by default all")
    given, options = parser.parse_known_args()
    table = mutations.load()
    if unknown := [name for name in given.names if name not in table]:
        parser.error(f"{', '.join(unknown)}: no mutants. There are {', '.join(table)}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # most are caught while pytest's own workers would still collect
        names = given.names or [*table]
        results = []
        for one in pool.map(lambda name: caught(name, table[name].tests, options), names):
            results.append(one)
            write(results)  # after each: a run takes long, and may be ended
    print(f"\n{'mutant':52} {'caught by':18} {'':8}  the first test that failed", *results, sep="\n")
    counts = Counter(one.by for one in results)
    print(f"\n{len(results)} mutants:", ", ".join(f"{number} by {by}" for by, number in counts.most_common()))
    return int(any(one.by not in CAUGHT for one in results))


if __name__ == "__main__":
    sys.exit(main())
