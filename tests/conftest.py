"""Starts the ranks' fork server at once: it imports torch while pytest still collects."""

import gc

import ranks

ranks.start()


def pytest_collection_finish() -> None:
    """What was imported for all tests stays: no collection looks at it again, nor do searches for living objects."""
    gc.collect()
    gc.freeze()
