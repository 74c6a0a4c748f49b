"""Steps at every stage on the device that is not there."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD

import zero
from simulated.world import Simulated, small_pieces
from zoo import Block, Stack

WIDTH, BLOCKS, RANK, WORLD = 8, 3, 1, 4

sgd = partial(SGD, lr=1e-3, momentum=0.9, foreach=True)  # reads no value on the host, as no optimizer does on a GPU


block = partial(Block, WIDTH, 2 * WIDTH)
net = partial(Stack, block, WIDTH, 3, blocks=BLOCKS)  # with parameters in the root unit, too


def blocks() -> list[nn.Module]:
    return [block() for _ in range(BLOCKS)]


Step = Callable[[nn.Module, Any], None]


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(ones(model)).sum().backward()
    optimizer.step()


def wrapped(module: nn.Module, comm: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = zero.FSDP(module, process_group=comm, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return model, sgd(model.parameters())


def built(
    there: Simulated,
    stage: int,
    module: nn.Module,
    *,
    world: int = WORLD,
    one_host: bool = True,
    optim: Any = sgd,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """One rank of `world`. options: of FSDP, or of OSS and ShardedDDP. Replicas are on other hosts."""
    comm: Any = there.comm(min(RANK, world - 1), world, one_host=one_host)
    if stage == 3:
        hybrid = options.get("sharding_strategy") == "HYBRID_SHARD"
        model, _ = wrapped(module, (comm, there.comm(0, 2, one_host=False)) if hybrid else comm, **options)
        return model, optim(model.parameters())
    of_ddp = {"reduce_buffer_size": options.pop("reduce_buffer_size", None), "precision": options.get("precision")}
    optimizer = zero.OSS(module.parameters(), optim, comm, **options)
    return zero.ShardedDDP(module, optimizer, **of_ddp) if stage == 2 else module, optimizer


def trains(
    stage: int,
    *,
    net: Callable[[], nn.Module] = net,
    take: Step = step,
    dtype: torch.dtype = torch.float32,
    bucket: int | None = None,
    **options: Any,
) -> Callable[[Simulated], None]:
    if bucket is not None:
        options["reduce_buffer_size"] = bucket

    def run(there: Simulated) -> None:
        model, optimizer = built(there, stage, net().to(dtype), **options)
        for _ in range(3):
            take(model, optimizer)

    return run


stage_1, stage_2, stage_3 = (partial(trains, stage) for stage in (1, 2, 3))


def in_small_chunks(run: Any) -> Any:
    """Masters are stepped and sent in more pieces than there are buffers to round them in."""

    def chunked(there: Simulated) -> None:
        with small_pieces(16):
            run(there)

    return chunked


def ones(model: nn.Module) -> Tensor:
    return torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)


def with_other_strides(model: nn.Module, optimizer: Any) -> None:
    """Gradients do not lie in memory as their parameters do, and memory is used again before the step."""
    optimizer.zero_grad()
    model(ones(model)).sum().backward()
    for param in model.parameters():
        if param.dim() == 2:
            param.grad = param.grad.t().contiguous().t()
    optimizer.step()


def with_clipping(model: nn.Module, optimizer: Any) -> None:
    """Within the limit: the number that gradients on the CPU are multiplied with would be taken to be on the device."""
    optimizer.zero_grad()
    model(ones(model)).sum().backward()
    (optimizer.clip_grad_norm if isinstance(optimizer, zero.OSS) else model.clip_grad_norm_)(1e6)
    optimizer.step()


def in_two_backwards(model: Any, optimizer: Any) -> None:
    """Gradients are accumulated, those of the first half unreduced."""
    optimizer.zero_grad()
    for context in (model.no_sync(), nullcontext(), nullcontext()):
        with context:
            model(ones(model)).sum().backward()
    optimizer.step()


def written_before_backward(model: Any, optimizer: Any) -> None:
    """The user writes into shards between forward and backward."""
    loss = model(torch.ones(2, WIDTH)).sum()
    for param in model.blocks.parameters():
        param.data.mul_(0.9)  # other writes autograd refuses
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated_and_written(model: nn.Module, optimizer: Any) -> None:
    """After a forward without a backward the user writes into shards."""
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
        for param in model.parameters():
            param.mul_(0.9)
    step(model, optimizer)


def masters_written(model: nn.Module, optimizer: Any) -> None:
    """The host writes into what is stepped, as loading state does."""
    step(model, optimizer)
    for param in model.parameters():
        optimizer.part(param).data.mul_(0.9)


HALF = zero.MixedPrecision(param_dtype=torch.bfloat16)
OFFLOAD = zero.CPUOffload()

SCENARIOS: dict[str, Any] = {
    "3": stage_3(),
    "3, no parameters in the root": stage_3(net=lambda: nn.Sequential(*blocks())),
    "3 memory first": stage_3(prefetch=1),
    "3 speed first": stage_3(prefetch=3),
    "3, two units in flight": stage_3(prefetch=2),
    "3 kept": stage_3(reshard_after_forward=False),
    "3 hybrid": stage_3(sharding_strategy="HYBRID_SHARD"),
    "3 replicated": stage_3(sharding_strategy="NO_SHARD"),
    "3 in 16 bits": stage_3(precision=HALF),
    "3 full parameters": stage_3(partition="whole"),
    "3 accumulated": stage_3(take=in_two_backwards),
    "3 written before backward": stage_3(take=written_before_backward),
    "3 evaluated": stage_3(take=evaluated_and_written),
    "3 offloaded": stage_3(offload=OFFLOAD),
    "3 offloaded in 16 bits": stage_3(offload=OFFLOAD, precision=HALF),
    "3 offloaded in 16 bits, one rank, clipped": stage_3(offload=OFFLOAD, precision=HALF, world=1, take=with_clipping),
    "3 offloaded, accumulated": stage_3(offload=OFFLOAD, take=in_two_backwards),
    "3 offloaded, evaluated": stage_3(offload=OFFLOAD, take=evaluated_and_written),
    "2 offloaded, clipped": stage_2(bucket=200, offload=OFFLOAD, take=with_clipping),
    "2 offloaded, accumulated": stage_2(bucket=200, offload=OFFLOAD, take=in_two_backwards),
    "2 offloaded in 16 bits, one rank, accumulated": stage_2(
        bucket=200, offload=OFFLOAD, dtype=torch.bfloat16, world=1, take=in_two_backwards
    ),
    "2 offloaded in 16 bits": in_small_chunks(stage_2(offload=OFFLOAD, dtype=torch.bfloat16)),
    "2 offloaded, written after the step": stage_2(bucket=200, offload=OFFLOAD, take=masters_written),
    "2 with master weights": stage_2(precision="bf16", dtype=torch.bfloat16),
    "1 offloaded, with other strides": stage_1(offload=OFFLOAD, take=with_other_strides),
    "1 with master weights": stage_1(precision="bf16", dtype=torch.bfloat16),
    "1 offloaded in 16 bits": in_small_chunks(stage_1(offload=OFFLOAD, dtype=torch.bfloat16)),
    "2 in small buckets": stage_2(bucket=200, take=with_clipping),
    "2 in 16 bits": stage_2(bucket=200, precision=zero.MixedPrecision(reduce_dtype=torch.float16)),
    "2 whole parameters": stage_2(bucket=200, partition="whole"),
    "2 accumulated": stage_2(bucket=200, take=in_two_backwards),
}
