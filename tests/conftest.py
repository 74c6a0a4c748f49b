"""Starts the ranks' fork server at once: it imports torch while pytest still collects."""

import gc
from pathlib import Path

import pytest

import gpus
import mutants
import ranks

FOR_ALL = ["transformers.trainer", "peft", "accelerate", "lightning.pytorch", "sklearn.datasets"]
FOR_ALL += ["torch._inductor.compile_fx", "torch.distributed.tensor.parallel"]
"""What takes each rank process seconds to import, and several files of the suite need."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: has more cases under `make matrix`, see matrix.py")
    config.addinivalue_line("markers", "slow: takes 0.3 s or more; `make test-quick` leaves it out")
    config.addinivalue_line("markers", "faults: has more cases under `make faults`, see matrix.py")
    mutants.put_in()
    if gpus.problem():
        raise pytest.UsageError(gpus.problem())
    if config.getoption("dist", "no") == "no":  # else xdist's workers run the tests
        whole = Path(__file__).parent in [Path(name).resolve() for name in config.args]
        ranks.start(*(FOR_ALL if whole else []))
        gpus.take(0)


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: no collection looks at it again, nor do searches for living objects."""
    gc.collect()
    gc.freeze()
