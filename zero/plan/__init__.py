"""What a stage costs before it is run: bytes a rank, bytes sent, time of a step, and which stage to take."""

from zero.plan.chrome_trace import write_trace
from zero.plan.hardware import Hardware, Link, as_hardware
from zero.plan.planner import plan
from zero.plan.result import Cost, Plan
from zero.plan.sizes import Options, Sizes
from zero.plan.timeline import Timing

__all__ = [
    "Cost",
    "Hardware",
    "Link",
    "Options",
    "Plan",
    "Sizes",
    "Timing",
    "as_hardware",
    "plan",
    "write_trace",
]
