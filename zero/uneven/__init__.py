"""Data that ends earlier on some ranks than on others."""

from zero.uneven.join import join

__all__ = ["join"]
