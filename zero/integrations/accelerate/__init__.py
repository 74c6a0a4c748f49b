"""Accelerate: its Accelerator, at any stage."""

from zero.integrations.accelerate.accelerator import Accelerator
from zero.integrations.accelerate.plugin import ZeroPlugin

__all__ = ["Accelerator", "ZeroPlugin"]
