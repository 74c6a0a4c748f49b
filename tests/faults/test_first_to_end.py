"""A launcher shows the error of the first process that ends: that of the rank which has raised, not of one that was
told."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

import gpus
import zero
from transports import TRANSPORTS, by
from zero.comm import forked
from zoo import Stack, batch

ENDS = """
import runpy, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
ending = runpy.run_path(sys.argv[1])
ending["after_any"]([other.pid])
if sys.argv[2] == "recovers":
    ending["as_it_comes"]()
print(other.poll() is None, flush=True)
sys.exit(1)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only where /proc says which processes run")
@pytest.mark.parametrize("way", ["told", "recovers"])
def test_a_process_that_was_told_ends_after_the_one_that_has_raised(way):
    """The one that has raised ends when its input does."""
    with subprocess.Popen([sys.executable, "-c", ENDS, forked.__file__, way], stdin=-1, stdout=-1) as told:
        assert told.stdin is not None and told.stdout is not None and told.stdout.readline() == b"True\n"
        if way == "told":
            with pytest.raises(subprocess.TimeoutExpired):
                told.wait(0.5)
            told.stdin.close()
        assert told.wait(20) == 1


def trains(rank: int, port: int, transport: str) -> None:
    torch.set_num_threads(1)
    where: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2}
    with by(transport):
        dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where)
        model, optimizer = zero.setup(Stack(), torch.optim.SGD, stage=3, lr=0.1)
        for step in range(3):
            model(batch(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1 and step == 1:
                raise ValueError("the user's own")


@pytest.mark.slow
@gpus.cpu_only("which ranks would share")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_spawn_shows_what_the_users_code_has_raised(transport):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        multiprocessing.ProcessRaisedException, match=r"(?s)Process 1 .*ValueError: the user's own"
    ) as raised:
        multiprocessing.spawn(trains, (port, transport), nprocs=2)
    assert "has stopped" not in str(raised.value)
