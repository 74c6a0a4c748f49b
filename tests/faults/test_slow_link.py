"""Full optimizer state over a link of 80 Mbit/s, on which a tensor takes seconds; skipped where no hosts can be made.

`make faults` sets ZERO_FAULTS=1 and runs it. As a script, this file is what a rank runs.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_hosts
from torch import nn
from two_hosts import APART, HOSTS, Hosts, wait_for

import ranks
import zero
from assertions import same
from inner import Comm

ROOT = Path(__file__).parents[2]
LINK = ["tc", "qdisc", "add", "dev", "link0", "root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "400ms"]


def states(rank: int, world: int) -> list[dict[str, Any] | None]:
    """Of optimizers of 8.4M parameters after a step at stages 1, 2 and 3: on rank 0."""
    found = []
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
        model, optimizer = zero.setup(net, torch.optim.SGD, stage=stage, lr=0.1, momentum=0.9)
        model(torch.full((2, 1024), rank + 0.5)).square().mean().backward()
        optimizer.step()
        found.append(zero.full_optimizer_state_dict(model, optimizer, to=0))
    return found


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(two_hosts.problem()), reason=two_hosts.problem() or "it can be run")
def test_full_optimizer_state_reaches_one_rank_over_a_slow_link(tmp_path):
    hosts, each = Hosts(tmp_path), list[subprocess.Popen[bytes]]()
    try:
        environment = {
            **os.environ,
            **APART,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "link0",
            "MASTER_ADDR": HOSTS["first-host"],
            "MASTER_PORT": "29599",
            "WORLD_SIZE": str(len(HOSTS)),
        }
        for rank, name in enumerate(HOSTS):
            hosts.run(name, LINK)
            command = [*hosts.command(name).split(), sys.executable, __file__, str(tmp_path)]
            with (tmp_path / f"log-{rank}").open("w") as log:
                each.append(subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stderr=log))
        wait_for(lambda: all(one.poll() == 0 for one in each) or any(one.poll() for one in each), 300)
        told = "\n".join((tmp_path / f"log-{rank}").read_text() for rank in range(len(HOSTS)))
        assert [one.poll() for one in each] == [0, 0], told
    finally:
        for process in each:
            process.kill()
        hosts.end()
    expected = ranks.run(states, 2)
    for rank in range(2):
        same(torch.load(tmp_path / f"states-{rank}.pt", weights_only=True), expected[rank])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert Comm().transport_name(torch.device("cpu")) == "gloo"
    torch.save(states(rank, world), folder / f"states-{rank}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
