"""State of optimizers: gathered, loaded, described."""

from zero.state import saved, user_optimizer, weights  # noqa: F401 - they register themselves
