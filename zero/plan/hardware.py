"""How fast hardware computes and sends: presets, and TOML files of the same."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import ceil, log2
from pathlib import Path
from typing import Any, Literal

import torch

from zero.plan.transport import Kind

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Link:
    """latency: seconds that one hop between two ranks takes. bandwidth: bytes a second of one rank.

    reduce, all_reduce: bytes a second of these if they are slower, as on the CPU, which also computes the sums.
    """

    latency: float
    bandwidth: float
    reduce: float | None = None
    all_reduce: float | None = None

    def of(self, kind: Kind) -> float:
        """Bytes a second of a transfer of the kind."""
        own = {"reduce": self.reduce, "all-reduce": self.all_reduce}.get(kind)
        return self.bandwidth if own is None else own


@dataclass(frozen=True)
class Group:
    """The ranks of a transfer.

    stride: from one of them to the next among all ranks. one_host: whether all are on one host, for hardware that does
    not overlap.
    """

    world: int
    stride: int = 1
    one_host: bool = False


@dataclass(frozen=True)
class Hardware:
    """flops: the peak FLOP/s by dtype. efficiency: the share of the peak that matrix multiplications attain.
    memory: bytes a second. cache, cached: operators on at most `cache` bytes move `cached` bytes a second.
    elements: results a second of operators that compute more than sums and products of each element.
    launch: seconds of the host for each operator and transfer. unit: seconds of the host for each all-gather and each
        reduction of a unit or bucket, besides its launches: zero's Python in the hooks around it.
    collective: seconds of a transfer before its first hop.
    exchange: seconds a rank for comparing the ranks' operations. within, between: links within hosts and between them.
    overlaps: whether launching, computing and sending go on at the same time; otherwise one after another.
    """

    name: str
    overlaps: bool
    ranks_a_host: int
    flops: Mapping[str, float]
    memory: float
    launch: float
    within: Link
    between: Link
    efficiency: float = 1
    cache: float = 0
    cached: float = float("inf")
    elements: float = float("inf")
    unit: float = 0
    collective: float = 0
    exchange: float = 0

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        return "nccl" if self.overlaps else "gloo"

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s. For dtypes that `flops` does not have, those of float32."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def hosts(self, group: Group) -> int:
        """The number of hosts that the group's ranks are on."""
        if not self.overlaps:
            return 1 if group.one_host else group.world
        return -(-group.world // max(1, self.ranks_a_host // group.stride))

    def transfer(self, kind: Kind, nbytes: int, group: Group) -> tuple[float, float]:
        """Seconds before bytes flow, and seconds in which they flow if nothing else is sent.

        The model is NCCL's: rings that hop from rank to rank and once to each other host, and for all-reduces trees of
        hosts. A host has as many links to others as ranks of the group, and sends through all of them.
        """
        world, hosts = group.world, self.hosts(group)
        if kind == "exchange":
            return self.exchange * (world - 1), 0
        on_a_host = -(-world // hosts)
        rounds = 2 if kind == "all-reduce" else 1
        if kind == "all-to-all":
            hops, far = int(on_a_host > 1), int(hosts > 1)
            near_bytes, far_bytes = nbytes * (on_a_host - 1) / world, nbytes * (world - on_a_host) / world
            seconds = max(near_bytes / self.within.of(kind), far_bytes / self.between.of(kind))
        else:
            far, hops = hosts - 1, world - hosts
            if kind == "all-reduce":
                far, hops = 2 * ceil(log2(hosts)), 2 * (on_a_host - 1)
            slowest = self.within.of(kind) if hosts == 1 else self.between.of(kind) * on_a_host
            if self.overlaps:
                slowest = min(slowest, self.within.of(kind))
            share = 1 if kind == "broadcast" else rounds * (world - 1) / world
            seconds = nbytes * share / slowest
        return self.collective + hops * self.within.latency + far * self.between.latency, seconds


def _gpus(name: str, flops: dict[str, float], memory: float, within: float, between: float) -> Hardware:
    """Eight GPUs a host. memory, within, between: bytes a second by the data sheets; 0.8 are taken to be attained.

    Latencies are those in NCCL's cost model (its src/graph/tuning.cc, rings, Simple protocol). The efficiency and the
    share of the memory's speed are those of steps on one H100 (docs/plan.md); `unit` is what benchmarks/host.py
    measured on an AMD EPYC, by transfer. Assumed, not measured: the share of the links, 6 us a launch, 60 us a rank and
    exchange.
    """
    return Hardware(
        name,
        overlaps=True,
        ranks_a_host=8,
        flops=flops,
        efficiency=0.6,
        memory=0.8 * memory,
        launch=6e-6,
        unit=250e-6,
        collective=8.4e-6,
        exchange=60e-6,
        within=Link(3.4e-6, 0.8 * within),
        between=Link(14e-6, 0.8 * between),
    )


PRESETS = {
    # NVIDIA's data sheets of H100 SXM (dense; NVLink 900 GB/s both ways) and DGX H100 (400 Gb/s a GPU)
    "h100-8": _gpus("h100-8", {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12}, 3.35e12, 450e9, 50e9),
    # NVIDIA's data sheets of A100 80GB SXM (dense; NVLink 600 GB/s both ways) and DGX A100 (200 Gb/s a GPU)
    "a100-8": _gpus("a100-8", {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}, 2.039e12, 300e9, 25e9),
    # benchmarks/calibrate.py on two cores of an AMD EPYC, one thread a rank, 22 November 2026; between: Gloo, one host
    "cpu": Hardware(
        "cpu",
        overlaps=False,
        ranks_a_host=1,
        flops={"float32": 82e9},
        memory=23e9,
        launch=12.7e-6,
        cache=4 << 20,
        cached=100e9,
        elements=1.85e9,
        exchange=88e-6,
        within=Link(64e-6, 4.9e9, reduce=2.1e9, all_reduce=2.6e9),
        between=Link(350e-6, 2.2e9, reduce=1.2e9, all_reduce=2.0e9),
    ),
}


def as_hardware(given: Hardware | str | Path) -> Hardware:
    """The Hardware of a preset's name or of a TOML file. Raises ValueError for anything else."""
    if isinstance(given, Hardware):
        return given
    if str(given) in PRESETS:
        return PRESETS[str(given)]
    path = Path(given)
    if path.suffix != ".toml":
        raise ValueError(f"hardware={str(given)!r} is unknown. Choose of {', '.join(PRESETS)}, or pass a TOML file.")
    if sys.version_info < (3, 11):
        raise ValueError(f"{path} cannot be read: TOML takes Python 3.11. Pass a zero.plan.Hardware(...) instead.")
    import tomllib

    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    links = {name: _made(Link, content[name], f"{path}, [{name}]") for name in ("within", "between") if name in content}
    hardware: Hardware = _made(Hardware, content | links, str(path))
    _refuse_flops(hardware.flops, path)
    return hardware


def _made(kind: type[Any], content: Any, where: str) -> Any:
    """An object with these fields. Raises ValueError for fields that are missing, unknown, or of a wrong type."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: {content!r} is not a table. Write its keys below a line with its name.")
    known = {one.name: one for one in fields(kind)}
    needed = [name for name, one in known.items() if one.default is MISSING]
    if missing := [name for name in needed if name not in content]:
        raise ValueError(f"{where}: {missing[0]!r} is missing. Needed are {', '.join(needed)}.")
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"{where}: {name!r} is unknown. There are {', '.join(known)}.")
        number = str(known[name].type).startswith(("float", "int"))
        if number and (not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{where}: {name} is {value!r}. Give a number that is not negative.")
        if name in ("bandwidth", "memory", "ranks_a_host", "efficiency", "reduce", "all_reduce") and not value:
            raise ValueError(f"{where}: {name} is 0. Give a number above 0.")
    if kind is Hardware and not isinstance(content["overlaps"], bool):
        raise ValueError(f"{where}: overlaps is {content['overlaps']!r}. Write true or false.")
    return kind(**content)


def _refuse_flops(flops: Any, path: Path) -> None:
    known = flops if isinstance(flops, dict) else {}
    if unknown := [name for name in known if name not in _DTYPES]:
        raise ValueError(f"{path}, [flops]: {unknown[0]!r} is unknown. There are {', '.join(_DTYPES)}.")
    if not isinstance(known.get("float32"), (int, float)) or any(not value > 0 for value in known.values()):
        raise ValueError(f"{path}, [flops]: 'float32' is missing or 0. Give FLOP/s by dtype, above 0.")
