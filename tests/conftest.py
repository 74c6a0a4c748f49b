"""Starts the ranks' fork server at once: it imports torch while pytest still collects."""

import gc
import os
from pathlib import Path

import pytest

import gpus
import mutants
import ranks

FOR_ALL = ["transformers.trainer", "peft", "accelerate", "lightning.pytorch", "sklearn.datasets"]
FOR_ALL += ["torch._inductor.compile_fx", "torch.distributed.tensor.parallel"]
"""What takes each rank process seconds to import, and several files of the suite need, none of them quick."""


# Before zero is imported: what each constructor says is no news here.
os.environ.setdefault("ZERO_LOG", "off")

# Nor what others say of what these tests mean to do. Each reads it when first imported, which the ranks' server does:
# DDP would rather not look for unused parameters where all are used, transformers notes each choice of small models.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: has more cases under `make matrix`, see matrix.py")
    config.addinivalue_line("markers", "slow: `make test-quick` leaves it out, as it takes 0.3 s or more")
    config.addinivalue_line("markers", "faults: has more cases under `make faults`, see matrix.py")
    mutants.put_in()
    if gpus.problem():
        raise pytest.UsageError(gpus.problem())
    if config.getoption("dist", "no") == "no":  # else xdist's workers run the tests
        whole = Path(__file__).parent in [Path(name).resolve() for name in config.args]
        ranks.start(*(FOR_ALL if whole and not config.getoption("markexpr") else []))
        gpus.take(0)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test whose cases are all alike the quick subset has every fifth."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        if not any(item.get_closest_marker("slow") for item in alike):
            for number, item in enumerate(alike):
                if number % 5:
                    item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: no collection looks at it again, nor do searches for living objects."""
    gc.collect()
    gc.freeze()
