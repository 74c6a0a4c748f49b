"""docs/examples/moved.py, the first script of README.md, trains and saves. `make dist` runs this where the wheel alone
is installed."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from pages import ROOT

import zero

SCRIPT = ROOT / "docs" / "examples" / "moved.py"
LAUNCHERS: list[list[str]] = [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]


def trains(folder: Path, launcher: list[str]) -> None:
    # Gloo aborts at interpreter exit now and then; the README need not speak of it.
    (folder / "train.py").write_text(SCRIPT.read_text() + "\nimport sys\nsys.stdout.flush()\nos._exit(0)\n")
    command = [sys.executable, *launcher, "train.py"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    loss = re.search(r"loss (\S+)", done.stdout)
    assert loss and float(loss[1]) < 0.99, done.stdout
    weights = torch.load(folder / "weights.pt", weights_only=True)
    shapes = {"0.weight": (256, 64), "0.bias": (256,), "2.weight": (64, 256), "2.bias": (64,)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes


if __name__ == "__main__":
    assert Path(zero.__file__).is_relative_to(sys.prefix), f"{zero.__file__} is not the installed one"
    for launcher in LAUNCHERS:
        with tempfile.TemporaryDirectory() as folder:
            trains(Path(folder), launcher)
