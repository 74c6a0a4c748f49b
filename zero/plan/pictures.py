"""Timelines of a plan, as a picture and as a trace for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero.plan.result import Plan
from zero.plan.timeline import Timing
from zero.plan.trace import QUEUES

_COLOURS = {"host": "#8a97a5", "compute": "#2f5d8c", "gather": "#3d8361", "reduce": "#c8553d"}


def write_trace(plan: Plan, file: Path) -> None:
    """Chrome's trace events: a process for each timing of the plan, a thread for each stream and for the host."""
    events: list[dict[str, Any]] = []
    for process, timing in enumerate(_timings(plan)):
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


def draw_timeline(plan: Plan, file: Path) -> None:
    """A strip for each timing of the plan, a row for each stream and for the host. Needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"a picture of a timeline needs matplotlib ({error}): pip install matplotlib") from error
    timings = _timings(plan)
    figure = Figure(figsize=(10, 1.5 * len(timings) + 0.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    longest = max(timing.step_ms for timing in timings)
    for axes, timing in zip(figure.subplots(len(timings), squeeze=False)[:, 0], timings, strict=True):
        for row, queue in enumerate(QUEUES):
            spans = [span for span in timing.timeline.spans if span.queue == queue]
            bars = [(1e3 * span.begin, 1e3 * (span.end - span.begin)) for span in spans]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=_COLOURS[queue])
        axes.set_yticks(range(len(QUEUES)), QUEUES)
        axes.set_ylim(len(QUEUES) - 0.5, -0.5)
        axes.set_xlim(0, longest)
        title = f"{timing.title}: {timing.step_ms:.1f} ms, of which {timing.exposed_ms:.1f} ms wait for transfers"
        axes.set_title(title, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms")
    figure.savefig(file, dpi=120)


def _timings(plan: Plan) -> tuple[Timing, ...]:
    if not plan.timings:
        raise ValueError("the plan has no times. Pass the hardware: zero.plan(..., hardware='h100-8').")
    return plan.timings
