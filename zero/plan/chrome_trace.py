"""Timelines of a plan as a trace for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero.plan.result import Plan
from zero.plan.trace import QUEUES


def write_trace(plan: Plan, file: Path) -> None:
    """Chrome's trace events: a process for each timing of the plan, a thread for each stream and for the host.

    Raises ValueError for a plan without hardware.
    """
    if not plan.timings:
        raise ValueError("the plan has no times. Pass the hardware: zero.plan(..., hardware='h100-8').")
    events: list[dict[str, Any]] = []
    for process, timing in enumerate(plan.timings):
        at = {"pid": process, "tid": 0}
        events.append({"name": "process_name", "ph": "M", **at, "args": {"name": timing.title}})
        for thread, queue in enumerate(QUEUES):
            at = {"pid": process, "tid": thread}
            events.append({"name": "thread_name", "ph": "M", **at, "args": {"name": queue}})
            for span in timing.timeline.spans:
                if span.queue == queue:
                    microseconds = {"ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin)}
                    events.append({"name": span.name, "ph": "X", **microseconds, **at})
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
