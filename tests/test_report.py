"""What zero says of itself: a line at construction, and `python -m zero.report`."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ranks
import zero
from transports import TRANSPORTS, by
from zero.report import report

ROOT = Path(__file__).parents[1]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def construct(rank, world, transport):
    logger, lines = logging.getLogger("zero"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with by(transport):
            for stage in (2, 3):
                model = nn.Sequential(nn.Linear(16, 3, bias=False), nn.Linear(3, 1, bias=False))
                model[1].weight.requires_grad_(False)
                if stage == 2:
                    sharding = zero.OSS([model[0].weight], torch.optim.SGD, lr=0.1)
                    zero.ShardedDDP(model, sharding)
                else:
                    zero.FSDP(model, ignored_parameters=[model[1].weight])
    finally:
        logger.removeHandler(lines)
        logger.setLevel(logging.NOTSET)
    return lines.lines


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_construction_says_what_it_sharded_in_one_line_on_the_first_rank(transport):
    first, *others = ranks.run(construct, 3, (transport,))
    assert others == [[], []]
    oss, sdp, fsdp = first
    where = f"of 1 parameters over 3 ranks, 64 of 192 of their bytes on rank 0, sent by {transport}; left out: "
    assert oss == f"OSS(SGD): optimizer state {where}nothing"
    assert sdp == f"ShardedDDP(Sequential): gradients {where}1 parameters that are frozen and in no optimizer"
    assert re.fullmatch(r"FSDP\(Sequential, .*FULL_SHARD.*, 1 units\): parameters and gradients .*", fsdp)
    assert fsdp.endswith(f"{where}1 parameters, ignored as the caller asked")


def test_the_environment_can_ask_for_the_lines():
    code = "import torch, zero; zero.OSS([torch.nn.Parameter(torch.ones(16))], torch.optim.SGD, lr=0.1)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ZERO_LOG": "info", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "zero INFO: OSS(SGD): optimizer state of 1 parameters over 1 ranks, 64 of 64 of" in run.stderr


def test_the_report_tells_versions_devices_and_transports():
    told = report()
    for expected in ("python 3", f"torch: {torch.__version__}", "numpy ", "CPU cores", "gloo", "process_vm_readv"):
        assert expected in told
    assert "could not be found out" not in told


def test_the_report_never_raises():
    broken = mock.Mock(side_effect=RuntimeError("broken"))
    with mock.patch("torch.cuda.is_available", broken), mock.patch("platform.platform", broken):
        told = report()
    assert "GPUs: could not be found out (RuntimeError: broken)" in told
    assert "transports:" in told
