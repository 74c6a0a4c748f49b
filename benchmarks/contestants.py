"""What wires.py and graphs.py compare: a GPT in bfloat16 with float32 master weights, sharded by each or not."""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW

import zero
from gpt import CONTEXT, GPT, Block
from launch import Rank

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulated.network import Network


@dataclass(frozen=True)
class Settings:
    """world: ranks, of which one runs. bandwidth, gpus_a_host, nics, link: see wires.py. tokens: of this rank's batch.

    reduce_dtype: float32 or bfloat16, in which gradients are sent; at stage 1 they have the model's 16 bits, and at
    stage 2 they are float32. rate: of learning; by default 0, since what the fake group brings are not the ranks'
    gradients, and the weights would diverge. capturable: the optimizer counts its steps on the GPU. ctas, one: see
    wires.py.
    """

    world: int
    bandwidth: float
    tokens: int
    layers: int
    width: int
    compile: bool
    reduce_dtype: str
    steps: int
    rate: float = 0.0
    capturable: bool = False
    ctas: int = 0
    one: bool = False
    gpus_a_host: int = 0
    nics: int = 0
    link: float = 300.0

    @property
    def network(self) -> Network:
        """In one host --bandwidth is that of links, and nothing else is used."""
        gpus = min(self.gpus_a_host, self.world) or self.world
        link = self.bandwidth if gpus == self.world else self.link
        return Network(self.world // gpus, gpus, self.nics or gpus, 1e9 * self.bandwidth, 1e9 * link)

    @property
    def words(self) -> int:
        return 16 * self.width

    def build(self, device: torch.device) -> GPT:
        torch.manual_seed(0)
        with torch.device(device):
            model = GPT(self.layers, self.width, tokens=self.words, tied=False)
        if self.compile:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block)
        return model

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(self.words, (self.tokens // CONTEXT, CONTEXT + 1), device=device)
        return drawn[:, :-1], drawn[:, 1:]


Trained = tuple[Callable[..., Tensor], torch.optim.Optimizer]


def adam(settings: Settings, device: torch.device) -> Callable[..., AdamW]:
    """A partial, in which zero sees the class: a function of ours it would measure, and by the CPU, where fused steps
    of torch 2.11 depend on the length."""
    on_gpu = device.type == "cuda"
    return partial(AdamW, lr=settings.rate, fused=on_gpu, capturable=on_gpu and settings.capturable)


def unsharded(settings: Settings, rank: Rank) -> Trained:
    model = settings.build(rank.device)

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast(rank.device.type, torch.bfloat16):
            return model(*batch)

    return loss, adam(settings, rank.device)(model.parameters())


def fsdp1(settings: Settings, rank: Rank) -> Trained:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    model = settings.build(rank.device)
    precision = MixedPrecision(torch.bfloat16, getattr(torch, settings.reduce_dtype))
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=precision,
        use_orig_params=True,
        device_id=rank.device,
    )
    return sharded, adam(settings, rank.device)(sharded.parameters())


def fsdp2(settings: Settings, rank: Rank) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = settings.build(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, settings.reduce_dtype))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, adam(settings, rank.device)(model.parameters())


def stage_3(settings: Settings, rank: Rank, *, reshards: bool = True) -> Trained:
    precision = zero.MixedPrecision(torch.bfloat16, getattr(torch, settings.reduce_dtype))
    model = zero.FSDP(
        settings.build(rank.device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision,
        reshard_after_forward=reshards,
    )
    return model, adam(settings, rank.device)(model.parameters())


def with_oss(stage: int, settings: Settings, rank: Rank) -> Trained:
    """Stages 1 and 2."""
    model, optim = settings.build(rank.device).bfloat16(), adam(settings, rank.device)
    return zero.setup(model, optim, stage=stage, partition="even", master_dtype=torch.float32)


CONTESTANTS: dict[str, Callable[[Settings, Rank], Trained]] = {
    "nothing sharded": unsharded,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "zero stage 3": stage_3,
    "zero stage 2": partial(with_oss, 2),
}


def add_options(parser: argparse.ArgumentParser, contestants: Iterable[str], *, tokens: int) -> None:
    """Those of the model, and `--only`. tokens: by default."""
    add, names, on_gpu = parser.add_argument, [*contestants], torch.cuda.is_available()
    for name, default, told in (
        ("--tokens", tokens, f"of a batch, a multiple of {CONTEXT}"),
        ("--layers", 18 if on_gpu else 2, "blocks"),
        ("--width", 2048 if on_gpu else 64, "of the model"),
    ):
        add(name, metavar="N", type=int, default=default, help=f"{told} (default: %(default)s)")
    add("--reduce-dtype", choices=["float32", "bfloat16"], default="float32")
    add("--only", nargs="+", choices=names, metavar="NAME", default=names, help=f"of {', '.join(names)}")
