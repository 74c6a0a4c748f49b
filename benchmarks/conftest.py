"""Shows what pytest-benchmark writes to its file only: CPU time, and how the variants compare."""

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = getattr(config, "_benchmarksession", None)
    for benchmark in session.benchmarks if session is not None else ():
        told = "  ".join(f"{name} {value}" for name, value in benchmark.extra_info.items())
        terminalreporter.write_line(f"{benchmark.group}, {benchmark.name}: {told}")
