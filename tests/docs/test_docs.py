"""The code of README.md and of the pages under docs/ runs: each block on two ranks, by itself, and the first of a page
by one process without a group, too.

The command of docs/plan.md runs for fewer parameters; `make matrix` runs it as it is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections import Counter
from pathlib import Path

import documented
import pytest
import torch
from pages import PAGES, README, ROOT, blocks, section

import matrix
import ranks
import zero
from launched import launched
from processes import python

FAST = ("sharded_ddp", "parallelism")
pages_with_code = [page for page in PAGES if any(marker != "script" for _, marker, _ in blocks(page))]


def run_blocks(rank: int, world: int, page: Path, folder: str) -> None:
    before = os.getcwd()
    try:
        for line, marker, source in blocks(page):
            if marker == "script":
                continue
            place = Path(folder, str(line))
            place.mkdir(exist_ok=True)
            os.chdir(place)
            kind, _, name = marker.partition(": ")
            assert kind in ("", "after"), f"{page.name}:{line}: {marker!r} is no marker"
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


SCRIPTS = ["oss", "sharded_ddp", "fsdp", "optimizers", "memory", "from_fsdp", "from_fairscale"]
"""The pages that begin with a script."""


def run_first_blocks_alone(rank: int, world: int, folder: str) -> list[str]:
    os.chdir(folder)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        for page in SCRIPTS:
            _, marker, source = next(blocks(ROOT / "docs" / f"{page}.md"))
            assert not marker, f"{page}.md begins with a block that cannot be pasted"
            exec(compile(source, page, "exec"), {})
        lines = (zero.__doc__ or "").splitlines()
        script = [line[4:] for line in lines if line.startswith("    ") and not line.startswith("    stage ")]
        exec("\n".join([*script, "print('loss', loss.item())"]), {})
    return re.findall(r"^loss (\S+)$", written.getvalue(), re.MULTILINE)


@pytest.mark.slow
def test_pages_begin_with_a_script_that_one_process_runs_without_a_group(tmp_path: Path) -> None:
    (losses,) = ranks.run(run_first_blocks_alone, args=(str(tmp_path),), bare=True, fresh=True)
    assert len(losses) > 5
    assert all(float(loss) < 1.1 for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_script_of_the_readme_trains(tmp_path: Path, launcher: list[str]) -> None:
    (source,) = [source for _, marker, source in blocks(README) if marker == "script"]
    script = tmp_path / "train.py"
    # Gloo aborts at interpreter exit now and then; the README need not speak of it.
    script.write_text(source + "\nimport sys\nsys.stdout.flush()\nos._exit(0)\n")
    written = python(*launcher, script, cwd=tmp_path).stdout
    loss = re.search(r"loss (\S+), sent (\d+) bytes", written)
    assert loss
    assert float(loss[1]) < 0.9
    assert (int(loss[2]) > 0) == bool(launcher)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    shapes = {"0.weight": (256, 64), "0.bias": (256,), "2.weight": (64, 256), "2.bias": (64,)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes


def counted(rank: int, world: int) -> Counter[str]:
    """What the feature of docs/how_it_is_built.md counts."""
    (source,) = re.findall(r"```python\n(.*?)```", section("how_it_is_built.md", "To add a feature"), re.DOTALL)
    names = documented.model()
    exec(source.replace("print(unshards)", ""), names)
    counts: Counter[str] = names["unshards"]
    return counts


def test_the_feature_that_a_page_adds_counts_unshards() -> None:
    expected = {"embedding.weight": 1, "blocks.0.norm.weight": 2, "blocks.1.norm.weight": 2}
    assert ranks.run(counted) == [expected, expected]


@pytest.mark.slow
@pytest.mark.matrix
def test_the_command_of_the_plan_runs() -> None:
    found = re.search(r"^python -m zero.plan (--parameters .*)$", (ROOT / "docs" / "plan.md").read_text(), re.MULTILINE)
    assert found
    words = found[1].split()
    if not matrix.WHOLE:  # the same of a hundredth of the parameters in fewer layers
        for word, smaller in {"7.5e9": "7.5e7", "32": "4", "40GiB": "0.4GiB"}.items():
            words[words.index(word)] = smaller
    assert "64 ranks: stage 2" in python("-m", "zero.plan", *words).stdout
