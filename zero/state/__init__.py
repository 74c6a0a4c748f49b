"""State of optimizers: gathered, loaded, described."""
