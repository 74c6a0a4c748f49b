"""Loss scaling with sharded gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero._torch import GradScaler as TorchGradScaler
from zero.comm import Comm
from zero.measure.param_groups import params_of
from zero.oss.optimizer import OSS
from zero.tensor_parallel.parts import others_of


class GradScaler(TorchGradScaler):
    """torch.amp.GradScaler for every stage: an inf or NaN in any rank's shard skips the step on all ranks.

    torch's GradScaler reads `param.grad`, which has no values at stage 2 and is this rank's shard at stage 3. At
    stage 1, where DistributedDataParallel averages full gradients, torch's works as well as this one.

    device: "cuda" or "cpu".
    process_group: of the optimizers at stage 3, by default all ranks. An OSS has its own.
    Further arguments are those of torch.amp.GradScaler. Collective: `unscale_`, and `step` if that was not called.
    """

    def __init__(
        self, device: str = "cuda", *, process_group: torch.distributed.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._comm = Comm(process_group)

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        comm, stepped = self._comm, optimizer
        if isinstance(optimizer, OSS):
            if optimizer.gradients.are_sharded:
                optimizer.gradients.refuse()
            comm, stepped = optimizer.comm, optimizer.optim if optimizer.gradients.are_sharded else optimizer
            allow_fp16 = allow_fp16 or bool(optimizer.shards.masters)  # float16 gradients are widened before the step
        found = super().unscale_gradients(stepped, inv_scale, found_inf, allow_fp16)
        # A rank that owns no gradient must skip or take the step as the other ranks do.
        overflows = [one.to(inv_scale.device) for one in found.values()] or [torch.zeros_like(found_inf)]
        total = torch.stack(overflows).amax(0)
        for ranks in (comm, *others_of(params_of(optimizer))):
            ranks.all_reduce(total, maximum=True)
        return {device: total.to(device) for device in found} or {inv_scale.device: total}
