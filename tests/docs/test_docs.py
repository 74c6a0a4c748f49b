"""The code of README.md and of the pages under docs/ runs: each block on two ranks, by itself, and a script that a
page begins with by one process without a group, too. Training is shortened; `make matrix` runs the commands of plans.
"""

import contextlib
import os
import re
import textwrap
from pathlib import Path

import documented
import first_script
import pytest
import torch.distributed as dist
from pages import PAGES, ROOT, all_blocks, blocks

import matrix
import ranks
import zero
from launched import launched
from processes import python

FAST = ("coming_from", "status")
SHORTER = {"range(20)": "range(2)", "world_size=64,": "world_size=64, stages=[3],"}
pages_with_code = [page for page in PAGES if any(blocks(page))]


def run_blocks(rank: int, world: int, page: Path, folder: str) -> None:
    """All of a page; without a group its first, if that is a script."""
    before, several = os.getcwd(), dist.is_initialized()
    try:
        for line, marker, source in [*blocks(page)][: None if several else 1]:
            if marker and not several:
                continue
            place = Path(folder, str(line))
            place.mkdir(exist_ok=True)
            os.chdir(place)
            kind, _, name = marker.partition(": ")
            assert kind in ("", "after"), f"{page.name}:{line}: {marker!r} is no marker"
            for written, shorter in SHORTER.items():
                source = source.replace(written, shorter)
            names = documented.PREAMBLES[name]() if name else {}
            under_a_launcher = launched(rank, world) if page.stem == "integrations" else contextlib.nullcontext()
            with contextlib.redirect_stdout(None), under_a_launcher:
                exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.stem not in FAST), id=page.stem) for page in pages_with_code],
)
def test_code_runs(page, tmp_path):
    ranks.run(run_blocks, args=(page, str(tmp_path)))
    ranks.run(run_blocks, args=(page, str(tmp_path)), bare=True)


def test_what_pages_quote_is_in_the_scripts():
    quoted = [
        (page, marker[4:], source) for page in PAGES for _, marker, source in all_blocks(page) if marker[:4] == "of: "
    ]
    assert len(quoted) >= 4
    for page, script, source in quoted:
        text = (ROOT / "docs" / script).read_text()
        found = [indent for indent in ("", "    ", "        ") if textwrap.indent(source, indent) in text]
        assert found, f"{page.name} quotes {script}, which has other lines"


@ranks.on(bare=True)
def test_the_script_of_the_package_trains(rank, world):
    lines = (zero.__doc__ or "").splitlines()
    script = [line[4:] for line in lines if line.startswith("    ") and not line.startswith("    stage ")]
    exec("\n".join([*script, "assert loss.item() < 1.1"]), {})


@pytest.mark.slow
@pytest.mark.parametrize("launcher", first_script.LAUNCHERS, ids=["alone", "torchrun"])
def test_the_script_of_the_readme_trains(tmp_path, launcher):
    first_script.trains(tmp_path, launcher)


@matrix.only
def test_commands_of_plans_print_what_the_pages_show():
    shown = re.compile(r"^python -m zero\.plan (--parameters [^\n]*)\n```\n+```\n(.*?)^```", re.DOTALL | re.MULTILINE)
    found = [one for page in PAGES for one in shown.findall(page.read_text())]
    assert found
    for command, output in found:
        assert python("-m", "zero.plan", *command.split()).stdout == output
