"""The code of README.md and of the pages under docs/ runs: each block on two ranks, by itself, and a script that a page
begins with by one process without a group, too. Training is shortened; `make matrix` runs the commands of plans. Pages
are short and name what is there; the package has the versions and names that they say.
"""

import ast
import contextlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import documented
import first_script
import pytest
import torch
import torch.distributed as dist
from pages import PAGES, ROOT, all_blocks, blocks

import matrix
import ranks
import zero
from launched import launched
from processes import python
from zero._torch.namesakes import refuse_mixtures

FAST = ("coming_from", "tensor_parallelism")
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


# What the pages name is there, and they are short. `make docs` looks after links.


WORDS, OF_A_PAGE = 15_000, 2_000
WIDTH = 88  # of code; wider, the site scrolls


def test_pages_are_short():
    words = {page.name: len(page.read_text().split()) for page in PAGES}
    assert max(words.values()) <= OF_A_PAGE and sum(words.values()) <= WORDS, words


def test_code_is_narrow():
    for page in PAGES:
        for line, _, source in blocks(page):
            wide = [text for text in source.splitlines() if len(text) > WIDTH]
            assert not wide, f"{page.name}:{line}: {wide}"


def test_named_files_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:tests|benchmarks|docs|zero)/[\w/]*\w\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_all_rooms_are_named():
    rooms = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero").iterdir() if path.suffix in ("", ".py")}
    rows = re.findall(r"^\| (`zero/[^|]+) \|", (ROOT / "docs" / "how_it_is_built.md").read_text(), re.MULTILINE)
    assert rooms - {"zero/__init__.py", "zero/__pycache__"} <= {*re.findall(r"`([\w/.]+)`", " ".join(rows))}


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").iterdir())
    for name in {*zero.__all__} - {"checkpoint"}:
        assert re.search(rf"^\.\. auto\w+:: (zero\.)?{name}$", text, re.MULTILINE), name


def texts() -> list[str]:
    found = []
    for path in (ROOT / "zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if isinstance(node, ast.JoinedStr | ast.Constant):
                text = "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in parts)
                found.append(re.sub(r"\{[^{}]*\}", "…", text))
    return found


def test_quoted_errors_are_those_of_the_source():
    """Each code span at the beginning of a line of a list: the beginning of an error."""
    page = (ROOT / "docs" / "when_it_fails.md").read_text()
    quoted = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^- (`.*?`): ", page, re.MULTILINE)))
    raised = texts()
    assert len(quoted) >= 10
    for beginning in quoted:
        start = beginning.removesuffix(" …").removesuffix("…")
        assert any(text.startswith(start) for text in raised), beginning


# The package as a whole: its version, its names, and other distributions that have its name.


def test_dir_lists_the_public_names_alone():
    assert sorted(dir(zero)) == sorted([*zero.__all__, "__version__"])


def test_a_foreign_init_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "zero", ModuleType("zero"))
    with pytest.raises(ImportError, match="Run: pip uninstall progressive-zero libzero zero zeroapi;"):
        refuse_mixtures()


def test_a_namesake_beside_is_told(monkeypatch):
    entries = ["progressive_zero-0.1.0.dist-info", "zeroapi-1.0.1.dist-info", "zeroconf-1.0.dist-info", "libzero"]
    monkeypatch.setattr(os, "listdir", lambda folder: entries)
    with pytest.warns(UserWarning, match="^zeroapi is installed in the same folder"):
        refuse_mixtures()


# The versions of the package, and of torch; README.md and setup.cfg name the newest that was tried.


def test_there_is_one_version():
    assert "\nversion = attr: zero.__version__\n" in (ROOT / "setup.cfg").read_text()
    assert f"\nversion: {zero.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(("version", "expected"), [("2.16.0.dev20261120+cpu", 1), ("2.100.1", 1), ("2.15.3+cu132", 0)])
def test_a_newer_torch_than_any_tested_is_warned_of_once(version, expected):
    code = f"import importlib, torch; torch.__version__ = {version!r}; import zero; importlib.reload(zero)"
    assert python("-W", "always", "-c", code).stderr.count(f"torch {version} is newer than 2.15") == expected


def test_the_running_torch_is_supported():
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def test_import_zero_imports_no_compiler():
    """It takes as long as torch itself, and whoever builds an optimizer of torch imports it anyway, later."""
    code = "import sys, zero; sys.exit({'torch._dynamo', 'torch.distributed.fsdp'} & {*sys.modules} or None)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # not forked where torch is imported already
