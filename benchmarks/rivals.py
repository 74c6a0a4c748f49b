"""The ways to train that are compared: plain DDP, its peers, and the stages of zero. Each is built by one function.

All use torch's AdamW. A variant whose package cannot be imported is missing, and says why.
"""

import contextlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import zero
from launch import Rank
from tasks import Task

LEARNING_RATE = 1e-3


class Trained(Protocol):
    """A model and its optimizer, whatever they are called by."""

    def loss(self, *batch: Tensor) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def update(self) -> None: ...


@dataclass
class Usual:
    """What is used as torch's own modules and optimizers are. zero_grad: where it is not the optimizer's."""

    model: nn.Module
    optimizer: Any
    zero_grad: Callable[[], None] | None = None

    def loss(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        (self.zero_grad or self.optimizer.zero_grad)()


@dataclass
class Engine:
    """DeepSpeed's."""

    engine: Any

    def loss(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.engine(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


Build = Callable[[nn.Module, type[nn.Module], Rank], Trained]
BUCKET = 25 * 2**20 // 4
"""Elements of a bucket where a peer's own default is out of all proportion: DDP's 25 MiB."""


@dataclass(frozen=True)
class Variant:
    """stage: what it keeps in shards, as zero.plan counts. package: that it needs besides torch and zero.

    together: whether the ranks train one model; without, losses are not those of the others.
    """

    title: str
    stage: str
    build: Build
    package: str | None = None
    together: bool = True

    def missing(self) -> str | None:
        """Why it cannot be run here, or None."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"there is no package {self.package} (make peers installs it)"
        return None


def _alone(model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    """What computing and stepping everything takes while the other ranks do the same: nothing is sent."""
    return Usual(model, AdamW(model.parameters(), lr=LEARNING_RATE))


def _ddp(model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    return Usual(DistributedDataParallel(model), AdamW(model.parameters(), lr=LEARNING_RATE))


def _zero_redundancy(model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, lr=LEARNING_RATE)
    return Usual(DistributedDataParallel(model), optimizer)


def _fsdp1(strategy: str, model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({block}),
        use_orig_params=True,
        device_id=rank.device,
    )
    return Usual(sharded, AdamW(sharded.parameters(), lr=LEARNING_RATE))


def _fsdp2(reshard: bool, model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.world,))
    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return Usual(model, AdamW(model.parameters(), lr=LEARNING_RATE))


def _fairscale(sharded: bool, model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    optimizer = OSS(model.parameters(), optim=AdamW, lr=LEARNING_RATE)
    if not sharded:
        return Usual(DistributedDataParallel(model), optimizer)
    wrapped = ShardedDataParallel(model, optimizer)
    # The optimizer's own zero_grad sets gradients to None, which takes them out of the buckets.
    return Usual(wrapped, optimizer, wrapped.zero_grad)


def _deepspeed(stage: int, model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    os.environ.update(RANK=str(rank.rank), LOCAL_RANK=str(rank.device.index or 0), WORLD_SIZE=str(rank.world))
    if rank.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,  # it clips to a norm of 1 by default
        # By default buckets have 2 GB.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Engine(engine)


def _zero(stage: int, reshard: bool, model: nn.Module, block: type[nn.Module], rank: Rank) -> Trained:
    if stage < 3:
        return Usual(*zero.setup(model, AdamW, stage=stage, lr=LEARNING_RATE))
    sharded = zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), reshard_after_forward=reshard)
    return Usual(sharded, AdamW(sharded.parameters(), lr=LEARNING_RATE))


VARIANTS = {
    "ddp": Variant("DDP", "0", _ddp),
    "alone": Variant("nothing sent", "0", _alone, together=False),
    "zro": Variant("DDP + ZeroRedundancyOptimizer", "1", _zero_redundancy),
    "fairscale1": Variant("FairScale OSS", "1", partial(_fairscale, False), "fairscale"),
    "deepspeed1": Variant("DeepSpeed stage 1", "1", partial(_deepspeed, 1), "deepspeed"),
    "zero1": Variant("zero stage 1", "1", partial(_zero, 1, True)),
    "fairscale2": Variant("FairScale OSS + SDP", "2", partial(_fairscale, True), "fairscale"),
    "deepspeed2": Variant("DeepSpeed stage 2", "2", partial(_deepspeed, 2), "deepspeed"),
    "zero2": Variant("zero stage 2", "2", partial(_zero, 2, True)),
    "fsdp1kept": Variant("FSDP1 SHARD_GRAD_OP", "3 kept", partial(_fsdp1, "SHARD_GRAD_OP")),
    "fsdp2kept": Variant("FSDP2 kept", "3 kept", partial(_fsdp2, False)),
    "zero3kept": Variant("zero stage 3 kept", "3 kept", partial(_zero, 3, False)),
    "fsdp1": Variant("FSDP1 FULL_SHARD", "3", partial(_fsdp1, "FULL_SHARD")),
    "fsdp2": Variant("FSDP2", "3", partial(_fsdp2, True)),
    "deepspeed3": Variant("DeepSpeed stage 3", "3", partial(_deepspeed, 3), "deepspeed"),
    "zero3": Variant("zero stage 3", "3", partial(_zero, 3, True)),
}


def build(name: str, task: Task, rank: Rank) -> Trained:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return VARIANTS[name].build(task.build(rank.device), task.block, rank)
