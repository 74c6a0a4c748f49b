"""Training with different numbers of batches on different ranks."""

from zero.features.uneven.join import join

__all__ = ["join"]
