"""Starts the ranks' fork server at once: it imports torch while pytest still collects."""

import gc

import pytest

import ranks

ranks.start()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: has more cases under `make matrix`, see matrix.py")


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: no collection looks at it again, nor do searches for living objects."""
    gc.collect()
    gc.freeze()
