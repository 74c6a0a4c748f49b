"""The code of README.md and of the pages under docs/ runs: each block on two ranks, by itself, and a script that a
page begins with by one process without a group, too. Training is shortened; `make matrix` runs the command of a plan.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import documented
import first_script
import pytest
import torch.distributed as dist
from pages import PAGES, ROOT, blocks

import matrix
import ranks
import zero
from launched import launched
from processes import python

SCRIPTS = ("oss", "sharded_ddp", "fsdp", "optimizers", "memory", "from_fsdp", "from_fairscale")
"""The pages that begin with a script."""
FAST = ("README", "how_it_is_built", "parallelism", "from_fairscale")
SHORTER = {"range(20)": "range(2)", "world_size=64,": "world_size=64, stages=[3],"}
pages_with_code = [page for page in PAGES if any(marker != "script" for _, marker, _ in blocks(page))]


def run_blocks(rank: int, world: int, page: Path, folder: str) -> None:
    """All of a page; without a group its first."""
    before, several = os.getcwd(), dist.is_initialized()
    try:
        for line, marker, source in [*blocks(page)][: None if several else 1]:
            if marker == "script":
                continue
            place = Path(folder, str(line))
            place.mkdir(exist_ok=True)
            os.chdir(place)
            kind, _, name = marker.partition(": ")
            assert kind in ("", "after"), f"{page.name}:{line}: {marker!r} is no marker"
            assert several or not marker, f"{page.name} begins with a block that cannot be pasted"
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
def test_code_runs(page: Path, tmp_path: Path) -> None:
    ranks.run(run_blocks, args=(page, str(tmp_path)))
    if page.stem in SCRIPTS:
        ranks.run(run_blocks, args=(page, str(tmp_path)), bare=True)


@ranks.on(bare=True)
def test_the_script_of_the_package_trains(rank: int, world: int) -> None:
    lines = (zero.__doc__ or "").splitlines()
    script = [line[4:] for line in lines if line.startswith("    ") and not line.startswith("    stage ")]
    exec("\n".join([*script, "assert loss.item() < 1.1"]), {})


@pytest.mark.slow
@pytest.mark.parametrize("launcher", first_script.LAUNCHERS, ids=["alone", "torchrun"])
def test_the_script_of_the_readme_trains(tmp_path: Path, launcher: list[str]) -> None:
    first_script.trains(tmp_path, launcher)


@matrix.only
def test_the_command_of_the_plan_prints_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    found = re.search(
        r"^```\npython -m zero.plan (--parameters [^\n]*)\n```\n\n```\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert found and python("-m", "zero.plan", *found[1].split()).stdout == found[2]
