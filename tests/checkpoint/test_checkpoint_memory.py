"""What saving, loading and exporting take besides the state itself, mostly by the system's peak of resident memory."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn

import matrix
import ranks
import zero
from inner import Meter
from processes import command
from runs import take_step

pytestmark = pytest.mark.slow

MIB = 1 << 20
BUFFER = 16 * MIB  # what is copied at a time
BLOCK = 4 * MIB  # what has a checksum of its own
SLACK = 6 * MIB  # Python objects, the allocator's rounding, the 1 MiB in which checksums are computed
BLOCKS, ONE = 8, 4 * MIB  # how many, and bytes of each
STATUS, CLEAR, IO = (Path("/proc/self") / name for name in ("status", "clear_refs", "io"))


def read(key):
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def bytes_read(work):
    before = int(IO.read_text().split()[1])
    work()
    return int(IO.read_text().split()[1]) - before


def peak_of(work):
    """Bytes by which resident memory rises above what it was before."""
    CLEAR.write_text("5")  # the peak starts from here
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def stepped(stage, **options):
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(BLOCKS)))
    model, optimizer = zero.setup(blocks, torch.optim.Adam, stage=stage, lr=1e-3, **options)
    for _ in range(2):
        take_step(optimizer, model(torch.ones(2, 1024)).square().mean())
        optimizer.zero_grad()
    return model, optimizer


def save_elsewhere(rank, world, path, stage):
    zero.checkpoint.save(path, *stepped(stage))


def measure(rank, world, path, other):
    model, optimizer = stepped(3)
    zero.checkpoint.save(f"{path}/warm", model, optimizer)
    peaks = {"save": peak_of(lambda: zero.checkpoint.save(path, model, optimizer))}
    behind = []
    peaks["save behind"] = peak_of(lambda: behind.append(zero.checkpoint.save(path, model, optimizer, wait=False)))
    behind[0].wait()
    peaks["read"] = bytes_read(lambda: zero.checkpoint.load(path, model, optimizer))
    peaks["load in place"] = peak_of(lambda: zero.checkpoint.load(path, model, optimizer))
    peaks["load of another stage and world"] = peak_of(lambda: zero.checkpoint.load(other, model, optimizer))
    optimizer.state.clear()
    peaks["load"] = peak_of(lambda: zero.checkpoint.load(path, model, optimizer))
    return peaks


@pytest.fixture(autouse=True)
def measurable():
    try:
        CLEAR.write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of resident memory cannot be read here: {error}")


@matrix.only
def test_peak_of_save_and_load(tmp_path):
    ranks.run(save_elsewhere, 1, (str(tmp_path / "other"), 0))
    written = 3 * BLOCKS * ONE // 2  # by each rank, of weights and two averages
    for peaks in ranks.run(measure, 2, (str(tmp_path), str(tmp_path / "other")), fresh=True):
        assert peaks["save"] <= SLACK, peaks
        assert peaks["save behind"] <= written + SLACK, peaks
        assert peaks["load in place"] <= BUFFER + SLACK, peaks
        assert peaks["load of another stage and world"] <= BUFFER + SLACK, peaks
        assert peaks["read"] <= 2 * written + 4 * BLOCK, peaks  # once to be checked, once to be taken
        assert peaks["load"] <= written * 2 // 3 + BUFFER + SLACK, peaks


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_masters_of_written_parameters_are_made_one_by_one(rank, world, stage, tmp_path):
    with Meter() as meter:
        model, optimizer = stepped(stage, precision="bf16")
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        meter.reset_peak()
        before = meter.live()
        zero.checkpoint.save(tmp_path, model, optimizer)
        assert meter.peak() - before <= 3 * ONE


def measure_export(rank, world, path):
    def export(dtype):
        with redirect_stdout(io.StringIO()):
            command("zero.checkpoint", "export", path, f"{path}/{dtype}", "--dtype", dtype)

    export("fp32")
    return peak_of(lambda: export("bf16"))


def test_peak_of_export(tmp_path):
    ranks.run(save_elsewhere, 1, (str(tmp_path), 0), bare=True)
    [peak] = ranks.run(measure_export, 1, (str(tmp_path),), bare=True, fresh=True)
    assert peak <= 2 * BUFFER + SLACK
