"""The names inside of zero that tests use beside what users call: units, shard groups, and the count of living bytes.

A test that needs one more says by it what no public call shows. Whoever moves something in zero mends it here.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

import zero
from zero.checkpoint import files
from zero.comm import Comm as Comm
from zero.comm.host_memory import Peers
from zero.comm.transport import GroupWork
from zero.fsdp.fsdp import FSDP, running_model
from zero.offload import offload_of as offload_of
from zero.oss.optimizer import set_bucket_size as set_bucket_size
from zero.plan.meter import Meter as Meter
from zero.plan.meter import nbytes as nbytes
from zero.shards.shard_group import ShardGroup
from zero.wrap.gradients import held_here as held_here


def shard_groups(of: FSDP | zero.OSS) -> list[ShardGroup]:
    """Each with its flat buffer `full`, this rank's `shard` of it, `params`, and `spans`: what of them it owns."""
    return [*(running_model(of).index.groups if isinstance(of, FSDP) else of.shards.shard_groups)]


def unit_names(model: FSDP) -> list[str]:
    """Of the modules that are units, the root's "" first."""
    return [unit.name for unit in running_model(model).units]


def unit_params(model: FSDP) -> dict[str, list[str]]:
    """By unit's name the names of its parameters, in the order of the model."""
    order = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    return {
        unit.name: sorted((name for group in unit.groups for name in group.names), key=order.index)
        for unit in running_model(model).units
    }


def unsharded(model: FSDP) -> list[str]:
    """The names of the units that have memory for full parameters now."""
    return [
        unit.name
        for unit in running_model(model).units
        if any(group.full.untyped_storage().nbytes() for group in unit.groups)
    ]


def unit_bytes(model: FSDP) -> int:
    """Bytes of the full parameters of the largest unit."""
    return max(sum(group.full.nbytes for group in unit.groups) for unit in running_model(model).units)


def unit_modules(model: FSDP) -> list[nn.Module]:
    return [unit.module for unit in running_model(model).units]


def unsharded_in_backward(model: FSDP, params: Iterable[nn.Parameter]) -> list[int]:
    """To be filled with how many units beside the root are unsharded whenever one of the parameters has a gradient."""
    counts: list[int] = []
    for param in params:
        param.register_hook(lambda _: counts.append(len([name for name in unsharded(model) if name])))
    return counts


def at_rest(meter: Meter) -> int:
    """Bytes that live once Gloo's threads have let go of what they sent: their number has stood for a while."""
    found = [meter.live()]
    while len(found) < 5 or len({*found[-5:]}) > 1:
        time.sleep(0.01)
        found.append(meter.live())
    return found[-1]


@contextmanager
def while_gloo_lets_go() -> Iterator[None]:
    """Each wait takes 2 ms more: Gloo's threads keep what has arrived for a moment after they have said so."""
    wait = GroupWork.wait

    def and_a_while(work: GroupWork) -> Any:
        result = wait(work)
        time.sleep(0.002)
        return result

    with mock.patch.object(GroupWork, "wait", and_a_while):
        yield


def progress_from(nbytes: int) -> AbstractContextManager[Any]:
    """Work of so many bytes, instead of 1 GiB, is long enough for a progress bar."""
    return mock.patch.object(files, "_LONG", nbytes)


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Of other ranks' memory, by each read."""
    read, counts = Peers.read, list[int]()

    def counting(peers: Peers, rank: int, address: int, into: Tensor) -> None:
        counts.append(into.nbytes)
        read(peers, rank, address, into)

    with mock.patch.object(Peers, "read", counting):
        yield counts


@contextmanager
def before_scatters(call: Callable[[], object]) -> Iterator[None]:
    """Calls a function before starting values are sent: those of a shard group at a time."""
    scatter = Comm.scatter
    with mock.patch.object(Comm, "scatter", lambda *args: (call(), scatter(*args))[1]):
        yield
