"""Three steps out of running out of memory under data parallelism, each resting on the one before."""

from typing import TYPE_CHECKING

from zero import checkpoint, checks, comm, features, interop, state  # noqa: F401 - three register themselves
from zero._torch import warn_if_untested
from zero.comm import Traffic, traffic
from zero.fsdp import (
    FSDP,
    MEMORY_FIRST,
    SPEED_FIRST,
    BackwardPrefetch,
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
)
from zero.interop.grad_scaler import GradScaler
from zero.oss import OSS
from zero.report import Report, report
from zero.scripts import (
    ParameterCount,
    clip_grad_norm_,
    count_parameters,
    full_optimizer_state_dict,
    full_state_dict,
    grad_norm,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    no_sync,
    unwrap,
)
from zero.sdp import ShardedDDP
from zero.setup import setup
from zero.shards.log import show_as_asked

if TYPE_CHECKING:  # features bring these, unless their folders are missing
    from zero.features.int8 import Int8
    from zero.features.offload import CPUOffload, DiskOffload
    from zero.features.step_in_backward import step_in_backward
    from zero.features.uneven import join
    from zero.plan import plan
else:
    from zero import plan  # the package, which can be called; mypy knows that of no package

globals().update(features.plug_in())
show_as_asked()
warn_if_untested()

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "DiskOffload",
    "FSDP",
    "GradScaler",
    "Int8",
    "MEMORY_FIRST",
    "MixedPrecision",
    "OSS",
    "ParameterCount",
    "Prefetch",
    "Report",
    "SPEED_FIRST",
    "ShardedDDP",
    "ShardingStrategy",
    "checkpoint",
    "comm",
    "Traffic",
    "clip_grad_norm_",
    "count_parameters",
    "full_optimizer_state_dict",
    "full_state_dict",
    "grad_norm",
    "join",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "no_sync",
    "plan",
    "report",
    "setup",
    "step_in_backward",
    "traffic",
    "unwrap",
]

__all__[:] = [name for name in __all__ if name in globals() or name not in features.NAMES]

if not TYPE_CHECKING:  # mypy would take any name for one of zero's

    def __getattr__(name: str) -> object:
        if name in features.NAMES:
            raise AttributeError(features.missing(features.NAMES[name], f"zero.{name}"))
        raise AttributeError(f"module 'zero' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
