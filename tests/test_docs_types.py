"""mypy accepts the code of README.md and of the pages and examples under docs/: the types are those that users see."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_docs import GPT, PAGES, PREAMBLES, ROOT, Block, blocks

if find_spec("mypy") is None:
    pytest.skip("needs mypy", allow_module_level=True)

IMPORTS = (
    "import functools, torch, zero; import torch.distributed as dist; from torch import Tensor, nn; from "
    "torch.distributed.fsdp.wrap import ModuleWrapPolicy; from torch.nn.parallel import DistributedDataParallel"
)
MODEL = "model = GPT(); batches = [(torch.zeros(2, 4), torch.zeros(2, 4))]; tokens, targets = batches[0]"
TRAINED = "model, optimizer = zero.setup(GPT(), torch.optim.Adam, stage={}, lr=1e-3)"
STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3, "a checkpoint": 3, "a coordinator": 3}


def preamble(marker: str) -> str:
    """In one line, what PREAMBLES runs before a block."""
    _, _, name = marker.partition(": ")
    assert not name or name in PREAMBLES
    if not name:
        return ""
    trained = f"; {TRAINED.format(STAGES[name])}" if name in STAGES else ""
    trained += "; coordinator = ''" if name == "a coordinator" else ""
    return f"{IMPORTS}; from documented.models import GPT, Block; {MODEL}{trained}"


def test_mypy_accepts_what_is_documented(tmp_path: Path) -> None:
    package, pages = tmp_path / "documented", {"models": Path("tests/test_docs.py")}
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text("\n".join([IMPORTS, inspect.getsource(Block), inspect.getsource(GPT)]))
    for page in PAGES:
        for line, marker, source in blocks(page):
            name = f"{page.stem.lower()}_{line}"
            pages[name] = page.relative_to(ROOT)
            (package / f"{name}.py").write_text(preamble(marker) + "\n" * (line - 1) + source)
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        pages[example.stem] = example.relative_to(ROOT)
        (package / example.name).write_text(example.read_text())
    assert len(pages) > 40
    mypy = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", "--no-error-summary", str(package)]
    paths = f"{ROOT}{os.pathsep}{tmp_path}"
    told = subprocess.run(mypy, cwd=ROOT, env={**os.environ, "MYPYPATH": paths}, capture_output=True, text=True)
    errors = re.sub(r"^\S*documented/(\w+)\.py", lambda found: str(pages[found[1]]), told.stdout, flags=re.MULTILINE)
    assert told.returncode == 0, f"{errors}{told.stderr}"
