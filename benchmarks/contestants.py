"""The ways to train that are compared: alone, plain DDP, its peers, and the stages of zero, each with its options.

Every command of this folder has its models and optimizers from here. A contestant whose package cannot be imported, or
which lacks what was asked for, is missing, and says why.
"""

import contextlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import zero
from launch import Rank
from models import Task

BUCKET = 25 * 2**20 // 4
"""Elements of a bucket where a peer's own default is out of all proportion: DDP's 25 MiB."""


ADAMW = partial(AdamW, lr=1e-3)


@dataclass(frozen=True)
class How:
    """optim: a class or a partial of it, in which zero sees the class: a function it would measure.

    dtype: in which is computed, float32 or bfloat16; master weights are float32. What has no policy of its own computes
        under torch.autocast.
    reduce_dtype: in which gradients are sent; by default as zero sends them, by others in float32. Not of DDP.
    offload: shards and optimizer state are stored on the CPU, except of the two that all are compared with.
    group: for zero, what stands for a process group.
    finds_units: whether stage 3 of zero chooses its units itself, as it does without a policy.
    """

    optim: Callable[[Iterable[nn.Parameter]], Optimizer] = ADAMW
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    group: Any = None
    finds_units: bool = False

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32


@dataclass
class Trained:
    """A model and its optimizer, used as torch's are.

    autocast: the dtype to compute in, if the model does not see to it. zero_grad, backward: where they are not those
        of the optimizer and of the loss.
    """

    model: nn.Module
    optimizer: Any
    autocast: torch.dtype = torch.float32
    zero_grad: Callable[[], None] | None = None
    backward: Callable[[Tensor], None] = Tensor.backward

    def loss(self, *batch: Tensor) -> Tensor:
        if self.autocast == torch.float32:
            return self.model(*batch)
        with torch.autocast(batch[0].device.type, self.autocast):
            return self.model(*batch)

    def update(self) -> None:
        self.optimizer.step()
        (self.zero_grad or self.optimizer.zero_grad)()


def _alone(model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    return Trained(model, how.optim(model.parameters()), autocast=how.dtype)


def _ddp(model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    return Trained(DistributedDataParallel(model), how.optim(model.parameters()), autocast=how.dtype)


def _zero_redundancy(model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    optimizer = ZeroRedundancyOptimizer(model.parameters(), how.optim)
    return Trained(DistributedDataParallel(model), optimizer, autocast=how.dtype)


def _fairscale(sharded: bool, model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    optimizer = OSS(model.parameters(), optim=how.optim)
    if not sharded:
        return Trained(DistributedDataParallel(model), optimizer, autocast=how.dtype)
    wrapped = ShardedDataParallel(model, optimizer)
    # The optimizer's own zero_grad sets gradients to None, which takes them out of the buckets.
    return Trained(wrapped, optimizer, autocast=how.dtype, zero_grad=wrapped.zero_grad)


def _fsdp1(kept: bool, model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    sharded = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        mixed_precision=MixedPrecision(how.dtype, how.reduce_dtype or torch.float32) if how.half else None,
        cpu_offload=CPUOffload(how.offload),
        use_orig_params=True,
        device_id=rank.device,
    )
    return Trained(sharded, how.optim(sharded.parameters()))


def _fsdp2(kept: bool, model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(rank.device.type, (rank.world,)),
        "reshard_after_forward": not kept,
    }
    if how.half:
        options["mp_policy"] = MixedPrecisionPolicy(how.dtype, how.reduce_dtype or torch.float32)
    if how.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=rank.device.type == "cuda")
    for module in [module for module in model.modules() if isinstance(module, block)]:
        fully_shard(module, **options)
    fully_shard(model, **options)
    return Trained(model, how.optim(model.parameters()))


def _deepspeed(stage: int, model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    os.environ.update(RANK=str(rank.rank), LOCAL_RANK=str(rank.device.index or 0), WORLD_SIZE=str(rank.world))
    if rank.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    # By default buckets have 2 GB.
    sharding: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if how.offload:
        sharding["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,  # it clips to a norm of 1 by default
        "bf16": {"enabled": how.half},
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=how.optim(model.parameters()), config=config)
    return Trained(engine, engine, zero_grad=lambda: None, backward=engine.backward)  # it sets them to zero itself


def _zero(stage: int, kept: bool, model: nn.Module, block: type[nn.Module], rank: Rank, how: How) -> Trained:
    offload = zero.CPUOffload() if how.offload else None
    precision = zero.MixedPrecision(how.dtype, how.reduce_dtype) if how.half else None
    if stage == 3:
        sharded = zero.FSDP(
            model,
            how.group,
            auto_wrap_policy=None if how.finds_units else ModuleWrapPolicy({block}),
            precision=precision,
            reshard_after_forward=not kept,
            offload=offload,
        )
        return Trained(sharded, how.optim(sharded.parameters()))
    options = {"process_group": how.group, "offload": offload, "precision": precision}
    return Trained(*zero.setup(model, how.optim, stage=stage, **options))


@dataclass(frozen=True)
class Contestant:
    """stage: what it keeps in shards, as zero.plan counts. package: that it needs besides torch and zero."""

    title: str
    stage: str
    make: Callable[[nn.Module, type[nn.Module], Rank, How], Trained]
    package: str | None = None
    offloads: bool = True

    @property
    def ours(self) -> bool:
        return self.title.startswith("zero")

    def missing(self, how: How) -> str | None:
        """Why it cannot be run here, or None."""
        if how.offload and not self.offloads:
            return "it offloads nothing"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"there is no package {self.package} (make peers installs it)"
        return None


CONTESTANTS = {
    "alone": Contestant("alone", "0", _alone),
    "ddp": Contestant("DDP", "0", _ddp),
    "zro": Contestant("DDP + ZeroRedundancyOptimizer", "1", _zero_redundancy, offloads=False),
    "fairscale1": Contestant("FairScale OSS", "1", partial(_fairscale, False), "fairscale", offloads=False),
    "deepspeed1": Contestant("DeepSpeed stage 1", "1", partial(_deepspeed, 1), "deepspeed"),
    "zero1": Contestant("zero stage 1, OSS", "1", partial(_zero, 1, False)),
    "fairscale2": Contestant("FairScale OSS + SDP", "2", partial(_fairscale, True), "fairscale", offloads=False),
    "deepspeed2": Contestant("DeepSpeed stage 2", "2", partial(_deepspeed, 2), "deepspeed"),
    "zero2": Contestant("zero stage 2, ShardedDDP", "2", partial(_zero, 2, False)),
    "fsdp1kept": Contestant("FSDP1 SHARD_GRAD_OP", "3 kept", partial(_fsdp1, True)),
    "fsdp2kept": Contestant("FSDP2, not resharded", "3 kept", partial(_fsdp2, True)),
    "zero3kept": Contestant("zero stage 3, kept", "3 kept", partial(_zero, 3, True)),
    "fsdp1": Contestant("FSDP1 FULL_SHARD", "3", partial(_fsdp1, False)),
    "fsdp2": Contestant("FSDP2", "3", partial(_fsdp2, False)),
    "deepspeed3": Contestant("DeepSpeed stage 3", "3", partial(_deepspeed, 3), "deepspeed"),
    "zero3": Contestant("zero stage 3, FSDP", "3", partial(_zero, 3, False)),
}

OVER_FAKE_RANKS = [name for name, one in CONTESTANTS.items() if name not in ("ddp", "zro") and not one.package]
"""DistributedDataParallel's own all-reduce, and DeepSpeed, do not run without the others. Stage 1 does in 16 bits."""


def build(name: str, task: Task, rank: Rank, how: How = How()) -> Trained:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return CONTESTANTS[name].make(task.build(rank.device), task.block, rank, how)
