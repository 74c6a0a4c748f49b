"""Shards and optimizer state in the memory of the CPU or in files, by the option `offload` of OSS and FSDP.

homes   CPUOffload, DiskOffload, and the memory of the CPU
disk    files that are mapped into memory
"""

from zero.features.offload.homes import CPUOffload, DiskOffload, home_of
from zero.shards import home

home.homes["offload"] = home_of
home.homes["cpu_offload"] = lambda given: home_of(given or None)  # PyTorch's name; it takes False for none

__all__ = ["CPUOffload", "DiskOffload"]
