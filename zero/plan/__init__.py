"""What a stage costs before it is run: bytes a rank, bytes sent, and which stage to take."""

from zero.plan.planner import plan
from zero.plan.result import Cost, Plan
from zero.plan.sizes import Options, Sizes

__all__ = ["Cost", "Options", "Plan", "Sizes", "plan"]
