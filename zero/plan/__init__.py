"""What a stage costs before it is run: bytes a rank, bytes sent, and which stage to take.

`zero.plan` is this package, and can be called: `zero.plan(...)` is `zero.plan.plan(...)`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from zero.plan.planner import plan
from zero.plan.result import Cost, Plan
from zero.plan.sizes import Options

__all__ = ["Cost", "Options", "Plan", "plan"]


class _CallablePackage(ModuleType):
    """`zero.plan` can be only one object: the package, of a class that can be called."""

    __signature__ = inspect.signature(plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
