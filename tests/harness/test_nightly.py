"""What ends `make nightly`."""

import runpy
import subprocess
from types import SimpleNamespace

from processes import ROOT


def test_no_failure_stops_the_others_and_one_makes_the_whole_fail(monkeypatch, capsys):
    failing = {"faults"}
    monkeypatch.setattr(subprocess, "run", lambda command: SimpleNamespace(returncode=2 * (command[1] in failing)))
    nightly = runpy.run_path(str(ROOT / "tests" / "nightly.py"))
    assert nightly["main"]() == 1
    rows = [line.split() for line in capsys.readouterr().out.split("result\n")[1].splitlines()]
    assert [(target, result) for target, _, result in rows] == [
        (target, "failed" if target == "faults" else "passed") for target in nightly["TARGETS"]
    ]
    failing.clear()
    assert nightly["main"]() == 0
