"""README.md and the pages under docs/: their links lead somewhere, and they name every option, room and test."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, README, ROOT, section

import zero
from zero.integrations.accelerate import ZeroPlugin


def test_the_readme_names_every_page() -> None:
    assert all(f"docs/{page.name}" in README.read_text() for page in PAGES[1:])


def anchors(page: Path) -> set[str]:
    """What headings are called in links, by the rules of GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target
    for name in re.findall(r"`((?:tests|benchmarks|docs|zero)/[\w/]*\w\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), name


OPTIONS: dict[str, list[Callable[..., Any] | str]] = {
    "every_stage": [zero.setup, zero.full_state_dict, zero.report],
    "oss": [zero.OSS, zero.OSS.from_optimizer, "offload"],
    "sharded_ddp": [zero.ShardedDDP],
    "fsdp": [zero.FSDP, zero.MixedPrecision, zero.FSDP.summon_full_params, "offload"],
    "from_fsdp": ["backward_prefetch", "cpu_offload", "device_id", "forward_prefetch", "ignored_states"]
    + ["limit_all_gathers", "offload", "use_orig_params"],
    "memory": [zero.CPUOffload, zero.DiskOffload, "offload"],
    "checkpoints": [zero.checkpoint.save, zero.checkpoint.load],
    "plan": [zero.plan],
    "integrations": [ZeroPlugin],
}
"""Whose parameters a page names, and what else."""


@pytest.mark.parametrize("page", OPTIONS)
def test_every_option_is_named(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for one in OPTIONS[page]:
        for name in [one] if isinstance(one, str) else inspect.signature(one).parameters:
            assert name == "module" or re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text), f"{one}: {name}"


def test_all_rooms_are_named() -> None:
    rooms = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero").iterdir() if path.suffix in ("", ".py")}
    first_column = re.findall(r"^\| (`[^|]+) \|", section("how_it_is_built.md", "The rooms"), re.MULTILINE)
    named = {name for cell in first_column for name in re.findall(r"`([\w/.]+)`", cell)}
    assert rooms - {"zero/__init__.py", "zero/__pycache__"} <= named


def test_dir_lists_the_public_names_alone() -> None:
    assert sorted(dir(zero)) == sorted([*zero.__all__, "__version__"])


def test_the_page_of_the_api_is_as_the_docstrings() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == written, "run `make api`"
