"""docs/examples/notebook.ipynb in a kernel: as it is, and as people run cells, again and after errors."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import matrix
from examples import EXAMPLES
from processes import ROOT

pytestmark = [
    matrix.clusters("nbclient", "ipykernel"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of Jupyter's own
]

NOTEBOOK = EXAMPLES / "notebook.ipynb"
SETUP, TRAIN, FUNCTION, LAUNCH = range(4)


def written() -> list[str]:
    import nbformat

    return [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]


def executed(cells: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell prints, or the error that it ends with."""
    import nbclient
    import nbformat

    for name, value in {"PYTHONPATH": str(ROOT), "ZERO_LOG": "info", "HOME": str(folder)}.items():
        monkeypatch.setenv(name, value)
    seeded = ["import torch; torch.manual_seed(0)", *cells]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in seeded])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True).execute(cwd=folder)
    told = [
        "".join(out["text"] if out["output_type"] == "stream" else out["evalue"] for out in cell.outputs)
        for cell in notebook.cells[1:]
    ]
    print(*told, sep="\n---\n")
    return told


def loss_of(told: str) -> float:
    return float(re.findall(r"^loss (\S+)", told, re.MULTILINE)[-1])


def test_it_runs_as_it_is(tmp_path, monkeypatch):
    import nbformat

    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    setup, train, function, launch = executed(written(), tmp_path, monkeypatch)
    assert "on 1 rank by this process alone" in setup and not function
    assert "on 2 ranks" in launch
    assert loss_of(train) < 0.3 and loss_of(launch) < 0.3  # 0.5 at first


def test_cells_run_again_and_after_errors(tmp_path, monkeypatch):
    cells = written()
    wrong = cells[SETUP].replace("stage=3", "stage=4")
    corrected = alone = cells[SETUP].splitlines()[-1]
    assert wrong != cells[SETUP] and alone.startswith("model, optimizer = zero.setup(net, optimizer,")
    unwrapped = "net = zero.unwrap(model)\noptimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)\n" + alone
    mistaken, again = (cells[LAUNCH].replace("(3)[0]", f"({stage})[0]") for stage in (4, 2))
    runs = [wrong, corrected, cells[TRAIN]]
    runs += [cells[SETUP], cells[SETUP], alone, cells[TRAIN], unwrapped, cells[TRAIN]]
    runs += [cells[FUNCTION], mistaken, cells[LAUNCH], again]
    told = executed(runs, tmp_path, monkeypatch)
    assert "stage=4 is no stage" in told[0] and told[1].startswith("zero: stage 3")
    assert told[3].startswith("zero: stage 3") and told[4].startswith("zero: stage 3")
    assert "in a notebook whose cell runs again wrap what zero.unwrap(model)" in told[5]
    losses = [loss_of(told[cell]) for cell in (2, 6, 8)]
    assert max(losses) < 0.3, losses  # 0.5 at first, each of another batch
    assert "stage=4 is no stage" in told[10]
    assert "2 ranks" in told[11] and "ShardedDDP" in told[12]
    assert loss_of(told[11]) < 0.3 and loss_of(told[12]) < 0.3
