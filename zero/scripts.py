"""For scripts, the same at any stage: gradient accumulation, and the plain module. full_state.py has weights and
optimizer state in full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from zero._torch.compiling import unwrapped_of_torchs
from zero.fsdp import FSDP
from zero.sdp import ShardedDDP
from zero.tensor_parallel.shown import take_out_of
from zero.wrappers import Wrapped, take_out, unwrapped


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which backward accumulates gradients without sending them, at any stage; the first backward
    outside sends all. Run forward and backward inside. Without other ranks nothing is sent anyway."""
    wrappers = unwrapped(model)[1]

    @contextmanager
    def without_sending() -> Iterator[None]:
        with ExitStack() as stack:
            for one in wrappers:
                stack.enter_context(one.no_sync())
            yield

    return without_sending()


def unwrap(model: nn.Module) -> nn.Module:
    """Collective. The plain module, with full parameters on every rank. It can be wrapped again at any stage.

    Takes FSDP, ShardedDDP and DistributedDataParallel, also inside of torch.compile, and modules that contain them; a
    plain module is returned as it is. Parameters stay the same objects; gradients are cleared at stages 2 and 3. There
    the wrapper, and the optimizers that stepped shards, raise RuntimeError from then on: save the optimizer's full
    state before, and load it into the next optimizer.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    inner, wrappers = unwrapped(model)
    for wrapper in wrappers:
        if isinstance(wrapper, FSDP | ShardedDDP):
            wrapper.unwrap()
        take_out_of(wrapper.module)
    take_out(inner)
    return inner if isinstance(unwrapped_of_torchs(model), Wrapped) else model
