"""Two hosts on one machine: each has a network, a host name and a file of host names of its own; a link joins them.

They are namespaces of Linux (unshare(1)). Where this user may make none, `problem` says why. Ranks of two such hosts
are told not to read one another's memory: they send over the link, as real hosts do.

As a script, this file is what a rank on them runs: it trains at every stage, sends state over a slow link, and then
trains until the link fails.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import matrix
import zero
from inner import Comm
from runs import on_mesh, sgd, stage_3, take_step
from zoo import Stack, loss_on

HOSTS = {"first-host": "10.213.7.1", "second-host": "10.213.7.2"}
TIMEOUT = 2.0
"""Seconds for which the ranks' process groups wait in training that the link's failure ends."""

STAGES: list[int | str] = [0, 1, 2, 3, "hybrid"]


def problem() -> str:
    """Why this machine lets this user make no hosts; nothing if it does."""
    if not matrix.FAULTS:
        return "make faults runs it; in tests/parity ranks of one machine train as between hosts"
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc", "mount") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with {', '.join(missing) or 'namespaces'}"
    try:
        Hosts(Path("/tmp")).end()
    except subprocess.CalledProcessError as error:
        return f"this user may make no network namespaces: {' '.join(map(str, error.cmd))}: {error.stderr.strip()}"
    return ""


class Hosts:
    """Two of them, from here until `end`. Raises CalledProcessError where they cannot be made."""

    def __init__(self, folder: Path, *, know_themselves: bool = True) -> None:
        """know_themselves: by the address at which the other reaches them; else by 127.0.1.1, as Debian has it."""
        self._know_themselves = know_themselves
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        try:
            self._start(folder)
        except BaseException:
            self.end()
            raise

    def _start(self, folder: Path) -> None:
        first, second = HOSTS
        self._holders[first] = self._hold(["unshare", *self._as_root, "--net", "--uts", "--mount"])
        within = self._entering(first) if self._as_root else []  # both are of one user namespace
        self._holders[second] = self._hold([*within, "unshare", "--net", "--uts", "--mount"])
        there = str(self._holders[second].pid)
        self.run(first, ["ip", "link", "add", "name", "link0", "type", "veth", "peer", "name", "link0", "netns", there])
        for name, address in HOSTS.items():
            names = folder / f"hosts-of-{name}"
            known = HOSTS if self._know_themselves else {**HOSTS, name: "127.0.1.1"}
            names.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {one}\n" for one, at in known.items()))
            for command in (
                ["hostname", name],
                ["mount", "--bind", str(names), "/etc/hosts"],
                ["ip", "address", "add", f"{address}/24", "dev", "link0"],
                ["ip", "link", "set", "lo", "up"],
                ["ip", "link", "set", "link0", "up"],
            ):
                self.run(name, command)

    def _hold(self, unshare: Sequence[str]) -> subprocess.Popen[str]:
        """A process that keeps namespaces, once they are there."""
        command = [*unshare, "sh", "-c", "echo there; exec cat"]
        holder = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            _, said = holder.communicate()
            raise subprocess.CalledProcessError(holder.returncode, unshare, stderr=said)
        return holder

    def _entering(self, name: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._as_root else []
        return ["nsenter", "--target", str(self._holders[name].pid), *user, "--net", "--uts", "--mount"]

    def run(self, name: str, command: Sequence[str]) -> None:
        subprocess.run([*self._entering(name), *command], check=True, capture_output=True, text=True)

    def command(self, name: str) -> str:
        """What a shell has to put before a command, to run it on the host of that name."""
        return " ".join(self._entering(name))

    def cut(self) -> None:
        """Sets the link down: what is sent is lost, and nobody is told."""
        self.run(next(iter(HOSTS)), ["ip", "link", "set", "link0", "down"])

    def mend(self) -> None:
        self.run(next(iter(HOSTS)), ["ip", "link", "set", "link0", "up"])

    def slow_down(self) -> None:
        """To 80 Mbit/s, until `speed_up`."""
        limit = ["rate", "80mbit", "burst", "64kb", "latency", "400ms"]
        for name in HOSTS:
            self.run(name, ["tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limit])

    def speed_up(self) -> None:
        for name in HOSTS:
            self.run(name, ["tc", "qdisc", "del", "dev", "link0", "root"])

    def end(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.communicate()


def build(stage: int | str, group: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    if stage != "hybrid":
        return zero.setup(Stack(), sgd, stage=stage, process_group=group)
    return stage_3(Stack(), sgd, **on_mesh(2, {"replicas": 2}))


def train(rank: int, world: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for stage in STAGES:
        model, optimizer = build(stage)
        losses = [take_step(optimizer, loss_on(rank, number)(model)) for number in range(4)]
        found[str(stage)] = losses, zero.full_state_dict(model, to=None)
    return found


def states(rank: int, world: int) -> list[dict[str, Any] | None]:
    """Of optimizers of 8.4M parameters after a step at stages 1, 2 and 3: on rank 0. Over a slow link a tensor takes
    seconds."""
    found = []
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
        model, optimizer = zero.setup(net, torch.optim.SGD, stage=stage, lr=0.1, momentum=0.9)
        model(torch.full((2, 1024), rank + 0.5)).square().mean().backward()
        optimizer.step()
        found.append(zero.full_optimizer_state_dict(model, optimizer, to=0))
    return found


def train_until_it_fails(stage: int, rank: int, folder: Path) -> tuple[str, float]:
    """What this rank says when the link fails, and when: processes of one machine have one clock."""
    model, optimizer = build(stage, dist.new_group(timeout=timedelta(seconds=TIMEOUT)))
    until, told = time.monotonic() + 60, "no error"
    try:
        while time.monotonic() < until:
            take_step(optimizer, loss_on(rank, 0)(model))
            (folder / f"training-{stage}-{rank}").touch()
    except RuntimeError as error:
        told = str(error)
    return told, time.monotonic()


def wait_for(there: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


def main(folder: Path, stages: Sequence[str]) -> None:
    """stages: those to train at until the link fails."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sent_by = Comm().transport_name(torch.device("cpu"))
    torch.save((os.uname().nodename, sent_by, train(rank, world)), folder / f"trained-{rank}.pt")
    wait_for((folder / "slow").exists)
    torch.save(states(rank, world), folder / f"states-{rank}.pt")
    dist.barrier()
    (folder / f"sent-{rank}").touch()
    wait_for((folder / "fast").exists)
    for stage in stages:
        told = train_until_it_fails(int(stage), rank, folder)
        (folder / f"told-{stage}-{rank}.partial").write_text(json.dumps(told))
        (folder / f"told-{stage}-{rank}.partial").rename(folder / f"told-{stage}-{rank}")
        wait_for((folder / f"mended-{stage}").exists)
    os._exit(0)  # groups whose link failed are not to be waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
