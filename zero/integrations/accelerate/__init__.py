"""Accelerate: its Accelerator, at any stage."""

# ruff: noqa: E402 (the imports below are what fails with an older version)
from zero.integrations.versions import refuse_older

refuse_older("accelerate")

from zero.integrations.accelerate.accelerator import Accelerator
from zero.integrations.accelerate.plugin import ZeroPlugin

__all__ = ["Accelerator", "ZeroPlugin"]
