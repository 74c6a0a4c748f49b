"""docs/how_it_is_built.md is true: its rooms are there, a step goes through the functions that its walks list, seams
have the methods and users that its table lists, and its feature works."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import test_docs
import zero
from transports import between_hosts

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how_it_is_built.md").read_text()

Place = tuple[str, int]
"""File below the root and first line of a function."""

WALKS = {
    "A gradient at stage 2": (2, False),
    "A gradient at stage 3": (3, False),
    "A parameter from shard to full": (3, True),
}
"""The stage of each, and whether it is one of a forward."""


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def walk(title: str) -> list[tuple[str, str]]:
    """Function and file of each row."""
    rows = [row for row in section(title).splitlines() if row.startswith("| `")]
    named = [re.match(r"\| `([\w.]+)` \| `(zero/\w+/\w+\.py)` \|", row) for row in rows]
    assert all(named), rows
    return [(found[1], found[2]) for found in named if found]


def defined(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, int]]:
    """Name, with what it is defined in, and first line of each class and function; a decorator belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield f"{outer}{node.name}", min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield from defined(node, f"{outer}{node.name}.")
        else:
            yield from defined(node, outer)


def place(function: str, file: str) -> Place:
    lines = dict(defined(ast.parse((ROOT / file).read_text())))
    assert function in lines, f"{file} has no {function}"
    return file, lines[function]


def called(rank: int, world: int, stage: int, forward: bool) -> list[Place]:
    """The functions of zero that a forward, or the backward and step after it, call in order once all is settled.

    One parameter in one unit, so that little is called twice.
    """
    with between_hosts():
        model: Any = nn.Sequential(nn.Linear(4, 8, bias=False))
        if stage == 2:
            model, optimizer = zero.setup(model, torch.optim.SGD, stage=2, lr=0.1)
        else:
            model = zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            inputs = torch.ones(3, 4, requires_grad=True) * 1  # as of a module before
            places: list[Place] = []
            with noted(places) if forward else nullcontext():
                loss = model(inputs).sum()
            with nullcontext() if forward else noted(places):
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        return places


@contextmanager
def noted(to: list[Place]) -> Iterator[None]:
    """Appends each function of zero that is called in here."""

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}{os.sep}zero"):
            to.append((Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("title", WALKS)
def test_a_step_goes_this_way(title: str) -> None:
    places = [(name, place(name, file)) for name, file in walk(title)]
    assert f"{len(places)} functions" in section(title)
    on_the_way = iter(ranks.run(called, args=WALKS[title])[0])
    for name, there in places:
        assert there in on_the_way, f"{name} is not called, or not after what stands above it"


def test_all_rooms_are_named() -> None:
    rooms = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero").iterdir() if path.suffix in ("", ".py")}
    first_column = re.findall(r"^\| (`[^|]+) \|", section("The rooms"), re.MULTILINE)
    named = {name for cell in first_column for name in re.findall(r"`([\w/.]+)`", cell)}
    assert rooms - {"zero/__init__.py", "zero/__pycache__"} <= named


def seams() -> list[tuple[str, str, str, set[str], set[str]]]:
    """Name, file, registry, methods, and who plugs in."""
    found = []
    for row in section("The seams").splitlines():
        cells = row.split("|")[1:-1]
        name, file, registry = (cell.strip(" `") for cell in cells[:3]) if len(cells) == 6 else ("", "", "")
        if file.startswith("zero/"):
            methods, plugged = re.findall(r"`(\w+)`", cells[4]), re.findall(r"\w+", cells[5])
            found.append((name, file, registry, {*methods}, {*plugged}))
    return found


SEAMS = seams()
AROUND = ["checks", "state", "interop", "features"]


def uses(tree: ast.AST) -> Iterator[str]:
    """What is imported from, or asked of, modules of zero, such as zero.comm.link.watchers."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                modules[name.asname or name.name] = full = f"{node.module}.{name.name}"
                yield full
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{modules.get(node.value.id)}.{node.attr}"


@pytest.mark.parametrize(("seam", "file", "registry", "methods", "plugged"), SEAMS, ids=[row[0] for row in SEAMS])
def test_seams_are_as_the_table_lists_them(
    seam: str, file: str, registry: str, methods: set[str], plugged: set[str]
) -> None:
    tree = ast.parse((ROOT / file).read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == seam:
            public = {each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"}
            assert methods == public
    registered = f"{file.removesuffix('.py').replace('/', '.')}.{registry}"
    found = set()
    for room in AROUND:
        for path in (ROOT / "zero" / room).rglob("*.py"):
            if path == ROOT / "zero" / "features" / "__init__.py":
                continue  # it registers refusals for folders that are missing
            if registered in uses(ast.parse(path.read_text())):
                found.add(path.relative_to(ROOT / "zero" / room).parts[0] if room == "features" else room)
    assert found == plugged


def test_every_feature_plugs_in_somewhere() -> None:
    features = {path.name for path in (ROOT / "zero" / "features").iterdir() if (path / "__init__.py").exists()}
    assert features <= {name for *_, plugged in SEAMS for name in plugged}


def counted(rank: int, world: int) -> Counter[str]:
    """What the feature of the page counts."""
    (source,) = re.findall(r"```python\n(.*?)```", section("To add a feature"), re.DOTALL)
    names = test_docs.model()
    exec(source.replace("print(unshards)", ""), names)
    counts: Counter[str] = names["unshards"]
    return counts


def test_the_feature_of_the_page_counts_unshards() -> None:
    expected = {"embedding.weight": 1, "blocks.0.norm.weight": 2, "blocks.1.norm.weight": 2}
    assert ranks.run(counted) == [expected, expected]
