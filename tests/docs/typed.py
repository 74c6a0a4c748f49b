"""Writes the code of the pages, of docs/examples and of refused.py as modules into a folder, where `make check` lets
mypy read it.

A line has the number there that it has in its page: the types are those that users see.
"""

import shutil
import sys
from pathlib import Path

from pages import PAGES, ROOT, blocks

IMPORTS = (
    "import functools, torch, zero; import torch.distributed as dist; from torch import Tensor, nn; from "
    "torch.distributed.fsdp.wrap import ModuleWrapPolicy; from torch.nn.parallel import DistributedDataParallel; "
    "from documented.models import GPT, Block"
)
MODEL = "model = GPT(); batches = [(torch.zeros(2, 4), torch.zeros(2, 4))]; tokens, targets = batches[0]"
TRAINED = "model, optimizer = zero.setup(GPT(), torch.optim.Adam, stage={}, lr=1e-3)"
STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3, "a checkpoint": 3}


def preamble(marker: str) -> str:
    _, _, name = marker.partition(": ")
    lines = [IMPORTS, MODEL] if name else []
    return "; ".join([*lines, TRAINED.format(STAGES[name])] if name in STAGES else lines)


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("documented.py"), folder / "models.py")
    shutil.copy(Path(__file__).with_name("refused.py"), folder)
    for page in PAGES:
        for line, marker, source in blocks(page):
            (folder / f"{page.stem.lower()}_{line}.py").write_text(preamble(marker) + "\n" * (line - 1) + source)
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        shutil.copy(example, folder)
    assert len([*folder.iterdir()]) > 20, "fewer blocks than the pages have"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
