"""The README's own script, run as the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from processes import ROOT, python


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = re.search(r"<!-- script -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    path = tmp_path / "train.py"
    # Gloo aborts at interpreter exit now and then; the README need not speak of it.
    path.write_text(found[1] + "\nimport sys\nsys.stdout.flush()\nos._exit(0)\n")
    return path


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_script_of_the_readme_trains(script: Path, launcher: list[str]) -> None:
    written = python(*launcher, script, cwd=script.parent).stdout
    loss = re.search(r"loss (\S+), sent (\d+) bytes", written)
    assert loss
    assert float(loss[1]) < 0.9
    assert (int(loss[2]) > 0) == bool(launcher)
    weights = torch.load(script.parent / "weights.pt", weights_only=True)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "0.weight": (256, 64),
        "0.bias": (256,),
        "2.weight": (64, 256),
        "2.bias": (64,),
    }
