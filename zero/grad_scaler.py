"""Loss scaling with sharded gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero._torch.optimizers import GradScaler as TorchGradScaler
from zero.measure.param_groups import params_of
from zero.oss.optimizer import OSS
from zero.tensor_parallel.parts import others_of


class GradScaler(TorchGradScaler):
    """torch.amp.GradScaler for every stage: an inf or NaN in any rank's shard skips the step on all ranks.

    torch's own works as well, except that it refuses the float16 gradients of stage 1, whose masters are float32.

    The arguments are those of torch.amp.GradScaler; device: "cuda" or "cpu". Collective at stages 1 to 3: `unscale_`,
    and `step` if that was not called.
    """

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, OSS):
            return super().unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)
        are_sharded = optimizer.gradients.are_sharded
        if are_sharded:
            optimizer.gradients.refuse()
        allow_fp16 = allow_fp16 or bool(optimizer.shards.masters)  # float16 gradients are widened before the step
        stepped = optimizer.optim if are_sharded else optimizer
        found = super().unscale_gradients(stepped, inv_scale, found_inf, allow_fp16)
        optimizer.gradients.scale_averages(inv_scale)
        # A rank that owns no gradient must skip or take the step as the other ranks do.
        overflows = [one.to(inv_scale.device) for one in found.values()] or [torch.zeros_like(found_inf)]
        total = torch.stack(overflows).amax(0)
        for ranks in (optimizer.comm, *others_of(params_of(optimizer))):
            ranks.all_reduce(total, maximum=True)
        return {device: total.to(device) for device in found} or {inv_scale.device: total}
