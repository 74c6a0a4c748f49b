"""State of optimizers: gathered, loaded, described."""

from zero.state import saved, weights  # noqa: F401 - they register themselves
