"""The rows of tests/versions.py have what the package supports, and the Makefile and the workflows take them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nightly
import versions
from zero._torch import NEWEST_TESTED
from zero.integrations.versions import TESTED

ROOT = Path(__file__).parents[2]
ROWS = versions.rows()


def test_the_rows_are_what_the_package_supports():
    oldest = int(versions.SETTINGS["options"]["python_requires"].removeprefix(">=3."))
    minors = [int(python.removeprefix("3.")) for python in versions.pythons()]
    assert minors == [*range(oldest, oldest + len(minors))]
    assert {row.python for row in ROWS} == {*versions.pythons()}
    torches = [row.torch for row in ROWS if row.torch]
    assert torches == ["2.11.0", "{}.{}.0".format(*NEWEST_TESTED)]
    assert {name: oldest for name, (oldest, _) in TESTED.items()} == versions.LIBRARIES


def test_a_row_differs_in_one_thing_and_its_environment_has_its_name():
    assert ROWS[0].variables() == []
    for row in ROWS[1:]:
        (variable,) = row.variables()
        # Not what the make that runs this test was given.
        command = ["env", "-i", "make", "-n", "READY=", "test-quick", variable]
        said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
        assert said.startswith(f".venv-{row.name}/bin/pytest ")


def test_constraints_differ_from_those_of_the_file_in_what_is_asked_for():
    before = versions.CONSTRAINTS.splitlines()

    def changes(torch: str, libraries: str) -> tuple[list[str], list[str]]:
        after = versions.constraints(torch, libraries).splitlines()
        return [line for line in before if line not in after], [line for line in after if line not in before]

    assert changes("", "") == ([], [])
    assert changes("2.99.0", "") == ([f"torch=={versions.developed_torch()}"], ["torch==2.99.0"])
    gone, new = changes("", "newest")
    assert sorted(line.partition("==")[0] for line in gone) == sorted([*TESTED, "peft"]) and not new
    for name, (oldest, _) in TESTED.items():
        assert re.search(rf"^{name}=={re.escape(oldest)}($|;)", versions.constraints("", "oldest"), re.MULTILINE)


def test_what_is_not_at_hand_is_left_out_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    row = versions.Row("torch-2.99.0", python="3.99", torch="2.99.0")
    assert versions.commands(row) == "no python3.99"

    answers = iter(
        [
            (1, "", "Looking\nERROR: No matching distribution found for torch==2.99.0\n"),
            (0, '{"install": [{"metadata": {"requires_dist": ["filelock", "nvidia-cudnn-cu13==9"]}}]}', ""),
            (0, '{"install": [{"metadata": {"requires_dist": ["filelock"]}}]}', ""),
        ]
    )
    monkeypatch.setattr(versions.shutil, "which", lambda name: name)

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, *(next(answers) if "torch==2.99.0" in command else (0,)))

    monkeypatch.setattr(versions.subprocess, "run", run)
    assert versions.commands(row) == "ERROR: No matching distribution found for torch==2.99.0"
    assert "is a build for CUDA; `make test-quick PYTHON=python3.99 TORCH=2.99.0`" in versions.commands(row)
    at_hand = versions.commands(row)
    given = ["PYTHON=python3.99", "TORCH=2.99.0"]
    assert at_hand == [["make", "test-quick", *given], ["make", "test", "ARGS=tests/integrations", *given]]
    (tmp_path / ".venv-torch-2.99.0").mkdir()
    (tmp_path / ".venv-torch-2.99.0" / ".ready").touch()
    assert versions.commands(row) == at_hand, "nothing was asked, as the environment is there"


def test_the_table_has_each_row_and_one_failure_fails_the_whole(capfd):
    passes, fails = [sys.executable, "-c", "print('ran')"], ["false"]
    assert nightly.in_turn({"good": [passes], "absent": "no python3.99"}) == 0
    assert nightly.in_turn({"bad": [fails, passes], "good": [passes]}) == 1
    said = capfd.readouterr().out
    assert said.count("\nran\n") == 3
    assert re.search(r"\ngood +\d+  passed\nabsent +0  left out: no python3.99\n", said)
    assert re.search(r"\nbad  +\d+  failed\ngood +\d+  passed\n$", said)


def test_the_workflows_take_the_rows_and_targets_and_else_the_python_that_zero_is_developed_by():
    command = [sys.executable, "tests/versions.py", "rows"]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    assert [versions.Row(**row) for row in json.loads(printed)] == ROWS
    folder = ROOT / ".github" / "workflows"
    text = "".join(path.read_text() for path in [*folder.glob("*.yml"), ROOT / ".readthedocs.yaml"])
    pythons = re.findall(r"^ +python(?:-version)?: (.*)$", text, re.MULTILINE)
    assert len(pythons) == 5 and {*pythons} == {f'"{versions.DEVELOPED_BY}"', "${{ matrix.python }}"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in nightly.TARGETS)
