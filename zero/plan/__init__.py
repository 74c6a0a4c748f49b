"""What a stage costs before it is run: bytes a rank, bytes sent, and which stage to take."""

from zero.plan.planner import plan
from zero.plan.result import Cost, Plan

__all__ = ["Cost", "Plan", "plan"]
