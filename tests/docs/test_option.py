"""The option that docs/how_it_is_built.md adds as an example works in a copy of zero."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USED = """
import torch.distributed as dist
from torch import nn
import zero
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
net = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(20, 20))
policy = lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear)
model = zero.FSDP(net(), auto_wrap_policy=policy, keep_below=100)
print([unit.stays for unit in zero.fsdp.fsdp.running_model(model).units][1:])
try:
    zero.FSDP(net(), keep_below=-1)
except ValueError as error:
    print(error, flush=True)
"""


def applied(diff: str, root: Path) -> None:
    """Each part, up to `@@`, is found once in its file."""
    for of_file in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, parts = of_file.partition("\n")
        source = (root / name).read_text()
        for part in parts.rstrip("\n").split("\n@@\n"):
            lines = part.split("\n")
            before, after = ("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")
            assert source.count(before) == 1, f"{name} has changed: {before}"
            source = source.replace(before, after)
        (root / name).write_text(source)


@pytest.mark.slow
def test_the_option_of_the_page_is_compared_checked_and_used(tmp_path):
    [diff] = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/how_it_is_built.md").read_text(), re.DOTALL)
    shutil.copytree(ROOT / "zero", tmp_path / "zero", ignore=shutil.ignore_patterns("__pycache__"))
    applied(diff, tmp_path)
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    done = subprocess.run([sys.executable, "-c", USED], **how, capture_output=True, text=True, timeout=60)
    stays, refused = done.stdout.splitlines() or [done.stderr, ""]
    assert stays == "[True, False]"
    assert "keep_below=-1" in refused
