"""README.md and the pages under docs/: their code runs, their links lead somewhere, and they name every option.

A ```python block is run on two ranks, by itself, and the first of a page by one process without a group, too. Where the
line above a block is `<!-- after: NAME -->`, NAME of `PREAMBLES` runs first, and the block sees what it returns.
`<!-- script -->` marks a script that tests/test_readme.py starts.
The command of docs/plan.md runs for fewer parameters; `make matrix` runs it as it is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import matrix
import ranks
import zero
from launched import launched
from zero.fsdp.options import translators
from zero.integrations.accelerate import ZeroPlugin
from zero.plan import Options
from zero.plan.command import main as plan_command
from zero.shards.home import homes

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

Namespace = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model() -> Namespace:
    """A plain model, a batch of this rank's, and a list of such batches."""
    torch.manual_seed(dist.get_rank())
    batches = [(torch.randint(16, (2, 4)), torch.randint(16, (2, 4))) for _ in range(3)]
    names = {"model": GPT(), "batches": batches, "tokens": batches[0][0], "targets": batches[0][1]}
    classes = {"Block": Block, "GPT": GPT, "DistributedDataParallel": DistributedDataParallel}
    modules = {"torch": torch, "nn": nn, "dist": dist, "zero": zero, "functools": functools}
    return {**names, **classes, **modules, "ModuleWrapPolicy": ModuleWrapPolicy}


def trained(stage: int) -> Namespace:
    """The model at a stage, after a step and another backward."""
    names = model()
    wrapped, optimizer = zero.setup(names["model"], torch.optim.Adam, stage=stage, lr=1e-3)
    for tokens, targets in names["batches"][:2]:
        optimizer.step()
        optimizer.zero_grad()
        wrapped(tokens, targets).backward()
    return {**names, "model": wrapped, "optimizer": optimizer}


def uneven() -> Namespace:
    """Rank 1 has fewer batches."""
    names = model()
    return {**names, "batches": names["batches"][dist.get_rank() :]}


def saved() -> Namespace:
    """A checkpoint of stage 3, as the first of the run."""
    names = trained(3)
    zero.checkpoint.save("run", names["model"], names["optimizer"])
    return names


PREAMBLES: dict[str, Callable[[], Namespace]] = {
    "model": model,
    "stage 1": functools.partial(trained, 1),
    "stage 2": functools.partial(trained, 2),
    "stage 3": functools.partial(trained, 3),
    "uneven batches": uneven,
    "a checkpoint": saved,
}


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, marker and source of each block of Python."""
    text = page.read_text()
    for found in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, found.start(2)) + 1, found[1] or "", found[2]


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
            names = PREAMBLES[name]() if name else {}
            under_a_launcher = launched(rank, world) if page.stem == "integrations" else contextlib.nullcontext()
            with contextlib.redirect_stdout(None), under_a_launcher:
                exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
    finally:
        os.chdir(before)


@by_page
def test_code_runs(page: Path, tmp_path: Path) -> None:
    if any(marker != "script" for _, marker, _ in blocks(page)):
        ranks.run(run_blocks, args=(page, str(tmp_path)))


WITHOUT_A_SCRIPT = (
    "checkpoints",
    "every_stage",
    "from_deepspeed",
    "integrations",
    "api",
    "gpus",
    "how_it_is_built",
    "measurements",
    "parallelism",
    "plan",
    "reliability",
)
"""The pages that do not begin with a script."""


def run_first_blocks_alone(rank: int, world: int, folder: str) -> list[str]:
    os.chdir(folder)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        for page in PAGES[1:]:
            if page.stem not in WITHOUT_A_SCRIPT:
                _, marker, source = next(blocks(page))
                assert not marker, f"{page.name} begins with a block that cannot be pasted"
                exec(compile(source, str(page), "exec"), {})
        lines = (zero.__doc__ or "").splitlines()
        script = [line[4:] for line in lines if line.startswith("    ") and not line.startswith("    stage ")]
        exec("\n".join([*script, "print('loss', loss.item())"]), {})
    return re.findall(r"^loss (\S+)$", written.getvalue(), re.MULTILINE)


def test_pages_begin_with_a_script_that_one_process_runs_without_a_group(tmp_path: Path) -> None:
    (losses,) = ranks.run(run_first_blocks_alone, args=(str(tmp_path),), bare=True, fresh=True)
    assert len(losses) > 5
    assert all(float(loss) < 1.1 for loss in losses)


def test_the_readme_is_a_front_door() -> None:
    assert len(README.read_text().splitlines()) <= 180
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in README.read_text()


def anchors(page: Path) -> set[str]:
    """What headings are called in links, by the rules of GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target
    for name in re.findall(r"`((?:tests|benchmarks|docs|zero)/[\w/]*\w\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_the_tests_that_tables_of_features_name_exist_and_users_need_not_read_them() -> None:
    named = []
    for page in PAGES:
        assert page.stem == "how_it_is_built" or "| test |" not in page.read_text(), page.name
        for table in re.findall(r"^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
            named += [name for row in table.splitlines() for name in row.split("|")[-2].replace(",", " ").split()]
    assert len(named) > 60
    assert [name for name in named if not (ROOT / "tests" / f"{name}.py").exists()] == []


OPTIONS = {
    "every_stage": [zero.setup, zero.GradScaler, zero.full_state_dict, zero.report],
    "oss": [zero.OSS, zero.OSS.from_optimizer],
    "sharded_ddp": [zero.ShardedDDP],
    "fsdp": [zero.FSDP, zero.MixedPrecision, zero.FSDP.summon_full_params],
    "memory": [zero.Prefetch, zero.CPUOffload, zero.DiskOffload],
    "checkpoints": [zero.checkpoint.save, zero.checkpoint.load],
    "plan": [zero.plan, Options],
    "integrations": [ZeroPlugin],
}


@pytest.mark.parametrize("page", OPTIONS)
def test_every_option_is_named(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for function in OPTIONS[page]:
        for name in inspect.signature(function).parameters:
            assert name == "module" or re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text), f"{function.__name__}: {name}"


def test_options_of_features_and_of_torch_are_named() -> None:
    for page, names in {
        "memory": ["offload"],
        "oss": ["offload"],
        "fsdp": ["offload"],
        "from_fsdp": [*translators, *homes],
    }.items():
        text = (ROOT / "docs" / f"{page}.md").read_text()
        assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)] == []


@pytest.mark.matrix
def test_the_command_of_the_plan_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"^python -m zero.plan (--parameters .*)$", (ROOT / "docs" / "plan.md").read_text(), re.MULTILINE)
    assert found
    words = found[1].split()
    if not matrix.WHOLE:  # the same of a hundredth of the parameters in fewer layers
        for word, smaller in {"7.5e9": "7.5e7", "32": "4", "40GiB": "0.4GiB"}.items():
            words[words.index(word)] = smaller
    plan_command(words)
    assert "64 ranks: stage 2" in capsys.readouterr().out


def test_dir_lists_the_public_names_alone() -> None:
    assert sorted(dir(zero)) == sorted([*zero.__all__, "__version__"])


def test_the_page_of_the_api_is_as_the_docstrings() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == written, "run `make api`"
    for name in {*zero.__all__} - {"checkpoint", "comm"}:  # these are modules
        assert re.search(rf"^### zero\.(\w+\.)?{name}$", written, re.MULTILINE), name
