"""A step of many ranks on a GPU and a network that are not there (tests/simulated): zero beside FSDP2, whose own code
runs on the simulated streams, too.

    python benchmarks/simulate.py --worlds 8 64

A GPT of 18 blocks of width 2,048, 1.05 billion parameters, is computed at a scale of 1 to 32: width, words, tokens and
context. So bytes are 32² as many, and products of matrices 32³. These run at FLOPS, and all that an operator reads and
writes passes MEMORY: one after another, no operator is fused. Transfers take what network.py says, on streams of their
own; those of one rank share its wire, in the order of their launches, whatever communicator they are of. Transfers take
nothing from the computing. Compare the figures with one another, not with a GPU's.

Gradients are sent as each of them does by default, zero float32 and FSDP2 what it computes in, or all in the same
dtype. zero is told which modules are units, as FSDP2 is, or ("by itself") not.

"hosts": the same where hosts take time, too: what wires.py has measured of a step spread over its launches,
and --hop us for each message from one host to the next as ranks compare what they do. FSDP2 compares nothing.

Prints milliseconds of a settled step, how many of them transfers add, the step where hosts take time and how often they
wait for one another, and the GB of each kind that a NIC sends, or, within one host, a GPU; writes simulate8.json.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from contestants import CONTESTANTS, How
from fake import Network, patched
from launch import Rank
from models import GPT, SEED, Block
from report import Figures, add_names, parser_of, tabulate
from simulated.device import Device, Event, Stream
from simulated.network import Wire
from simulated.world import Simulated, simulated
from zero.fsdp import choice

SCALE = 32
LAYERS, WIDTH, CONTEXT, WORDS = 18, 2048, 128, 32768
FLOPS = {torch.bfloat16: 600e12, torch.float32: 300e12}
MEMORY, LINK, NIC, GPUS = 3e12, 300e9, 45e9, 8
RANK, STEPS, TOKENS = 1, 3, (8192, 2048)
NAMES = ["zero1", "zero2", "zero3", "zero3 by itself", "fsdp2"]
F32, BF16 = torch.float32, torch.bfloat16
SENT: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32, float32": (F32, F32),
    "bfloat16, each by default": (BF16, None),
    "bfloat16, float32": (BF16, F32),
    "bfloat16, bfloat16": (BF16, BF16),
}
"""In what is computed, and in what the user asks gradients to be sent."""
HOST = {"zero1": 0.042, "zero2": 0.052, "zero3": 0.067, "zero3 by itself": 0.067, "fsdp2": 0.118}
"""Seconds that the host takes to launch a step of 8,192 tokens beside an H200 (docs/measurements.md); of stage 1 by its
number of Python calls between those of the others."""


@dataclass(frozen=True)
class Case:
    network: Network
    tokens: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    hop: float = 0.0

    def transfer(self, kind: str, nbytes: float) -> float:
        return self.network.seconds(kind, nbytes * SCALE**2)

    def batch(self) -> Tensor:
        return torch.zeros(self.tokens // CONTEXT, CONTEXT // SCALE, dtype=torch.int64)

    def compute(self, operator: Any, args: Sequence[Any]) -> float:
        return flops(operator.name().partition("::")[2], args) * SCALE**3 / FLOPS[self.dtype]


def flops(name: str, args: Sequence[Any]) -> float:
    """Of a product of matrices, and of attention, whose masked half is left out."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if name.startswith(("mm", "addmm", "bmm")):
        first, second = tensors[-2:]
        return 2.0 * first.numel() * second.shape[-1]
    if "_scaled_dot_product" in name:
        length, passes = tensors[0].shape[-2], 2.5 if "backward" in name else 1
        return 2.0 * passes * tensors[0].numel() * length
    return 0.0


class Handle:
    """What FSDP2 asks torch.cuda for."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def Event(self) -> Any:
        device = self._device

        class Later(Event):
            def __init__(self) -> None: ...

            def record(self, stream: Stream | None = None) -> None:
                super().__init__(stream or device.current_stream())

        return Later()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None: ...


ASKING = [f"fsdp._fully_shard._fsdp_{name}" for name in ("collectives", "init", "param_group", "state")]


@contextmanager
def one_communicator(there: Simulated, world: int) -> Iterator[None]:
    """Process groups, of torch's fake backend, send by one group that is not there."""
    group = there.group(RANK, world, there.transfer)
    with ExitStack() as replaced:
        for module in (*ASKING, "device_mesh"):
            handle = mock.patch(f"torch.distributed.{module}._get_device_handle", return_value=Handle(there.device))
            replaced.enter_context(handle)
        replaced.enter_context(
            patched(
                gather=lambda _, *args: group._allgather_base(*args),
                reduce=lambda _, *args: group._reduce_scatter_base(*args),
                all_reduce=lambda _, *args: group.allreduce(*args),
                broadcast=lambda _, *args: group.broadcast(*args),
                all_to_all=lambda _, *args: group.alltoall_base(*args),
            )
        )
        yield


@dataclass(frozen=True)
class Step:
    """seconds; bytes by kind; how often it launched a kernel or a transfer, and hosts compared what they do."""

    seconds: float
    sent: Counter[str]
    launches: int
    comparisons: int


def step_of(name: str, case: Case, *, wires: bool = True, launch: float = 0.0) -> Step:
    """The last of the steps. wires: whether transfers take time. launch: seconds of the host for each."""
    world, transfer = case.network.ranks, case.transfer if wires else lambda *_: 0.0
    options: dict[str, Any] = {"compute": case.compute, "bandwidth": MEMORY / SCALE**2, "transfer": transfer}
    hop = case.hop if launch else 0.0
    with simulated(wire=Wire(), hop=hop, **options) as there, one_communicator(there, world):
        torch.manual_seed(SEED)
        model = GPT(LAYERS, WIDTH // SCALE, WORDS // SCALE, tied=False)
        comm, reduce_dtype = there.comm(RANK, world, one_host=case.network.hosts == 1), case.reduce_dtype
        if name == "fsdp2" and reduce_dtype is None:
            reduce_dtype = case.dtype
        optim, alone = partial(AdamW, lr=0.0, fused=True), name.endswith("by itself")
        how = How(optim, case.dtype, reduce_dtype, group=comm, finds_units=alone)
        contestant = CONTESTANTS[name.partition(" ")[0]]
        with mock.patch("zero.fsdp.choice._SMALL", choice._SMALL // SCALE**2):
            trained = contestant.make(model, Block, Rank(RANK, world, torch.device("cuda")), how)
        batch, hosts = case.batch(), comm.link.hosts
        there.device.launch = launch
        for _ in range(STEPS):
            begin = max(there.device.computing.time, there.device.host.time)
            there.device.transfers.clear()
            there.device.launches.clear()
            hosts.compared = 0
            trained.backward(trained.loss(batch, batch))
            trained.update()
        sent: Counter[str] = Counter()
        network = case.network
        for kind, nbytes, *_ in there.device.transfers:
            by = network.nic_bytes if network.hosts > 1 else network.link_bytes
            sent[kind] += round(by(kind, nbytes) * SCALE**2)
        launches = there.device.launches.total() + len(there.device.transfers)
        ended = max(there.device.computing.time, there.device.host.time)
        return Step(ended - begin, sent, launches, hosts.compared)


def networks(world: int) -> dict[str, Network]:
    if world <= GPUS:
        return {f"{world} ranks": Network(1, world, 1, NIC, LINK)}
    hosts, nics = world // GPUS, {"one NIC a host": 1, "one NIC a GPU": GPUS}
    return {f"{world} ranks, {told}": Network(hosts, GPUS, count, NIC, LINK) for told, count in nics.items()}


def measure(name: str, case: Case) -> Figures:
    found, alone = (step_of(name, case, wires=wires) for wires in (True, False))
    priced = step_of(name, case, launch=HOST[name] / found.launches)
    return {
        "ms": 1000 * found.seconds,
        "exposed": 1000 * (found.seconds - alone.seconds),
        "hosts": 1000 * priced.seconds,
        "compare": found.comparisons,
        "GB sent": ", ".join(f"{kind} {nbytes / 1e9:.2f}" for kind, nbytes in sorted(found.sent.items())),
    }


def main() -> None:
    worlds = [8, 64], f"ranks: up to {GPUS}, or multiples"
    parser = parser_of(__doc__, worlds=worlds, tokens=([*TOKENS], "of a rank's batch"), hop=(35.0, "us of a message"))
    add_names(parser, "--sent", [*SENT])
    add_names(parser, "--only", NAMES)
    given = parser.parse_args()
    for world in given.worlds:
        dist.init_process_group("fake", rank=RANK, world_size=world, store=FakeStore())
        jobs = {
            f"{where}, {tokens:,} tokens, {sent}: {name}": partial(
                measure, name, Case(network, tokens, *SENT[sent], hop=given.hop / 1e6)
            )
            for (where, network), tokens, sent, name in product(
                networks(world).items(), given.tokens, given.sent, given.only
            )
        }
        tabulate(jobs, 1, given.out, f"simulate{world}", "network, tokens, computed in, gradients sent")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
