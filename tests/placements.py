"""Where parameters, gradients and optimizer state lie: steps at each placement that are planned, and the same steps run
on ranks, whose tensors are counted."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero
import zoo
from inner import Meter, held_here, nbytes, shard_groups, unit_bytes
from transports import between_hosts
from zero.plan import Cost
from zero.sdp import AveragingDDP

KINDS = ("parameters", "gradients", "optimizer", "peak", "sent")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 192, layers: int = 4, words: int = 300) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.through(self.words(tokens))
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Outer(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x))


class Nested(Model):
    """Units hold units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer(192) for _ in range(3))


class Recomputed(Model):
    """What a block computes is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class RecomputedOutside(Model):
    """The same from outside of the units, which are gathered for it."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Turned(Model):
    """Blocks run from the last to the first, one of them twice, and the root computes between them."""

    def through(self, x: Tensor) -> Tensor:
        for number in (3, 2, 3, 1, 0):
            x = self.norm(self.blocks[number](x))
        return x


class Tied(Model):
    """The output layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight


class Reentrant(Model):
    """What a block computes is computed without a graph first, and again in backward. No gradient comes before that,
    though the output layer takes most: its weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__(words=2000)
        self.norm, self.head = nn.Identity(), nn.Linear(192, 2000, bias=False)
        self.head.weight = self.words.weight

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Buffered(Model):
    """Buffers, of two dtypes, are as large as some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(800, 192))
        self.register_buffer("numbers", torch.zeros(100, dtype=torch.int64))

    def through(self, x: Tensor) -> Tensor:
        return super().through(x + self.places[: x.shape[1]])


class HalfFrozen(Model):
    """Two of the blocks, and the embedding."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.words, self.blocks[0], self.blocks[2]):
            module.requires_grad_(False)


class Gated(Block):
    """An LSTM, whose kernel leaves a workspace for its backward."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return x + output


class Recurrent(Model):
    """Blocks are LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(192) for _ in range(4))


class Equal(nn.Sequential):
    """Eight equal units, with hardly any activations: what the formulas of the papers are about."""

    def __init__(self) -> None:
        super().__init__(*(zoo.Block(192, 512) for _ in range(8)))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.float()).float().square().mean()


class Backwards(Equal):
    """Units run from the last to the first: gradients arrive in another order than that of parameters."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*self._modules.values()][::-1])


MODELS = {
    kind.__name__: kind
    for kind in (
        *(Model, Nested, Recomputed, RecomputedOutside, Turned, Tied, Reentrant),
        *(Buffered, HalfFrozen, Recurrent, Equal, Backwards),
    )
}


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
}


@dataclass(frozen=True)
class Case:
    """unsent: backwards under no_sync before the one that is sent. groups: whether the optimizer has weights that decay
    and the others in two groups of parameters."""

    stage: str
    world: int = 2
    partition: str = "auto"
    mixed: bool = False
    optim: str = "adam"
    reduce: Any = None
    width: int = 192
    tokens: tuple[int, int] = (4, 32)
    replicas: int = 1
    one_host: bool = True
    words: int = 300
    layers: int = 4
    model: str = "Model"
    prefetch: int | None = None
    default_units: bool = False
    unsent: int = 0
    groups: bool = False


def batch(case: Case) -> tuple[Tensor]:
    return (torch.zeros((2, 192) if issubclass(MODELS[case.model], Equal) else case.tokens, dtype=torch.int64),)


def precision(case: Case) -> zero.MixedPrecision:
    return zero.MixedPrecision(param_dtype=torch.bfloat16 if case.mixed else None, reduce_dtype=case.reduce)


def policy(case: Case) -> ModuleWrapPolicy | None:
    return None if case.default_units else ModuleWrapPolicy({Block, zoo.Block})


def planned(case: Case) -> Cost:
    with torch.device("meta"):
        model = model_of(case)
    plan = zero.plan(
        model,
        world_size=case.world,
        optimizer=OPTIMIZERS[case.optim],
        auto_wrap_policy=policy(case),
        batch=batch(case),
        prefetch=case.prefetch,
        stages=[case.stage],
        partition=case.partition,
        precision=precision(case),
        backend="gloo",
        one_host=case.one_host,
    )
    return plan.cost(case.stage)


def measured(rank: int, world: int, case: Case) -> dict[str, int]:
    """Two settled steps on one rank, their tensors counted: bytes by KINDS, and `largest`: of the largest shard group
    or unit, full."""
    with ExitStack() as entered:
        if not case.one_host:
            entered.enter_context(between_hosts())
        meter = entered.enter_context(Meter())
        model, optimizer = build(case)
        step(case, model, optimizer)
        peaks = []
        for _ in range(2):
            meter.reset_peak()
            before = zero.traffic().total
            backwards(case, model)
            found = at_rest(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(meter.peak())
        largest = unit_bytes(model) if isinstance(model, zero.FSDP) else 0
        if isinstance(optimizer, zero.OSS):
            largest = max(group.full.nbytes for group in shard_groups(optimizer))
        # Now and then a thread of Gloo drops its buffer a moment late.
        return {**found, "peak": min(peaks), "sent": zero.traffic().total - before, "largest": largest}


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optim = model_of(case), OPTIMIZERS[case.optim]
    if case.stage.startswith("3"):
        sharded = zero.FSDP(
            model,
            auto_wrap_policy=policy(case),
            partition=case.partition,
            precision=precision(case),
            prefetch=case.prefetch,
            **strategy(case),
        )
        return sharded, optim(sharded.parameters())
    if case.stage == "0":
        return zero.setup(model, optim(model.parameters()), stage=0, precision=precision(case))
    named = [*(model.bfloat16() if case.mixed else model).named_parameters()]
    decaying = [(name, param) for name, param in named if param.dim() > 1]
    others = [(name, param) for name, param in named if param.dim() < 2]
    optimizer = zero.OSS(
        [{"params": decaying, "weight_decay": 0.1}, {"params": others}] if case.groups else named,
        optim,
        partition=case.partition,
        precision=precision(case),
    )
    wrapper = zero.ShardedDDP if case.stage == "2" else AveragingDDP
    return wrapper(model, optimizer, precision=precision(case)), optimizer


def model_of(case: Case) -> nn.Module:
    return Model(case.width, case.layers, case.words) if case.model == "Model" else MODELS[case.model]()


def strategy(case: Case) -> dict[str, Any]:
    """FSDP's arguments for a stage and so many replicas."""
    if case.replicas == case.world:
        return {"sharding_strategy": "NO_SHARD"}
    if case.replicas == 1:
        return {"sharding_strategy": "SHARD_GRAD_OP" if case.stage == "3 kept" else "FULL_SHARD"}
    hybrid = "HYBRID_SHARD_ZERO2" if case.stage == "3 kept" else "HYBRID_SHARD"
    mesh = init_device_mesh("cpu", (case.replicas, case.world // case.replicas))
    return {"sharding_strategy": hybrid, "device_mesh": mesh}


def backwards(case: Case, model: nn.Module) -> None:
    for number in range(case.unsent + 1):
        with model.no_sync() if number < case.unsent else nullcontext():
            model(*batch(case)).backward()


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backwards(case, model)
    optimizer.step()
    optimizer.zero_grad()


def at_rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    inner = optimizer.optim if isinstance(optimizer, zero.OSS) else optimizer
    buffers = [flat.full for flat in shard_groups(optimizer)] if isinstance(optimizer, zero.OSS) else []
    params = [*model.parameters(), *buffers]
    both = [*params, *(param for group in inner.param_groups for param in group["params"])]
    state = [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
    masters = nbytes(both) - nbytes(params)
    gradients = nbytes(grad for param in both if (grad := held_here(param.grad)) is not None)
    return {
        "parameters": nbytes(params) + nbytes(model.buffers()),
        "gradients": gradients,
        "optimizer": nbytes(state) + masters,
    }
