"""Process groups: their backends, and collectives on groups and backends that torch.distributed did not make."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# For which ranks may connect with one another over Gloo.
_CONNECTS = timedelta(minutes=1)

# Seconds that an abort may take before nobody waits for it.
_ABORTS = 5.0


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group waits for collectives on such a device. There is a public way to set it, none to read it."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def shortest_timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The shortest time for which any backend of the group waits."""
    return min(timeout_of(group, device) for device in group._device_types)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name, in small letters, of the group's backend for tensors on such a device; None if it has none."""
    # torch.distributed.get_backend() returns that of one device type only.
    if all(kind.type != device.type for kind in group._device_types):
        return None
    name = str(group._get_backend(device).name()).lower()
    # torch takes Gloo for devices from which it cannot send, such as mps.
    return name if device.type in dist.Backend.backend_capability.get(name, [device.type]) else None


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store by which the group's ranks found one another. Each group has its own, the same on all its ranks."""
    # Public is only the store that init_process_group() was called with.
    return dist.distributed_c10d._world.pg_map[group][1]


def in_stream_order(options: Any) -> Any:
    """Has a collective on a GPU run on the current stream, instead of a stream of the group."""
    # torch.distributed's functions do so with async_op=False, but then they wait. On other devices nothing changes.
    options.asyncOp = False
    return options


def gloo_groups(
    gloo: Any, store: dist.Store, rank: int, world: int, timeout: timedelta, address: str, *, lazy: bool = False
) -> Iterator[Any]:
    """Yields Gloo groups that torch.distributed does not know, each with connections of its own, which is collective;
    one thread serves those of all. gloo: torch's class. address: of this host, where the other ranks connect; empty for
    that of the host's name. GLOO_SOCKET_IFNAME goes before both. lazy: two ranks connect when one first sends to the
    other; a ring needs two sockets of each, where all with all would need as many as there are ranks."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:  # which torch reads for its own groups alone
        devices = [gloo.create_device(interface=name, lazy_init=lazy) for name in interfaces.split(",")]
    elif address:
        devices = [gloo.create_device(hostname=address, lazy_init=lazy)]
    else:
        devices = [gloo.create_default_device(lazy_init=lazy)]
    options = gloo._Options()
    # What all ranks read of the store to connect grows with their number.
    options._devices, options._timeout = devices, min(timeout, _CONNECTS + timedelta(seconds=world / 4))
    for number in count():
        try:
            group = gloo(dist.PrefixStore(f"{number}", store), rank, world, options)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} could not connect with the others over Gloo in {options._timeout.total_seconds():.0f} s. "
                f"Its own address is {devices[0]}. Where this is not in the network between the hosts, set "
                f"GLOO_SOCKET_IFNAME to its interface on each, such as eth0. {error}"
            ) from error
        group._set_default_timeout(timeout)
        yield group


def driver_version() -> int:
    """The version of CUDA that the driver of NVIDIA's GPUs is of, such as 12030 for 12.3; 0 without one."""
    version: Any = getattr(torch._C, "_cuda_getDriverVersion", None)  # of builds for GPUs
    return 0 if version is None else int(version())


def another_like(group: dist.ProcessGroup, device: torch.device, store: dist.Store, ranks: list[int]) -> Any:
    """A Backend of the same ranks with communicators of its own; None if the group's for the device is not NCCL. store:
    used by nothing else. ranks: those of the job that these are."""
    # Not torch.distributed.new_group(), which is collective over all ranks of the job.
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)  # of builds for GPUs
    if nccl is None or not isinstance(group._get_backend(device), nccl):
        return None
    options: Any = nccl.Options()
    given: Any = group._get_backend(device).options
    options._timeout, options.config = timeout_of(group, device), given.config
    options.group_name, options.global_ranks_in_group = (
        "zero's reductions",
        ranks,
    )  # else torch's logs take it for WORLD
    return nccl(store, group.rank(), group.size(), options)


def abort(groups: Iterable[Any], device: torch.device) -> None:
    """Ends the collectives of ProcessGroups or Backends on such a device that are still running, and returns after some
    seconds at most. They can send nothing afterwards. torch's public function ends all backends of a ProcessGroup."""
    # All at once: NCCL waits for all kernels of the device, and one of them may wait for another communicator's.
    threads = [Thread(target=_abort, args=(group, device), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORTS)


def _abort(group: Any, device: torch.device) -> None:
    with suppress(RuntimeError, ReferenceError):  # this backend has no abort; the user has dropped the group
        backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
        backend.abort()


@contextmanager
def coalesced(group: Any, device: torch.device, works: list[dist.Work | None]) -> Iterator[None]:
    """Launches the collectives within as one operation, where the backend can: NCCL (ncclGroupStart).

    works: those of the collectives; one that stands for all takes their place. torch's own context manager cannot be
    used again after an error within it.
    """
    where = (device,) if hasattr(group, "_get_backend") else ()  # a Backend is of one device
    backend = group._get_backend(device) if where else group
    if getattr(backend, "supports_coalescing", False):
        group._start_coalescing(*where)
        yield
        works[:] = [group._end_coalescing(*where)]
    else:
        yield


class OneTensor(NamedTuple):
    """The names of a group's collectives of one tensor, or one to each rank."""

    all_gather: str
    all_to_all: str
    reduce_scatter: str


def collectives_of_one_tensor(group: Any) -> OneTensor:
    """Those of a ProcessGroup or Backend. They differ between these and between versions of torch; the functions of
    torch.distributed take only groups that it made itself."""
    new = OneTensor("all_gather_single", "all_to_all_single", "reduce_scatter_single")
    old = OneTensor("_allgather_base", "alltoall_base", "_reduce_scatter_base")
    return OneTensor(*(name if hasattr(group, name) else before for name, before in zip(new, old, strict=True)))
