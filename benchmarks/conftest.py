"""Shows what pytest-benchmark writes to its file only, and says in that file no more of the machine than counts."""

import os
import platform
from typing import Any

import pytest
import torch

from report import processor


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "cpu": {"brand_raw": processor(), "count": os.cpu_count()},
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        **device,
    }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = getattr(config, "_benchmarksession", None)
    for benchmark in session.benchmarks if session is not None else ():
        told = "  ".join(f"{name} {value}" for name, value in benchmark.extra_info.items())
        terminalreporter.write_line(f"{benchmark.group}, {benchmark.name}: {told}")
